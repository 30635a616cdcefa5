"""Engines at a server over real sockets: sharing, refusals, bad messages, death."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import wire
from engine_adapter.answers import GroupQuery
from engine_adapter.client import SchedulerClient
from engine_adapter.link import LinkState
from tests.broker.harness import TestBroker, running
from tests.engines import KEY, ROW, Engine, key


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    with running(tmp_path) as test_broker:
        yield test_broker


def test_one_engine_loads_what_another_has_stored(broker: TestBroker) -> None:
    a, b = Engine(broker.path, "a"), Engine(broker.path, "b")
    keys = [key(n) for n in range(10)]
    assert a.store("r", keys) == 10
    a.client.finish("r")
    assert a.client.reset is not None
    assert b.lookup("r", [*keys, key(99)]) == 10
    b.load("r", keys)
    b.client.finish("r")
    assert b.store("r2", keys) == 0  # all of it is there
    broker.check()
    a.close()
    b.close()


def test_another_namespace_shares_nothing(broker: TestBroker) -> None:
    a, b = Engine(broker.path, "a"), Engine(broker.path, "b", model="another")
    a.store("r", [key(1)])
    assert a.lookup("r2", [key(1)]) == 1
    assert b.lookup("r", [key(1)]) == 0
    a.close()
    b.close()


def test_an_engine_that_resets_shares_no_more(broker: TestBroker) -> None:
    a, b = Engine(broker.path, "a"), Engine(broker.path, "b")
    a.store("r", [key(1)])
    a.client.finish("r")
    assert a.client.reset()
    a.worker.step()
    assert a.lookup("r2", [key(1)]) == 0
    assert b.lookup("r2", [key(1)]) == 1
    a.close()
    b.close()


def raw(broker: TestBroker) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(5)
    connection.connect(broker.path)
    return connection


def read_all(connection: socket.socket) -> list[wire.Message]:
    reader, messages = wire.FrameReader(), []
    while data := connection.recv(1 << 16):
        reader.feed(data)
        while (message := reader.next()) is not None:
            messages.append(message)
    return messages


@pytest.mark.parametrize(
    "sent",
    [
        b"\0\0\0\5hello",
        struct.pack(">I", wire.MAX_FRAME_BYTES + 1),
        wire.encode(wire.Finish(request="r")),
        struct.pack(">I", 2) + b"\x91\x30",
    ],
    ids=["garbage", "too large", "not attached", "unknown type"],
)
def test_a_bad_first_message_ends_only_its_own_connection(broker: TestBroker, sent: bytes) -> None:
    a = Engine(broker.path, "a")
    connection = raw(broker)
    connection.sendall(sent)
    (error,) = read_all(connection)
    assert isinstance(error, wire.Error)
    a.store("r", [key(1)])
    assert a.lookup("r2", [key(1)]) == 1
    connection.close()
    a.close()


def attach(**changes: object) -> wire.Attach:
    fields: dict[str, object] = {
        "protocol": wire.PROTOCOL_VERSION,
        "client": "test",
        "engine_id": "e",
        "role": wire.Role.SCHEDULER,
        "rank": 0,
        "world": 1,
        "row_bytes": ROW,
        "key_bytes": KEY,
        "pid": os.getpid(),
        "namespace": b"n" * 16,
        "weights_version": None,
        "events": False,
    }
    return wire.Attach(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "code", "ours", "theirs"),
    [
        ({"protocol": 7}, wire.RefusalCode.VERSION, "1", "7"),
        ({"engine_id": "a", "row_bytes": 8192}, wire.RefusalCode.GEOMETRY, "4096", "8192"),
        ({"row_bytes": 4097}, wire.RefusalCode.GEOMETRY, "4096", "4097"),
        ({"engine_id": "a", "world": 2}, wire.RefusalCode.GEOMETRY, "1", "2"),
        ({"engine_id": "a"}, wire.RefusalCode.TAKEN, str(os.getpid()), str(os.getpid())),
        ({"namespace": b""}, wire.RefusalCode.NAMESPACE, "16", "0"),
    ],
    ids=["protocol", "row size", "no page", "world", "taken", "namespace"],
)
def test_a_wrong_attach_is_refused_with_both_values(
    broker: TestBroker, changes: dict[str, object], code: wire.RefusalCode, ours: str, theirs: str
) -> None:
    a = Engine(broker.path, "a")
    connection = raw(broker)
    connection.sendall(wire.encode(attach(**changes)))
    (refused,) = read_all(connection)
    assert isinstance(refused, wire.Refused)
    assert (refused.code, refused.ours, refused.theirs) == (code, ours, theirs)
    connection.close()
    a.close()


def test_status_tells_of_engines_and_checks_the_laws(broker: TestBroker) -> None:
    a = Engine(broker.path, "a")
    a.store("r", [key(1), key(2)])
    assert a.lookup("r2", [key(1), key(2), key(3)]) == 2
    connection = raw(broker)
    connection.sendall(wire.encode(attach(role=wire.Role.ADMIN)))
    connection.sendall(wire.encode(wire.Status(seq=1, verify=True)))
    reader = wire.FrameReader()
    messages: list[wire.Message] = []
    while len(messages) < 2:
        reader.feed(connection.recv(1 << 16))
        while (message := reader.next()) is not None:
            messages.append(message)
    assert isinstance(messages[1], wire.StatusReply)
    status = messages[1].status
    assert status["healthy"] is True
    assert status["engines"][0]["engine_id"] == "a"
    assert status["pools"][0]["ready"] == 2
    metrics = status["pools"][0]["metrics"]
    assert metrics["kvquay:kv_offload_tiering_chunk_queries:('0:primary',)"] == 3
    assert metrics["kvquay:kv_offload_tiering_chunk_hits:('0:primary',)"] == 2
    connection.close()
    a.close()


def test_without_a_broker_everything_is_a_miss(tmp_path: Path) -> None:
    client = SchedulerClient(
        str(tmp_path / "none.sock"),
        engine_id="a",
        namespace=b"n" * 16,
        row_bytes=ROW,
        key_bytes=KEY,
    )
    query = GroupQuery(group=0, keys=[key(1)], positions=[16])
    assert client.lookup("r", [query]).is_miss
    assert client.prepare_store("r", [key(1)], [16]).declined
    assert client.state is LinkState.DOWN
    client.finish("r")
