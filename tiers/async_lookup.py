"""Lookups that may block, answered "ask again" until a thread of their own knows.

For tiers whose lookup is I/O. Keys asked in one step go to the thread together at `flush`; verdicts
are shared by all requests that refer to a key, and forgotten with the last of them. There is no
deadline here: a tier that hangs leaves its keys unknown, and the broker's deadlines turn that into
MISS.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from tiers.base import OffloadKey, ReqContext

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
"""How long `shutdown` waits for a `batch_lookup` that is running."""


class LookupPhase(Enum):
    """How far the question about a key has got."""

    PENDING = auto()  # asked, waits for the next flush
    IN_FLIGHT = auto()  # with the thread
    RESOLVED = auto()  # answered


@dataclass(slots=True)
class LookupState:
    """One question about one key. `generation` tells it from earlier ones about the same key."""

    generation: int
    phase: LookupPhase = LookupPhase.PENDING
    result: bool | None = None
    request_ids: set[str] = field(default_factory=set)


_Question = tuple[OffloadKey, ReqContext, int]
_Verdict = tuple[OffloadKey, int, bool]


class AsyncLookupManager(ABC):
    """Asks `batch_lookup` on a daemon thread. Needs no lock.

    Every attribute belongs to the caller's side (one thread, or under the manager's lock) except
    the two queues, through which questions and verdicts pass whole batches at a time.
    """

    def __init__(self, tier_type: str, *, join_timeout_s: float = JOIN_TIMEOUT_S) -> None:
        self._tier_type = tier_type
        self._join_timeout_s = join_timeout_s
        self._lookup_state: dict[OffloadKey, LookupState] = {}
        self._req_keys: dict[str, set[OffloadKey]] = {}
        self._next_generation = 0
        self._lookup_batch: list[_Question] = []
        self._lookup_queue: queue.SimpleQueue[list[_Question] | None] = queue.SimpleQueue()
        self._pending_results: queue.SimpleQueue[list[_Verdict]] = queue.SimpleQueue()
        self._need_to_drain = False
        self._closed = False
        self._thread = threading.Thread(
            target=self._worker, name=f"kvquay_lookup_{tier_type}", daemon=True
        )
        self._thread.start()

    @abstractmethod
    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """Whether the tier has each of `keys`, in order. May block; runs on the lookup thread.

        An exception, or another number of answers than keys, counts as "none of them".
        """

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Whether the tier has `key`; None: not known yet, ask again in a later step.

        After `shutdown` an unanswered key is answered False.
        """
        if self._need_to_drain:
            self._need_to_drain = False
            self.drain_results()
        state = self._lookup_state.get(key)
        if self._closed:
            return state is not None and state.result is True
        if state is None:
            state = LookupState(self._next_generation)
            self._next_generation += 1
            self._lookup_state[key] = state
            self._lookup_batch.append((key, req_context, state.generation))
        state.request_ids.add(req_context.req_id)
        self._req_keys.setdefault(req_context.req_id, set()).add(key)
        return state.result

    def flush(self) -> None:
        """Hand the step's questions to the thread. Call once per step, at its end."""
        self.drain_results()
        self._need_to_drain = True
        batch: list[_Question] = []
        for question in self._lookup_batch:
            key, _, generation = question
            state = self._lookup_state.get(key)
            # A question whose requests have all gone meanwhile is not asked.
            if state is not None and state.generation == generation:
                state.phase = LookupPhase.IN_FLIGHT
                batch.append(question)
        self._lookup_batch = []
        if batch and not self._closed:
            self._lookup_queue.put(batch)

    def drain_results(self) -> None:
        """Take in the verdicts that have arrived; those that nobody waits for are dropped."""
        while True:
            try:
                verdicts = self._pending_results.get_nowait()
            except queue.Empty:
                return
            for key, generation, found in verdicts:
                state = self._lookup_state.get(key)
                if state is None or state.generation != generation:
                    continue
                if state.phase is LookupPhase.RESOLVED:
                    raise AssertionError(
                        f"lookup {generation} of tier {self._tier_type} was answered twice"
                    )
                if not state.request_ids:
                    del self._lookup_state[key]
                    continue
                state.phase = LookupPhase.RESOLVED
                state.result = found

    def mark_miss(self, keys: Collection[OffloadKey]) -> None:
        """Loads of `keys` failed: they are no longer there, whatever was answered before.

        Else a bad chunk would be looked up, loaded and failed without end. Questions that are not
        answered yet stay open.
        """
        for key in keys:
            state = self._lookup_state.get(key)
            if state is not None and state.phase is LookupPhase.RESOLVED:
                state.result = False

    def cleanup(self, req_id: str) -> None:
        """A request has ended; forget the keys that no other request refers to.

        A question that the thread has stays, so that a new request about the key can share it.
        """
        for key in self._req_keys.pop(req_id, ()):
            state = self._lookup_state[key]
            state.request_ids.discard(req_id)
            if not state.request_ids and state.phase is not LookupPhase.IN_FLIGHT:
                del self._lookup_state[key]

    def shutdown(self) -> None:
        """Stop the thread. One that hangs in `batch_lookup` is left behind, with a warning."""
        if not self._closed:
            self._closed = True
            self._lookup_queue.put(None)
        self._thread.join(self._join_timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "lookup thread %s still hangs in batch_lookup after %.1f s and is left behind; "
                "check what tier %s reads from",
                self._thread.name,
                self._join_timeout_s,
                self._tier_type,
            )

    def _worker(self) -> None:
        while (batch := self._lookup_queue.get()) is not None:
            by_request: dict[str, list[_Question]] = {}
            for question in batch:
                by_request.setdefault(question[1].req_id, []).append(question)
            verdicts: list[_Verdict] = []
            for questions in by_request.values():
                answers = self._ask(questions)
                for (key, _, generation), found in zip(questions, answers, strict=True):
                    verdicts.append((key, generation, found))
            self._pending_results.put(verdicts)

    def _ask(self, questions: list[_Question]) -> list[bool]:
        """Answers for the questions of one request, whatever the tier does."""
        keys = [key for key, _, _ in questions]
        ctx = questions[0][1]
        try:
            answers = [bool(found) for found in self.batch_lookup(keys, ctx)]
        except Exception:  # the thread serves all requests and must go on
            logger.warning(
                "tier %s failed to look up %d keys of request %s; they count as missing",
                self._tier_type,
                len(keys),
                ctx.req_id,
                exc_info=True,
            )
            return [False] * len(keys)
        if len(answers) != len(keys):
            logger.warning(
                "tier %s gave %d answers for %d keys of request %s; all count as missing",
                self._tier_type,
                len(answers),
                len(keys),
                ctx.req_id,
            )
            return [False] * len(keys)
        return answers
