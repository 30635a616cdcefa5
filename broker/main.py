"""The broker process: puts server, pools and memory together, for one incarnation.

Started by the supervisor, which tells it everything over the control channel; ends with it.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from broker import wire
from broker.attach import Refusal, Registry
from broker.config import ServeConfig
from broker.errors import BrokerError, ConfigError, SupervisorLost
from broker.link import SupervisorLink
from broker.members import Member
from broker.memory import PoolMemory, Region, split
from broker.pool import Pool
from broker.server import Server
from broker.session import EngineSession
from broker.version import VERSION
from tiers.factory import SecondaryTierFactory
from tiers.policies.factory import CachePolicyFactory
from tiers.sessions import Deadlines, Shares

log = logging.getLogger(__name__)

EXIT_CONFIG = 2


class Broker:
    """One incarnation."""

    def __init__(self, link: SupervisorLink) -> None:
        start, fds = link.start()
        self._link = link
        self.config = ServeConfig.from_json(start["config"])
        self.incarnation = int(start["incarnation"])
        _check_names(self.config)
        self._reserved = bool(start["reserved"])
        self.region = Region.open(fds[0], start["huge_pages"])
        self._listener = socket.socket(fileno=fds[1])
        self._started_at = time.monotonic()
        self._asked_for_memory = False
        self._no_memory = ""
        self._lock = threading.Lock()
        self.pools: list[Pool] = []
        self._places = split(self.region.size_bytes, self.config.pool)
        self._old_mappers: dict[int, dict[str, Any]] = dict(
            zip(fds[2:], start["mappers"], strict=True)
        )
        self.registry = Registry(self._pool_for)
        self.server = Server(
            self._listener,
            self.registry,
            self.pools,
            self._lock,
            attached=self._attached,
            memory_fd=lambda pool: self.region.fd,
            hand_over=link.hand_over,
            about=self._about,
            outbound_limit_bytes=self.config.outbound_limit,
            notice_limit_bytes=self.config.notice_limit,
            on_turn=self._on_turn,
        )

    def run(self) -> None:
        """Serve until told to end, then give everything back."""
        self.server.watch_fd(self._link.fileno(), self._hear)
        for pidfd in self._old_mappers:
            self.server.watch_fd(pidfd, lambda fd=pidfd: self._mapper_done(fd))  # type: ignore[misc]
        if self._old_mappers:
            log.warning(
                "incarnation %d: %d processes still map the memory; no row is given out until "
                "they are gone or have attached again",
                self.incarnation,
                len(self._old_mappers),
            )
        signal.signal(signal.SIGTERM, lambda *_: self.server.stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._link.ready()
        self.server.run()
        for pool in self.pools:
            pool.shutdown()
        if self.server.failure is not None:
            raise self.server.failure

    def _hear(self) -> None:
        while (got := self._link.take()) is not None:
            message, fds = got
            for fd in fds:
                os.close(fd)
            if message.get("reserved"):
                self._reserved = True
                self._thaw_if_safe()
            self._no_memory = message.get("no_memory", self._no_memory)

    # ---- restart -----------------------------------------------------------------------------

    @property
    def is_frozen(self) -> bool:
        """Whether rows may not be given out yet."""
        return bool(self._old_mappers) or not self._reserved

    def _on_turn(self, now: float) -> None:
        """Old mappers that stay too long (stopped, say) are left alone with the old memory."""
        late = now - self._started_at > self.config.restart_wait
        if self._old_mappers and late and not self._asked_for_memory:
            self._asked_for_memory = True
            log.warning(
                "%d processes of before have neither ended nor attached again within %g s; "
                "asking for fresh memory",
                len(self._old_mappers),
                self.config.restart_wait,
            )
            self._link.say({"want_memory": True})

    def _mapper_done(self, pidfd: int) -> None:
        """A process that mapped the memory under an earlier broker is dead, or attached again."""
        self.server.unwatch_fd(pidfd)
        del self._old_mappers[pidfd]
        os.close(pidfd)
        self._thaw_if_safe()

    def _thaw_if_safe(self) -> None:
        if self.is_frozen:
            return
        if self._asked_for_memory:
            self._link.say({"thawed": True})
        with self._lock:
            for pool in self.pools:
                pool.frozen = False
            for engine in self.registry.engines.values():
                engine.announce()

    def _attached(self, engine: EngineSession, member: Member) -> wire.Attached:
        for pidfd, info in list(self._old_mappers.items()):
            if member.maps and info["process"] == member.process:
                self._mapper_done(pidfd)
        memory = engine.pool.memory
        assert isinstance(memory, PoolMemory)
        return wire.Attached(
            protocol=wire.PROTOCOL_VERSION,
            broker=f"kvquay {VERSION}",
            incarnation=self.incarnation,
            rows=memory.rows,
            row_bytes=memory.row_bytes,
            rows_offset=memory.rows_offset,
            generation_offset=memory.generation_offset,
            memory_bytes=memory.memory_bytes,
            epoch=engine.epoch.number,
        )

    # ---- pools -------------------------------------------------------------------------------

    def _pool_for(self, row_bytes: int) -> Pool:
        for pool in self.pools:
            if pool.row_bytes == row_bytes:
                return pool
        if len(self.pools) == len(self._places):
            taken = ", ".join(str(pool.row_bytes) for pool in self.pools)
            raise Refusal(
                wire.RefusalCode.NO_MEMORY,
                f"rows of {row_bytes} bytes: the memory is divided into rows of {taken} bytes; "
                "start kvquay with one --pool SIZE for each row size",
                ours=taken,
                theirs=str(row_bytes),
            )
        offset, size = self._places[len(self.pools)]
        config = self.config
        try:
            pool = Pool(
                PoolMemory(self.region, offset, size, row_bytes),
                lock=self._lock,
                clock=time.monotonic,
                policy=config.policy,
                shares=Shares(
                    total=config.share_total,
                    tiers=config.share_tiers,
                    peers=config.share_peers,
                    sure=config.share_sure,
                ),
                deadlines=Deadlines(
                    pending_s=config.pending_deadline,
                    retry_s=config.retry_deadline,
                    request_s=config.request_wait,
                ),
                tiers=config.tier,
                backpressure=config.backpressure,
                zero_on_reuse=config.zero_on_reuse,
            )
        except (ConfigError, ValueError, TypeError) as error:
            raise Refusal(
                wire.RefusalCode.NO_MEMORY,
                f"no pool for rows of {row_bytes} bytes: {error}",
                ours=str(size),
                theirs=str(row_bytes),
            ) from error
        pool.frozen = self.is_frozen
        self.pools.append(pool)
        log.info("pool %d: %d rows of %d bytes", len(self.pools), pool.num_rows, row_bytes)
        return pool

    def _about(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "protocol": wire.PROTOCOL_VERSION,
            "pid": os.getpid(),
            "incarnation": self.incarnation,
            "uptime_s": round(time.monotonic() - self._started_at, 3),
            "memory_bytes": self.region.size_bytes,
            "memory_reserved": self._reserved,
            "huge_pages": self.region.huge_pages,
            "no_fresh_memory": self._no_memory,
            "waiting_for_old_mappers": [
                {**info, "pidfd": None} for info in self._old_mappers.values()
            ],
        }


def _check_names(config: ServeConfig) -> None:
    """Policies and tiers are named by text: find them now, not when the first engine comes."""
    try:
        CachePolicyFactory.get_cache_policy_cls(config.policy)
    except (ValueError, ImportError) as error:
        raise ConfigError("policy", config.policy, str(error)) from error
    for tier in config.tier:
        try:
            SecondaryTierFactory.get_tier_class(tier)
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError("tier", tier, str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="python -m broker.main")
    parser.add_argument("--control-fd", type=int, required=True)
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        broker = Broker(SupervisorLink(arguments.control_fd))
        logging.getLogger().setLevel(broker.config.log_level.upper())
        broker.run()
    except SupervisorLost as error:
        log.error("%s", error)
        return 1
    except BrokerError as error:
        log.error("%s", error)
        return EXIT_CONFIG if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
