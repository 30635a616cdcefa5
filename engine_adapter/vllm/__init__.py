"""vLLM behind the broker: its offloading connector's scheduler and worker sides over our rows."""
