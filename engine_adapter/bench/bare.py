"""The limit for lookups: a server that does nothing but look keys up in one dict.

A Unix stream socket, a `selectors` loop, length-prefixed MessagePack, one dict look-up per key,
8 bytes per key in the answer, stops at the first missing key. Run as a process of its own:
`python -m engine_adapter.bench.bare SOCKET CHUNKS SEED KEY_BYTES`.
"""

from __future__ import annotations

import gc
import selectors
import socket
import struct
import sys

import msgpack
import numpy as np

LENGTH = struct.Struct(">I")
PREFIX = b"n" * 16
"""Stands for the namespace, so that the dict's keys are as long as the broker's."""


def make_keys(chunks: int, seed: int, key_bytes: int) -> list[bytes]:
    """The same distinct random keys for the same arguments, in every process."""
    blob = np.random.default_rng(seed).bytes(chunks * key_bytes)
    return [blob[at : at + key_bytes] for at in range(0, len(blob), key_bytes)]


def serve(path: str, chunks: int, seed: int, key_bytes: int) -> None:
    """Serve until standard input ends."""
    index = {PREFIX + key: row for row, key in enumerate(make_keys(chunks, seed, key_bytes))}
    get = index.get
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin.buffer, selectors.EVENT_READ)
    buffers: dict[socket.socket, bytearray] = {}
    gc.freeze()
    gc.disable()
    print("ready", flush=True)
    while True:
        for ready, _ in selector.select():
            if ready.fileobj is sys.stdin.buffer:
                return
            if ready.fileobj is listener:
                accepted, _ = listener.accept()
                selector.register(accepted, selectors.EVENT_READ)
                buffers[accepted] = bytearray()
                continue
            connection = ready.fileobj
            assert isinstance(connection, socket.socket)
            data = connection.recv(1 << 18)
            if not data:
                selector.unregister(connection)
                connection.close()
                del buffers[connection]
                continue
            buffer = buffers[connection]
            buffer += data
            while len(buffer) >= LENGTH.size:
                (size,) = LENGTH.unpack_from(buffer)
                if len(buffer) < LENGTH.size + size:
                    break
                seq, packed = msgpack.unpackb(bytes(buffer[LENGTH.size : LENGTH.size + size]))
                del buffer[: LENGTH.size + size]
                rows = []
                for at in range(0, len(packed), key_bytes):
                    row = get(PREFIX + packed[at : at + key_bytes])
                    if row is None:
                        break
                    rows.append(row)
                answer = msgpack.packb([seq, struct.pack(f"<{len(rows)}Q", *rows)])
                connection.sendall(LENGTH.pack(len(answer)) + answer)


class BareClient:
    """Asks a bare server, one call at a time."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._buffer = bytearray()

    def lookup(self, seq: int, keys: list[bytes]) -> int:
        """How many leading keys are there."""
        body = msgpack.packb([seq, b"".join(keys)])
        self._socket.sendall(LENGTH.pack(len(body)) + body)
        buffer = self._buffer
        while True:
            if len(buffer) >= LENGTH.size:
                (size,) = LENGTH.unpack_from(buffer)
                if len(buffer) >= LENGTH.size + size:
                    _, packed = msgpack.unpackb(bytes(buffer[LENGTH.size : LENGTH.size + size]))
                    del buffer[: LENGTH.size + size]
                    return len(packed) // 8
            buffer += self._socket.recv(1 << 18)

    def close(self) -> None:
        """End."""
        self._socket.close()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
