"""What a step costs an engine while one of its requests waits for a chunk that another is storing.

A step reads what the broker has said and asks for the waiting request's answer again. Prints the
median per number of keys; it should not depend on it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from broker import wire
from engine_adapter.answers import GroupQuery
from engine_adapter.bench.servers import ServerFailed, broker
from engine_adapter.client import SchedulerClient
from engine_adapter.worker import WorkerClient

ROW_BYTES = 4096
KEY_BYTES = 36
READY_S = 60.0
PATIENT = ("--pending-deadline", "600s", "--retry-deadline", "600s", "--request-wait", "600s")


def _client(socket: Path, name: str, world: int) -> SchedulerClient:
    return SchedulerClient(
        str(socket),
        engine_id=name,
        namespace=wire.namespace_digest({"bench": "step"}),
        row_bytes=ROW_BYTES,
        key_bytes=KEY_BYTES,
        world=world,
        call_timeout_s=5.0,
    )


def measure(keys: int, steps: int) -> float:
    """Median seconds of a step."""
    names = [n.to_bytes(32, "big") + b"\0\0\0\0" for n in range(keys)]
    positions = range(1, keys + 1)
    memory = (4 * keys + 64) * (ROW_BYTES + 64)
    with tempfile.TemporaryDirectory(prefix="kvquay-bench-") as folder:
        socket = Path(folder, "broker.sock")
        with broker(socket, "--memory", str(memory), "--log-level", "warning", *PATIENT):
            storing = _client(socket, "storing", 1)
            worker = WorkerClient(
                str(socket), engine_id="storing", row_bytes=ROW_BYTES, key_bytes=KEY_BYTES
            )
            waiting = _client(socket, "waiting", 0)
            ready = worker.wait_attached(READY_S) and storing.wait_ready(READY_S)
            if not ready or not waiting.wait_ready(READY_S):
                raise ServerFailed("the broker does not let the benchmark attach")
            if len(storing.prepare_store("s", names, positions).accepted) != keys:
                raise ServerFailed(f"no room for {keys} chunks")
            queries = [GroupQuery(group=0, keys=names, positions=positions)]
            times = []
            for _ in range(steps):
                start = time.perf_counter()
                waiting.step()
                answer = waiting.lookup("r", queries)
                times.append(time.perf_counter() - start)
                if not answer.pending:
                    raise ServerFailed("the request does not wait")
            for client in (storing, waiting, worker):
                client.close()
    return statistics.median(times[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """`kvquay bench step`."""
    parser = argparse.ArgumentParser(prog="kvquay bench step", description=__doc__)
    parser.add_argument("--keys", default="32,4096")
    parser.add_argument("--steps", type=int, default=20_000)
    arguments = parser.parse_args(argv)
    for text in arguments.keys.split(","):
        print(f"{int(text):>6} keys: {measure(int(text), arguments.steps) * 1e6:.2f} us per step")
    return 0
