"""The rows of a primary tier: what state each is in, and every way it may change.

Covers states, reader counts and free rows, in arrays indexed by row. It knows no key, policy,
owner or clock; `tiers.primary` says which key a row holds, `tiers.ledger` who claims it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from enum import IntEnum, auto
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

NOT_READY: Final = -1
"""Reader count of a row whose bytes mean nothing yet."""

Rows = NDArray[np.integer[Any]]


class SlotState(IntEnum):
    """What a row is good for. Free, ready, reserved and quarantined rows add up to the pool."""

    FREE = 0
    RESERVED = 1  # one writer owns the row; its bytes mean nothing yet
    READY = 2  # may be read, held and, without readers, evicted
    QUARANTINED = 3  # no key leads here, but somebody may still touch the bytes


class SlotEvent(IntEnum):
    """Why a row changes state."""

    RESERVE = auto()  # a store or a promotion takes it
    COMPLETE = auto()  # its writer says that the bytes are there
    FAIL = auto()  # its writer says that they are not and will not be
    EVICT = auto()  # the policy gave its chunk up; nobody reads it
    FORGET = auto()  # its chunk became unreachable (reset, bad bytes); nobody reads it
    FORGET_HELD = auto()  # the same, while somebody still reads it
    WRITER_LOST = auto()  # its writer died, timed out or was reset, and may still write
    RELEASE = auto()  # nobody can touch it any more


S, E = SlotState, SlotEvent
TRANSITIONS: Final[Mapping[tuple[SlotState, SlotEvent], SlotState]] = MappingProxyType(
    {
        (S.FREE, E.RESERVE): S.RESERVED,
        (S.RESERVED, E.COMPLETE): S.READY,
        (S.RESERVED, E.FAIL): S.FREE,
        (S.RESERVED, E.WRITER_LOST): S.QUARANTINED,
        (S.READY, E.EVICT): S.FREE,
        (S.READY, E.FORGET): S.FREE,
        (S.READY, E.FORGET_HELD): S.QUARANTINED,
        (S.QUARANTINED, E.RELEASE): S.FREE,
    }
)


class IllegalTransition(Exception):
    """A bug in this program: a row was told to do what its state does not allow."""


class ChunkStatus:
    """One row as policies see it: `chunk_id` is its number, `ref_cnt` its readers (-1: not ready).

    Made alone it keeps its own count; a table's status reads and writes the table.
    """

    __slots__ = ("_cells", "_index", "chunk_id")

    def __init__(
        self, chunk_id: int, cells: MutableSequence[int] | NDArray[np.int32] | None = None
    ) -> None:
        self.chunk_id = chunk_id
        self._cells: MutableSequence[int] | NDArray[np.int32] = (
            [NOT_READY] if cells is None else cells
        )
        self._index = 0 if cells is None else chunk_id

    @property
    def ref_cnt(self) -> int:
        """Readers of the row; -1 while its bytes are not there."""
        return int(self._cells[self._index])

    @ref_cnt.setter
    def ref_cnt(self, value: int) -> None:
        self._cells[self._index] = value

    @property
    def is_ready(self) -> bool:
        """Whether the bytes may be read."""
        return self.ref_cnt >= 0

    def move_to(self, cells: NDArray[np.int32]) -> None:
        """Keep the count in `cells[chunk_id]` from now on."""
        count = self.ref_cnt
        self._cells, self._index = cells, self.chunk_id
        self.ref_cnt = count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChunkStatus):
            return NotImplemented
        return self is other or (
            self.chunk_id == other.chunk_id
            and self._cells is other._cells
            and self._index == other._index
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ChunkStatus(chunk_id={self.chunk_id}, ref_cnt={self.ref_cnt})"


_LEGAL = np.full((len(SlotState), max(SlotEvent) + 1), -1, dtype=np.int8)
for (_state, _event), _next in TRANSITIONS.items():
    _LEGAL[_state, _event] = _next

_UNREAD_ONLY: Final = frozenset({SlotEvent.EVICT, SlotEvent.FORGET})
"""Events that free a ready row at once, and would free it under its readers."""


class SlotTable:
    """State and reader count of every row of one pool. Guarded by the manager's lock.

    `ref_cnt` (int32, shape (num_rows,)) is -1 for a row that is not ready. `generation` (uint32,
    same shape) grows each time a row is given out, so that an old row number can be told from a
    new one; where a shared-memory header is given, it is written there for all to see.
    """

    def __init__(self, num_rows: int, generation: NDArray[np.uint32] | None = None) -> None:
        if num_rows < 1:
            raise ValueError(f"a pool needs at least one row, got {num_rows}")
        if generation is not None and generation.shape != (num_rows,):
            raise ValueError(f"{generation.shape} generations for {num_rows} rows")
        self.num_rows = num_rows
        self.ref_cnt: NDArray[np.int32] = np.full(num_rows, NOT_READY, dtype=np.int32)
        self.generation: NDArray[np.uint32] = (
            np.zeros(num_rows, dtype=np.uint32) if generation is None else generation
        )
        self._state: NDArray[np.int8] = np.zeros(num_rows, dtype=np.int8)
        self._counts = [0] * len(SlotState)
        self._counts[SlotState.FREE] = num_rows
        self._fresh = 0  # rows from here on were never given out
        self._free: list[int] = []  # given back, last first

    def status(self, row: int) -> ChunkStatus:
        """The row as policies see it."""
        return ChunkStatus(row, self.ref_cnt)

    def state(self, row: int) -> SlotState:
        """State of one row."""
        return SlotState(int(self._state[row]))

    def is_resident(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of `rows` a key leads to: those being written and those that are ready."""
        states = self._state[rows]
        resident: NDArray[np.bool_] = (states == SlotState.RESERVED) | (states == SlotState.READY)
        return resident

    def in_state(self, state: SlotState) -> NDArray[np.bool_]:
        """Which rows are in `state`, shape (num_rows,)."""
        mask: NDArray[np.bool_] = self._state == state
        return mask

    def count(self, state: SlotState) -> int:
        """How many rows are in `state`."""
        return self._counts[state]

    @property
    def num_free(self) -> int:
        """Rows that can be given out."""
        return self._counts[SlotState.FREE]

    def allocate(self, n: int) -> list[int]:
        """Give out `n` free rows, never-used ones first, then the last given back."""
        if n > self.num_free:
            raise IllegalTransition(f"{n} rows wanted, {self.num_free} of {self.num_rows} free")
        fresh = min(n, self.num_rows - self._fresh)
        rows = list(range(self._fresh, self._fresh + fresh))
        self._fresh += fresh
        rows.extend(self._free.pop() for _ in range(n - fresh))
        self.move(rows, SlotEvent.RESERVE)
        self.generation[rows] += np.uint32(1)
        return rows

    def move(self, rows: list[int] | Rows, event: SlotEvent) -> None:
        """Take all of `rows` (distinct) through one transition, or none if one may not."""
        if len(rows) == 0:
            return
        index = np.asarray(rows, dtype=np.intp)
        before = self._state[index]
        after = _LEGAL[before, event]
        if after.min() < 0:
            at = int(np.argmin(after))
            raise IllegalTransition(
                f"row {int(index[at])} cannot take {event.name} while "
                f"{SlotState(int(before[at])).name}"
            )
        if event in _UNREAD_ONLY and self.ref_cnt[index].any():
            at = int(np.flatnonzero(self.ref_cnt[index])[0])
            raise IllegalTransition(
                f"row {int(index[at])} cannot take {event.name} while it has "
                f"{int(self.ref_cnt[index[at]])} reader(s)"
            )
        self._state[index] = after
        for state, number in enumerate(np.bincount(before, minlength=len(SlotState))):
            self._counts[state] -= int(number)
        for state, number in enumerate(np.bincount(after, minlength=len(SlotState))):
            self._counts[state] += int(number)
        if event == SlotEvent.COMPLETE:
            self.ref_cnt[index] = 0
        elif int(after[0]) != SlotState.READY:
            self.ref_cnt[index] = NOT_READY
        if int(after[0]) == SlotState.FREE:
            self._free.extend(index.tolist())

    def check(self) -> None:
        """V2: the states add up, and only ready rows count readers. AssertionError if not."""
        counted = np.bincount(self._state, minlength=len(SlotState)).tolist()
        if counted != self._counts:
            raise AssertionError(f"rows by state are {counted}, counted as {self._counts}")
        ready = self._state == SlotState.READY
        wrong = np.flatnonzero((self.ref_cnt >= 0) != ready)
        if len(wrong):
            raise AssertionError(f"row {int(wrong[0])}: readers and state do not agree")
        if len(self._free) + self.num_rows - self._fresh != self.num_free:
            raise AssertionError(f"{self.num_free} rows are free, the free list disagrees")
