"""A small engine for tests: scheduler and worker in one process, chunks with patterned bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from broker import wire
from engine_adapter.answers import GroupQuery
from engine_adapter.client import SchedulerClient
from engine_adapter.worker import WorkerClient

ROW = 4096
KEY = 36


def key(number: int) -> bytes:
    """A key of 36 bytes."""
    return number.to_bytes(32, "big") + b"\0\0\0\0"


def data_of(chunk: bytes) -> NDArray[np.uint8]:
    """The bytes that belong to a key."""
    return np.frombuffer((chunk * (ROW // KEY + 1))[:ROW], dtype=np.uint8)


class Engine:
    """Scheduler and worker of one engine."""

    def __init__(self, path: str, name: str, model: str = "m") -> None:
        self.worker = WorkerClient(path, engine_id=name, row_bytes=ROW, key_bytes=KEY)
        self.client = SchedulerClient(
            path,
            engine_id=name,
            namespace=wire.namespace_digest({"model": model}),
            row_bytes=ROW,
            key_bytes=KEY,
            call_timeout_s=2.0,
            events=True,
        )
        assert self.worker.wait_attached(5)
        assert self.client.wait_ready(5)

    def store(self, request: str, keys: Sequence[bytes]) -> int:
        offer = self.client.prepare_store(request, keys, range(16, 16 * len(keys) + 1, 16))
        accepted = [keys[index] for index in offer.accepted]
        assert self.worker.store(offer.refs, [data_of(k) for k in accepted]).all()
        self.client.complete_store(request, accepted)
        return len(accepted)

    def lookup(self, request: str, keys: Sequence[bytes]) -> int:
        query = GroupQuery(group=0, keys=keys, positions=range(16, 16 * len(keys) + 1, 16))
        answer = self.client.lookup(request, [query])
        while answer.pending:
            self.client._link.wait_for(lambda: True, 0.01)
            answer = self.client.lookup(request, [query])
        return answer.groups[0].count

    def load(self, request: str, keys: Sequence[bytes]) -> None:
        refs = self.client.prepare_load(request, keys)
        assert refs is not None
        buffers = [np.empty(ROW, dtype=np.uint8) for _ in keys]
        assert self.worker.load(refs, buffers).all()
        for chunk, buffer in zip(keys, buffers, strict=True):
            assert np.array_equal(buffer, data_of(chunk))
        self.client.complete_load(request, keys)

    def close(self) -> None:
        self.client.close()
        self.worker.close()
