"""An engine says at its start whether others at its broker can share with it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine_adapter.vllm import neighbours
from tests.engines import Engine
from tests.faults.brokers import real_broker


def test_it_says_who_shares_and_warns_if_nobody_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvquay")
    with real_broker(tmp_path) as broker:
        engines = [Engine(broker.path, "a")]
        neighbours.tell(broker.path, "a")
        assert not caplog.records  # alone
        engines.append(Engine(broker.path, "b"))
        neighbours.tell(broker.path, "b")
        assert "shares with 1 of 1" in caplog.text
        assert [record.levelname for record in caplog.records] == ["INFO"]
        engines.append(Engine(broker.path, "c", model="other"))
        neighbours.tell(broker.path, "c")
        assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
        assert "none of the 2 other engines" in caplog.text
        for engine in engines:
            engine.close()


def test_a_broker_that_does_not_answer_is_no_matter(tmp_path: Path) -> None:
    neighbours.tell(str(tmp_path / "nobody"), "a")
