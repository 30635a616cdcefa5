"""Real processes: ended, killed and stopped, at every side. Times are five times the promises."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from broker.supervisor import EXIT_CONFIG, EXIT_MEMORY, EXIT_OK, EXIT_SOCKET
from tests.faults.brokers import RealBroker, RealEngine, eventually, real_broker, real_engine

FIVE_TIMES_1_S = 5.0
FIVE_TIMES_3_S = 15.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("entry", ["-m broker", "kvquay"])
def test_a_signal_ends_it_cleanly(tmp_path: Path, number: int, entry: str) -> None:
    command = [sys.executable, "-m", "broker"]
    if entry == "kvquay":
        command = [str(Path(sys.executable).with_name("kvquay"))]
    process = subprocess.Popen(
        [*command, "serve", "--socket", str(tmp_path / "b.sock"), "--memory", "16MiB"],
        stderr=subprocess.DEVNULL,
    )
    assert eventually(lambda: bool(psutil.Process(process.pid).children()))
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(number)
    assert process.wait(20) == EXIT_OK
    assert not child.is_running()
    assert list(tmp_path.iterdir()) == []


def test_sighup_is_refused_with_a_message(tmp_path: Path) -> None:
    with real_broker(tmp_path) as broker:
        broker.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: "can't be reloaded" in broker.log.read_text())
        assert broker.status() is not None


def test_a_killed_broker_is_replaced_and_engines_attach_again(tmp_path: Path) -> None:
    with real_broker(tmp_path) as broker, real_engine(broker.path, "a") as a:
        assert a.ask("store", "r", [1, 2, 3]) == 3
        assert a.ask("lookup", "r2", [1, 2, 3]) == 3
        broker.child.kill()
        # a load that was running on the old mapping is right, or to be computed again
        answer = a.ask("load", "r2", [1, 2, 3])
        assert answer == "recompute" or answer["wrong"] == 0
        assert eventually(lambda: a.ask("step") == 2, FIVE_TIMES_3_S)
        assert a.ask("lookup", "r3", [1, 2, 3]) == 0
        assert a.ask("store", "r4", [1, 2, 3]) == 3
        assert a.ask("lookup", "r5", [1, 2, 3]) == 3
        assert a.ask("load", "r5", [1, 2, 3]) == {"good": 3, "wrong": 0}


def test_after_a_restart_no_row_is_given_out_while_an_old_mapper_lives(tmp_path: Path) -> None:
    with (
        real_broker(tmp_path) as broker,
        real_engine(broker.path, "a") as a,
        real_engine(broker.path, "b") as b,
    ):
        assert a.ask("store", "r", [1]) == 1
        b.kill(signal.SIGSTOP)
        broker.child.kill()
        assert eventually(lambda: (broker.status() or {}).get("incarnation") == 2)
        a.ask("step")
        assert a.ask("reserve", "r2", [5]) == []  # declined: b may still write
        status = broker.status()
        assert status is not None
        assert [m["engine"] for m in status["waiting_for_old_mappers"]].count("b") == 1
        b.kill(signal.SIGKILL)
        assert eventually(lambda: a.ask("step") == 2)
        assert a.ask("store", "r3", [5]) == 1


def test_a_mapper_that_stays_is_left_alone_with_the_old_memory(tmp_path: Path) -> None:
    with (
        real_broker(tmp_path, "--restart-wait", "200ms") as broker,
        real_engine(broker.path, "a") as a,
        real_engine(broker.path, "b") as b,
    ):
        assert a.ask("store", "r", [1]) == 1
        assert len(b.ask("reserve", "r", [2])) == 1
        b.kill(signal.SIGSTOP)
        broker.child.kill()
        assert eventually(lambda: a.ask("step") == 3)  # 2 waited in vain, 3 has fresh memory
        assert a.ask("store", "r2", [5]) == 1
        b.kill(signal.SIGCONT)
        b.ask("write", "r", [2])  # into the memory of before, where it harms nobody
        assert eventually(lambda: b.ask("step") == 3)
        assert b.ask("lookup", "r3", [5]) == 1
        assert b.ask("load", "r3", [5]) == {"good": 1, "wrong": 0}
        status = broker.status()
        assert status is not None
        assert status["waiting_for_old_mappers"] == []


def test_without_its_supervisor_the_broker_ends(tmp_path: Path) -> None:
    broker = RealBroker(tmp_path)
    broker.wait_up()
    child = broker.child
    broker.process.kill()
    broker.process.wait()
    assert eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    # what it left is replaced by the next one
    with real_broker(tmp_path) as second:
        assert second.status() is not None


def test_a_dead_engine_gives_back_what_it_held(tmp_path: Path) -> None:
    with real_broker(tmp_path) as broker, real_engine(broker.path, "b") as b:
        a = RealEngine(broker.path, "a")
        assert a.ask("store", "r", [1, 2]) == 2
        assert a.ask("lookup", "r1", [1, 2]) == 2
        assert a.ask("take", "r1", [1, 2]) is True
        assert len(a.ask("reserve", "r2", [3, 4])) == 2
        assert a.ask("write", "r2", [3]) == "written"
        a.kill()
        a.end()
        assert broker.wait_rows(busy=0, quarantined=0, ready=2)
        assert b.ask("lookup", "r", [1, 2, 3]) == 2  # nothing half-written is readable
        assert b.ask("store", "r", [3]) == 1


def test_a_forked_child_does_not_keep_a_dead_engine_alive(tmp_path: Path) -> None:
    with real_broker(tmp_path) as broker:
        a = RealEngine(broker.path, "a")
        assert len(a.ask("reserve", "r", [1])) == 1
        child = a.ask("fork")
        try:
            a.kill()
            a.end()
            assert broker.wait_rows(busy=0, quarantined=0)
            with real_engine(broker.path, "a") as again:
                assert again.ask("store", "r", [1]) == 1
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_stopped_engine_is_not_dead(tmp_path: Path) -> None:
    with (
        real_broker(tmp_path, "--pending-deadline", "100ms") as broker,
        real_engine(broker.path, "a") as a,
        real_engine(broker.path, "b") as b,
    ):
        assert len(a.ask("reserve", "r", [1])) == 1
        a.kill(signal.SIGSTOP)
        assert b.ask("lookup", "r", [1]) == 0  # not for ever: the wait has a deadline
        status = broker.status()
        assert status is not None
        assert status["pools"][0]["reserved"] == 1
        a.kill(signal.SIGCONT)
        assert a.ask("step") == 1


def test_too_much_memory_is_refused_with_numbers(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "broker", "serve"),
            *("--socket", str(tmp_path / "b.sock"), "--memory", "900TiB"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == EXIT_MEMORY
    assert "943,718,700.0 MiB" in result.stderr
    assert "--memory" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_second_broker_on_one_socket_is_refused(tmp_path: Path) -> None:
    with real_broker(tmp_path) as broker:
        result = subprocess.run(
            [sys.executable, "-m", "broker", "serve", "--socket", broker.path],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == EXIT_SOCKET
        assert str(broker.process.pid) in result.stderr
        assert broker.status() is not None


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stale.bind(str(tmp_path / "b.sock"))
    stale.close()
    with real_broker(tmp_path) as broker:
        assert broker.status() is not None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--policy", "clock"], "clock"),
        (["--tier", '{"type": "floppy"}'], "floppy"),
        (["--memory", "lots"], "--memory"),
        (["--share-total", "0.1"], "share_total"),
    ],
)
def test_bad_settings_are_refused_by_name(tmp_path: Path, options: list[str], named: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "broker", "serve", "--socket", str(tmp_path / "b.sock"), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert result.returncode == EXIT_CONFIG
    assert named in result.stderr
