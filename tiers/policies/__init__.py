"""Eviction policies: the contract (`base`), LRU, ARC, and finding one by name (`factory`)."""
