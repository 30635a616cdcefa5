"""What a step costs an engine while one of its requests waits for a chunk that another is storing.

A step reads what the broker has said and asks for the waiting request's answer again. Prints the
median per number of keys; it should not depend on it. With `--vllm`, what vLLM's scheduler runs of
ours per step beyond its own connector, with one request waiting and with fifty.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

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


@contextmanager
def waiting(keys: int, requests: int) -> Iterator[tuple[SchedulerClient, list[GroupQuery]]]:
    """A client whose lookups wait, since another engine is storing all of their `keys` chunks."""
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
            client = _client(socket, "waiting", 0)
            ready = worker.wait_attached(READY_S) and storing.wait_ready(READY_S)
            if not ready or not client.wait_ready(READY_S):
                raise ServerFailed("the broker does not let the benchmark attach")
            if len(storing.prepare_store("s", names, positions).accepted) != keys:
                raise ServerFailed(f"no room for {keys} chunks")
            queries = [GroupQuery(group=0, keys=names, positions=positions)]
            for number in range(requests):
                if not client.lookup(str(number), queries).pending:
                    raise ServerFailed("the request does not wait")
            yield client, queries
            for each in (storing, client, worker):
                each.close()


def measure(keys: int, steps: int) -> float:
    """Median seconds of a step."""
    times = []
    with waiting(keys, 1) as (client, queries):
        for _ in range(steps):
            start = time.perf_counter()
            client.step()
            answer = client.lookup("0", queries)
            times.append(time.perf_counter() - start)
            if not answer.pending:
                raise ServerFailed("the request does not wait")
    return statistics.median(times[1:])


def measure_vllm(keys: int, requests: int, steps: int) -> float:
    """Median seconds of ours in a step of vLLM's scheduler with `requests` waiting; ImportError
    without vLLM."""
    from engine_adapter.vllm.connector import KvquayConnector
    from engine_adapter.vllm.manager import BrokerManager

    manager = BrokerManager(events=False)
    connector = KvquayConnector.__new__(KvquayConnector)  # of it only what a step uses
    connector._manager = manager
    asked = [SimpleNamespace(request_id=str(number)) for number in range(requests)]
    times = []
    with waiting(keys, requests) as (client, queries):
        manager.connect(client)
        for request in asked:
            manager.ask(request.request_id, 0, queries)
        for _ in range(steps):
            start = time.perf_counter()
            for request in asked:
                if connector.get_num_new_matched_tokens(request, 0)[0] is not None:
                    raise ServerFailed("the request does not wait")
            manager.step()
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """`kvquay bench step`."""
    parser = argparse.ArgumentParser(prog="kvquay bench step", description=__doc__)
    parser.add_argument("--keys", help="default: 32,4096; with --vllm 32,512,4096")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--vllm", action="store_true")
    arguments = parser.parse_args(argv)
    for text in (arguments.keys or ("32,512,4096" if arguments.vllm else "32,4096")).split(","):
        if arguments.vllm:
            for requests in (1, 50):
                seconds = measure_vllm(int(text), requests, arguments.steps)
                print(
                    f"{int(text):>6} keys, {requests:>2} waiting: {seconds * 1e6:.2f} us of ours "
                    "per step",
                    flush=True,
                )
            continue
        print(f"{int(text):>6} keys: {measure(int(text), arguments.steps) * 1e6:.2f} us per step")
    return 0
