"""Notices and events of any number leave in messages that the other end takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from broker import wire
from broker.pool import Pool
from broker.telling import event_messages, notice_messages
from tests.broker.harness import MemfdMemory
from tests.tiers.doubles import FakeClock
from tiers.base import Medium, OffloadingEvent, OffloadKey


def named(number: int, size: int = 36) -> OffloadKey:
    return OffloadKey(b"n" * 16 + number.to_bytes(size, "big"))


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(MemfdMemory(8, 4096), lock=threading.Lock(), clock=FakeClock())
    yield made
    made.shutdown()


def through_the_wire(message: wire.Message) -> wire.Message:
    return wire.decode(wire.encode(message)[4:])


@pytest.mark.parametrize("keys", [1, 1024, 1025, 3000])
def test_notices_of_any_number_arrive(pool: Pool, keys: int) -> None:
    told = {named(number): -1 for number in range(keys)}
    found = []
    for message in notice_messages({("r", 3): told}, pool):
        arrived = through_the_wire(message)
        assert arrived == message
        assert (message.request, message.attempt) == ("r", 3)
        found.append(message.keys)
    assert b"".join(found) == b"".join(key[16:] for key in told)


@pytest.mark.parametrize(
    ("events", "keys", "size"), [(1, 1, 36), (3, 2500, 36), (700, 2, 36), (9, 1024, 255)]
)
def test_events_of_any_number_arrive_in_their_order(events: int, keys: int, size: int) -> None:
    given = [
        OffloadingEvent(
            [named(at * keys + n, size) for n in range(keys)], Medium.CPU, removed=at % 2 == 0
        )
        for at in range(events)
    ]
    found = []
    for message in event_messages(given):
        assert through_the_wire(message) == message
        found += [(event.removed, event.keys) for event in message.events]
    flat = [
        (removed, keys[at : at + size])
        for removed, keys in found
        for at in range(0, len(keys), size)
    ]
    assert flat == [(event.removed, key[16:]) for event in given for key in event.keys]


def test_nothing_to_tell_is_no_message(pool: Pool) -> None:
    assert not list(event_messages([]))
    assert not list(notice_messages({}, pool))
