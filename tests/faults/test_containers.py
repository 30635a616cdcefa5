"""Engines in other namespaces than the broker's, as in containers: processes, users, /dev/shm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.brokers import PYTHONPATH, RealEngine, real_broker, real_engine

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="NAMESPACES NOT TESTED: needs root"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="NAMESPACES NOT TESTED: no unshare"),
]

OWN_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
SMALL_SHM = (
    *("unshare", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"',
    "sh",
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="kvquay-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_engines_in_sibling_process_namespaces_share_and_die(tmp_path: Path) -> None:
    with (
        real_broker(tmp_path, prefix=OWN_PIDS) as broker,
        real_engine(broker.path, "b", prefix=OWN_PIDS) as b,
    ):
        a = RealEngine(broker.path, "a", prefix=OWN_PIDS)
        assert a.ask("store", "r", [1, 2]) == 2
        assert b.ask("lookup", "r", [1, 2]) == 2
        assert b.ask("load", "r", [1, 2]) == {"good": 2, "wrong": 0}
        b.ask("finish", "r")
        assert len(a.ask("reserve", "r2", [3])) == 1
        a.kill()
        a.end()
        assert broker.wait_rows(busy=0, quarantined=0, ready=2)
        assert b.ask("store", "r3", [3]) == 1


def test_a_small_dev_shm_does_not_matter(tmp_path: Path) -> None:
    with real_broker(tmp_path, "--memory", "160MiB", prefix=SMALL_SHM) as broker:
        status = broker.status()
        assert status is not None
        assert status["memory_bytes"] == 160 << 20
        with (
            real_engine(broker.path, "a", prefix=SMALL_SHM) as a,
            real_engine(broker.path, "b", prefix=SMALL_SHM) as b,
        ):
            assert a.ask("store", "r", list(range(100))) == 100
            assert b.ask("lookup", "r", list(range(100))) == 100
            assert b.ask("load", "r", list(range(100))) == {"good": 100, "wrong": 0}


def as_user(user: int, group: int) -> tuple[str, ...]:
    """Runs what follows as another user, with one group."""
    return ("setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups")


def python_for_all() -> str | None:
    """A Python of this version that another user can run, with this code; None if there is none."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in (os.path.realpath(sys.executable), f"/usr/bin/python{version}"):
        if os.path.exists(python):
            # It must also be able to start itself, as the supervisor starts the broker.
            text = (
                "import subprocess, sys, tests.faults.engine;"
                "subprocess.run([sys.executable, '-c', ''], check=True)"
            )
            code = [*as_user(12345, 12345), python, "-c", text]
            environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
            if not subprocess.run(
                code, env=environment, capture_output=True, check=False
            ).returncode:
                return python
    return None


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="USERS NOT TESTED: no setpriv")
def test_two_users_share_by_group_and_a_stranger_does_not(folder: Path) -> None:
    python = python_for_all()
    if python is None:
        pytest.skip("USERS NOT TESTED: other users cannot read this Python or this checkout")
    socket_folder = folder / "run"
    socket_folder.mkdir(mode=0o750)
    os.chown(socket_folder, 12345, 54321)
    with real_broker(
        socket_folder, "--socket-group", "54321", prefix=as_user(12345, 54321), python=python
    ) as broker:
        with (
            real_engine(broker.path, "a", prefix=as_user(11111, 54321), python=python) as a,
            real_engine(broker.path, "b", prefix=as_user(22222, 54321), python=python) as b,
        ):
            assert a.ask("store", "r", [1]) == 1
            assert b.ask("lookup", "r", [1]) == 1
            assert b.ask("load", "r", [1]) == {"good": 1, "wrong": 0}
        attempt = subprocess.run(
            [*as_user(33333, 33333), python, "-m", "tests.faults.engine", broker.path, "c"],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert attempt.returncode != 0
        assert "Permission denied" in attempt.stderr
