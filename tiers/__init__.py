"""The tiering core: one primary tier in host memory and the secondary tiers behind it.

Covers keys, slots, eviction, promotion and cascade, with one lock that the caller holds. It knows
no engine, socket or process; `broker` serves it to engines, and one engine may use it in-process.
"""
