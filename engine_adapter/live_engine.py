"""One engine process of a live replay: really stores and loads patterned chunks, checks every byte.

Runs what it is told over a pipe, one request at a time. What to run and what it all adds up to is
in `engine_adapter.live`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from broker import wire
from engine_adapter.answers import GroupQuery
from engine_adapter.client import SchedulerClient
from engine_adapter.worker import WorkerClient

KEY_BYTES = 36
BLOCK_TOKENS = 512
PAGE_BYTES = 4096
READY_S = 60.0
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one request came to. Times in seconds; `wrong` counts chunks with a wrong byte."""

    blocks: int
    hit_blocks: int
    tokens: int
    hit_tokens: int
    stored_blocks: int
    wrong: int
    lookup_s: float
    load_s: float
    store_s: float


def key_of(hash_id: int) -> bytes:
    """The key that stands for a block of the trace, in KV group 0."""
    return hash_id.to_bytes(32, "big") + b"\0\0\0\0"


def pattern(hash_id: int, ramp: NDArray[np.uint64], out: NDArray[np.uint64]) -> None:
    """Bytes that belong to this block and to no other: a ramp from a number of its own."""
    np.add(ramp, np.uint64((hash_id + 1) * _MIX & _MASK), out=out)


def tokens_of(input_length: int, block: int) -> int:
    """Tokens of the prompt that lie in a block."""
    return max(0, min(BLOCK_TOKENS, input_length - block * BLOCK_TOKENS))


class LiveEngine:
    """Scheduler and worker of one engine, in this process."""

    def __init__(self, socket: str, engine_id: str, chunk_bytes: int, most_blocks: int) -> None:
        row_bytes = -(-chunk_bytes // PAGE_BYTES) * PAGE_BYTES
        self._worker = WorkerClient(
            socket, engine_id=engine_id, row_bytes=row_bytes, key_bytes=KEY_BYTES
        )
        self._client = SchedulerClient(
            socket,
            engine_id=engine_id,
            namespace=wire.namespace_digest({"replay": "patterned chunks", "bytes": chunk_bytes}),
            row_bytes=row_bytes,
            key_bytes=KEY_BYTES,
            call_timeout_s=1.0,
        )
        if not self._worker.wait_attached(READY_S) or not self._client.wait_ready(READY_S):
            raise RuntimeError(f"engine {engine_id} could not attach within {READY_S:g} s")
        words = chunk_bytes // 8
        self._ramp = np.arange(words, dtype=np.uint64)
        self._expected = np.empty(words, dtype=np.uint64)
        self._buffers = np.empty((most_blocks, words), dtype=np.uint64)
        self._number = 0

    def run(self, hash_ids: Sequence[int], input_length: int) -> Outcome:
        """One request: look its prompt up, load what is there, store the rest."""
        self._number += 1
        request = f"r{self._number}"
        keys = [key_of(hash_id) for hash_id in hash_ids]
        positions = [(index + 1) * BLOCK_TOKENS for index in range(len(keys))]
        query = GroupQuery(group=0, keys=keys, positions=positions)
        start = time.perf_counter()
        answer = self._client.lookup(request, [query])
        while answer.pending:
            self._client.step()
            answer = self._client.lookup(request, [query])
        looked_up = time.perf_counter()
        hits, wrong = self._load(request, keys[: answer.groups[0].count], hash_ids)
        loaded = time.perf_counter()
        stored = self._store(request, keys[hits:], positions[hits:], hash_ids[hits:])
        done = time.perf_counter()
        self._client.finish(request)
        self._worker.step()
        self._client.step()
        return Outcome(
            blocks=len(keys),
            hit_blocks=hits,
            tokens=input_length,
            hit_tokens=sum(tokens_of(input_length, block) for block in range(hits)),
            stored_blocks=stored,
            wrong=wrong,
            lookup_s=looked_up - start,
            load_s=loaded - looked_up,
            store_s=done - loaded,
        )

    def _load(
        self, request: str, keys: Sequence[bytes], hash_ids: Sequence[int]
    ) -> tuple[int, int]:
        refs = self._client.prepare_load(request, keys) if keys else None
        if refs is None:
            return 0, 0
        buffers = [self._buffers[index].view(np.uint8) for index in range(len(keys))]
        good = self._worker.load(refs, buffers)
        failed = [key for key, is_good in zip(keys, good.tolist(), strict=True) if not is_good]
        self._client.complete_load(request, keys, failed)
        wrong = 0
        for index in np.flatnonzero(good).tolist():
            pattern(hash_ids[index], self._ramp, self._expected)
            wrong += not np.array_equal(self._expected, self._buffers[index])
        return (int(np.argmin(good)) if failed else len(keys)), wrong

    def _store(
        self,
        request: str,
        keys: Sequence[bytes],
        positions: Sequence[int],
        hash_ids: Sequence[int],
    ) -> int:
        if not keys:
            return 0
        offer = self._client.prepare_store(request, keys, positions)
        if not len(offer.accepted):
            return 0
        for index in offer.accepted:
            pattern(hash_ids[index], self._ramp, self._buffers[index])
        good = self._worker.store(
            offer.refs, [self._buffers[index].view(np.uint8) for index in offer.accepted]
        )
        accepted = [keys[index] for index in offer.accepted]
        self._client.complete_store(request, accepted, success=bool(good.all()))
        return len(accepted)

    def close(self) -> None:
        """Leave the broker."""
        self._client.close()
        self._worker.close()


def main(pipe: Connection, socket: str, engine_id: str, chunk_bytes: int, most_blocks: int) -> None:
    """Body of the process: answer each (hash_ids, input_length) with an Outcome, until None."""
    engine = LiveEngine(socket, engine_id, chunk_bytes, most_blocks)
    pipe.send("ready")
    while (work := pipe.recv()) is not None:
        pipe.send(engine.run(*work))
    engine.close()
