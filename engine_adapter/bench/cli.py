"""`kvquay bench NAME`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Final

from engine_adapter.bench.servers import ServerFailed

BENCHMARKS: Final[dict[str, tuple[str, str]]] = {
    "lookup": ("engine_adapter.bench.lookup", "latency of lookups beside a bare server"),
    "transfer": ("engine_adapter.bench.transfer", "throughput of store and load beside memcpy"),
    "step": ("engine_adapter.bench.step", "what a step costs while a request waits"),
    "broker": ("engine_adapter.bench.footprint", "start, memory and idle cost of the broker"),
}


def main(argv: Sequence[str]) -> int:
    """Run one benchmark."""
    if not argv or argv[0] not in BENCHMARKS:
        print("usage: kvquay bench NAME [OPTION ...]\n", file=sys.stderr)
        for name, (_, text) in BENCHMARKS.items():
            print(f"  {name:<9} {text}", file=sys.stderr)
        return 2
    run: Callable[[Sequence[str]], int] = importlib.import_module(BENCHMARKS[argv[0]][0]).main
    try:
        return run(argv[1:])
    except ServerFailed as error:
        print(f"kvquay bench {argv[0]}: {error}", file=sys.stderr)
        return 1
