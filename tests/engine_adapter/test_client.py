"""The scheduler's client: bounded calls, degraded mode, what it asks and what it only sends."""

from __future__ import annotations

import numpy as np
import pytest

from broker import wire
from engine_adapter.answers import Answer, GroupQuery
from engine_adapter.breaker import FAILURES, OPEN_S
from engine_adapter.client import (
    CALL_TIMEOUT_S,
    MISS_AGAIN_S,
    UNUSED_HOLDS_S,
    WAIT_LIMIT_S,
)
from engine_adapter.link import LinkState
from tests.engine_adapter.fake_broker import FakeBroker, hits, key

KEYS = [key(1), key(2)]


class Ends:
    """An attached client and its broker."""

    def __init__(self) -> None:
        self.broker = FakeBroker()
        self.client = self.broker.new_client()
        self.attach()

    def attach(self) -> None:
        self.client.step()
        if self.broker.channel is not None:
            self.broker.hear()
            self.client.step()

    def lookup(self) -> Answer:
        return self.client.lookup("r", [GroupQuery(group=0, keys=KEYS, positions=[16, 32])])

    def asked(self) -> int:
        return len(self.broker.of(wire.Lookup))


@pytest.fixture
def ends() -> Ends:
    ends = Ends()
    assert ends.client.is_ready
    return ends


def test_a_call_without_an_answer_takes_the_call_time_out_and_is_a_miss(ends: Ends) -> None:
    began = ends.broker.clock.now
    assert ends.lookup().is_miss
    assert ends.broker.clock.now - began == pytest.approx(CALL_TIMEOUT_S)
    cancels = ends.broker.of(wire.Cancel)
    assert [message.attempt for message in cancels if isinstance(message, wire.Cancel)] == [1]


def test_three_time_outs_open_the_breaker_and_every_attempt_is_cancelled(ends: Ends) -> None:
    for _ in range(FAILURES + 5):
        assert ends.lookup().is_miss
    assert ends.asked() == FAILURES
    assert len(ends.broker.of(wire.Cancel)) == FAILURES
    ends.broker.answer = hits(4, 5)
    ends.broker.clock.advance(OPEN_S)
    assert ends.lookup().groups[0].count == 2


def test_a_late_answer_closes_the_breaker(ends: Ends) -> None:
    for _ in range(FAILURES):
        assert ends.lookup().timed_out
    assert not ends.lookup().timed_out  # not asked
    ends.broker.say(wire.LookupReply(seq=FAILURES, request="r", attempt=1, results=()))
    ends.client.step()
    ends.broker.answer = hits(4, 5)
    assert ends.lookup().groups[0].count == 2


def test_stores_declined_by_the_breaker_leave_the_request_alone(ends: Ends) -> None:
    ends.broker.answer = hits(4, 5)
    held = ends.lookup()
    ends.broker.answer = lambda message: None
    for number in range(FAILURES):
        assert ends.client.prepare_store(f"other {number}", [key(9)], [16]).declined
    cancelled = len(ends.broker.of(wire.Cancel))
    assert ends.client.prepare_store("r", [key(9)], [16]).declined
    assert len(ends.broker.of(wire.Cancel)) == cancelled
    assert ends.lookup() == held


def test_an_answer_is_known_until_it_is_used(ends: Ends) -> None:
    ends.broker.answer = hits(4, 5)
    first = ends.lookup()
    for _ in range(100):
        ends.client.step()
        assert ends.lookup() == first
    assert ends.asked() == 1


def test_a_miss_is_asked_again_after_250_ms(ends: Ends) -> None:
    ends.broker.answer = hits(wire.ROW_MISS)
    assert ends.lookup().is_miss
    ends.broker.clock.advance(MISS_AGAIN_S - 0.001)
    assert ends.lookup().is_miss
    assert ends.asked() == 1
    ends.broker.clock.advance(0.001)
    ends.broker.answer = hits(4, 5)
    assert ends.lookup().groups[0].count == 2


def test_holds_of_a_request_not_looked_up_are_released_after_2_s(ends: Ends) -> None:
    ends.broker.answer = hits(4, 5)
    ends.lookup()
    ends.broker.clock.advance(UNUSED_HOLDS_S - 0.1)
    ends.client.step()
    assert not ends.broker.of(wire.Release)
    ends.broker.clock.advance(0.7)
    ends.client.step()
    assert len(ends.broker.of(wire.Release)) == 1
    assert ends.client.prepare_load("r", KEYS) is None


def test_prepare_load_needs_no_broker(ends: Ends) -> None:
    ends.broker.answer = hits(4, 5)
    ends.lookup()
    assert ends.broker.channel is not None
    ends.broker.channel.broker_open = False  # dead, and nobody has told the client yet
    refs = ends.client.prepare_load("r", KEYS)
    assert refs is not None
    assert refs["row"].tolist() == [4, 5]
    assert ends.client.prepare_load("r", KEYS) is None


def test_without_a_broker_everything_is_a_miss_and_nothing_is_stored(ends: Ends) -> None:
    ends.broker.is_there = False
    ends.broker.die()
    began = ends.broker.clock.now
    assert ends.lookup().is_miss
    assert ends.client.prepare_store("r", [key(1)], [16]).declined
    assert not ends.client.reset()
    assert ends.broker.clock.now == began


def test_it_attaches_again_by_itself_and_asks_anew(ends: Ends) -> None:
    ends.broker.answer = hits(4, 5)
    ends.lookup()
    ends.broker.die()
    ends.client.step()
    assert ends.client.prepare_load("r", KEYS) is None
    ends.broker.clock.advance(1.0)
    ends.attach()
    assert ends.client.state is LinkState.UP
    ends.broker.answer = hits(6, 7)
    ends.lookup()
    refs = ends.client.prepare_load("r", KEYS)
    assert refs is not None
    assert refs["row"].tolist() == [6, 7]


def notice(attempt: int, number: int, row: int) -> wire.Notice:
    refs = np.array([(row, 1)], dtype=wire.ROW_REF).tobytes()
    return wire.Notice(request="r", attempt=attempt, keys=key(number), refs=refs)


def test_a_notice_right_behind_the_reply_counts(ends: Ends) -> None:
    pending = hits(4, wire.ROW_PENDING)

    def answer(message: wire.Message) -> None:
        reply = pending(message)
        if reply is not None:
            ends.broker.say(reply)
            ends.broker.say(notice(1, 2, 7))  # the client's read finds both

    ends.broker.answer = answer
    answered = ends.lookup()
    assert not answered.pending
    assert answered.groups[0].count == 2
    refs = ends.client.prepare_load("r", KEYS)
    assert refs is not None
    assert refs["row"].tolist() == [4, 7]


def test_notices_of_an_old_attempt_are_dropped(ends: Ends) -> None:
    ends.broker.answer = hits(4, wire.ROW_PENDING)
    assert ends.lookup().pending
    ends.client.preempted("r")
    assert ends.lookup().pending
    ends.broker.say(notice(1, 2, 7))
    assert ends.lookup().pending
    ends.broker.say(notice(2, 2, 7))
    assert not ends.lookup().pending


def test_a_wait_that_the_broker_never_ends_is_ended_here(ends: Ends) -> None:
    ends.broker.answer = hits(4, wire.ROW_PENDING)
    assert ends.lookup().pending
    ends.broker.clock.advance(WAIT_LIMIT_S - 0.1)
    assert ends.lookup().pending
    ends.broker.clock.advance(0.2)
    assert ends.lookup().is_miss
    assert ends.client.prepare_load("r", KEYS[:1]) is None


def test_a_late_answer_to_an_offer_gives_its_rows_back(ends: Ends) -> None:
    assert ends.client.prepare_store("r", [key(1)], [16]).declined
    asked = ends.broker.of(wire.PrepareStore)[0]
    assert isinstance(asked, wire.PrepareStore)
    refs = np.array([(3, 1)], dtype=wire.ROW_REF).tobytes()
    ends.broker.say(
        wire.StoreReply(
            seq=asked.seq,
            request="r",
            attempt=asked.attempt,
            status=wire.StoreStatus.OK,
            accepted=b"\0\0\0\0",
            refs=refs,
            present=b"",
            writing=b"",
        )
    )
    ends.client.step()
    done = ends.broker.of(wire.CompleteStore)[0]
    assert isinstance(done, wire.CompleteStore)
    assert (done.refs, done.success, done.attempt) == (refs, False, asked.attempt)


def test_an_answer_that_comes_with_a_reset_is_none(ends: Ends) -> None:
    def answer(message: wire.Message) -> wire.Message | None:
        reply = hits(4, 5)(message)
        if reply is None:
            return None
        ends.broker.say(reply)
        return wire.ResetNotice(epoch=1)

    ends.broker.answer = answer
    assert ends.lookup().is_miss
    assert ends.client.prepare_load("r", KEYS) is None
    assert len(ends.broker.of(wire.Cancel)) == 1


def test_a_finished_request_is_forgotten_with_the_connection(ends: Ends) -> None:
    ends.broker.answer = hits(4, 5)
    ends.lookup()
    ends.client.prepare_load("r", KEYS)
    ends.client.finish("r")
    assert ends.client._requests
    ends.broker.die()
    ends.client.step()
    assert not ends.client._requests


@pytest.mark.parametrize("version", [None, "v2"])
def test_a_reset_is_declared_again_when_it_attaches_again(ends: Ends, version: str | None) -> None:
    ends.client.reset(version)
    ends.broker.die()
    ends.client.step()
    ends.broker.clock.advance(1.0)
    ends.attach()
    attach = ends.broker.of(wire.Attach)[-1]
    assert isinstance(attach, wire.Attach)
    assert attach.weights_version is not None
    assert attach.weights_version == (version or attach.weights_version)


def test_a_reset_that_cannot_be_asked_for_attaches_anew(ends: Ends) -> None:
    for _ in range(FAILURES):
        ends.lookup()
    assert not ends.client.reset("v2")
    assert ends.client.state is LinkState.DOWN
    ends.attach()
    attach = ends.broker.of(wire.Attach)[-1]
    assert isinstance(attach, wire.Attach)
    assert attach.weights_version == "v2"
