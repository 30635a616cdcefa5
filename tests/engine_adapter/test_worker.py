"""The worker's client: copies that verify, fences, and a forked child that has nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from broker import wire
from engine_adapter.answers import Refs
from engine_adapter.link import LinkState
from engine_adapter.worker import Memory, WorkerClient
from tests.broker.harness import running
from tests.engine_adapter.fake_broker import KEY, ROW, FakeBroker
from tests.engines import Engine
from tests.races.host import HostMemory, Mapped


class Ends:
    """An attached worker, its broker and the memory."""

    def __init__(self) -> None:
        self.broker = FakeBroker()
        self.memory = HostMemory()
        self.client = WorkerClient(
            "",
            engine_id="e",
            row_bytes=ROW,
            key_bytes=KEY,
            populate=False,
            clock=self.broker.clock,
            connect=self.broker.connect,
            map_memory=lambda fd, attached: cast(Memory, Mapped(self.memory)),
        )
        self.attach()

    def attach(self) -> None:
        self.client.step()
        self.broker.hear()
        self.client.memory = cast(Memory, Mapped(self.memory))  # no descriptor comes with the fake
        self.client.step()

    def ended(self) -> list[int]:
        return [m.epoch for m in self.broker.of(wire.TransfersEnded) if hasattr(m, "epoch")]


@pytest.fixture
def ends() -> Ends:
    return Ends()


def refs_of(*pairs: tuple[int, int]) -> Refs:
    return np.array(list(pairs), dtype=wire.ROW_REF)


def test_only_rows_of_the_right_generation_are_good(ends: Ends) -> None:
    ends.memory.generation[:] = [1, 2, 3, 4]
    ends.memory.data[1] = 7
    into = [np.zeros(8, dtype=np.uint8) for _ in range(3)]
    good = ends.client.load(refs_of((1, 2), (2, 2), (99, 1)), into)
    assert good.tolist() == [True, False, False]
    assert into[0].tolist() == [7] * 8
    assert not into[1].any()


def test_a_row_given_to_another_key_during_the_copy_is_not_good(ends: Ends) -> None:
    class Overwritten(list[NDArray[np.uint8]]):
        def __getitem__(self, at: object) -> NDArray[np.uint8]:  # type: ignore[override]
            ends.memory.generation[1] += 1
            return np.zeros(8, dtype=np.uint8)

    assert not ends.client.load(refs_of((1, 0)), Overwritten([np.zeros(8, dtype=np.uint8)])).any()


def test_stores_write_only_rows_that_are_still_ours(ends: Ends) -> None:
    ends.memory.generation[:] = 5
    source = np.full(8, 9, dtype=np.uint8)
    assert ends.client.store(refs_of((0, 5), (1, 4)), [source, source]).tolist() == [True, False]
    assert ends.memory.data[:2, 0].tolist() == [9, 0]


def test_without_memory_nothing_is_good(ends: Ends) -> None:
    ends.broker.die()
    ends.client.step()
    assert not ends.client.load(refs_of((0, 0)), [np.zeros(8, dtype=np.uint8)]).any()
    assert not ends.client.store(refs_of((0, 0)), [np.zeros(8, dtype=np.uint8)]).any()


def test_it_says_that_older_transfers_ended_once_they_have(ends: Ends) -> None:
    with ends.client.transfer():
        ends.broker.say(wire.ResetNotice(epoch=3))
        ends.client.step()
        assert ends.ended() == []
        with ends.client.transfer():  # younger than the notice
            pass
    ends.client.step()
    assert ends.ended() == [3]


def test_a_younger_transfer_does_not_hold_it_up(ends: Ends) -> None:
    ends.broker.say(wire.ResetNotice(epoch=3))
    ends.client.step()
    with ends.client.transfer():
        ends.client.step()
        assert ends.ended() == [3]


def test_the_count_of_another_broker_begins_anew(ends: Ends) -> None:
    ends.broker.say(wire.ResetNotice(epoch=3))
    ends.client.step()
    assert ends.ended() == [3]
    ends.broker.die()
    ends.client.step()
    ends.broker.clock.advance(1.0)
    ends.attach()
    with ends.client.transfer():
        ends.broker.say(wire.ResetNotice(epoch=1))
        ends.client.step()
        assert ends.ended() == [3]
    ends.client.step()
    assert ends.ended() == [3, 1]


def test_it_does_not_attach_again_while_a_copy_runs(ends: Ends) -> None:
    with ends.client.transfer():
        ends.broker.die()
        ends.client.step()
        ends.broker.clock.advance(1.0)
        ends.client.step()
        assert ends.broker.connects == 1
    ends.client.step()
    assert ends.broker.connects == 2


def test_a_forked_child_has_neither_connection_nor_memory(tmp_path: Path) -> None:
    with running(tmp_path) as broker:
        engine = Engine(broker.path, "forks")
        assert engine.store("r", [b"k" * 36]) == 1
        assert engine.worker.memory is not None
        address = engine.worker.memory._address
        assert _is_mapped(address)
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            found = "nothing"
            try:
                if engine.worker.memory is not None or engine.client.state is not LinkState.CLOSED:
                    found = "something"
                engine.client.step()
                engine.worker.step()
                if engine.client.prepare_store("c", [b"c" * 36], [16]).accepted:
                    found = "a connection"
                if _is_mapped(address):
                    found = "the worker's mapping"
                os.write(write_end, found.encode())
            finally:
                os._exit(0)
        os.close(write_end)
        with open(read_end, "rb") as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        assert said == b"nothing"
        assert engine.lookup("r2", [b"k" * 36]) == 1  # the parent's connection goes on
        engine.close()


def _is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.startswith(f"{address:x}-") for line in lines)
