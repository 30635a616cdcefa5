"""Which LoRA adapter a request runs under, by what its files hold: vLLM's keys only have its name.

Covers digests of adapters' files, made on a thread of its own; knows no request and no broker.
"""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

logger = logging.getLogger("vllm.kvquay")

DIGEST_BYTES = 16
_PIECE = 1 << 20


class Adapter(Protocol):
    """What is used of vLLM's LoRARequest."""

    lora_int_id: int
    lora_path: str


class Adapters:
    """Digests, each made once: vLLM too reads an adapter's files once for each number, unless it is
    told to load them in place of what it has."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kvquay-adapters")
        self._known: dict[tuple[int, str], Future[bytes | None]] = {}

    def digest(self, adapter: Adapter) -> bytes | None:
        """16 bytes over names and contents of the adapter's files; None while they are being read,
        and for good if they can't be. Never reads a file itself: it is called by a scheduler."""
        key = (adapter.lora_int_id, adapter.lora_path)
        known = self._known.get(key)
        if known is None or getattr(adapter, "load_inplace", False):
            known = self._known[key] = self._thread.submit(_digest, adapter.lora_path)
        return known.result() if known.done() else None

    def close(self) -> None:
        """No more digests."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _digest(path: str) -> bytes | None:
    try:
        return _contents(_files(Path(path)))
    except OSError as error:
        logger.warning("kvquay: requests of adapter %s are not cached: %s", path, error)
        return None


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(file for file in path.iterdir() if file.is_file())
    if not files:
        raise FileNotFoundError(f"no files of an adapter in {path}")
    return files


def _contents(files: list[Path]) -> bytes:
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"kvquay-adapter")
    for file in files:
        one = hashlib.blake2b(file.name.encode(), digest_size=32)
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE):
                one.update(piece)
        whole.update(one.digest())
    return whole.digest()
