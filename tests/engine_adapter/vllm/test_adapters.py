"""Digests of LoRA adapters: by content, made aside, once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_adapter.vllm.adapters import Adapters
from tests.faults.brokers import eventually


@dataclass
class Lora:
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False


def settled(adapters: Adapters, lora: Lora) -> bytes | None:
    """The digest, once the files have been read."""
    eventually(lambda: adapters.digest(lora) is not None, 2.0)
    return adapters.digest(lora)


def folder(path: Path, content: bytes) -> str:
    path.mkdir()
    (path / "adapter_config.json").write_bytes(b"{}")
    (path / "adapter_model.safetensors").write_bytes(content)
    return str(path)


def test_content_counts_and_place_and_number_do_not(tmp_path: Path) -> None:
    adapters = Adapters()
    one = settled(adapters, Lora(1, folder(tmp_path / "one", b"w" * 9)))
    same = settled(adapters, Lora(2, folder(tmp_path / "same", b"w" * 9)))
    other = settled(adapters, Lora(3, folder(tmp_path / "other", b"v" * 9)))
    assert one is not None
    assert len(one) == 16
    assert one == same != other
    adapters.close()


def test_the_same_number_is_not_read_again_unless_loaded_in_place(tmp_path: Path) -> None:
    adapters = Adapters()
    lora = Lora(1, folder(tmp_path / "a", b"old"))
    old = settled(adapters, lora)
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"new")
    assert adapters.digest(lora) == old  # vLLM goes on with what it has
    adapters.digest(Lora(1, lora.lora_path, load_inplace=True))
    assert eventually(lambda: adapters.digest(lora) not in (None, old))
    adapters.close()


def test_files_that_cannot_be_read_give_none_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = Adapters()
    lora = Lora(1, str(tmp_path / "missing"))
    adapters.digest(lora)
    assert eventually(lambda: "not cached" in caplog.text)
    assert adapters.digest(lora) is None
    adapters.close()
