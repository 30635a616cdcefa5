"""The manager as one tier sees it while it serves requests from outside: all but that tier."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from tiers.base import (
    LookupResult,
    OffloadKey,
    ParentManager,
    ReqContext,
    RequestOffloadingContext,
    TransferJob,
)

if TYPE_CHECKING:
    from tiers.manager import TieringOffloadingManager


class TierFacingParent(ParentManager):
    """See `ParentManager` for when it may be used."""

    __slots__ = ("_m", "_origin_idx")

    def __init__(self, manager: TieringOffloadingManager, tier_idx: int) -> None:
        self._m = manager
        self._origin_idx = tier_idx

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return self._m.on_new_request(req_context, exclude_tier_idx=self._origin_idx)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._m.lookup(key, req_context, exclude_tier_idx=self._origin_idx)

    def create_store_job(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> TransferJob:
        return self._m.create_store_job(keys, req_context, self._origin_idx)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._m.on_request_finished(req_context, exclude_tier_idx=self._origin_idx)
