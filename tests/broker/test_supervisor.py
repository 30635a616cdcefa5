"""The supervisor with brokers that die: restarts, incarnations, and a crash loop that stops."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from broker.supervisor import EXIT_CONFIG, EXIT_CRASH_LOOP, MAX_DEATHS

RUN = """
import sys
from broker.cli import set_up_logging
from broker.config import ServeConfig
from broker.errors import BrokerError
from broker.supervisor import Supervisor, exit_code
set_up_logging("info")
config = ServeConfig(socket=sys.argv[1], memory=1 << 20)
try:
    sys.exit(Supervisor(config, broker_argv=[sys.executable, "-c", sys.argv[2]]).run())
except BrokerError as error:
    print(error, file=sys.stderr)
    sys.exit(exit_code(error))
"""
SAY_INCARNATION = """
import sys
from broker.link import SupervisorLink
link = SupervisorLink(int(sys.argv[2]))
start, fds = link.start()
print("incarnation", start["incarnation"], "descriptors", len(fds), file=sys.stderr, flush=True)
link.ready()
"""


def supervise(folder: Path, child: str, before: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", before + RUN, str(folder / "b.sock"), child],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )


def test_a_crash_loop_stops_loudly_and_leaves_nothing(tmp_path: Path) -> None:
    result = supervise(tmp_path, SAY_INCARNATION + "sys.exit(9)")
    assert result.returncode == EXIT_CRASH_LOOP
    for number in range(1, MAX_DEATHS + 1):
        assert f"incarnation {number} descriptors 2" in result.stderr
    assert f"incarnation {MAX_DEATHS + 1}" not in result.stderr
    assert f"died {MAX_DEATHS} times" in result.stderr
    assert "status 9" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_broker_that_never_gets_ready_is_killed_and_counts_as_a_crash(tmp_path: Path) -> None:
    impatient = "import broker.supervisor\nbroker.supervisor.READY_DEADLINE_S = 0.2\n"
    result = supervise(tmp_path, "import signal; signal.pause()", before=impatient)
    assert result.returncode == EXIT_CRASH_LOOP
    assert result.stderr.count("was not ready within 0.2 s") == MAX_DEATHS
    assert "SIGKILL" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_broker_that_dies_before_it_is_told_anything_is_a_crash_too(tmp_path: Path) -> None:
    result = supervise(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert result.returncode == EXIT_CRASH_LOOP
    assert "SIGKILL" in result.stderr
    assert "out of memory?" in result.stderr


def test_a_refused_configuration_is_not_tried_again(tmp_path: Path) -> None:
    result = supervise(tmp_path, f"import sys; sys.exit({EXIT_CONFIG})")
    assert result.returncode == EXIT_CONFIG
    assert "starting it again" not in result.stderr
