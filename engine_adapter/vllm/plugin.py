"""vLLM finds us here (entry point group `vllm.general_plugins`), in each of its processes."""

from __future__ import annotations

CONNECTOR = "KvquayConnector"
SPEC = "KvquayOffloadingSpec"
"""Names by which vLLM's configuration knows our classes."""


def register() -> None:
    """Make our connector and spec known by name; more than once is fine."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            CONNECTOR, "engine_adapter.vllm.connector", "KvquayConnector"
        )
    if SPEC not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(
            SPEC, "engine_adapter.vllm.spec", "BrokerOffloadingSpec"
        )
