"""Which LoRA adapter a request runs under, by what its files hold: vLLM's keys only have its name.

Covers digests of adapters' files; knows no request and no broker.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

logger = logging.getLogger("vllm.kvquay")

DIGEST_BYTES = 16
_PIECE = 1 << 20


class Adapters:
    """Digests, remembered as long as the files look the same."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[tuple[str, int, int], ...], bytes]] = {}

    def digest(self, path: str) -> bytes:
        """16 bytes over names and contents of the adapter's files. Of files that cannot be read a
        random one: the request then shares with nobody."""
        try:
            files = _files(Path(path))
            stamp = tuple(
                (str(file), status.st_size, status.st_mtime_ns)
                for file in files
                for status in (file.stat(),)
            )
            known = self._known.get(path)
            if known is None or known[0] != stamp:
                known = self._known[path] = (stamp, _contents(files))
            return known[1]
        except OSError as error:
            logger.warning("kvquay: requests of adapter %s share nothing: %s", path, error)
            return os.urandom(DIGEST_BYTES)


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
