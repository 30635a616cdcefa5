"""What a replay prints: one JSON object per combination, or a table; and progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PROGRESS_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One combination and what came of it; `extra` holds what only its mode knows."""

    policy: str
    engines: int
    layout: str
    mode: str
    memory_blocks: int
    requests: int
    block_hit_rate: float
    token_hit_rate: float
    seconds: float
    extra: Mapping[str, Any]

    def as_json(self) -> str:
        """The object, in one line."""
        return json.dumps(
            {
                "policy": self.policy,
                "engines": self.engines,
                "layout": self.layout,
                "mode": self.mode,
                "memory_blocks": self.memory_blocks,
                "requests": self.requests,
                "block_hit_rate": round(self.block_hit_rate, 6),
                "token_hit_rate": round(self.token_hit_rate, 6),
                "seconds": round(self.seconds, 3),
                **self.extra,
            }
        )


def table(rows: Sequence[Row]) -> str:
    """Aligned columns, one line per combination; live figures below where there are some."""
    lines = [
        f"{'policy':<8} {'engines':>7} {'layout':<8} {'mode':<9} {'blocks':>9} {'requests':>8} "
        f"{'block hits':>10} {'token hits':>10} {'seconds':>8}"
    ]
    for row in rows:
        lines.append(
            f"{row.policy:<8} {row.engines:>7} {row.layout:<8} {row.mode:<9} "
            f"{row.memory_blocks:>9,} {row.requests:>8,} {row.block_hit_rate:>10.4f} "
            f"{row.token_hit_rate:>10.4f} {row.seconds:>8.2f}"
        )
        if row.mode == "live":
            extra = row.extra
            lines.append(
                f"         load {extra['load_gb_per_s']:.2f} GB/s, store "
                f"{extra['store_gb_per_s']:.2f} GB/s; lookup p50 {extra['lookup_p50_ms']:.2f} ms, "
                f"p99 {extra['lookup_p99_ms']:.2f} ms; every byte checked"
            )
    return "\n".join(lines)


def progress_printer(label: str, total: int) -> Callable[[int], None]:
    """Says on standard error how far it is, twice a second at most, and only to a person."""
    last = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if sys.stderr.isatty() and now - last >= PROGRESS_EVERY_S:
            last = now
            print(f"\r{label}: {done:,} of {total:,}", end="\x1b[K", file=sys.stderr, flush=True)

    return tell


def end_progress() -> None:
    """Clear the progress line."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
