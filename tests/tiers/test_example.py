"""The memory tier: it keeps bytes, ends jobs at once, and reports partial loads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.doubles import key, keys
from tiers.base import (
    CacheHitSource,
    JobResult,
    LookupResult,
    Medium,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    TransferJob,
)
from tiers.example import ExampleSecondaryTierManager, ExampleTierInfo

ROWS, ROW = 8, 16
CTX = ReqContext("r")


class Bench:
    """A tier over a little memory of its own."""

    def __init__(self, **options: Any) -> None:
        self.memory = bytearray(ROWS * ROW)
        self.view = memoryview(self.memory).cast("B", (ROWS, ROW))
        self.tier = ExampleSecondaryTierManager(None, self.view, "example", **options)
        self._job_id = 0

    def row(self, number: int) -> bytes:
        return bytes(self.memory[number * ROW : (number + 1) * ROW])

    def fill(self, number: int, byte: int) -> None:
        self.memory[number * ROW : (number + 1) * ROW] = bytes([byte]) * ROW

    def run(self, promotion: bool, names: list[OffloadKey], rows: list[int]) -> JobResult:
        self._job_id += 1
        job = TransferJob(self._job_id, names, np.array(rows, dtype=np.int32), promotion, CTX)
        (self.tier.submit_load if promotion else self.tier.submit_store)(job)
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self._job_id
        assert list(self.tier.get_finished_jobs()) == []
        return result


def test_bytes_come_back_in_other_rows() -> None:
    bench = Bench()
    bench.fill(1, 0x11)
    bench.fill(2, 0x22)
    stored = bench.run(False, keys(1, 2), [1, 2])
    assert stored.success
    assert stored.transfer_bytes == 2 * ROW
    bench.fill(1, 0xFF)  # the tier has a copy of its own
    loaded = bench.run(True, keys(2, 1), [5, 6])
    assert loaded.success
    assert loaded.successful_keys is None
    assert (bench.row(5), bench.row(6)) == (b"\x22" * ROW, b"\x11" * ROW)
    assert bench.row(7) == bytes(ROW)


def test_lookup_and_count() -> None:
    bench = Bench()
    assert bench.tier.lookup(key(1), CTX) is LookupResult.MISS
    bench.run(False, keys(1), [0])
    assert bench.tier.lookup(key(1), CTX) is LookupResult.HIT
    assert bench.tier.get_num_chunks() == 1
    assert set(bench.tier.chunks) == set(keys(1))


def test_what_is_there_is_not_copied_again() -> None:
    bench = Bench()
    bench.fill(0, 0x11)
    bench.run(False, keys(1), [0])
    bench.fill(0, 0x22)
    result = bench.run(False, keys(1), [0])
    assert result.success
    assert result.transfer_bytes == 0
    assert bench.tier.chunks[key(1)] == b"\x11" * ROW


def test_a_missing_chunk_fails_alone() -> None:
    bench = Bench()
    bench.fill(0, 0x11)
    bench.run(False, keys(1, 3), [0, 0])
    result = bench.run(True, keys(1, 2, 3), [4, 5, 6])
    assert not result.success
    assert result.successful_keys == keys(1, 3)
    assert bench.row(4) == bench.row(6) == b"\x11" * ROW
    assert bench.row(5) == bytes(ROW)
    nothing = bench.run(True, keys(9), [4])
    assert not nothing.success
    assert nothing.successful_keys == []


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_a_row_that_is_not_there_fails_and_touches_nothing(wrong: int) -> None:
    bench = Bench()
    assert not bench.run(False, keys(1), [wrong]).success
    assert bench.tier.lookup(key(1), CTX) is LookupResult.MISS
    bench.fill(0, 0x11)
    bench.run(False, keys(1), [0])
    before = bytes(bench.memory)
    result = bench.run(True, keys(1), [wrong])
    assert result.successful_keys == []
    assert bytes(bench.memory) == before


def test_a_bound_lets_the_least_recently_used_go() -> None:
    bench = Bench(max_chunks=3)
    bench.run(False, keys(1, 2, 3), [0, 0, 0])
    bench.tier.touch(keys(1, 9), CTX)
    bench.run(True, keys(2), [4])
    bench.run(False, keys(4), [0])
    assert list(bench.tier.chunks) == keys(1, 2, 4)
    with pytest.raises(ValueError, match="max_chunks"):
        Bench(max_chunks=0)


def test_configuration_shows_the_parameter() -> None:
    tier = Bench(custom_param=42).tier
    assert tier.config_info() == {"example_info": 42}
    assert tier.config_info_keys({}) == ("example_info",)
    assert ExampleTierInfo(example_info=1).as_config_info() == {"example_info": 1}


def test_it_is_a_plain_memory_tier() -> None:
    tier = Bench().tier
    assert tier.medium is Medium.CPU
    assert tier.cache_hit_source is CacheHitSource.HOST
    assert not tier.serves_external_requests
    assert tier.on_new_request(CTX).policy is OffloadPolicy.CHUNK_LEVEL
    assert not tier.has_pending_work()
    tier.drain_jobs()


def test_the_view_can_be_released_after_jobs() -> None:
    bench = Bench()
    bench.run(False, keys(1), [0])
    bench.run(True, keys(1), [1])
    bench.tier.shutdown()
    bench.view.release()
    bench.memory.clear()  # BufferError if anything still looks at it
    assert bench.tier.get_num_chunks() == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, ROWS - 1))))
def test_bytes_read_are_bytes_stored(steps: list[tuple[bool, int, int]]) -> None:
    bench = Bench(max_chunks=3)
    for promotion, name, row in steps:
        if promotion:
            bench.fill(row, 0xEE)
            known = bench.tier.lookup(key(name), CTX) is LookupResult.HIT
            assert bench.run(True, keys(name), [row]).success is known
            assert bench.row(row) == bytes([name if known else 0xEE]) * ROW
        else:
            bench.fill(row, name)
            assert bench.run(False, keys(name), [row]).success
        assert bench.tier.get_num_chunks() <= 3
