"""Words of the tiering core: keys, enums, filters, a request, events, where a transfer lies.

Values only; who acts on them is in `tiers.base`, which also exports every name from here.
"""

from __future__ import annotations

import struct
from abc import ABC
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum, auto
from typing import Any, ClassVar, NamedTuple, NewType, TypeVar

import numpy as np
from numpy.typing import NDArray

OffloadKey = NewType("OffloadKey", bytes)
"""Name of a chunk: block hash of its last block, then the KV group as 4 bytes, big-endian."""

_GROUP = struct.Struct(">I")


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Key of the chunk that ends with `block_hash` in KV group `group_idx` (0 to 2**32 - 1)."""
    return OffloadKey(block_hash + _GROUP.pack(group_idx))


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """Block hash of a key: all but its last 4 bytes."""
    return key[: -_GROUP.size]


def get_offload_group_idx(key: OffloadKey) -> int:
    """KV group of a key: its last 4 bytes."""
    group: int = _GROUP.unpack_from(key, len(key) - _GROUP.size)[0]
    return group


class Medium(Enum):
    """What a tier keeps its chunks on."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    """Where a tier is, seen from the instance that speaks of it."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class CacheHitSource(StrEnum):
    """Where a loaded chunk came from, in order of distance from the accelerator."""

    DEVICE = "device"
    HOST = "host"
    P2P = "p2p"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"

    @classmethod
    def outermost(cls, sources: Iterable[CacheHitSource]) -> CacheHitSource:
        """The source furthest from the accelerator; ValueError if there is none."""
        order = list(cls)
        return max(sources, key=order.index)


class TierMatcher(NamedTuple):
    """One wish about a tier. None on either side matches everything on that axis."""

    medium: Medium | None = None
    locality: Locality | None = None

    def matches(self, medium: Medium | None, locality: Locality | None) -> bool:
        """Whether a tier with this medium and locality satisfies the wish."""
        return (self.medium is None or medium is None or self.medium is medium) and (
            self.locality is None or locality is None or self.locality is locality
        )


@dataclass(frozen=True)
class TierFilter:
    """Which secondary tiers a request may load from: any that one matcher accepts.

    No matcher at all allows nothing. The primary tier and stores are never filtered.
    """

    matchers: tuple[TierMatcher, ...] = ()
    ALL: ClassVar[TierFilter]

    def allows(self, medium: Medium | None, locality: Locality | None) -> bool:
        """Whether a tier with this medium and locality may serve the request's loads."""
        if self is TierFilter.ALL:
            return True
        return any(matcher.matches(medium, locality) for matcher in self.matchers)


TierFilter.ALL = TierFilter(matchers=(TierMatcher(),))


@dataclass(frozen=True)
class KvHintAction:
    """One hint of an orchestrator about KV data."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KvHintsEnvelope:
    """Hints of an orchestrator that travel with a request."""

    protocol_version: str
    message_id: str
    actions: list[KvHintAction] = field(default_factory=list)


_T = TypeVar("_T")


@dataclass
class ReqContext:
    """A request as its tiers see it; the same object for all calls about one request.

    `_state` is scratch space, one value per type. Positions are end-token positions of keys in
    this request; recency needs them to let tails go before heads.
    """

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: KvHintsEnvelope | None = None
    load_tier_filter: TierFilter = TierFilter.ALL
    _state: dict[type, Any] = field(default_factory=dict, repr=False, init=False)
    _offload_key_positions: dict[OffloadKey, int] = field(
        default_factory=dict, repr=False, init=False
    )

    def set_state(self, val: Any) -> None:
        """Keep `val`, in place of an earlier value of the same type."""
        self._state[type(val)] = val

    def get_state(self, cls: type[_T]) -> _T | None:
        """The value of exactly this type, if one was set."""
        return self._state.get(cls)

    def set_offload_key_position(self, key: OffloadKey, end_token: int) -> None:
        """Say at which token of the request the chunk `key` ends."""
        self._offload_key_positions[key] = end_token

    def get_offload_key_position(self, key: OffloadKey) -> int | None:
        """End token of `key` in this request, if known."""
        return self._offload_key_positions.get(key)


class LookupResult(Enum):
    """Answer to "can this chunk be loaded?". Secondary tiers never answer HIT_PENDING."""

    MISS = auto()  # nowhere, or the primary tier cannot take a promotion
    HIT = auto()  # readable in the primary tier now
    HIT_PENDING = auto()  # a primary slot is reserved, its bytes are on their way
    RETRY = auto()  # a secondary tier does not know yet; ask again


class OffloadPolicy(Enum):
    """What a tier wants of a request: new chunks only, or all chunks of the request."""

    CHUNK_LEVEL = "chunk_level"
    REQUEST_LEVEL = "request_level"


@dataclass
class RequestOffloadingContext:
    """Answer to on_new_request."""

    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


class ScheduleEndContext(NamedTuple):
    """What the engine's scheduler did in the step that ends."""

    new_req_ids: Collection[str]
    preempted_req_ids: Collection[str]


class LoadStoreSpec:
    """Where one side of a transfer lies; each medium has its own subclass."""


@dataclass
class PrepareStoreOutput:
    """Room made for a store: the keys to write, where to, and what was evicted for it."""

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey]


@dataclass
class OffloadingEvent:
    """Chunks became readable in a medium, or left it.

    `metadata_only` marks a reservation that failed: nothing was ever announced for it.
    """

    keys: list[OffloadKey]
    medium: Medium
    removed: bool
    locality: Locality | None = None
    ownership: str | None = None
    removal_expected: bool = False
    metadata_only: bool = False


@dataclass(frozen=True)
class OffloadingMetricMetadata:
    """Name-independent description of a metric."""

    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass(frozen=True)
class OffloadingCounterMetadata(OffloadingMetricMetadata):
    """A number that only grows."""


@dataclass(frozen=True)
class OffloadingGaugeMetadata(OffloadingMetricMetadata):
    """A number that goes up and down."""

    multiprocess_mode: str = "mostrecent"


@dataclass(frozen=True)
class OffloadingHistogramMetadata(OffloadingMetricMetadata):
    """A distribution; `buckets` are upper bounds in the metric's unit."""

    buckets: tuple[float, ...] | None = None


@dataclass(frozen=True)
class OffloadingKVEventsConfig:
    """What an engine wants of KV events."""

    enable_kv_cache_events: bool
    self_describing_kv_events: bool


ConfigInfoMapping = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class ConfigInfo:
    """Static configuration shown as the labels of one info metric."""

    @classmethod
    def config_info_keys(cls) -> tuple[str, ...]:
        """Names of the values, in order."""
        return tuple(f.name for f in fields(cls))

    def as_config_info(self) -> ConfigInfoMapping:
        """The values that are known, by name."""
        values = {name: getattr(self, name) for name in self.config_info_keys()}
        return {name: value for name, value in values.items() if value is not None}


class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
    """A place named by block numbers: `block_ids`, int32, shape (n,)."""

    def __init__(self, block_ids: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        self.block_ids: NDArray[np.int32] = np.array(block_ids, dtype=np.int32)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of an engine, ordered by KV group.

    `group_sizes[i]` blocks belong to group i (their sum is the number of blocks);
    `block_indices[i]` is the logical index of the group's first block in its request, so that a
    transfer may start in the middle of a chunk.
    """

    def __init__(
        self,
        block_ids: Sequence[int] | NDArray[np.integer[Any]],
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
    ) -> None:
        super().__init__(block_ids)
        if sum(group_sizes) != len(self.block_ids) or len(group_sizes) != len(block_indices):
            raise ValueError(
                f"group_sizes {list(group_sizes)} and block_indices {list(block_indices)} do not "
                f"describe {len(self.block_ids)} blocks"
            )
        self.group_sizes = group_sizes
        self.block_indices = block_indices
