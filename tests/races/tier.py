"""The scripted tier as the broker builds it: by module path and class name."""

from __future__ import annotations

from tests.tiers import doubles
from tiers.base import JobResult, TransferJob


class ScriptedTier(doubles.ScriptedTier):
    """Its loads end when the test ends them. What is stored is dropped at once, with success: a
    chunk that came back by itself would only double every run."""

    def __init__(
        self, offloading_spec: object, primary_kv_view: memoryview, tier_type: str
    ) -> None:
        super().__init__(primary_kv_view, tier_type)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self.finished.append(JobResult(job_metadata.job_id, True, None, transfer_time=0.001))
