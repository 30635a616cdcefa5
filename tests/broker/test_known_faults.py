"""Faults seen in a public cache server on this very work, one test each that ours has them not.

Those about killed engines are in tests/faults/test_processes.py, noise is in test_fuzz.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker import wire
from engine_adapter.answers import GroupQuery
from tests.broker.harness import TestBroker, running
from tests.broker.test_server import attach, raw, read_all
from tests.engines import ROW, Engine, data_of, key
from tests.tiers.doubles import ScriptedTier


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    with running(tmp_path, rows=16) as test_broker:
        yield test_broker


def test_every_error_is_answered(broker: TestBroker) -> None:
    connection = raw(broker)
    connection.sendall(wire.encode(attach(world=0)))
    connection.sendall(
        wire.encode(wire.Ping(seq=1))[:-1] + b"\xc1"
    )  # a byte that MessagePack lacks
    answers = read_all(connection)
    assert isinstance(answers[0], wire.Attached)
    assert isinstance(answers[-1], wire.Error)
    assert "MessagePack" in answers[-1].text
    connection.close()


def test_a_slow_reader_never_sees_other_data(broker: TestBroker) -> None:
    reader, writer = Engine(broker.path, "reader"), Engine(broker.path, "writer")
    writer.store("r", [key(1), key(2)])
    writer.client.finish("r")
    assert reader.lookup("slow", [key(1), key(2)]) == 2
    refs = reader.client.prepare_load("slow", [key(1), key(2)])
    assert refs is not None
    for number in range(10, 100, 2):  # several times the pool
        request = f"w{number}"
        writer.store(request, [key(number), key(number + 1)])
        writer.client.finish(request)
    buffers = [np.empty(ROW, dtype=np.uint8) for _ in refs]
    assert reader.worker.load(refs, buffers).all()
    assert np.array_equal(buffers[0], data_of(key(1)))
    assert np.array_equal(buffers[1], data_of(key(2)))
    reader.client.complete_load("slow", [key(1), key(2)])
    reader.close()
    writer.close()


def test_a_burst_of_twice_the_memory_is_not_called_stored(broker: TestBroker) -> None:
    engine = Engine(broker.path, "a")
    keys = [key(n) for n in range(32)]
    stored = engine.store("r", keys)
    assert 0 < stored <= 16
    assert engine.lookup("r2", keys) == stored  # what was accepted is there, all of it
    engine.load("r2", keys[:stored])
    engine.close()


def test_two_engines_with_one_request_id_get_their_own_data(broker: TestBroker) -> None:
    a, b = Engine(broker.path, "a"), Engine(broker.path, "b")
    assert a.store("same", [key(1)]) == 1
    assert b.store("same", [key(2)]) == 1
    assert a.lookup("load", [key(1)]) == 1
    assert b.lookup("load", [key(2)]) == 1
    a.client.finish("load")  # ends only what is its own
    b.load("load", [key(2)])
    broker.check()
    a.close()
    b.close()


def test_the_second_writer_of_a_key_is_not_told_that_it_stored(broker: TestBroker) -> None:
    a, b = Engine(broker.path, "a"), Engine(broker.path, "b")
    first = a.client.prepare_store("r", [key(1)], [16])
    second = b.client.prepare_store("r", [key(1), key(2)], [16, 32])
    assert list(first.accepted) == [0]
    assert (list(second.accepted), list(second.writing), list(second.present)) == ([1], [0], [])
    a.client.complete_store("r", [key(1)], success=False)
    b.client.complete_store("r", [key(2)])
    for engine in (a, b):  # what they have sent is handled now
        assert engine.client.calls.call(wire.Ping(seq=77), 77) == wire.Pong(seq=77)
    again = b.client.prepare_store("r2", [key(1), key(2)], [16, 32])
    assert (list(again.accepted), list(again.present)) == ([0], [1])
    a.close()
    b.close()


class StuckTier(ScriptedTier):
    """Has everything and never delivers."""

    def __init__(
        self, offloading_spec: object, primary_kv_view: memoryview, tier_type: str
    ) -> None:
        super().__init__(primary_kv_view, tier_type)
        self.chunks = _Everything()

    def end_all(self) -> None:
        for job_id in list(self.running):
            self.end(job_id, [])


class _Everything(dict):  # type: ignore[type-arg]
    def __contains__(self, item: object) -> bool:
        return True


def test_a_slow_tier_delays_nobody_else(tmp_path: Path) -> None:
    config = {"type": "StuckTier", "module_path": "tests.broker.test_known_faults"}
    with running(tmp_path, rows=64, tiers=[config]) as broker:
        waiting, other = Engine(broker.path, "waiting"), Engine(broker.path, "other")
        query = GroupQuery(group=0, keys=[key(9)], positions=[16])
        assert waiting.client.lookup("r", [query]).pending
        assert other.client.calls.call(wire.Ping(seq=1), 1) == wire.Pong(seq=1)
        assert waiting.lookup("r", [key(9)]) == 0  # the wait ends by its deadline
        assert other.client.calls.timeouts == 0
        waiting.close()
        other.close()


def test_a_hundred_requests_on_a_stuck_chunk_wait_once(tmp_path: Path) -> None:
    from tiers.sessions import Deadlines

    deadlines = Deadlines(pending_s=0.2, retry_s=0.1, request_s=0.3)
    with running(tmp_path, rows=64, deadlines=deadlines) as broker:
        stuck, asking = Engine(broker.path, "stuck"), Engine(broker.path, "asking")
        assert stuck.client.prepare_store("r", [key(1)], [16]).accepted
        pending = 0
        for number in range(100):
            query = GroupQuery(group=0, keys=[key(1)], positions=[16])
            pending += asking.client.lookup(f"r{number}", [query]).pending
            assert asking.lookup(f"r{number}", [key(1)]) == 0
            asking.client.finish(f"r{number}")
        assert pending == 1  # the slot is overdue from then on: a MISS at once
        stuck.close()
        asking.close()


def test_a_client_used_from_two_threads_says_so(broker: TestBroker) -> None:
    from engine_adapter.link import WrongThread

    engine = Engine(broker.path, "a")
    seen: list[BaseException] = []

    def use() -> None:
        try:
            engine.client.step()
        except WrongThread as error:
            seen.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(seen) == 1
    assert "thread" in str(seen[0])
    engine.close()


def test_a_prompt_longer_than_a_message_is_asked_and_stored_in_parts(tmp_path: Path) -> None:
    with running(tmp_path, rows=8000) as broker:
        a, b = Engine(broker.path, "a"), Engine(broker.path, "b")
        keys = [key(n) for n in range(2600)]
        assert a.store("r", keys) == 2600
        assert b.lookup("r", [*keys, key(9999)]) == 2600
        b.load("r", keys[:2500])
        # what it has sent is handled now
        assert b.client.calls.call(wire.Ping(seq=77), 77) == wire.Pong(seq=77)
        broker.check()
        with broker.lock:
            (pool,) = broker.pools
            assert pool.hub.rows.num_busy == 0
        # a window is searched from the end, in one message
        query = GroupQuery(group=0, keys=keys, positions=range(1, 2601), window=4, first_window=1)
        answer = b.client.lookup("w", [query])
        assert (answer.groups[0].first, answer.groups[0].count) == (2596, 4)
        a.close()
        b.close()


class Odd:
    """Nothing that a message can carry."""


@pytest.mark.parametrize("name", ["x" * 300, "\ud800", "line\nbreak", "\0", "", "é" * 200])
@pytest.mark.parametrize(
    "params", [None, {"a": "x" * 20_000}, {"a": Odd()}, {1: 2}, {"a": 2**80}, {"a": "\ud800"}]
)
def test_what_a_user_calls_a_request_does_not_cost_the_cache(
    broker: TestBroker, name: str, params: Any
) -> None:
    a, b = Engine(broker.path, "a"), Engine(broker.path, "b")
    a.client.begin(name, kv_transfer_params=params)
    assert a.store(name, [key(1)]) == 1
    a.client.finish(name)
    assert a.client.calls.call(wire.Ping(seq=77), 77) == wire.Pong(seq=77)
    b.client.begin(name, kv_transfer_params=params)
    assert b.lookup(name, [key(1)]) == 1
    b.load(name, [key(1)])
    b.client.finish(name)
    a.close()
    b.close()
