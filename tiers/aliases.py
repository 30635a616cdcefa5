"""Names under which tests and tools of the public manager look at its inner state.

Each leads to where the state really is; nothing here decides or keeps anything.
"""

from __future__ import annotations

import threading

from tiers.base import JobId, OffloadKey, SecondaryTierManager, TransferJob
from tiers.jobs import JobMetadata, PendingPromotion
from tiers.poller import TierPoller
from tiers.transfers import Transfers


class ManagerAliases:
    """For a manager with `transfers`, `secondary_tiers` and perhaps a poll thread."""

    transfers: Transfers
    secondary_tiers: list[SecondaryTierManager]
    _poller: TierPoller | None

    @property
    def _transfer_jobs(self) -> dict[JobId, JobMetadata]:
        return self.transfers.jobs

    @property
    def _pending_load_submissions(self) -> dict[tuple[int, str], PendingPromotion]:
        return self.transfers.pending

    @property
    def _request_load_sources(self) -> dict[str, dict[OffloadKey, int]]:
        return self.transfers.load_sources

    @property
    def _tier_poll_thread(self) -> threading.Thread | None:
        return None if self._poller is None else self._poller.thread

    def _next_job_id(self) -> JobId:
        return self.transfers.next_job_id()

    def _register_job(self, job: TransferJob, tier_idx: int) -> None:
        self.transfers.register(job, tier_idx)

    def _process_finished_jobs(self) -> None:
        self.transfers.collect(self.secondary_tiers)
