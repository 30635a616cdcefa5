"""The end of a manager: thread, tiers, memory, in this order, as far as each lets go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack

from tiers.base import SecondaryTierManager
from tiers.poller import JOIN_TIMEOUT_S, TierPoller
from tiers.primary import CPUPrimaryTierOffloadingManager

logger = logging.getLogger(__name__)


def shut_down(
    poller: TierPoller | None,
    lock: threading.Lock,
    tiers: Sequence[SecondaryTierManager],
    primary_tier: CPUPrimaryTierOffloadingManager,
) -> None:
    """See TieringOffloadingManager.shutdown. The lock is not held by the caller."""
    with ExitStack() as held:
        if poller is not None and not poller.stop():
            if not lock.acquire(timeout=JOIN_TIMEOUT_S):
                raise RuntimeError(
                    "the tier poll thread hangs with the lock held: tiers are not torn down "
                    "and their memory is kept"
                )
            held.callback(lock.release)
        failures: list[Exception] = []
        for tier in tiers:
            try:
                tier.shutdown()
            except Exception as error:  # the next tier gets its attempt all the same
                logger.exception("tier %s failed to shut down", tier.tier_type)
                failures.append(error)
        if failures:
            raise failures[0]
        primary_tier.shutdown()
