"""vLLM's own worker over our rows, its device replaced: without a GPU only the GPU's part is not
tested, that is its streams, its copies and its registration of memory."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import re
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from engine_adapter.vllm import cuda
from engine_adapter.vllm.cuda import CudaRowWorker, SharedRows
from engine_adapter.vllm.rows import RowLayout, RowsLoadStoreSpec
from engine_adapter.vllm.worker import RowWorker
from tests.engine_adapter.vllm.kv import (
    Host,
    blocks_of,
    bytes_of,
    caches_of,
    layout_of,
    refs_of,
)

PAGES = [64, 32]
GROUPS = [[(0, 64), (1, 24)], [(1, 32)]]


class OnDevice(torch.Tensor):
    """A tensor in host memory that says it is on a GPU."""

    is_cuda = True


class Device:
    """In the place of a GPU: copies happen at once, and end when `busy` is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.busy = False
        self.copies = 0
        self.fail = False
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                pass

            def record(self, stream: object) -> None:
                pass

            def query(self) -> bool:
                return not device.busy

            def synchronize(self) -> None:
                device.busy = False

            def elapsed_time(self, end: object) -> float:
                return 1.0

        class Stream:
            def wait_stream(self, other: object) -> None:
                pass

            def wait_event(self, event: object) -> None:
                pass

        platform = SimpleNamespace(
            is_xpu=lambda: False,
            Stream=Stream,
            current_stream=Stream,
            stream=lambda stream: contextlib.nullcontext(),
        )
        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(gpu_worker, "current_platform", platform)
        monkeypatch.setattr(gpu_worker, "HAS_TRITON", False)
        monkeypatch.setattr(gpu_worker, "ops", SimpleNamespace(swap_blocks_batch=self.copy))

    def copy(self, src: Any, dst: Any, sizes: Any, **_: object) -> None:
        if self.fail:
            raise RuntimeError("device is lost")
        self.copies += 1
        for item in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(*item)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def on_device(caches: CanonicalKVCaches) -> CanonicalKVCaches:
    for entry in caches.tensors:
        entry.tensor = entry.tensor.as_subclass(OnDevice)
    return caches


class Bench:
    """vLLM's worker over a host's memory."""

    def __init__(self, seed: int = 0, layout: RowLayout | None = None, host: Host | None = None):
        self.layout = layout or layout_of(PAGES)
        self.host = host or Host(self.layout.row_bytes)
        self.client = self.host.client()
        self.caches = on_device(caches_of(PAGES, GROUPS, seed=seed))
        self.worker = CudaRowWorker(self.client, self.caches, self.layout)

    def end(self, job: int) -> int:
        """Bytes of a job that has ended."""
        self.worker.wait({job})
        (result,) = self.worker.get_finished()
        assert result.job_id == job
        assert result.success
        assert result.transfer_size is not None
        return int(result.transfer_size)

    def running(self) -> bool:
        return bool(self.client._running)


@pytest.fixture
def bench(device: Device) -> Iterator[Bench]:
    made = Bench()
    yield made
    made.worker.shutdown()


# The region


@contextlib.contextmanager
def vllm_region(layout: RowLayout, rows: int) -> Iterator[SharedOffloadRegion]:
    region = SharedOffloadRegion(
        engine_id=f"kvquay-test-{uuid.uuid4()}",
        num_chunks=rows,
        rank=0 if layout.replicated else layout.rank,
        kv_bytes_per_chunk=layout.row_bytes,
        cpu_page_size=layout.worker_bytes,
    )
    try:
        yield region
    finally:
        region.cleanup()


@pytest.mark.parametrize(
    "layout",
    [
        layout_of(PAGES),
        layout_of(PAGES, 3, rank=0, world=2),
        layout_of(PAGES, 3, rank=1, world=2),
        layout_of([5000, 96], 2, rank=2, world=3),
        layout_of(PAGES, 2, rank=1, world=2, replicated=True),
    ],
)
@pytest.mark.parametrize("view", ["create_next_worker_view", "create_next_canonical_view"])
def test_views_are_those_of_vllms_own_region(layout: RowLayout, view: str) -> None:
    ours = SharedRows(Host(layout.row_bytes, rows=6).memory(), layout)
    sizes = [layout.worker_bytes // 3, layout.worker_bytes // 3, layout.worker_bytes % 3 + 1]
    with vllm_region(layout, 6) as theirs:
        for name in ("rank", "page_size", "num_chunks", "_row_stride", "total_size_bytes"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert (ours.is_pinned, ours.pinned_addresses) == (False, [])
        assert ours._base is not None
        assert ours._base.dtype == theirs._base.dtype
        assert ours._base.shape == theirs._base.shape
        for size in sizes:
            mine, own = getattr(ours, view)(size), getattr(theirs, view)(size)
            assert (mine.dtype, mine.shape, mine.stride()) == (own.dtype, own.shape, own.stride())
            assert mine.data_ptr() - ours._base.data_ptr() == (
                own.data_ptr() - theirs._base.data_ptr()
            )
            del own


def test_the_base_is_the_first_row_and_only_rows() -> None:
    host = Host(4096, rows=5)
    memory = host.memory()
    region = SharedRows(memory, layout_of(PAGES))
    assert region._base is not None
    assert region._base.data_ptr() == memory.rows.ctypes.data
    assert region._base.data_ptr() % region.page_size == 0
    assert len(region._base) == region.total_size_bytes == 5 * 4096
    region._base[4096] = 7
    assert host.rows[1, 0] == 7


def test_all_that_vllm_asks_of_a_region_is_there() -> None:
    region = SharedRows(Host(4096).memory(), layout_of(PAGES))
    source = inspect.getsource(gpu_worker)
    asked = set(re.findall(r"\b(?:self\._)?(?:mmap_)?region\.(\w+)", source))
    assert {"create_next_worker_view", "cleanup", "is_pinned", "_base"} <= asked
    assert [name for name in asked if not hasattr(region, name)] == []
    for name in ("create_next_worker_view", "create_next_canonical_view", "cleanup"):
        assert inspect.signature(getattr(SharedRows, name)) is not None
        assert list(inspect.signature(getattr(SharedRows, name)).parameters) == list(
            inspect.signature(getattr(SharedOffloadRegion, name)).parameters
        )


def test_a_cell_that_is_full_is_told() -> None:
    layout = layout_of(PAGES)
    region = SharedRows(Host(4096).memory(), layout)
    region.create_next_worker_view(layout.worker_bytes)
    with pytest.raises(ValueError, match="end behind"):
        region.create_next_worker_view(1)
    with pytest.raises(ValueError, match="end behind"):
        region.create_next_canonical_view(4097)


def test_slots_are_whole_pages_around_the_cells() -> None:
    layout = layout_of([5000], 1, rank=1, world=2)
    region = SharedRows(Host(layout.row_bytes, rows=2).memory(), layout)
    assert layout.row_bytes == 12288
    assert list(region.iter_worker_slot_ranges()) == [(4096, 8192), (16384, 8192)]


@pytest.mark.parametrize("accepted", [True, False])
def test_vllm_registers_the_rows_and_it_is_undone(
    accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    undone: list[int] = []

    def register(address: int, size: int) -> bool:
        asked.append((address, size))
        return accepted or len(asked) == 1

    monkeypatch.setattr(gpu_worker, "host_register", register)
    monkeypatch.setattr(gpu_worker, "host_unregister", undone.append)
    monkeypatch.setattr(cuda, "host_unregister", undone.append)
    monkeypatch.setattr(gpu_worker, "MAX_HOST_REGISTER_CHUNK_BYTES", 4 * 4096)
    memory = Host(4096, rows=10).memory()
    region = SharedRows(memory, layout_of(PAGES))
    gpu_worker.pin_mmap_region(region)
    base = memory.rows.ctypes.data
    pieces = [(base, 16384), (base + 16384, 16384), (base + 32768, 8192)]
    assert asked == (pieces if accepted else pieces[:2])
    assert region.is_pinned == accepted
    region.cleanup()
    region.cleanup()
    assert sorted(undone) == ([at for at, _ in pieces] if accepted else [base])
    assert not region.is_pinned


# The worker


def test_what_it_stores_is_what_our_own_worker_loads(bench: Bench) -> None:
    """Both ways, with several groups, unpadded pages and a load from inside of a chunk."""
    other = caches_of(PAGES, GROUPS, seed=1)
    host_worker = RowWorker(bench.host.client(), other, bench.layout)
    stored = blocks_of((2, [3, 7, 5, 6]), (0, [1, 2]))
    assert bench.worker.submit_store(1, stored, bench.host.spec(4, 2, 9))
    assert bench.end(1) == 4 * (64 + 24) + 2 * 32
    loaded = blocks_of((3, [10, 11, 12]), (0, [13, 14]))
    host_worker.submit_load(2, bench.host.spec(4, 2, 9), loaded)
    host_worker.wait({2})
    mine, theirs = bytes_of(bench.caches), bytes_of(other)
    assert np.array_equal(mine[0][[7, 5, 6]], theirs[0][[10, 11, 12]])
    assert np.array_equal(mine[1][[7, 5, 6], :24], theirs[1][[10, 11, 12], :24])
    assert np.array_equal(mine[1][[1, 2]], theirs[1][[13, 14]])

    host_worker.submit_store(3, blocks_of((0, [0, 1]), (0, [])), bench.host.spec(5))
    host_worker.wait({3})
    bench.worker.submit_load(4, bench.host.spec(5), blocks_of((0, [8, 9]), (0, [])))
    assert bench.end(4) == 2 * (64 + 24)
    assert np.array_equal(bytes_of(bench.caches)[0][[8, 9]], bytes_of(other)[0][[0, 1]])
    assert bench.worker.take_failed() == host_worker.take_failed() == (set(), set())
    host_worker.shutdown()


def test_a_transfer_is_open_until_the_copy_has_ended(bench: Bench, device: Device) -> None:
    device.busy = True
    bench.worker.submit_load(1, bench.host.spec(4), blocks_of((0, [3, 7]), (0, [])))
    assert bench.worker.get_finished() == []
    assert bench.running()
    bench.host.generation[4] += 1
    device.busy = False
    assert len(bench.worker.get_finished()) == 1
    assert not bench.running()
    assert bench.worker.take_failed() == ({(4, 5)}, {1})


def test_a_store_with_a_row_of_anothers_writes_nothing(bench: Bench, device: Device) -> None:
    spec = bench.host.spec(4, 2)
    bench.host.generation[2] += 1
    bench.worker.submit_store(1, blocks_of((0, [3, 7, 5, 6]), (0, [])), spec)
    assert bench.end(1) == 0
    assert bench.worker.take_failed() == ({(4, 5), (2, 3)}, set())
    assert not bench.host.rows.any()
    assert not bench.running()


def test_a_load_with_a_row_of_anothers_tells_that_row(bench: Bench) -> None:
    spec = bench.host.spec(4, 2)
    bench.host.generation[2] += 1
    bench.worker.submit_load(1, spec, blocks_of((0, [3, 7, 5, 6]), (0, [])))
    bench.end(1)
    assert bench.worker.take_failed() == ({(2, 3)}, {1})


def test_a_row_beyond_the_pool_is_not_read(bench: Bench, device: Device) -> None:
    rows = RowsLoadStoreSpec(refs_of((4, 5), (1000, 1)))
    bench.worker.submit_load(1, rows, blocks_of((0, [3, 7, 5, 6]), (0, [])))
    assert bench.end(1) == 0
    assert device.copies == 0
    assert bench.worker.take_failed() == ({(4, 5), (1000, 1)}, {1})


def test_what_vllm_would_assert_fails_the_job_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.worker.submit_load(1, bench.host.spec(4, 2), blocks_of((0, [3]), (0, [])))
    assert bench.end(1) == 0
    assert bench.worker.take_failed() == ({(4, 5), (2, 3)}, {1})
    assert "MisplacedBlocks" in caplog.text


def test_a_device_that_refuses_fails_the_job_alone(
    bench: Bench, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device.fail = True
    bench.worker.submit_load(1, bench.host.spec(4), blocks_of((0, [3, 7]), (0, [])))
    bench.end(1)
    assert bench.worker.take_failed() == ({(4, 5)}, {1})
    assert "device is lost" in caplog.text
    assert not bench.running()


def test_unregistered_memory_is_told(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    Bench().worker.shutdown()
    assert "could not be registered" in caplog.text


def until(worker: CudaRowWorker, done: Callable[[], bool]) -> None:
    """Wait for the builder's thread, then let the worker see it."""
    while not done():
        if worker._next is not None:
            worker._next.result(10)
        worker.get_finished()


def test_without_a_broker_jobs_fail_and_a_new_mapping_is_taken_up(
    bench: Bench, device: Device
) -> None:
    bench.client.memory = None
    bench.worker.submit_load(1, bench.host.spec(4), blocks_of((0, [3, 7]), (0, [])))
    assert bench.end(1) == 0
    assert bench.worker.take_failed() == ({(4, 5)}, {1})

    memory = bench.host.memory()
    bench.client.memory = memory
    until(
        bench.worker,
        lambda: bench.worker._copier is not None and bench.worker._copier.memory is memory,
    )
    bench.worker.submit_load(2, bench.host.spec(4), blocks_of((0, [3, 7]), (0, [])))
    assert bench.end(2) > 0
    assert bench.worker.take_failed() == (set(), set())


def test_an_old_mapping_stays_until_its_copies_have_ended(bench: Bench, device: Device) -> None:
    device.busy = True
    bench.worker.submit_load(1, bench.host.spec(4), blocks_of((0, [3, 7]), (0, [])))
    old = bench.worker._copier
    bench.client.memory = None
    assert bench.worker.get_finished() == []
    assert bench.worker._copier is old
    assert bench.end(1) > 0
    assert bench.worker.take_failed() == (set(), set())
    until(bench.worker, lambda: bench.worker._next is None and bench.worker._copier is None)


def test_a_worker_that_can_not_be_built_costs_the_cache_only(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(4096)

    def fails(*_: object, mmap_region: SharedRows) -> Any:
        regions.append(mmap_region)
        raise RuntimeError("no kernel image")

    regions: list[SharedRows] = []
    caches = on_device(caches_of(PAGES, GROUPS))
    worker = CudaRowWorker(host.client(), caches, layout_of(PAGES), build=fails)
    worker.submit_load(1, host.spec(4), blocks_of((0, [3, 7]), (0, [])))
    assert [result.job_id for result in worker.get_finished()] == [1]
    assert worker.take_failed() == ({(4, 5)}, {1})
    assert "no kernel image" in caplog.text
    assert regions[0]._base is None
    worker.shutdown()


def test_rows_of_another_size_cost_the_cache_only(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(8192)
    worker = CudaRowWorker(host.client(), on_device(caches_of(PAGES, GROUPS)), layout_of(PAGES))
    worker.submit_load(1, host.spec(4), blocks_of((0, [3, 7]), (0, [])))
    assert worker.take_failed() == ({(4, 5)}, {1})
    assert "8192 bytes, not 4096" in caplog.text
    worker.shutdown()


def test_shutdown_waits_for_copies_and_fails_what_was_not_told(
    bench: Bench, device: Device
) -> None:
    device.busy = True
    bench.worker.submit_load(1, bench.host.spec(4), blocks_of((0, [3, 7]), (0, [])))
    bench.worker.shutdown()
    bench.worker.shutdown()
    assert not device.busy
    assert not bench.running()
    bench.worker.submit_store(2, blocks_of((0, [3, 7]), (0, [])), bench.host.spec(4))
    assert [result.job_id for result in bench.worker.get_finished()] == [1, 2]
    assert bench.worker.take_failed() == ({(4, 5)}, {1})


def test_expedited_is_handed_on_to_a_vllm_that_knows_it(device: Device) -> None:
    host, seen = Host(4096), []

    class Newer(gpu_worker.CPUOffloadingWorker):
        def submit_load(self, job: int, src: Any, dst: Any, expedited: bool = False) -> bool:
            seen.append(expedited)
            return bool(super().submit_load(job, src, dst))

    caches = on_device(caches_of(PAGES, GROUPS))
    worker = CudaRowWorker(host.client(), caches, layout_of(PAGES), build=Newer)
    for job, expedited in ((1, True), (2, False)):
        worker.submit_load(job, host.spec(4), blocks_of((0, [3, 7]), (0, [])), expedited)
    assert seen == [True, False]
    worker.shutdown()
