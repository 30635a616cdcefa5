"""The engine: blocks, block hashes, prefill that loads what the cache has, greedy decoding."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine_adapter.simple import Chunk, SimpleCache
from engine_adapter.toy.model import ToyConfig, ToyModel

PAGE_BYTES = 4096
GROUP = b"\0\0\0\0"
FIRST_PARENT = hashlib.sha256(b"kvquay toy").digest()


class OutOfBlocks(Exception):
    """The prompt and its answer are longer than the engine's own memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """An answer and where the prompt's KV came from, in blocks."""

    tokens: tuple[int, ...]
    loaded_blocks: int
    computed_blocks: int
    stored_blocks: int


def row_bytes(config: ToyConfig) -> int:
    """Bytes of one chunk, whole pages."""
    size = 4 * int(np.prod(config.block_shape))
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def open_cache(socket: str, engine_id: str, config: ToyConfig) -> SimpleCache:
    """The broker at `socket` as the cache of an engine of this configuration."""
    return SimpleCache(
        socket,
        engine_id,
        row_bytes=row_bytes(config),
        key_bytes=32 + len(GROUP),
        kv_depends_on=config.kv_depends_on(),
    )


def block_keys(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Keys of the full blocks: each hash covers its tokens and all before them."""
    parent, keys = FIRST_PARENT, []
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = hashlib.sha256(parent + bytes(tokens[at : at + block_tokens])).digest()
        keys.append(parent + GROUP)
    return keys


class ToyEngine:
    """One request at a time, on one thread."""

    def __init__(self, config: ToyConfig, cache: SimpleCache | None = None) -> None:
        self.config = config
        self._model = ToyModel(config)
        self._cache = cache
        self._number = 0

    def _chunk(self, block: int) -> Chunk:
        """The bytes of a block, as they lie in the engine's memory."""
        return self._model.kv[block].numpy().reshape(-1).view(np.uint8)

    def generate(self, prompt: bytes, max_tokens: int) -> Generation:
        """Greedy answer to a prompt of at least one byte. OutOfBlocks if it does not fit."""
        c, size = self.config, self.config.block_tokens
        tokens = list(prompt)
        needed = -(-(len(tokens) + max_tokens) // size)
        if needed > c.num_blocks or not tokens:
            raise OutOfBlocks(
                f"{len(tokens)} prompt and {max_tokens} answer tokens need {needed} blocks of "
                f"{size}; there are {c.num_blocks}, and a prompt has at least one token"
            )
        table = list(range(needed))
        self._number += 1
        request = f"toy{self._number}"
        keys = block_keys(tokens, size)
        positions = [(index + 1) * size for index in range(len(keys))]
        # The last token is always computed: its logits begin the answer.
        wanted = min(len(keys), (len(tokens) - 1) // size)
        loaded = 0
        if self._cache is not None and wanted:
            loaded = self._cache.load(
                request, keys[:wanted], positions[:wanted], [self._chunk(b) for b in table[:wanted]]
            )
        for start in range(loaded * size, len(tokens), size):
            logits = self._model.forward(tokens[start : start + size], start, table)
        stored = 0
        if self._cache is not None and len(keys) > loaded:
            stored = self._cache.store(
                request,
                keys[loaded:],
                positions[loaded:],
                [self._chunk(b) for b in table[loaded : len(keys)]],
            )
        answer: list[int] = []
        while len(answer) < max_tokens:
            answer.append(int(logits.argmax()))
            if len(answer) < max_tokens:
                logits = self._model.forward([answer[-1]], len(tokens) + len(answer) - 1, table)
        if self._cache is not None:
            self._cache.finish(request)
        return Generation(
            tokens=tuple(answer),
            loaded_blocks=loaded,
            computed_blocks=-(-len(tokens) // size) - loaded,
            stored_blocks=stored,
        )
