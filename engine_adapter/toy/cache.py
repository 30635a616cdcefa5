"""The broker as the toy engine's cache of chunks: scheduler and worker in one process."""

from __future__ import annotations

import time
from collections.abc import Sequence

from broker import wire
from engine_adapter.answers import GroupQuery
from engine_adapter.client import SchedulerClient
from engine_adapter.toy.engine import GROUP, Chunk, row_bytes
from engine_adapter.toy.model import ToyConfig
from engine_adapter.worker import WorkerClient

KEY_BYTES = 32 + len(GROUP)
PENDING_S = 5.0


class BrokerCache:
    """A `ChunkCache` that is a broker. Absent or dead, it has nothing and keeps nothing."""

    def __init__(self, socket: str, engine_id: str, config: ToyConfig) -> None:
        size = row_bytes(config)
        self.worker = WorkerClient(socket, engine_id=engine_id, row_bytes=size, key_bytes=KEY_BYTES)
        self.client = SchedulerClient(
            socket,
            engine_id=engine_id,
            namespace=wire.namespace_digest(config.kv_depends_on()),
            row_bytes=size,
            key_bytes=KEY_BYTES,
            call_timeout_s=0.5,
        )

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the broker has both of us, in time."""
        return self.worker.wait_attached(timeout_s) and self.client.wait_ready(timeout_s)

    def load(
        self, request: str, keys: Sequence[bytes], positions: Sequence[int], into: Sequence[Chunk]
    ) -> int:
        """As ChunkCache."""
        self.step()
        query = GroupQuery(group=0, keys=keys, positions=positions)
        answer = self.client.lookup(request, [query])
        end = time.monotonic() + PENDING_S
        while answer.pending and time.monotonic() < end:
            self.client.step()
            answer = self.client.lookup(request, [query])
        there = keys[: answer.groups[0].count] if answer.groups and not answer.pending else ()
        refs = self.client.prepare_load(request, there) if there else None
        if refs is None:
            return 0
        good = self.worker.load(refs, into).tolist()
        failed = [key for key, is_good in zip(there, good, strict=True) if not is_good]
        self.client.complete_load(request, there, failed)
        return good.index(False) if failed else len(there)

    def store(
        self, request: str, keys: Sequence[bytes], positions: Sequence[int], chunks: Sequence[Chunk]
    ) -> int:
        """As ChunkCache."""
        self.step()
        offer = self.client.prepare_store(request, keys, positions)
        accepted = [keys[index] for index in offer.accepted]
        if not accepted:
            return 0
        good = self.worker.store(offer.refs, [chunks[index] for index in offer.accepted])
        self.client.complete_store(request, accepted, success=bool(good.all()))
        return len(accepted)

    def finish(self, request: str) -> None:
        """As ChunkCache."""
        self.client.finish(request)
        self.step()

    def step(self) -> None:
        """Hear what the broker has said."""
        self.client.step()
        self.worker.step()

    def close(self) -> None:
        """Leave the broker."""
        self.client.close()
        self.worker.close()
