"""Benchmarks: every figure beside a limit measured in the same run, as ratios of medians.

`lookup` against a bare server, `transfer` against memcpy. Nothing here is imported by an engine.
"""
