"""Copies between KV tensors and rows: the right bytes, nothing else, and what was not good."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, TransferResult

from broker import wire
from engine_adapter.answers import GroupQuery
from engine_adapter.client import SchedulerClient
from engine_adapter.link import LinkState
from engine_adapter.vllm.rows import RowLayout, RowsLoadStoreSpec
from engine_adapter.vllm.worker import RowWorker
from engine_adapter.worker import WorkerClient
from tests.broker.harness import running
from tests.engine_adapter.fake_broker import KEY, FakeBroker, key
from tests.engine_adapter.vllm.kv import (
    Host,
    blocks_of,
    bytes_of,
    caches_of,
    layout_of,
    refs_of,
)

PAGES = [64, 32]
GROUPS = [[(0, 64), (1, 32)]]


class Bench:
    """A worker over a host's memory; jobs run to their end."""

    def __init__(self, seed: int = 0, host: Host | None = None, **options: Any) -> None:
        self.layout = options.pop("layout", None) or layout_of(PAGES)
        self.caches = options.pop("caches", None) or caches_of(PAGES, GROUPS, seed=seed)
        self.host = host or Host(self.layout.row_bytes)
        self.client = self.host.client()
        self.worker = RowWorker(self.client, self.caches, self.layout, **options)

    def store(self, job: int, blocks: GPULoadStoreSpec, rows: RowsLoadStoreSpec) -> TransferResult:
        assert self.worker.submit_store(job, blocks, rows)
        return self.end(job)

    def load(self, job: int, rows: RowsLoadStoreSpec, blocks: GPULoadStoreSpec) -> TransferResult:
        assert self.worker.submit_load(job, rows, blocks)
        return self.end(job)

    def end(self, job: int) -> TransferResult:
        self.worker.wait({job})
        (result,) = self.worker.get_finished()
        assert result.job_id == job
        assert result.success
        return result

    def close(self) -> None:
        self.worker.shutdown()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


class Gate:
    """Stands in the way of a worker's copies: `before` and `after` run on the copy's thread."""

    def __init__(self, worker: RowWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        for name in ("store", "load"):
            monkeypatch.setattr(worker._pages, name, self._between(getattr(worker._pages, name)))

    def _between(self, copy: Callable[..., int]) -> Callable[..., int]:
        def gated(*arguments: Any) -> int:
            self.before()
            size = copy(*arguments)
            self.after()
            return size

        return gated


def test_what_was_stored_is_loaded_by_another_engine(bench: Bench) -> None:
    other = Bench(seed=1, host=bench.host)
    stored = bench.store(1, blocks_of((0, [3, 7, 5, 6])), bench.host.spec(4, 2))
    assert stored.transfer_size == 4 * 96
    loaded = other.load(2, bench.host.spec(4, 2), blocks_of((0, [1, 9, 0])))
    assert loaded.transfer_size == 3 * 96
    for mine, theirs in zip(bytes_of(bench.caches), bytes_of(other.caches), strict=True):
        assert np.array_equal(mine[[3, 7, 5]], theirs[[1, 9, 0]])
    assert bench.worker.take_failed() == other.worker.take_failed() == (set(), set())
    other.close()


@st.composite
def jobs(draw: st.DrawFn) -> tuple[CanonicalKVCaches, RowLayout, GPULoadStoreSpec, list[int]]:
    """Tensors, a layout of one or several workers, and blocks of some groups with their rows."""
    page_bytes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    groups = draw(
        st.lists(
            st.lists(
                st.integers(0, len(page_bytes) - 1).flatmap(
                    lambda t: st.tuples(st.just(t), st.integers(1, page_bytes[t]))
                ),
                min_size=1,
                max_size=3,
                unique_by=lambda ref: ref[0],
            ),
            min_size=1,
            max_size=3,
        )
    )
    per_chunk, world = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    layout = layout_of(page_bytes, per_chunk, draw(st.integers(0, world - 1)), world)
    free, parts, num_rows = draw(st.permutations(range(32))), [], 0
    for _ in groups:
        chunks = draw(st.integers(0, 2))
        skipped = draw(st.integers(0, per_chunk - 1)) if chunks else 0
        count = chunks * per_chunk - skipped
        first = draw(st.integers(0, 5)) * per_chunk + skipped
        parts.append((first if count else 0, free[:count]))
        free, num_rows = free[count:], num_rows + chunks
    rows = draw(st.permutations(range(8)))[:num_rows]
    caches = caches_of(page_bytes, groups, num_blocks=32, seed=draw(st.integers(0, 9)))
    return caches, layout, blocks_of(*parts), rows


def expected_rows(
    before: Any,
    caches: CanonicalKVCaches,
    layout: RowLayout,
    blocks: GPULoadStoreSpec,
    rows: list[int],
) -> Any:
    """The rows after a store, written out one page at a time."""
    after, at, taken = before.copy(), 0, 0
    starts = [layout.cell_offset]
    for entry in caches.tensors:
        starts.append(starts[-1] + entry.page_size_bytes * layout.blocks_per_chunk)
    for refs, size, first in zip(
        caches.group_data_refs, blocks.group_sizes, blocks.block_indices, strict=True
    ):
        skipped = first % layout.blocks_per_chunk
        for number in range(size):
            chunk, slot = divmod(skipped + number, layout.blocks_per_chunk)
            block = blocks.block_ids[at + number]
            for ref in refs:
                entry = caches.tensors[ref.tensor_idx]
                begin = starts[ref.tensor_idx] + slot * entry.page_size_bytes
                page = entry.tensor.numpy()[block, : ref.page_size_bytes].view(np.uint8)
                after[rows[taken + chunk], begin : begin + ref.page_size_bytes] = page
        at += size
        taken += -(-(skipped + size) // layout.blocks_per_chunk) if size else 0
    return after


@given(jobs())
def test_a_round_trip_gives_the_same_bytes_and_touches_nothing_else(
    job: tuple[CanonicalKVCaches, RowLayout, GPULoadStoreSpec, list[int]],
) -> None:
    caches, layout, blocks, rows = job
    bench = Bench(layout=layout, caches=caches, partial_chunks=True)
    bench.host.rows[:] = np.random.default_rng(1).integers(0, 256, bench.host.rows.shape)
    expected = expected_rows(bench.host.rows, caches, layout, blocks, rows)
    original = bytes_of(caches)

    stored = bench.store(1, blocks, bench.host.spec(*rows))
    assert np.array_equal(bench.host.rows, expected)
    for entry, data in zip(caches.tensors, original, strict=True):
        assert np.array_equal(entry.tensor.numpy(), data)

    wiped = [np.full_like(data, 77) for data in original]
    at = 0
    for refs, size in zip(caches.group_data_refs, blocks.group_sizes, strict=True):
        for block in blocks.block_ids[at : at + size]:
            for ref in refs:
                used = slice(ref.page_size_bytes)
                wiped[ref.tensor_idx][block, used] = original[ref.tensor_idx][block, used]
        at += size
    for entry in caches.tensors:
        entry.tensor.fill_(77)
    loaded = bench.load(2, bench.host.spec(*rows), blocks)
    for entry, data in zip(caches.tensors, wiped, strict=True):
        assert np.array_equal(entry.tensor.numpy(), data)
    assert np.array_equal(bench.host.rows, expected)
    assert loaded.transfer_size == stored.transfer_size
    assert bench.worker.take_failed() == (set(), set())
    bench.close()


def test_workers_of_one_engine_each_have_their_cell() -> None:
    layouts = [layout_of(PAGES, rank=rank, world=2) for rank in range(2)]
    host = Host(layouts[0].row_bytes)
    ranks = [Bench(seed=r, host=host, layout=layout) for r, layout in enumerate(layouts)]
    originals = [bytes_of(bench.caches) for bench in ranks]
    for bench in ranks:
        bench.store(1, blocks_of((0, [3, 7])), host.spec(5))
    for bench in reversed(ranks):
        bench.load(2, host.spec(5), blocks_of((0, [8, 9])))
    for bench, original in zip(ranks, originals, strict=True):
        for now, was in zip(bytes_of(bench.caches), original, strict=True):
            assert np.array_equal(now[[8, 9]], was[[3, 7]])
        bench.close()
    assert not host.rows[5, 2 * layouts[0].worker_bytes :].any()


def test_of_replicated_workers_rank_0_writes_and_all_read() -> None:
    layouts = [layout_of(PAGES, rank=rank, world=2, replicated=True) for rank in range(2)]
    host = Host(layouts[0].row_bytes)
    first, second = (Bench(seed=r, host=host, layout=layout) for r, layout in enumerate(layouts))
    assert second.store(1, blocks_of((0, [3, 7])), host.spec(5)).transfer_size == 0
    assert not host.rows.any()
    first.store(1, blocks_of((0, [3, 7])), host.spec(5))
    second.load(2, host.spec(5), blocks_of((0, [0, 1])))
    assert np.array_equal(bytes_of(second.caches)[0][[0, 1]], bytes_of(first.caches)[0][[3, 7]])
    assert first.worker.take_failed() == second.worker.take_failed() == (set(), set())
    first.close()
    second.close()


def test_rows_that_became_anothers_before_the_copy_are_left_alone(bench: Bench) -> None:
    spec = bench.host.spec(4, 2)
    bench.host.generation[2] += 1
    result = bench.store(1, blocks_of((0, [3, 7, 5, 6])), spec)
    assert result.transfer_size == 2 * 96
    assert bench.host.rows[4].any()
    assert not bench.host.rows[2].any()
    assert bench.worker.take_failed() == ({(2, 3)}, set())
    assert bench.worker.take_failed() == (set(), set())

    result = bench.load(2, spec, blocks_of((0, [0, 1, 2, 8])))
    assert result.transfer_size == 2 * 96
    assert bench.worker.take_failed() == ({(2, 3)}, {2})


def test_rows_that_became_anothers_during_the_copy_do_not_count(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(bench.worker, monkeypatch)

    def reused() -> None:
        bench.host.generation[4] += 1

    gate.after = reused
    bench.load(1, bench.host.spec(4, 2), blocks_of((0, [3, 7, 5, 6])))
    assert bench.worker.take_failed() == ({(4, 5)}, {1})
    bench.store(2, blocks_of((0, [3, 7, 5, 6])), bench.host.spec(4, 2))
    assert bench.worker.take_failed() == ({(4, 6)}, set())


def test_a_row_beyond_the_pool_is_a_bad_row(bench: Bench) -> None:
    bench.load(1, RowsLoadStoreSpec(refs_of((4, 5), (1000, 1))), blocks_of((0, [0, 1, 2, 3])))
    assert bench.worker.take_failed() == ({(1000, 1)}, {1})


def test_chunks_whose_front_is_gone_are_stored_only_on_demand() -> None:
    blocks = blocks_of((1, [3, 5, 6]))
    careful, bold = Bench(), Bench(partial_chunks=True)
    careful.store(1, blocks, careful.host.spec(4, 2))
    assert careful.worker.take_failed() == ({(4, 5)}, set())
    assert np.flatnonzero(np.any(careful.host.rows, axis=1)).tolist() == [2]
    bold.store(1, blocks, bold.host.spec(4, 2))
    assert bold.worker.take_failed() == (set(), set())
    assert np.array_equal(bold.host.rows[4, 64:128].view(np.int8), bytes_of(bold.caches)[0][3])
    careful.close()
    bold.close()


def test_blocks_that_do_not_fit_their_rows_fail_with_a_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.store(1, blocks_of((0, [3])), bench.host.spec(4, 2))
    assert bench.worker.take_failed() == ({(4, 5), (2, 3)}, set())
    assert not bench.host.rows.any()
    assert "MisplacedBlocks" in caplog.text


def test_a_copy_that_fails_costs_its_job_and_one_warning(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(bench.worker, monkeypatch)

    def fails() -> None:
        raise MemoryError("no room for a batch")

    gate.before = fails
    for job in (1, 2):
        assert bench.load(job, bench.host.spec(job), blocks_of((0, [3, 7]))).transfer_size == 0
    assert bench.worker.take_failed() == ({(1, 2), (2, 3)}, {1, 2})
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING and "job" in r.msg]
    assert len(warnings) == 1
    assert "no room for a batch" in warnings[0].getMessage()
    gate.before = lambda: None
    bench.load(3, bench.host.spec(1), blocks_of((0, [3, 7])))
    assert bench.worker.take_failed() == (set(), set())


def test_rows_of_another_size_fail(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(layout=replace(layout_of(PAGES), row_bytes=8192), host=Host(4096))
    bench.store(1, blocks_of((0, [3, 7])), bench.host.spec(1))
    assert bench.worker.take_failed() == ({(1, 2)}, set())
    assert "4096 bytes, not 8192" in caplog.text
    bench.close()


def test_without_a_broker_jobs_end_at_once_with_nothing(bench: Bench) -> None:
    bench.client.memory = None
    assert bench.store(1, blocks_of((0, [3, 7])), bench.host.spec(4)).transfer_size == 0
    assert bench.load(2, bench.host.spec(4), blocks_of((0, [3, 7]))).transfer_size == 0
    assert bench.worker.take_failed() == ({(4, 5)}, {2})


def test_jobs_of_an_earlier_memory_fail_though_generations_agree(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    gate = Gate(bench.worker, monkeypatch)

    def held_up() -> None:
        began.set()
        assert go_on.wait(10)

    gate.before = held_up
    bench.worker.submit_load(1, bench.host.spec(1), blocks_of((0, [3, 7])))
    bench.worker.submit_load(2, bench.host.spec(2), blocks_of((0, [5, 6])))  # behind it
    assert began.wait(10)
    bench.client.memory = bench.host.memory()
    go_on.set()
    bench.worker.wait({1, 2})
    assert {result.job_id for result in bench.worker.get_finished()} == {1, 2}
    assert bench.worker.take_failed() == ({(2, 3)}, {2})


def test_a_broker_that_dies_meanwhile_neither_hangs_nor_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the copy that runs the generations decide; it re-attaches when that has ended."""
    broker = FakeBroker()
    layout = layout_of(PAGES)
    host = Host(layout.row_bytes)
    client = WorkerClient(
        "",
        engine_id="e",
        row_bytes=layout.row_bytes,
        key_bytes=KEY,
        clock=broker.clock,
        connect=broker.connect,
    )
    client.step()
    broker.hear()
    client.step()
    client.memory = host.memory()  # no descriptor comes with the fake
    worker = RowWorker(client, caches_of(PAGES, GROUPS), layout)
    began, go_on = threading.Event(), threading.Event()
    gate = Gate(worker, monkeypatch)

    def held_up() -> None:
        began.set()
        assert go_on.wait(10)

    gate.before = held_up
    worker.submit_store(1, blocks_of((0, [3, 7])), host.spec(1))
    assert began.wait(10)
    broker.die()
    assert worker.get_finished() == []
    assert client.memory is None
    broker.clock.advance(1.0)
    assert worker.get_finished() == []
    assert broker.connects == 1
    worker.submit_store(2, blocks_of((0, [5, 6])), host.spec(2))
    go_on.set()
    worker.wait({1, 2})
    assert sorted(result.job_id for result in worker.get_finished()) == [1, 2]
    assert worker.take_failed() == ({(2, 3)}, set())
    assert broker.connects == 2
    worker.shutdown()


def test_the_broker_hears_that_transfers_ended_when_results_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = FakeBroker()
    layout = layout_of(PAGES)
    host = Host(layout.row_bytes)
    client = WorkerClient(
        "", engine_id="e", row_bytes=4096, key_bytes=KEY, clock=broker.clock, connect=broker.connect
    )
    client.step()
    broker.hear()
    client.step()
    client.memory = host.memory()
    worker = RowWorker(client, caches_of(PAGES, GROUPS), layout)
    began, go_on = threading.Event(), threading.Event()
    gate = Gate(worker, monkeypatch)

    def held_up() -> None:
        began.set()
        assert go_on.wait(10)

    gate.before = held_up
    worker.submit_load(1, host.spec(1), blocks_of((0, [3, 7])))
    assert began.wait(10)
    broker.say(wire.ResetNotice(epoch=3))
    assert worker.get_finished() == []
    assert not broker.of(wire.TransfersEnded)
    go_on.set()
    worker.wait({1})
    assert len(worker.get_finished()) == 1
    assert len(broker.of(wire.TransfersEnded)) == 1
    worker.shutdown()


def test_a_client_that_raises_does_not_reach_the_engine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise OSError("can't map")

    monkeypatch.setattr(bench.client, "step", fails)
    bench.store(1, blocks_of((0, [3, 7])), bench.host.spec(4))
    assert bench.worker.take_failed() == (set(), set())
    assert "can't map" in caplog.text


def test_jobs_after_shutdown_fail_and_end(bench: Bench) -> None:
    bench.worker.shutdown()
    bench.worker.shutdown()
    bench.store(1, blocks_of((0, [3, 7])), bench.host.spec(4))
    assert bench.worker.take_failed() == ({(4, 5)}, set())


def test_copies_run_on_the_processors_given(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = min(os.sched_getaffinity(0))
    own = os.sched_getaffinity(0)
    bench = Bench(cpus=[cpu])
    seen: list[set[int]] = []
    gate = Gate(bench.worker, monkeypatch)
    gate.before = lambda: seen.append(os.sched_getaffinity(0))
    bench.store(1, blocks_of((0, [3, 7])), bench.host.spec(4))
    bench.load(2, bench.host.spec(4), blocks_of((0, [3, 7])))
    assert seen == [{cpu}, {cpu}]
    assert os.sched_getaffinity(0) == own
    bench.close()


def test_processors_that_are_not_there_cost_a_warning_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(cpus=[100_000])
    assert bench.store(1, blocks_of((0, [3, 7])), bench.host.spec(4)).transfer_size == 192
    assert "can't keep to [100000]" in caplog.text
    bench.close()


def test_a_layout_for_other_tensors_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="describes other tensors"):
        Bench(layout=layout_of([64]), caches=caches_of(PAGES, GROUPS))


class Engine:
    """A scheduler's client and a row worker at a real broker."""

    def __init__(self, path: str, name: str, seed: int) -> None:
        self.layout = layout_of(PAGES)
        names: dict[str, Any] = {
            "engine_id": name,
            "row_bytes": self.layout.row_bytes,
            "key_bytes": KEY,
        }
        self.client = WorkerClient(path, **names)
        self.scheduler = SchedulerClient(
            path, namespace=wire.namespace_digest({"model": "m"}), call_timeout_s=2.0, **names
        )
        self.caches = caches_of(PAGES, GROUPS, seed=seed)
        self.worker = RowWorker(self.client, self.caches, self.layout)
        self.attach()

    def attach(self) -> None:
        assert self.client.wait_attached(5)
        assert self.scheduler.wait_ready(5)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.close()
        self.client.close()


def test_a_broker_between_two_engines_and_its_restart(tmp_path: Path) -> None:
    keys = [key(1), key(2)]
    with running(tmp_path) as broker:
        writer, reader = Engine(broker.path, "w", 0), Engine(broker.path, "r", 1)
        offer = writer.scheduler.prepare_store("a", keys, [64, 128])
        assert list(offer.accepted) == [0, 1]
        writer.worker.submit_store(1, blocks_of((0, [3, 7, 5, 6])), RowsLoadStoreSpec(offer.refs))
        writer.worker.wait({1})
        assert writer.worker.take_failed() == (set(), set())
        writer.scheduler.complete_store("a", keys)
        writer.scheduler.step()

        query = [GroupQuery(group=0, keys=keys, positions=[64, 128])]
        answer = reader.scheduler.lookup("b", query)
        while answer.pending or answer.is_miss:
            reader.scheduler._link.wait_for(lambda: True, 0.01)
            answer = reader.scheduler.lookup("b", query)
        refs = reader.scheduler.prepare_load("b", keys)
        assert refs is not None
        reader.worker.submit_load(2, RowsLoadStoreSpec(refs), blocks_of((0, [0, 1, 2, 4])))
        reader.worker.wait({2})
        assert reader.worker.take_failed() == (set(), set())
        for mine, theirs in zip(bytes_of(writer.caches), bytes_of(reader.caches), strict=True):
            assert np.array_equal(mine[[3, 7, 5, 6]], theirs[[0, 1, 2, 4]])
    Path(broker.path).unlink()
    while reader.client.state is LinkState.UP:
        reader.worker.get_finished()
    reader.worker.submit_load(3, RowsLoadStoreSpec(refs), blocks_of((0, [0, 1, 2, 4])))
    reader.worker.wait({3})
    bad, loads = reader.worker.take_failed()
    assert loads == {3}
    assert len(bad) == 2
    with running(tmp_path) as again:
        assert again.path == broker.path
        writer.attach()
        offer = writer.scheduler.prepare_store("c", keys, [64, 128])
        writer.worker.submit_store(4, blocks_of((0, [3, 7, 5, 6])), RowsLoadStoreSpec(offer.refs))
        writer.worker.wait({4})
        assert writer.worker.take_failed() == (set(), set())
        writer.close()
        reader.close()
