"""Noise at a live broker: the sender gets an error or loses its connection, nobody else notices."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from broker import wire
from tests.broker.harness import running
from tests.broker.test_server import attach
from tests.broker.wire_fuzz import stream
from tests.engines import Engine, key

SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.all_combinations) for seed in range(2, 12))]
FRAMES = 1500


class Noisy:
    """A connection that is opened again whenever the broker ends it."""

    def __init__(self, path: str, *, attached: bool) -> None:
        self._path, self._attached = path, attached
        self.opened = 0
        self._open()

    def _open(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(5)
        self._socket.connect(self._path)
        self.opened += 1
        if self._attached:
            message = attach(engine_id=f"noisy{self.opened}", key_bytes=8, world=0)
            self._socket.sendall(wire.encode(message))

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
            self._socket.setblocking(False)
            try:
                while self._socket.recv(1 << 16):
                    continue
            except BlockingIOError:
                self._socket.settimeout(5)
                return
        except OSError:
            pass
        self._socket.close()
        self._open()

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_noise_harms_nobody_else(tmp_path: Path, seed: int, attached: bool) -> None:
    with running(tmp_path, rows=32, tiers=[{"type": "memory", "max_chunks": 8}]) as broker:
        engine = Engine(broker.path, "quiet")
        noisy = Noisy(broker.path, attached=attached)
        for number, data in enumerate(stream(seed, FRAMES)):
            noisy.send(data)
            if number % 100 == 0:
                request = f"r{number}"
                assert engine.store(request, [key(number), key(number + 1)]) == 2
                assert engine.lookup(request, [key(number), key(number + 1)]) == 2
                engine.load(request, [key(number), key(number + 1)])
                engine.client.finish(request)
                broker.check()
        assert noisy.opened > 10
        noisy.close()
        engine.close()
        assert broker.server.failure is None
        assert broker.server.control_plane.is_alive
