"""Which weights an engine has: by content where they are files here, by name and commit elsewhere.

Two fine-tunes of one model agree in everything but values, so values are read: 4 KiB of every MiB
of each file, and its end. A tensor of a MiB can't change unseen, and 16 GB take 64 MB of reads.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

STRIDE_BYTES = 1 << 20
SAMPLE_BYTES = 4 << 10
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npcache")


def fingerprint(model_config: Any) -> dict[str, str | None]:
    """What tells these weights from others; text that is equal wherever the files lie."""
    place = Path(str(model_config.model_weights or model_config.model))
    if place.exists():
        return {"files": digest_of_files(place)}
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    return {
        "name": str(model_config.model),
        "revision": None if model_config.revision is None else str(model_config.revision),
        "commit": None if commit is None else str(commit),
    }


def digest_of_files(place: Path) -> str:
    """Over names and sampled contents of the weights in a folder, or of one file, in name order."""
    files = [place] if place.is_file() else sorted(_weights_in(place))
    whole = hashlib.blake2b(digest_size=16, person=b"kvquay-weights")
    for file in files:
        name = file.name if place.is_file() else str(file.relative_to(place))
        whole.update(hashlib.blake2b(name.encode(), digest_size=32).digest())
        whole.update(_sampled(file))
    return whole.hexdigest()


def _weights_in(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.suffix in _WEIGHTS and file.is_file()]


def _sampled(file: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        digest.update(size.to_bytes(8, "big"))
        for at in range(0, size, STRIDE_BYTES):
            digest.update(os.pread(stream.fileno(), SAMPLE_BYTES, at))
        digest.update(os.pread(stream.fileno(), SAMPLE_BYTES, max(0, size - SAMPLE_BYTES)))
    return digest.digest()
