"""Processes of an engine at the broker, what their namespace stands for, and refusals counted."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import Protocol

from broker import wire


class Port(Protocol):
    """A member's connection: a bounded queue that never blocks."""

    def send(self, message: wire.Message) -> None: ...

    @property
    def queued_bytes(self) -> int: ...


@dataclass(slots=True, eq=False)
class Member:
    """A process of the engine that is, or was, attached. `rank` is -1 for the scheduler.

    `maps`: it was given the memory, and can touch rows until it is gone or has said that its
    transfers from before `ended_fence` have ended. `process` identifies it for ever (the inode of
    its pidfd); None where the kernel can't say, and then EOF counts as its death.
    """

    rank: int
    port: Port | None
    pid: int | None
    maps: bool
    process: int | None = None
    exited: bool = False
    ended_fence: int = 0

    @property
    def is_gone(self) -> bool:
        """Whether the process can do nothing any more: it is dead and its connection closed."""
        return self.port is None and (self.exited or self.process is None)

    def may_touch(self, fence: int) -> bool:
        """Whether it may still touch rows claimed before `fence`."""
        return self.maps and not self.is_gone and self.ended_fence < fence


def effective_namespace(namespace: bytes, weights_version: str | None, nonce: bytes) -> bytes:
    """Namespace of an epoch: what the engine declared, the user's version, the broker's nonce."""
    digest = hashlib.blake2b(digest_size=wire.NAMESPACE_BYTES, person=b"kvquay-epoch")
    version = b"-" if weights_version is None else b"+" + weights_version.encode()
    for part in (namespace, version, nonce):
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()


def nonce_for(weights_version: str | None) -> bytes:
    """Nonce of a new epoch: none where a version names it, so that all who name it share."""
    return os.urandom(wire.NAMESPACE_BYTES) if weights_version is None else b""


@dataclass(slots=True)
class Epoch:
    """What a namespace stands for now. The first nonce is empty, so that engines with equal
    declarations share without a word between them."""

    number: int = 0
    weights_version: str | None = None
    nonce: bytes = b""


@dataclass(slots=True)
class Counters:
    """What was refused, by reason; shown in status."""

    refused: dict[str, int] = field(default_factory=dict)

    def refuse(self, reason: str, number: int = 1) -> None:
        """Count `number` refusals."""
        if number:
            self.refused[reason] = self.refused.get(reason, 0) + number
