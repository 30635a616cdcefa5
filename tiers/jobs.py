"""What the manager remembers of transfers and requests in flight. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tiers.base import OffloadKey, ReqContext, TransferJob


@dataclass
class PendingPromotion:
    """Rows reserved by lookups of one request for one tier; the load is not submitted yet."""

    req_context: ReqContext
    keys: list[OffloadKey] = field(default_factory=list)
    chunk_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RequestState:
    """A request whose end the tiers have not been told yet.

    `request_level_tiers` are the tiers that want all its chunks; `pending_cascade_keys` are chunks
    for them that are still being written to the primary tier.
    """

    req_context: ReqContext
    pending_primary_stores: int = 0
    is_finished: bool = False
    request_level_tiers: set[int] | None = None
    pending_cascade_keys: list[OffloadKey] = field(default_factory=list)


class JobMetadata(NamedTuple):
    """A job in flight and the tier that runs it."""

    transfer_job: TransferJob
    tier_idx: int
