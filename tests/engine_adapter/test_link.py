"""A connection that comes and goes: attach, refusal, re-attach, warnings, threads, fork."""

from __future__ import annotations

import logging
import threading

import pytest

from broker import wire
from engine_adapter.link import RETRY_S, Link, LinkState, WrongThread, attach_message
from engine_adapter.once_a_minute import WARN_EVERY_S
from tests.engine_adapter.fake_broker import KEY, ROW, FakeBroker


class Ends:
    """A link, its broker, and what it was told."""

    def __init__(self) -> None:
        self.broker = FakeBroker()
        self.told: list[wire.Message] = []
        self.downs = 0
        attach = attach_message(
            wire.Role.SCHEDULER, "e", ROW, KEY, 1, namespace=b"n" * wire.NAMESPACE_BYTES
        )
        self.link = Link(
            self.broker.connect,
            lambda: attach,
            lambda message, fds: self.told.append(message),
            self._down,
            self.broker.clock,
        )

    def _down(self) -> None:
        self.downs += 1

    def attach(self) -> None:
        self.link.poll()
        self.broker.hear()
        self.link.poll()


@pytest.fixture
def ends() -> Ends:
    return Ends()


def test_the_first_message_is_an_attach_and_its_answer_makes_it_up(ends: Ends) -> None:
    ends.link.poll()
    assert ends.link.state.name == "ATTACHING"
    assert [type(message) for message in ends.broker.hear()] == [wire.Attach]
    ends.link.poll()
    assert ends.link.state is LinkState.UP
    assert isinstance(ends.told[0], wire.Attached)


def test_nothing_is_sent_unless_it_is_up(ends: Ends) -> None:
    assert not ends.link.send(wire.Ping(seq=1))
    ends.attach()
    assert ends.link.send(wire.Ping(seq=1))


def test_it_attaches_again_by_itself(ends: Ends) -> None:
    ends.attach()
    ends.broker.die()
    ends.link.poll()
    assert (ends.link.state, ends.downs) == (LinkState.DOWN, 1)
    ends.link.poll()
    assert ends.broker.connects == 1
    ends.broker.clock.advance(RETRY_S)
    ends.attach()
    assert (ends.link.state, ends.broker.connects) == (LinkState.UP, 2)


def test_an_attach_without_an_answer_is_given_up(ends: Ends) -> None:
    ends.link.poll()
    ends.broker.clock.advance(11)
    ends.link.poll()
    assert ends.link.state is LinkState.DOWN


def test_a_refused_attach_names_both_values_and_is_tried_again(ends: Ends) -> None:
    ends.broker.refuses = True
    ends.attach()
    assert ends.link.state.name == "REFUSED"
    assert "broker: 7, here: 8" in ends.link.last_error
    ends.broker.refuses = False
    ends.broker.clock.advance(RETRY_S)
    ends.attach()
    assert ends.link.state is LinkState.UP


def test_an_absent_broker_is_said_once_a_minute(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    ends.broker.is_there = False
    with caplog.at_level(logging.WARNING):
        for _ in range(int(2 * WARN_EVERY_S / RETRY_S)):
            ends.link.poll()
            ends.broker.clock.advance(RETRY_S)
    assert len(caplog.records) == 2
    assert ends.broker.connects == 2 * WARN_EVERY_S / RETRY_S


def test_another_thread_is_told_so(ends: Ends) -> None:
    ends.link.check_thread()
    caught: list[BaseException] = []

    def use() -> None:
        try:
            ends.link.check_thread()
        except WrongThread as error:
            caught.append(error)

    other = threading.Thread(target=use)
    other.start()
    other.join()
    assert "first used it" in str(caught[0])
    ends.link.check_thread()


def test_what_is_no_message_ends_the_connection(ends: Ends) -> None:
    ends.attach()
    assert ends.broker.channel is not None
    ends.broker.channel.on_wait(ends.broker.channel, 0.0)
    ends.broker.say(wire.Error(seq=0, code=wire.ErrorCode.MALFORMED, text="what?"))
    ends.link.poll()
    assert ends.link.state is LinkState.DOWN
    assert "what?" in ends.link.last_error


def test_a_wait_takes_no_longer_than_it_may(ends: Ends) -> None:
    ends.attach()
    began = ends.broker.clock.now
    assert not ends.link.wait_for(lambda: False, 0.02)
    assert ends.broker.clock.now - began == pytest.approx(0.02)


def test_a_wait_ends_with_the_connection(ends: Ends) -> None:
    ends.attach()
    ends.broker.die()
    assert not ends.link.wait_for(lambda: False, 5.0)
    assert ends.link.state is LinkState.DOWN


def test_closed_is_for_good(ends: Ends) -> None:
    ends.attach()
    ends.link.close()
    ends.broker.clock.advance(60)
    ends.link.poll()
    assert (ends.link.state, ends.broker.connects) == (LinkState.CLOSED, 1)


@pytest.mark.parametrize(
    ("namespace", "key_bytes", "text"),
    [(b"short", KEY, "5 bytes, not 16"), (b"n" * 16, 4, "keys of 4 bytes")],
)
def test_an_attach_that_cannot_hold_is_not_sent(
    namespace: bytes, key_bytes: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        attach_message(wire.Role.SCHEDULER, "e", ROW, key_bytes, 1, namespace=namespace)
