"""A small real engine: a transformer that computes, a paged KV cache, and the broker behind it.

For the demo and for tests that need no vLLM. Needs torch (the `toy` extra).
"""
