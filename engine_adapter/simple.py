"""The broker as a plain, waiting cache of chunks, for an engine of one process and one thread.

Scheduler and worker in one; nothing fails: a broker that is absent or dead has nothing and keeps
nothing. Engines with workers of their own use `engine_adapter.client` and `.worker` instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from broker import wire
from engine_adapter.answers import GroupQuery
from engine_adapter.client import SchedulerClient
from engine_adapter.worker import WorkerClient

Chunk = NDArray[np.uint8]
PENDING_S = 5.0


class SimpleCache:
    """See the module."""

    def __init__(
        self,
        socket: str,
        engine_id: str,
        *,
        row_bytes: int,
        key_bytes: int,
        kv_depends_on: Mapping[str, wire.Field],
        call_timeout_s: float = 0.5,
    ) -> None:
        names = {"engine_id": engine_id, "row_bytes": row_bytes, "key_bytes": key_bytes}
        self.worker = WorkerClient(socket, **names)  # type: ignore[arg-type]
        self.client = SchedulerClient(
            socket,
            namespace=wire.namespace_digest(kv_depends_on),
            call_timeout_s=call_timeout_s,
            **names,  # type: ignore[arg-type]
        )

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the broker has both of us, in time."""
        return self.worker.wait_attached(timeout_s) and self.client.wait_ready(timeout_s)

    def load(
        self, request: str, keys: Sequence[bytes], positions: Sequence[int], into: Sequence[Chunk]
    ) -> int:
        """Fill the first chunks of `into`; how many are there and good, from the first on."""
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
        """Keep chunks; how many were kept."""
        self.step()
        offer = self.client.prepare_store(request, keys, positions)
        accepted = [keys[index] for index in offer.accepted]
        if not accepted:
            return 0
        good = self.worker.store(offer.refs, [chunks[index] for index in offer.accepted])
        self.client.complete_store(request, accepted, success=bool(good.all()))
        return len(accepted)

    def finish(self, request: str) -> None:
        """The request has ended."""
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
