"""Replaying a trace of requests: simulated over the real manager, or live over a real broker.

`trace` reads the format, `generate` makes traces of it, `simulate` drives the manager without data,
`report` prints. The live mode is outside this package (it needs engines) and found by name.
"""
