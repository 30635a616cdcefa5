"""The scheduler's side: what vLLM is told, whatever the broker does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, PrepareStoreOutput, ReqContext

from broker import wire
from engine_adapter.answers import GroupQuery
from engine_adapter.client import WAIT_LIMIT_S
from engine_adapter.vllm.manager import (
    LOOK_AGAIN_S,
    MOST_FAILED_LOADS,
    MOST_REFUSALS,
    MOST_TIMED_OUT,
    REFUSED_AGAIN_S,
    BrokerManager,
)
from engine_adapter.vllm.rows import RowsLoadStoreSpec
from tests.engine_adapter.fake_broker import FakeBroker, hits, key

KEYS = [OffloadKey(key(number)) for number in range(1, 5)]
POSITIONS = [16, 32, 48, 64]


def context(req_id: str = "r") -> ReqContext:
    made = ReqContext(req_id=req_id)
    for each, position in zip(KEYS, POSITIONS, strict=True):
        made.set_offload_key_position(each, position)
    return made


class Ends:
    """A manager and the broker its client talks to."""

    def __init__(self) -> None:
        self.broker = FakeBroker()
        self.manager = BrokerManager(events=False, clock=self.broker.clock)
        client = self.broker.new_client()
        client.step()
        self.broker.hear()
        client.step()
        assert client.is_ready
        self.manager.connect(client)
        self.manager.on_new_request(context())

    def ask(self) -> bool:
        """The first two keys."""
        query = GroupQuery(group=0, keys=[bytes(k) for k in KEYS[:2]], positions=POSITIONS[:2])
        return self.manager.ask("r", 0, [query])

    def found(self) -> list[LookupResult]:
        return [self.manager.lookup(each, context()) for each in KEYS[:3]]

    def store(self) -> PrepareStoreOutput | None:
        return self.manager.prepare_store(KEYS, context())

    def asked(self, kind: type[wire.Message]) -> int:
        return len(self.broker.of(kind))


@pytest.fixture
def ends() -> Ends:
    return Ends()


def takes(*accepted: int, present: tuple[int, ...] = (), writing: tuple[int, ...] = ()) -> Any:
    """Answers every offer with these indexes."""

    def answer(message: wire.Message) -> wire.Message | None:
        if not isinstance(message, wire.PrepareStore):
            return None
        refs = np.array([(row, 1) for row in accepted], dtype=wire.ROW_REF)
        return wire.StoreReply(
            seq=message.seq,
            request=message.request,
            attempt=message.attempt,
            status=wire.StoreStatus.OK,
            accepted=np.asarray(accepted, dtype="<u4").tobytes(),
            refs=refs.tobytes(),
            present=np.asarray(present, dtype="<u4").tobytes(),
            writing=np.asarray(writing, dtype="<u4").tobytes(),
        )

    return answer


def test_one_question_answers_all_that_vllm_asks(ends: Ends) -> None:
    ends.broker.answer = hits(4, 5)
    assert ends.ask()
    for _ in range(3):
        assert ends.found() == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]
    assert ends.asked(wire.Lookup) == 1


def test_a_lookup_that_times_out_is_asked_again_and_a_stuck_broker_is_a_miss(ends: Ends) -> None:
    assert not ends.ask()
    ends.broker.answer = hits(4, 5)
    assert ends.ask()
    assert ends.found()[0] is LookupResult.HIT
    ends.broker.answer = lambda message: None
    ends.manager.on_request_finished(context())
    ends.manager.on_new_request(context())
    asked = 0
    while not ends.ask():
        asked += 1
    assert 0 < asked <= MOST_TIMED_OUT
    assert ends.found() == [LookupResult.MISS] * 3


def test_a_request_whose_loads_keep_failing_is_computed(ends: Ends) -> None:
    ends.broker.answer = hits(4, 5)
    for _ in range(MOST_FAILED_LOADS):
        assert ends.ask()
        assert ends.found()[0] is LookupResult.HIT
        ends.manager.prepare_load(KEYS[:2], context())
        ends.manager.note_failed([(4, 1)], ["r"])
        ends.manager.complete_load(KEYS[:2], context())
    assert ends.ask()
    assert ends.found() == [LookupResult.MISS] * 3
    (last,) = ends.broker.of(wire.CompleteLoad)[-1:]
    assert isinstance(last, wire.CompleteLoad)
    assert ends.manager.figures.loads_failed == MOST_FAILED_LOADS


def test_a_part_is_taken_in_the_order_of_the_offer_and_later_positions_are_holes(
    ends: Ends,
) -> None:
    ends.broker.answer = takes(0, 2, present=(1,))
    output = ends.store()
    assert output is not None
    assert list(output.keys_to_store) == [KEYS[0], KEYS[2]]
    assert list(output.evicted_keys) == []
    assert ends.manager.figures.holes == 1
    asked = ends.asked(wire.PrepareStore)
    later = ends.manager.prepare_store(KEYS[3:], context())
    assert later is not None
    assert list(later.keys_to_store) == []
    assert ends.asked(wire.PrepareStore) == asked
    assert ends.manager.figures.holes == 2


def test_what_another_is_writing_is_no_hole(ends: Ends) -> None:
    ends.broker.answer = takes(0, 1, writing=(2, 3))
    output = ends.store()
    assert output is not None
    assert list(output.keys_to_store) == KEYS[:2]
    assert ends.manager.figures.holes == 0


def test_refused_eight_times_then_empty_and_asked_again_only_after_50_ms(ends: Ends) -> None:
    ends.broker.answer = takes()
    for number in range(MOST_REFUSALS):
        assert ends.store() is None, number
        assert ends.asked(wire.PrepareStore) == 1
    empty = ends.store()
    assert empty is not None
    assert list(empty.keys_to_store) == []
    ends.broker.clock.advance(1.01 * REFUSED_AGAIN_S)
    ends.broker.answer = takes(0, 1, 2, 3)
    output = ends.store()
    assert output is not None
    assert list(output.keys_to_store) == KEYS


def test_an_offer_that_times_out_is_made_again_at_once(ends: Ends) -> None:
    assert ends.store() is None
    ends.broker.answer = takes(0, 1, 2, 3)
    output = ends.store()
    assert output is not None
    assert list(output.keys_to_store) == KEYS


def test_without_a_broker_nothing_is_found_and_nothing_is_offered_again(ends: Ends) -> None:
    ends.broker.die()
    ends.manager.step()
    ends.broker.is_there = False
    assert ends.ask()
    assert ends.found() == [LookupResult.MISS] * 3
    output = ends.store()
    assert output is not None
    assert list(output.keys_to_store) == []
    assert ends.manager.figures.without_broker == 1


def test_a_request_of_an_adapter_that_is_not_read_yet_is_not_cached(ends: Ends) -> None:
    class Lora:
        lora_int_id = 1
        lora_path = "/nowhere"

    ends.broker.answer = hits(4, 5)
    ends.manager.expect("r", Lora())
    ends.manager.on_new_request(context())
    assert ends.ask()
    assert ends.found() == [LookupResult.MISS] * 3
    output = ends.store()
    assert output is not None
    assert list(output.keys_to_store) == []
    assert ends.asked(wire.Lookup) == ends.asked(wire.PrepareStore) == 0


FAULTY: list[tuple[str, Callable[[BrokerManager], Any], Any]] = [
    ("lookup", lambda m: m.ask("r", 0, [GroupQuery(group=0, keys=[], positions=[])]), True),
    ("prepare_store", lambda m: m.prepare_store(KEYS, context()), None),
    ("touch", lambda m: m.touch(KEYS, context()), None),
    ("finish", lambda m: m.on_request_finished(context()), None),
    ("step", lambda m: m.step(), None),
    ("reset", lambda m: m.reset_cache(), None),
]


@pytest.mark.parametrize(("name", "call", "answer"), FAULTY, ids=[each[0] for each in FAULTY])
def test_no_exception_reaches_the_engine(
    name: str,
    call: Callable[[BrokerManager], Any],
    answer: Any,
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(ends.manager.client, name, broken)
    assert call(ends.manager) is answer
    assert ends.manager.figures.faults == 1


def test_a_load_without_holds_fails_at_the_worker(ends: Ends) -> None:
    spec = ends.manager.prepare_load(KEYS, context())
    assert isinstance(spec, RowsLoadStoreSpec)
    assert len(spec.refs) == len(KEYS)
    assert ends.manager.figures.loads_lost == 1


def test_while_a_request_waits_nothing_is_asked_and_its_end_is_heard(ends: Ends) -> None:
    ends.broker.answer = hits(4, wire.ROW_PENDING)
    ends.ask()
    for _ in range(5):
        ends.manager.step()
        assert ends.manager.waiting == {"r": 0}
    assert not ends.manager.has_pending_work()  # an idle engine does not spin for others
    refs = np.array([(5, 1)], dtype=wire.ROW_REF).tobytes()
    ends.broker.say(wire.Notice(request="r", attempt=1, keys=bytes(KEYS[1]), refs=refs))
    ends.manager.step()
    assert ends.manager.waiting == {}
    assert ends.ask()
    assert ends.found()[:2] == [LookupResult.HIT] * 2
    assert ends.asked(wire.Lookup) == 1


def test_a_wait_without_end_is_a_miss(ends: Ends) -> None:
    ends.broker.answer = hits(4, wire.ROW_PENDING)
    ends.ask()
    for _ in range(int(WAIT_LIMIT_S / LOOK_AGAIN_S) - 1):
        ends.broker.clock.advance(LOOK_AGAIN_S)
        ends.manager.step()
        assert ends.manager.waiting == {"r": 0}
    ends.broker.clock.advance(3 * LOOK_AGAIN_S)
    ends.manager.step()
    assert ends.manager.waiting == {}
    assert ends.ask()
    assert ends.found() == [LookupResult.MISS] * 3


def test_who_finishes_or_starts_over_waits_no_more(ends: Ends) -> None:
    ends.broker.answer = hits(4, wire.ROW_PENDING)
    ends.ask()
    ends.manager.preempted(["r"])
    assert ends.manager.waiting == {}
    ends.ask()
    ends.manager.on_request_finished(context())
    assert ends.manager.waiting == {}


def test_figures_are_taken_once(ends: Ends) -> None:
    ends.store()
    assert ends.manager.get_stats() is not None
    assert ends.manager.get_stats() is None
