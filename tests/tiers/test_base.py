"""The contract's own small rules: keys, filters, hit sources, specs and request state."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.base import (
    CacheHitSource,
    GPULoadStoreSpec,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    SecondaryTierManager,
    TierFilter,
    TierMatcher,
    TransferJob,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

MEDIA = st.sampled_from([None, *Medium])
LOCALITIES = st.sampled_from([None, *Locality])
MATCHERS = st.builds(TierMatcher, MEDIA, LOCALITIES)


class PlainTier(SecondaryTierManager):
    """As little as a tier can be."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        pass

    def submit_load(self, job_metadata: TransferJob) -> None:
        pass

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return ()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        pass


class MemoryTier(PlainTier):
    medium = Medium.CPU


class DiskTier(PlainTier):
    medium = Medium.STORAGE


class PeerTier(PlainTier):
    medium = Medium.CPU
    cache_hit_source = CacheHitSource.P2P
    serves_external_requests = True


class PublicPeerTier(PlainTier):
    tolerates_off_thread_polling = True


@given(st.binary(max_size=64), st.integers(0, 2**32 - 1))
def test_a_key_gives_back_what_it_was_made_of(block_hash: bytes, group: int) -> None:
    key = make_offload_key(block_hash, group)
    assert get_offload_block_hash(key) == block_hash
    assert get_offload_group_idx(key) == group
    assert key[-4:] == group.to_bytes(4, "big")


@given(MATCHERS, MEDIA, LOCALITIES)
def test_none_on_either_side_matches_its_axis(
    matcher: TierMatcher, medium: Medium | None, locality: Locality | None
) -> None:
    expected = all(
        wish is None or there is None or wish is there
        for wish, there in ((matcher.medium, medium), (matcher.locality, locality))
    )
    assert matcher.matches(medium, locality) is expected


@given(st.lists(MATCHERS, max_size=4), MEDIA, LOCALITIES)
def test_a_filter_allows_what_one_of_its_matchers_accepts(
    matchers: list[TierMatcher], medium: Medium | None, locality: Locality | None
) -> None:
    allowed = TierFilter(tuple(matchers)).allows(medium, locality)
    assert allowed is any(matcher.matches(medium, locality) for matcher in matchers)


@given(MEDIA, LOCALITIES)
def test_no_matcher_allows_nothing_and_all_allows_everything(
    medium: Medium | None, locality: Locality | None
) -> None:
    assert not TierFilter().allows(medium, locality)
    assert TierFilter.ALL.allows(medium, locality)
    assert ReqContext("r").load_tier_filter is TierFilter.ALL


def test_hit_source_follows_the_medium() -> None:
    assert PlainTier.cache_hit_source is CacheHitSource.EXTERNAL_UNSPECIFIED
    assert MemoryTier.cache_hit_source is CacheHitSource.HOST
    assert DiskTier.cache_hit_source is CacheHitSource.DISK


def test_hit_source_that_is_set_wins_and_is_inherited() -> None:
    class SlowPeerTier(PeerTier):
        pass

    assert PeerTier.cache_hit_source is CacheHitSource.P2P
    assert SlowPeerTier.cache_hit_source is CacheHitSource.P2P


def test_subclass_with_another_medium_gets_its_hit_source() -> None:
    class SpilledTier(MemoryTier):
        medium = Medium.STORAGE

    class SameTier(DiskTier):
        pass

    assert SpilledTier.cache_hit_source is CacheHitSource.DISK
    assert SameTier.cache_hit_source is CacheHitSource.DISK


def test_outermost_source_is_the_furthest_from_the_accelerator() -> None:
    assert CacheHitSource.outermost([CacheHitSource.DISK, CacheHitSource.HOST]) == "disk"
    assert CacheHitSource.outermost(CacheHitSource) is CacheHitSource.EXTERNAL_UNSPECIFIED
    with pytest.raises(ValueError, match=r"empty|arg"):
        CacheHitSource.outermost([])


def test_off_thread_polling_is_another_name_for_serving() -> None:
    assert PeerTier.tolerates_off_thread_polling
    assert PublicPeerTier.serves_external_requests
    assert not PlainTier.serves_external_requests
    assert not PlainTier.tolerates_off_thread_polling


def test_the_alias_holds_in_subclasses() -> None:
    class Quiet(PublicPeerTier):
        serves_external_requests = False

    class Loud(Quiet):
        tolerates_off_thread_polling = True

    class Heir(PeerTier):
        pass

    assert not Quiet.tolerates_off_thread_polling
    assert Loud.serves_external_requests
    assert Heir.tolerates_off_thread_polling
    assert Heir.serves_external_requests


def test_tier_knows_its_row_size() -> None:
    view = memoryview(bytearray(6 * 16)).cast("B", (6, 16))
    assert PlainTier(None, view, "plain").block_size_bytes == 16
    assert PlainTier(None, view, "plain").bp_detector is None
    with pytest.raises(ValueError, match="no rows"):
        PlainTier(None, _scalar(), "plain")


def _scalar() -> memoryview:
    return memoryview(bytearray(1)).cast("B", ())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_gpu_spec_takes_groups_that_add_up(sizes: list[int]) -> None:
    spec = GPULoadStoreSpec(list(range(sum(sizes))), sizes, [0] * len(sizes))
    assert spec.block_ids.tolist() == list(range(sum(sizes)))
    assert spec.block_ids.dtype.name == "int32"
    with pytest.raises(ValueError, match="do not"):
        GPULoadStoreSpec([*range(sum(sizes)), 99], sizes, [0] * len(sizes))
    with pytest.raises(ValueError, match="do not"):
        GPULoadStoreSpec(list(range(sum(sizes))), sizes, [0] * (len(sizes) + 1))


def test_request_state_is_kept_by_exact_type() -> None:
    class Base:
        pass

    class Derived(Base):
        pass

    ctx = ReqContext("r")
    first, second, derived = Base(), Base(), Derived()
    ctx.set_state(first)
    ctx.set_state(derived)
    ctx.set_state(second)
    assert ctx.get_state(Base) is second
    assert ctx.get_state(Derived) is derived
    assert ctx.get_state(int) is None
    assert ReqContext("r").get_state(Base) is None


def test_positions_belong_to_one_request() -> None:
    key = make_offload_key(b"h", 0)
    ctx = ReqContext("r")
    ctx.set_offload_key_position(key, 256)
    assert ctx.get_offload_key_position(key) == 256
    assert ReqContext("r").get_offload_key_position(key) is None
