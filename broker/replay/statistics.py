"""What traces look like, side by side.

A session is told from the blocks alone, as a trace names none: a request goes on with the session
that first used the last of its leading blocks seen before. The first block does not count, since it
is everybody's; a longer system prompt that several chats share makes one session of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from broker.replay.trace import TraceRequest


def statistics_of(trace: Sequence[TraceRequest]) -> dict[str, float]:
    """Figures of a trace by name; rates are fractions, lengths tokens."""
    inputs = np.array([request.input_length for request in trace])
    outputs = np.array([request.output_length for request in trace])
    uses = Counter(block for request in trace for block in request.hash_ids)
    session_of: dict[int, int] = {}
    turns: list[int] = []
    total = hits = continued = 0
    for request in trace:
        total += len(request.hash_ids)
        leading = 0
        for block in request.hash_ids:
            if block not in session_of:
                break
            leading += 1
        hits += leading
        if leading > 1:
            continued += 1
            session = session_of[request.hash_ids[leading - 1]]
        else:
            session = len(turns)
            turns.append(0)
        turns[session] += 1
        for block in request.hash_ids[leading:]:
            session_of.setdefault(block, session)
    times = [request.timestamp for request in trace]
    span_s = (max(times) - min(times)) / 1000
    return {
        "requests": len(trace),
        "seconds": span_s,
        "requests per second": len(trace) / max(span_s, 1e-9),
        "distinct blocks": len(uses),
        "distinct blocks per request": len(uses) / len(trace),
        "blocks seen once": sum(1 for count in uses.values() if count == 1) / len(uses),
        "input mean": float(inputs.mean()),
        "input p50": float(np.percentile(inputs, 50)),
        "input p90": float(np.percentile(inputs, 90)),
        "input p99": float(np.percentile(inputs, 99)),
        "output mean": float(outputs.mean()),
        "output p50": float(np.percentile(outputs, 50)),
        "output p90": float(np.percentile(outputs, 90)),
        "requests that continue": continued / len(trace),
        "sessions": len(turns),
        "turns per session": len(trace) / len(turns),
        "sessions of one turn": turns.count(1) / len(turns),
        "most turns": max(turns),
        "block hit rate, no limit": hits / total,
    }


def compare(traces: Mapping[str, Sequence[TraceRequest]]) -> str:
    """A table with one column per trace."""
    columns = {name: statistics_of(trace) for name, trace in traces.items()}
    names = list(next(iter(columns.values())))
    heads = [name[-28:] for name in columns]
    lines = [f"{'':<28}" + "".join(f"{head:>30}" for head in heads)]
    for name in names:
        cells = "".join(f"{_show(column[name]):>30}" for column in columns.values())
        lines.append(f"{name:<28}{cells}")
    return "\n".join(lines)


def _show(value: float) -> str:
    if isinstance(value, int) or value >= 100:
        return f"{value:,.0f}"
    return f"{value:,.4f}"
