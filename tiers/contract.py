"""What an engine's scheduler may ask of its offloading manager.

`tiers.base` exports it. No state and no policy here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from tiers.vocabulary import (
    CacheHitSource,
    ConfigInfoMapping,
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

if TYPE_CHECKING:
    from tiers.metrics import OffloadingConnectorStats


class OffloadingManager(ABC):
    """What an engine's scheduler asks about its offloaded chunks. One thread, or under `lock`.

    Methods never take the lock. A caller holds it for as long as a fact that one call established
    (a HIT) must stay true for the next (its prepare_load). `shutdown` is called without it.
    """

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Guards the manager and all behind it; not re-entrant."""
        return nullcontext()

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether `key` can be loaded. Does not count as a use of the chunk."""

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Where the chunk that this request loads came from, for accounting of hits."""
        return CacheHitSource.HOST

    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin chunks that lookup called HIT, until complete_load, and say where they lie."""

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: B027
        """Count chunks as used now; heads of a prefix stay longer than its tail."""

    def complete_load(  # noqa: B027
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> None:
        """The transfer of prepare_load has ended; unpin."""

    @abstractmethod
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve room for the keys that are not there yet; None if room can't be had.

        All or nothing: if what is missing does not fit, nothing is reserved and nothing evicted.
        """

    def complete_store(  # noqa: B027
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """The transfer of prepare_store has ended; make the chunks readable, or free them."""

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request begins; no key of it is known yet."""

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027
        """No further lookup or prepare call will come for the request; completions may."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events since the last call, which hands them over."""
        return ()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: B027
        """The engine's step has ended; submit what the step gathered."""

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping for work in flight here."""
        return False

    def reset_cache(self) -> None:
        """Forget every chunk of the primary tier."""
        raise NotImplementedError(f"{type(self).__name__} cannot reset its cache")

    def on_reset_flushed(self) -> None:  # noqa: B027
        """Every transfer that ran at the reset has been reported by the workers."""

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Metrics since the last call, which hands them over; None if there are none."""
        return None

    def config_info(self) -> Sequence[ConfigInfoMapping]:
        """Static configuration, one mapping per tier that has some."""
        return ()

    def shutdown(self) -> None:  # noqa: B027
        """Release everything. Called without `lock`."""
