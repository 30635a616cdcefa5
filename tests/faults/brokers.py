"""A real broker, as a user runs it, and real engine processes beside it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

DEADLINE_S = 20.0
PYTHONPATH = os.pathsep.join([str(Path(__file__).parents[2]), sysconfig.get_path("purelib")])
"""This checkout and these packages, for any interpreter of the same version."""


def eventually(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> bool:
    """Whether the condition comes true in time; asks every few milliseconds."""
    end = time.monotonic() + deadline_s
    poller = select.poll()
    while time.monotonic() < end:
        if condition():
            return True
        poller.poll(5)
    return condition()


class RealBroker:
    """`kvquay serve` in a process of its own."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        prefix: Sequence[str] = (),
        python: str = sys.executable,
        **popen: Any,
    ) -> None:
        self.path = str(folder / "b.sock")
        self.log = folder / "broker.log"
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *prefix,
                    python,
                    "-m",
                    "broker",
                    "serve",
                    "--socket",
                    self.path,
                    "--memory",
                    "16MiB",
                    *options,
                ],
                stderr=log,
                env=environment,
                **popen,
            )

    def status(self, *, verify: bool = True) -> dict[str, Any] | None:
        """What `kvquay status` says; None while nobody answers."""
        from broker.commands import Admin, NoBroker
        from broker.wire import Status, StatusReply

        try:
            admin = Admin(self.path)
            answer = admin.ask(Status(seq=1, verify=verify))
            admin.close()
        except NoBroker:
            return None
        assert isinstance(answer, StatusReply)
        return answer.status

    def wait_up(self) -> dict[str, Any]:
        """Status of the broker once it answers and its memory is reserved."""

        def up() -> bool:
            status = self.status()
            return status is not None and bool(status["memory_reserved"])

        assert eventually(up), self.log.read_text()
        status = self.status()
        assert status is not None
        return status

    def wait_rows(self, **wanted: int) -> bool:
        """Whether the first pool comes to have these figures."""

        def there() -> bool:
            status = self.status()
            return (
                status is not None
                and bool(status["pools"])
                and all(status["pools"][0][name] == value for name, value in wanted.items())
            )

        return eventually(there)

    @property
    def child(self) -> psutil.Process:
        """The broker process under the supervisor."""
        (child,) = [
            c
            for c in psutil.Process(self.process.pid).children(recursive=True)
            if "broker.main" in c.cmdline()
        ]
        return child

    def end(self) -> int:
        """Stop it as an operator does; the exit status."""
        if self.process.poll() is None:
            self.supervisor.terminate()
        return self.process.wait(DEADLINE_S)

    @property
    def supervisor(self) -> psutil.Process:
        """The process that `kvquay serve` is; what runs it may be in between (`unshare --fork`)."""
        outer = psutil.Process(self.process.pid)
        for process in [outer, *outer.children(recursive=True)]:
            if process.cmdline()[1:4] == ["-m", "broker", "serve"]:
                return process
        return outer


@contextmanager
def real_broker(folder: Path, *options: str, **how: Any) -> Iterator[RealBroker]:
    """A running broker; afterwards nothing of it is left, and it was healthy to the end."""
    broker = RealBroker(folder, *options, **how)
    try:
        broker.wait_up()
        yield broker
        status = broker.status()
        assert status is None or status["healthy"], status
    finally:
        broker.end()
        assert not Path(broker.path).exists()
        assert not Path(broker.path + ".lock").exists()


class RealEngine:
    """An engine in a process of its own, told what to do line by line."""

    def __init__(
        self,
        path: str,
        name: str,
        *,
        prefix: Sequence[str] = (),
        python: str = sys.executable,
        **popen: Any,
    ) -> None:
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        self.process = subprocess.Popen(
            [*prefix, python, "-m", "tests.faults.engine", path, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
            **popen,
        )
        assert self.read() == "ready"

    def read(self) -> Any:
        """Its next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def ask(self, *command: Any) -> Any:
        """Do one thing and say what came of it."""
        self.tell(*command)
        return self.read()

    def tell(self, *command: Any) -> None:
        """Do one thing; nobody waits."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> None:
        """Gone in any case."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue


@contextmanager
def real_engine(path: str, name: str, **how: Any) -> Iterator[RealEngine]:
    """An attached engine."""
    engine = RealEngine(path, name, **how)
    try:
        yield engine
    finally:
        engine.end()
