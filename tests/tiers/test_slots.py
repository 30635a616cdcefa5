"""Rows of a pool: every arrow of the table, and what holds whatever happens to them."""

from __future__ import annotations

from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiers.slots import (
    NOT_READY,
    TRANSITIONS,
    ChunkStatus,
    IllegalTransition,
    SlotEvent,
    SlotState,
    SlotTable,
)

S, E = SlotState, SlotEvent

WAYS_TO = {
    S.FREE: [],
    S.RESERVED: [E.RESERVE],
    S.READY: [E.RESERVE, E.COMPLETE],
    S.QUARANTINED: [E.RESERVE, E.WRITER_LOST],
}


def table_with_row_in(state: SlotState) -> SlotTable:
    """A pool of one row, brought to `state`."""
    table = SlotTable(1)
    if state is not S.FREE:
        table.allocate(1)
    for event in WAYS_TO[state][1:]:
        table.move([0], event)
    assert table.state(0) is state
    return table


@pytest.mark.parametrize(("state", "event"), list(product(SlotState, SlotEvent)))
def test_every_pair_is_in_the_table_or_refused(state: SlotState, event: SlotEvent) -> None:
    table = table_with_row_in(state)
    if event is E.RESERVE and state is S.FREE:
        table.allocate(1)
    elif (state, event) in TRANSITIONS:
        table.move([0], event)
    else:
        with pytest.raises(IllegalTransition, match=f"{event.name} while {state.name}"):
            table.move([0], event)
        assert table.state(0) is state
    assert table.state(0) is TRANSITIONS.get((state, event), state)
    table.check()


def test_free_is_reachable_from_everywhere() -> None:
    reached, grown = {S.FREE}, True
    while grown:
        before = len(reached)
        reached |= {state for (state, _), after in TRANSITIONS.items() if after in reached}
        grown = len(reached) > before
    assert reached == set(SlotState)


def test_a_reserved_row_is_not_readable() -> None:
    table = SlotTable(2)
    (row,) = table.allocate(1)
    assert table.state(row) is S.RESERVED
    assert not table.status(row).is_ready
    assert table.num_free == 1


def test_a_completed_write_makes_the_row_readable_without_readers() -> None:
    table = table_with_row_in(S.RESERVED)
    table.move([0], E.COMPLETE)
    assert table.state(0) is S.READY
    assert table.status(0).ref_cnt == 0


def test_a_failed_write_gives_the_row_back() -> None:
    table = table_with_row_in(S.RESERVED)
    table.move([0], E.FAIL)
    assert table.allocate(1) == [0]


def test_the_row_of_a_lost_writer_is_kept_apart() -> None:
    table = table_with_row_in(S.RESERVED)
    table.move([0], E.WRITER_LOST)
    assert table.state(0) is S.QUARANTINED
    assert table.num_free == 0
    assert table.status(0).ref_cnt == NOT_READY


@pytest.mark.parametrize("event", [E.EVICT, E.FORGET])
def test_an_unread_row_given_up_can_be_reused(event: SlotEvent) -> None:
    table = table_with_row_in(S.READY)
    table.move([0], event)
    assert table.status(0).ref_cnt == NOT_READY
    assert table.allocate(1) == [0]


@pytest.mark.parametrize("event", [E.EVICT, E.FORGET])
def test_a_row_is_not_freed_under_its_readers(event: SlotEvent) -> None:
    table = SlotTable(2)
    table.move(table.allocate(2), E.COMPLETE)
    table.status(1).ref_cnt = 2
    with pytest.raises(IllegalTransition, match=f"row 1 cannot take {event.name}.*2 reader"):
        table.move([0, 1], event)
    assert table.count(S.READY) == 2
    table.check()


def test_a_row_forgotten_under_a_reader_is_kept_apart() -> None:
    table = table_with_row_in(S.READY)
    table.status(0).ref_cnt = 1
    table.move([0], E.FORGET_HELD)
    assert table.state(0) is S.QUARANTINED
    assert table.num_free == 0


def test_a_quarantined_row_is_free_once_released() -> None:
    table = table_with_row_in(S.QUARANTINED)
    table.move([0], E.RELEASE)
    assert table.allocate(1) == [0]


def test_fresh_rows_go_first_then_the_last_given_back() -> None:
    table = SlotTable(4)
    table.move(table.allocate(3), E.COMPLETE)
    table.move([1, 0], E.EVICT)
    assert table.allocate(3) == [3, 0, 1]


def test_more_rows_than_are_free_are_refused_with_the_numbers() -> None:
    table = SlotTable(3)
    table.allocate(2)
    with pytest.raises(IllegalTransition, match="2 rows wanted, 1 of 3 free"):
        table.allocate(2)
    assert table.num_free == 1


def test_a_batch_with_one_illegal_row_moves_none() -> None:
    table = SlotTable(3)
    table.allocate(2)
    with pytest.raises(IllegalTransition, match="row 2 cannot take COMPLETE while FREE"):
        table.move(np.array([0, 1, 2]), E.COMPLETE)
    assert table.count(S.RESERVED) == 2
    table.check()


def test_a_row_gets_a_new_generation_each_time_it_is_given_out() -> None:
    shared = np.zeros(2, dtype=np.uint32)
    table = SlotTable(2, shared)
    table.allocate(1)
    table.move([0], E.FAIL)
    table.allocate(2)
    assert shared.tolist() == [2, 1]


def test_generations_wrap_without_complaint() -> None:
    table = SlotTable(1, np.array([2**32 - 1], dtype=np.uint32))
    table.allocate(1)
    assert table.generation.tolist() == [0]


def test_nothing_to_move_or_allocate_is_fine() -> None:
    table = SlotTable(1)
    table.move([], E.EVICT)
    assert table.allocate(0) == []


def test_impossible_pools_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one row, got 0"):
        SlotTable(0)
    with pytest.raises(ValueError, match=r"\(3,\) generations for 2 rows"):
        SlotTable(2, np.zeros(3, dtype=np.uint32))


def test_resident_rows_are_those_written_or_ready() -> None:
    table = SlotTable(4)
    table.allocate(3)
    table.move([1], E.COMPLETE)
    table.move([2], E.WRITER_LOST)
    assert table.is_resident(np.arange(4)).tolist() == [True, True, False, False]


@pytest.mark.parametrize("break_it", ["reader of a free row", "state", "free list"])
def test_check_finds_what_does_not_add_up(break_it: str) -> None:
    table = SlotTable(3)
    table.move(table.allocate(2), E.COMPLETE)
    table.move([0], E.EVICT)
    table.check()
    if break_it == "reader of a free row":
        table.status(0).ref_cnt = 1
    elif break_it == "state":
        table._state[0] = S.READY
    else:
        table._free.append(0)
    with pytest.raises(AssertionError):
        table.check()


def test_a_status_made_alone_counts_for_itself() -> None:
    chunk, other = ChunkStatus(7), ChunkStatus(7)
    assert (chunk.ref_cnt, chunk.is_ready) == (NOT_READY, False)
    chunk.ref_cnt = 2
    assert chunk.is_ready
    assert other.ref_cnt == NOT_READY
    assert chunk != other
    assert "ref_cnt=2" in repr(chunk)


def test_statuses_of_one_row_are_equal_and_share_its_count() -> None:
    table = SlotTable(2)
    one, same = table.status(1), table.status(1)
    one.ref_cnt = 3
    assert same.ref_cnt == 3
    assert one == same
    assert one != table.status(0)
    assert one != SlotTable(2).status(1)
    assert one != "chunk"


def test_a_status_takes_its_count_along() -> None:
    chunk, table = ChunkStatus(1), SlotTable(2)
    chunk.ref_cnt = 4
    chunk.move_to(table.ref_cnt)
    assert table.ref_cnt.tolist() == [NOT_READY, 4]
    assert chunk == table.status(1)


class SlotMachine(RuleBasedStateMachine):
    """Rows are neither lost nor shared, and a model of one state per row agrees."""

    @initialize(num_rows=st.integers(1, 9))
    def begin(self, num_rows: int) -> None:
        self.table = SlotTable(num_rows)
        self.states = [S.FREE] * num_rows
        self.readers = [NOT_READY] * num_rows
        self.generations = [0] * num_rows

    def rows_in(self, data: st.DataObject, state: SlotState) -> list[int]:
        rows = [row for row, is_in in enumerate(self.states) if is_in is state]
        return data.draw(st.lists(st.sampled_from(rows), unique=True)) if rows else []

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        free = self.states.count(S.FREE)
        rows = self.table.allocate(data.draw(st.integers(0, free)))
        assert len(set(rows)) == len(rows)
        for row in rows:
            assert self.states[row] is S.FREE
            self.states[row] = S.RESERVED
            self.generations[row] += 1

    @precondition(lambda self: hasattr(self, "states"))
    @rule(data=st.data(), arrow=st.sampled_from(sorted(TRANSITIONS)))
    def move(self, data: st.DataObject, arrow: tuple[SlotState, SlotEvent]) -> None:
        state, event = arrow
        if event is E.RESERVE:
            return
        rows = self.rows_in(data, state)
        if event in (E.EVICT, E.FORGET):
            rows = [row for row in rows if self.readers[row] == 0]
        self.table.move(rows, event)
        for row in rows:
            self.states[row] = TRANSITIONS[arrow]
            self.readers[row] = 0 if self.states[row] is S.READY else NOT_READY

    @rule(data=st.data(), count=st.integers(0, 3))
    def read(self, data: st.DataObject, count: int) -> None:
        for row in self.rows_in(data, S.READY):
            self.table.status(row).ref_cnt = self.readers[row] = count

    @rule(data=st.data(), event=st.sampled_from(SlotEvent), other=st.sampled_from(SlotState))
    def refuse(self, data: st.DataObject, event: SlotEvent, other: SlotState) -> None:
        rows = self.rows_in(data, other)
        if rows and (other, event) not in TRANSITIONS:
            with pytest.raises(IllegalTransition):
                self.table.move(rows, event)

    @invariant()
    def states_agree(self) -> None:
        if hasattr(self, "table"):
            self.table.check()
            assert [self.table.state(row) for row in range(len(self.states))] == self.states
            assert self.table.ref_cnt.tolist() == self.readers
            assert self.table.generation.tolist() == self.generations
            assert sum(map(self.table.count, SlotState)) == len(self.states)
            assert self.table.num_free == self.states.count(S.FREE)


SlotMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, database=None
)
TestSlotMachine = SlotMachine.TestCase


def test_the_documented_table_is_the_one_in_code() -> None:
    from pathlib import Path

    from tiers.slots import TRANSITIONS, SlotEvent, SlotState

    names = {
        SlotEvent.RESERVE: "reserve",
        SlotEvent.COMPLETE: "complete",
        SlotEvent.FAIL: "fail",
        SlotEvent.EVICT: "evict",
        SlotEvent.FORGET: "forget",
        SlotEvent.FORGET_HELD: "forget, while read",
        SlotEvent.WRITER_LOST: "writer lost",
        SlotEvent.RELEASE: "release",
    }
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    text = text.replace(
        "| ready | evict, forget | free |", "| ready | evict | free |\n| ready | forget | free |"
    )
    section = text[text.index("## States of a row") : text.index("## Who owns what")]
    rows = {
        tuple(part.strip() for part in line.strip("|").split("|"))
        for line in section.splitlines()
        if line.startswith("|")
    }
    expected = {
        (SlotState(before).name.lower(), names[event], SlotState(after).name.lower())
        for (before, event), after in TRANSITIONS.items()
    }
    assert rows - {("from", "event", "to"), ("---", "---", "---")} == expected
