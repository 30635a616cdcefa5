"""A state machine of the shared manager: sessions, requests, attempts and tiers that delay, fail in
part and lie about sizes. After every step: V1, V2, owners, and every held row holds its key."""

from __future__ import annotations

import contextlib
import os

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.tiers.doubles import FakeClock, key, make_manager, pattern, read, write
from tiers.base import OffloadKey
from tiers.ledger import NO_ROWS
from tiers.sessions import Deadlines, Shares

SESSIONS = ("a", "b")
REQUESTS = ("r0", "r1")
KEYS = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(lambda ns: [key(n) for n in ns])


class ManagerMachine(RuleBasedStateMachine):
    ROWS = 8

    @initialize(policy=st.sampled_from(["lru", "arc"]), shared=st.booleans())
    def start(self, policy: str, shared: bool) -> None:
        self.clock = FakeClock()
        self.manager, self.tiers = make_manager(self.ROWS, tiers=2, cache_policy=policy)
        shares = Shares() if shared else Shares(total=1.0, tiers=1.0, peers=1.0, sure=1.0)
        self.hub = self.manager.share(shares=shares, deadlines=Deadlines(), clock=self.clock)
        # what the model knows: (session, request, attempt) -> rows it may read, and their keys
        self.attempts: dict[tuple[str, str], int] = {}

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for tier in self.tiers:
                tier.end_all()
            self.manager.transfers.collect(self.manager.secondary_tiers)
            for view in list(self.hub.views.values()):
                view.close()
            for tier in self.tiers:
                tier.end_all()
            self.manager.transfers.collect(self.manager.secondary_tiers)
            self.hub.check()
            # V1: nothing lives, so nothing is claimed
            assert self.hub.rows.num_busy == 0
            assert not self.manager._req_state
            assert not self.hub._waiters
            self.manager.shutdown()

    def attempt(self, session: str, request: str) -> int:
        view = self.manager.session(session)
        if request not in view.requests or view.requests[request].finished:
            view.begin(request)
            self.attempts[session, request] = 1
        return self.attempts[session, request]

    @rule(s=st.sampled_from(SESSIONS), r=st.sampled_from(REQUESTS), ks=KEYS)
    def lookup(self, s: str, r: str, ks: list[OffloadKey]) -> None:
        attempt = self.attempt(s, r)
        view = self.manager.session(s)
        answers = view.lookup_many(ks, r, attempt, np.arange(1, len(ks) + 1))
        assert 1 <= len(answers) <= len(ks)
        assert all(answer != -1 for answer in answers[:-1])
        for k, row in zip(ks, answers.tolist(), strict=False):
            if row >= 0:
                assert read(self.manager, row) == pattern(k)
                assert row in view.requests[r].attempts[attempt].held or (
                    row in view.requests[r].attempts[attempt].loading
                )

    @rule(
        s=st.sampled_from(SESSIONS),
        r=st.sampled_from(REQUESTS),
        ks=KEYS,
        window=st.integers(1, 3),
    )
    def lookup_window(self, s: str, r: str, ks: list[OffloadKey], window: int) -> None:
        attempt = self.attempt(s, r)
        start, answers = self.manager.session(s).lookup_window(ks, r, attempt, window, 1)
        for k, row in zip(ks[start:], answers.tolist(), strict=False):
            if row >= 0:
                assert read(self.manager, row) == pattern(k)

    @rule(s=st.sampled_from(SESSIONS), r=st.sampled_from(REQUESTS), part=st.floats(0, 1))
    def take(self, s: str, r: str, part: float) -> None:
        attempt = self.attempt(s, r)
        view = self.manager.session(s)
        claims = view.requests[r].attempts.get(attempt)
        held = NO_ROWS if claims is None else claims.held
        chosen = held[: int(len(held) * part)]
        assert len(view.take(r, attempt, chosen)) == 0
        assert len(view.take(r, attempt, np.array([self.ROWS - 1], dtype=np.int32))) in (0, 1)

    @rule(
        s=st.sampled_from(SESSIONS), r=st.sampled_from(REQUESTS), ok=st.booleans(), data=st.data()
    )
    def complete_load(self, s: str, r: str, ok: bool, data: st.DataObject) -> None:
        view = self.manager.session(s)
        if r not in view.requests:
            return
        number = data.draw(st.sampled_from(sorted(view.requests[r].attempts) or [1]))
        claims = view.requests[r].attempts.get(number)
        if claims is None:
            return
        rows = claims.loading[:2]
        refused = view.complete_rows(r, number, rows if ok else NO_ROWS, NO_ROWS if ok else rows)
        assert len(refused) == 0
        # a double completion is refused and changes nothing
        assert len(view.complete_rows(r, number, rows)) == len(rows)

    @rule(s=st.sampled_from(SESSIONS), r=st.sampled_from(REQUESTS), ks=KEYS)
    def offer(self, s: str, r: str, ks: list[OffloadKey]) -> None:
        attempt = self.attempt(s, r)
        answer = self.manager.session(s).offer(ks, r, attempt, np.arange(1, len(ks) + 1))
        assert answer is not None
        assert answer.accepted == sorted(answer.accepted)
        for index, row in zip(answer.accepted, answer.rows.tolist(), strict=True):
            write(self.manager, row, ks[index])

    @rule(
        s=st.sampled_from(SESSIONS), r=st.sampled_from(REQUESTS), ok=st.booleans(), data=st.data()
    )
    def complete_store(self, s: str, r: str, ok: bool, data: st.DataObject) -> None:
        view = self.manager.session(s)
        if r not in view.requests:
            return
        number = data.draw(st.sampled_from(sorted(view.requests[r].attempts) or [1]))
        claims = view.requests[r].attempts.get(number)
        if claims is None:
            return
        rows = claims.storing[:3]
        assert len(view.complete_offer(r, number, rows, ok)) == 0
        assert len(view.complete_offer(r, number, rows, ok)) == len(rows)

    @rule(s=st.sampled_from(SESSIONS), r=st.sampled_from(REQUESTS))
    def finish(self, s: str, r: str) -> None:
        self.manager.session(s).finish(r)

    @rule(s=st.sampled_from(SESSIONS), r=st.sampled_from(REQUESTS))
    def cancel(self, s: str, r: str) -> None:
        attempt = self.attempt(s, r)
        self.manager.session(s).cancel(r, attempt)
        self.attempts[s, r] = attempt + 1

    @rule(s=st.sampled_from(SESSIONS), r=st.sampled_from(REQUESTS))
    def release(self, s: str, r: str) -> None:
        self.manager.session(s).release(r, self.attempt(s, r))

    @rule(s=st.sampled_from(SESSIONS), settle=st.booleans())
    def engine_dies(self, s: str, settle: bool) -> None:
        view = self.manager.session(s)
        view.orphan()
        if settle:
            view.close()

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.5]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.hub.tick()

    @precondition(lambda self: any(tier.running for tier in self.tiers))
    @rule(
        data=st.data(), how=st.sampled_from(["all", "none", "some"]), size=st.integers(0, 1 << 40)
    )
    def job_ends(self, data: st.DataObject, how: str, size: int) -> None:
        tier = data.draw(st.sampled_from([t for t in self.tiers if t.running]))
        job_id = data.draw(st.sampled_from(sorted(tier.running)))
        keys_of_job = list(tier.running[job_id].keys)
        good = {"all": None, "none": [], "some": keys_of_job[: len(keys_of_job) // 2]}[how]
        tier.end(job_id, good, transfer_bytes=size)
        self.manager.transfers.collect(self.manager.secondary_tiers)

    @rule(n=st.integers(0, 9), which=st.integers(0, 1))
    def a_tier_forgets(self, n: int, which: int) -> None:
        tier = self.tiers[which]
        if not any(key(n) in set(job.keys) for job in tier.running.values()):
            tier.chunks.pop(key(n), None)

    @rule(n=st.integers(0, 9), which=st.integers(0, 1))
    def a_tier_has(self, n: int, which: int) -> None:
        self.tiers[which].chunks[key(n)] = pattern(key(n))

    @rule(n=st.integers(0, 9), which=st.integers(0, 1), on=st.booleans())
    def a_tier_is_unsure(self, n: int, which: int, on: bool) -> None:
        with contextlib.suppress(KeyError):
            (self.tiers[which].unsure.add if on else self.tiers[which].unsure.remove)(key(n))

    @invariant()
    def the_laws_hold(self) -> None:
        if not hasattr(self, "hub"):
            return
        self.hub.check()
        slots = self.hub.rows.slots
        for row in range(self.ROWS):
            if slots.ref_cnt[row] >= 0:
                chunk = self.hub.rows.key_of(row)
                assert chunk is not None
                assert read(self.manager, row) == pattern(chunk)  # V3
        for view in self.hub.views.values():
            for (request, attempt), told in view.take_notices().items():
                claims = view.requests[request]
                assert claims.attempt == attempt
                for chunk, row in told.items():
                    assert chunk not in claims.waits
                    if row >= 0:
                        assert read(self.manager, row) == pattern(chunk)
                        assert row in claims.attempts[attempt].held


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=int(os.environ.get("KVQUAY_MACHINE_EXAMPLES", "60")),
    stateful_step_count=40,
    deadline=None,
)
