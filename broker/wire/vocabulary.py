"""Limits, codes and errors of the protocol. Values only."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import ClassVar, Final

import numpy as np

PROTOCOL_VERSION: Final = 1
MAX_FRAME_BYTES: Final = 1 << 20
MAX_KEYS: Final = 1024
MAX_NAME_BYTES: Final = 256
MAX_TEXT_BYTES: Final = 4096
MAX_PARAMS_BYTES: Final = 16 << 10
MAX_GROUPS: Final = 64
MAX_WORLD: Final = 4096
"""Workers of an engine; a SessionState can list them all."""
MAX_NESTING: Final = 16
"""Maps and lists inside one another in a field of free form, the field itself counted."""
MAX_ENTRIES: Final = 4096
"""Entries of any one map or list, so that a small frame can't become a million objects."""
NAMESPACE_BYTES: Final = 16
MIN_KEY_BYTES, MAX_KEY_BYTES = 5, 255

ROW_REF: Final = np.dtype([("row", "<u4"), ("generation", "<u4")])
"""Packed answer for one key: row of the pool and the generation it had then."""
ROW_MISS: Final = 0xFFFFFFFF
ROW_PENDING: Final = 0xFFFFFFFE
ROW_RETRY: Final = 0xFFFFFFFD
"""In place of a row: not there; on its way, a notice will tell; a tier does not know yet, ditto."""

LENGTH: Final = struct.Struct(">I")


class ErrorCode(IntEnum):
    """Why a message was not obeyed."""

    MALFORMED = 1
    TOO_LARGE = 2
    UNKNOWN_TYPE = 3
    UNKNOWN_NAMESPACE = 4


class RefusalCode(IntEnum):
    """Why an attach was refused."""

    VERSION = 1
    GEOMETRY = 2
    NAMESPACE = 3
    TAKEN = 4
    NO_MEMORY = 5
    NOT_NOW = 6


class WireError(Exception):
    """The other end broke the protocol; `code` goes back to it."""

    code: ClassVar[ErrorCode] = ErrorCode.MALFORMED


class Malformed(WireError):
    """Not MessagePack, or fields of the wrong number, type or range."""


class TooLarge(WireError):
    """A frame or field beyond its limit."""

    code = ErrorCode.TOO_LARGE


class UnknownType(WireError):
    """A message type that this version does not have."""

    code = ErrorCode.UNKNOWN_TYPE


class Role(IntEnum):
    """What a connection is for."""

    SCHEDULER = 0
    WORKER = 1
    ADMIN = 2


class LookupMode(IntEnum):
    """How a group is searched: from its head to the first MISS, or from its end for a run."""

    PREFIX = 0
    WINDOW = 1


class StoreStatus(IntEnum):
    """OK: rows were given, or all is there already. BUSY: nothing fits now. DECLINED: the session
    is not ready, or the attempt is over."""

    OK = 0
    BUSY = 1
    DECLINED = 2
