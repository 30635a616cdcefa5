"""What a step costs while a request waits: one non-blocking read and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine_adapter.answers import GroupQuery
from engine_adapter.client import SchedulerClient
from tests.broker.harness import running
from tests.engines import KEY, ROW, Engine, key

STEPS = 200
SCRIPT = """
import sys
from tests.engine_adapter.test_steps import waiting_client
client, query = waiting_client(sys.argv[1], int(sys.argv[2]))
print("waiting", flush=True)
sys.stdin.readline()
for _ in range({steps}):
    client.step()
    assert client.lookup("r", [query]).pending
print("stepped", flush=True)
"""


def waiting_client(path: str, keys: int) -> tuple[SchedulerClient, GroupQuery]:
    """A client whose request waits for a chunk that somebody else is storing."""
    from broker import wire

    client = SchedulerClient(
        path,
        engine_id="waiting",
        namespace=wire.namespace_digest({"model": "m"}),
        row_bytes=ROW,
        key_bytes=KEY,
        world=0,
        call_timeout_s=2.0,
    )
    assert client.wait_ready(5)
    prompt = [key(n) for n in range(1, keys + 1)]
    query = GroupQuery(group=0, keys=prompt, positions=range(1, keys + 1))
    assert client.lookup("r", [query]).pending
    return client, query


@pytest.mark.skipif(shutil.which("strace") is None, reason="SYSTEM CALLS NOT COUNTED: no strace")
@pytest.mark.parametrize("keys", [32, 1024])
def test_a_waiting_step_makes_two_reads_and_no_other_system_call(tmp_path: Path, keys: int) -> None:
    from tiers.sessions import Deadlines

    patient = Deadlines(pending_s=60.0, retry_s=60.0, request_s=60.0)
    with running(tmp_path, rows=2048, deadlines=patient) as broker:
        storing = Engine(broker.path, "storing")
        numbers = [key(n) for n in range(1, keys + 1)]
        assert storing.client.prepare_store("s", numbers, range(1, keys + 1)).accepted
        trace = tmp_path / "trace"
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(steps=STEPS), broker.path, str(keys)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "waiting\n"
        watcher = subprocess.Popen(
            ["strace", "-o", str(trace), "-p", str(process.pid)], stderr=subprocess.PIPE
        )
        assert watcher.stderr is not None
        assert b"attached" in watcher.stderr.readline()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "stepped\n"
        process.stdin.close()
        process.wait(10)
        watcher.wait(10)
        watcher.stderr.close()
        process.stdout.close()
        lines = trace.read_text().splitlines()  # of the thread that steps
        calls = [line.split("(")[0] for line in lines]
        # from the first read of the first step to the write of the answer
        first = calls.index("recvfrom")
        last = next(i for i, line in enumerate(lines) if line.startswith('write(1, "stepped'))
        between = [call for call in calls[first:last] if call != "brk"]
        assert set(between) == {"recvfrom"}
        assert len(between) == 2 * STEPS
        storing.close()
