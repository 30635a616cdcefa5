"""`kvquay replay` and `kvquay trace`: options in, rows out.

Bad options and bad lines end with a message and exit status 2, before any combination has run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from broker.errors import BrokerError
from broker.replay import generate, report, simulate
from broker.replay.report import Row
from broker.replay.statistics import compare
from broker.replay.trace import BadTrace, TraceFileError, TraceRequest, read_trace

LIVE: Final = "engine_adapter.live"
"""Found by name: the broker imports nothing of engines."""
EXIT_BAD_INPUT: Final = 2
WORD_BYTES: Final = 8


def replay_main(argv: Sequence[str]) -> int:
    """Replay a trace over every combination asked for."""
    return _refusing("replay", _replay, argv)


def trace_main(argv: Sequence[str]) -> int:
    """Make a trace, or compare the statistics of traces."""
    return _refusing("trace", _trace, argv)


def _refusing(name: str, command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    try:
        return command(argv)
    except (BadTrace, simulate.BadReplay) as error:
        print(f"kvquay {name}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _replay(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="kvquay replay",
        description="Replay a trace of requests: hit rates of one shared cache or of one cache per "
        "engine, simulated, or live with real engine processes that check every byte.",
    )
    parser.add_argument("trace", type=Path, help="JSON lines in the published format")
    parser.add_argument("--mode", choices=["simulate", "live"], default="simulate")
    parser.add_argument("--engines", default="1", help="one or several numbers: 2,4,8")
    parser.add_argument(
        "--memory-blocks", default="10000", help="blocks in total, over all engines; or several"
    )
    parser.add_argument("--layout", default="shared", help="shared, private or both")
    parser.add_argument("--policy", default="lru", help="lru, arc, a dotted path; or several")
    parser.add_argument("--seed", type=int, default=0, help="which engine gets which request")
    parser.add_argument("--limit", type=int, help="only the first requests")
    parser.add_argument(
        "--chunk-bytes", type=int, default=65536, help="bytes of a chunk (live mode)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per combination")
    arguments = parser.parse_args(argv)
    if arguments.limit is not None and arguments.limit < 1:
        raise simulate.BadReplay(f"--limit {arguments.limit}: at least one request is needed")
    if arguments.chunk_bytes < 1 or arguments.chunk_bytes % WORD_BYTES:
        raise simulate.BadReplay(
            f"--chunk-bytes {arguments.chunk_bytes}: must be a positive multiple of {WORD_BYTES}"
        )
    setups = [
        simulate.Setup(
            policy=policy,
            engines=engines,
            layout=layout,
            memory_blocks=blocks,
            seed=arguments.seed,
        )
        for policy in arguments.policy.split(",")
        for engines in _numbers(arguments.engines, "--engines")
        for blocks in _numbers(arguments.memory_blocks, "--memory-blocks")
        for layout in _layouts(arguments.layout)
    ]
    for setup in setups:
        setup.check()
    trace = read_trace(arguments.trace, arguments.limit)
    rows: list[Row] = []
    for setup in setups:
        found = [_simulated(trace, setup)]
        if arguments.mode == "live":
            found.append(_live(trace, setup, arguments.chunk_bytes))
        rows += found
        if arguments.json:
            for row in found:
                print(row.as_json(), flush=True)
    if not arguments.json:
        print(report.table(rows))
    return 0


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise simulate.BadReplay(f"{option} {text!r}: must be numbers, divided by commas") from None


def _layouts(text: str) -> Sequence[str]:
    return simulate.LAYOUTS if text == "both" else text.split(",")


def _simulated(trace: Sequence[TraceRequest], setup: simulate.Setup) -> Row:
    label = f"{setup.policy}, {setup.engines} engines, {setup.layout}"
    result = simulate.run(trace, setup, report.progress_printer(label, len(trace)))
    report.end_progress()
    return _row(setup, "simulate", result, {"evictions": result.evictions})


def _live(trace: Sequence[TraceRequest], setup: simulate.Setup, chunk_bytes: int) -> Row:
    live = importlib.import_module(LIVE)
    requests = [
        live.LiveRequest(hash_ids=request.hash_ids, input_length=request.input_length)
        for request in trace
    ]
    try:
        result = live.run_live(
            requests,
            engines=setup.engines,
            memory_blocks=setup.memory_blocks,
            layout=setup.layout,
            policy=setup.policy,
            seed=setup.seed,
            chunk_bytes=chunk_bytes,
            progress=sys.stderr.isatty(),
        )
    except RuntimeError as error:
        raise BrokerError(f"live replay failed: {error}") from error
    extra = {
        "load_gb_per_s": round(result.load_bytes_per_s / 1e9, 3),
        "store_gb_per_s": round(result.store_bytes_per_s / 1e9, 3),
        "lookup_p50_ms": round(result.lookup_p50_s * 1e3, 3),
        "lookup_p99_ms": round(result.lookup_p99_s * 1e3, 3),
        "stored_blocks": result.stored_blocks,
        "wrong_chunks": result.wrong_chunks,
    }
    return _row(setup, "live", result, extra)


def _row(setup: simulate.Setup, mode: str, result: Any, extra: dict[str, Any]) -> Row:
    return Row(
        policy=setup.policy,
        engines=setup.engines,
        layout=setup.layout,
        mode=mode,
        memory_blocks=setup.memory_blocks,
        requests=result.requests,
        block_hit_rate=result.block_hit_rate,
        token_hit_rate=result.token_hit_rate,
        seconds=result.seconds,
        extra=extra,
    )


def _trace(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="kvquay trace", description="Make a trace of chats, or show statistics of traces."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("generate", help="multi-turn chats with shared system prompts")
    making.add_argument("--requests", type=int, default=12_000)
    making.add_argument("--seed", type=int, default=0)
    making.add_argument("-o", "--output", type=Path, help="file; default: standard output")
    showing = commands.add_parser("stats", help="a table, one column per trace")
    showing.add_argument("trace", type=Path, nargs="+")
    arguments = parser.parse_args(argv)
    if arguments.command == "stats":
        print(compare({str(path): read_trace(path) for path in arguments.trace}))
        return 0
    lines = "".join(
        request.as_line() + "\n"
        for request in generate.generate(arguments.requests, arguments.seed)
    )
    if arguments.output is None:
        sys.stdout.write(lines)
    else:
        try:
            arguments.output.write_text(lines)
        except OSError as error:
            raise TraceFileError(
                f"{arguments.output} cannot be written: {error.strerror}"
            ) from None
        print(f"{arguments.requests:,} requests in {arguments.output}", file=sys.stderr)
    return 0
