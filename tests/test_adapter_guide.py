"""The adapter of docs/adapter-guide.md, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.broker.harness import running
from tests.engines import ROW, data_of, key

GUIDE = Path(__file__).parents[1] / "docs" / "adapter-guide.md"
MOST_LINES = 60


def adapter_source() -> str:
    found = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


class Memory:
    """Stands for an engine: chunks by key."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, NDArray[np.uint8]] = {}

    def bytes_of(self, chunk: bytes) -> NDArray[np.uint8]:
        return self.chunks[chunk]

    def room_for(self, chunk: bytes) -> NDArray[np.uint8]:
        return self.chunks.setdefault(chunk, np.zeros(ROW, dtype=np.uint8))


def test_the_guide_is_a_complete_adapter_in_under_sixty_lines(tmp_path: Path) -> None:
    source = adapter_source()
    assert len(source.splitlines()) < MOST_LINES
    names: dict[str, Any] = {}
    exec(source, names)
    keys, positions = [key(n) for n in range(5)], [16, 32, 48, 64, 80]
    with running(tmp_path) as broker:
        a, b = (names["Adapter"](broker.path, name, ROW, {"model": "m"}) for name in "ab")
        for adapter in (a, b):
            assert adapter.worker.wait_attached(5)
            assert adapter.client.wait_ready(5)
        first, second = Memory(), Memory()
        first.chunks = {k: data_of(k) for k in keys[:3]}
        assert a.load("r", keys, positions, first) == 0
        a.store("r", keys[:3], positions[:3], first)
        a.finish("r")
        assert a.client.wait_ready(1)
        assert b.load("r", keys, positions, second) == 3
        for k in keys[:3]:
            assert np.array_equal(second.chunks[k], data_of(k))
        b.finish("r")
        b.step()
        broker.check()
        for adapter in (a, b):
            adapter.client.close()
            adapter.worker.close()
