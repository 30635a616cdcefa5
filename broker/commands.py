"""`kvquay serve`, `status` and `reset`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from broker import wire
from broker.cli import set_up_logging
from broker.config import ServeConfig, add_flags, load
from broker.errors import BrokerError
from broker.supervisor import Supervisor
from broker.version import VERSION

ANSWER_DEADLINE_S = 30.0
EXIT_UNHEALTHY = 1


class NoBroker(BrokerError):
    """Nobody answers at the socket."""


def serve(argv: Sequence[str]) -> int:
    """Run a broker until a signal ends it."""
    parser = argparse.ArgumentParser(
        prog="kvquay serve",
        description="Run the broker of this host. Each option is also a variable "
        "(KVQUAY_MEMORY, ...) and a key of the TOML file.",
    )
    add_flags(parser)
    given = vars(parser.parse_args(argv))
    config = load(given, os.environ)
    set_up_logging(config.log_level)
    return Supervisor(config).run()


class Admin:
    """A short-lived admin connection."""

    def __init__(self, path: str) -> None:
        """NoBroker if nobody listens there."""
        try:
            self._connection = wire.AdminConnection(path, ANSWER_DEADLINE_S)
        except OSError as error:
            raise NoBroker(
                f"no broker at {path}: {error.strerror}; start one with `kvquay serve`, or name "
                "its socket with --socket"
            ) from None
        self.ask(wire.admin_attach(f"kvquay {VERSION}"))

    def ask(self, message: wire.Message) -> wire.Message:
        """Send one message, return its answer. NoBroker if none comes."""
        try:
            answer = self._connection.ask(message)
        except OSError as error:
            self._connection.close()
            raise NoBroker(f"the broker does not answer: {error}") from None
        if isinstance(answer, (wire.Error, wire.Refused)):
            self._connection.close()
            raise BrokerError(answer.text)
        return answer

    def close(self) -> None:
        """End."""
        self._connection.close()


def _socket_option(parser: argparse.ArgumentParser) -> None:
    item = next(f for f in fields(ServeConfig) if f.name == "socket")
    parser.add_argument("--socket", help=item.metadata["help"])


def status(argv: Sequence[str]) -> int:
    """Show a running broker; exit status 1 if it is not healthy."""
    parser = argparse.ArgumentParser(prog="kvquay status", description=status.__doc__)
    _socket_option(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--verify", action="store_true", help="check the laws V1, V2 and V6 first")
    arguments = parser.parse_args(argv)
    admin = Admin(wire.socket_path(arguments.socket))
    answer = admin.ask(wire.Status(seq=1, verify=arguments.verify))
    admin.close()
    assert isinstance(answer, wire.StatusReply)
    if arguments.json:
        print(json.dumps(answer.status, indent=2))
    else:
        _print_status(answer.status)
    return 0 if answer.status["healthy"] else EXIT_UNHEALTHY


def _print_status(found: dict[str, Any]) -> None:
    health = "healthy" if found["healthy"] else "NOT HEALTHY"
    checked = " (laws checked)" if found["verified"] else ""
    print(
        f"kvquay {found['version']}, incarnation {found['incarnation']}, up "
        f"{found['uptime_s']:.0f} s: {health}{checked}"
    )
    state = "reserved" if found["memory_reserved"] else "being reserved"
    print(
        f"memory {found['memory_bytes'] / (1 << 20):,.1f} MiB, {state}, huge pages: "
        f"{found['huge_pages']}"
    )
    for text in found["violations"]:
        print(f"law broken: {text}")
    if found["no_fresh_memory"]:
        print(f"no cache until they have gone: {found['no_fresh_memory']}")
    for mapper in found["waiting_for_old_mappers"]:
        print(f"waiting for engine {mapper['engine']} worker {mapper['rank']} of before")
    for number, pool in enumerate(found["pools"]):
        print(
            f"pool {number}: {pool['rows']:,} rows of {pool['row_bytes']:,} bytes; "
            f"{pool['ready']:,} ready, {pool['reserved']:,} being written, "
            f"{pool['quarantined']:,} quarantined, {pool['free']:,} free; "
            f"{pool['evictions']:,} evictions; tiers: {_tiers(pool['tiers'])}"
        )
    for engine in found["engines"]:
        ready = "ready" if engine["ready"] else f"waits for workers {engine['missing_workers']}"
        print(
            f"engine {engine['engine_id']}: {ready}, {engine['requests']} requests, "
            f"{engine['rows_claimed']} rows claimed, namespace {engine['namespace'][:12]}"
        )
    for reason, count in sorted(found["refused"].items()):
        print(f"refused: {count} x {reason}")


def _tiers(tiers: Sequence[dict[str, Any]]) -> str:
    if not tiers:
        return "none"
    return ", ".join(
        f"{tier['type']}{' (DISABLED: too slow)' if tier['disabled'] else ''}, "
        f"{tier['slow_calls']} slow calls"
        for tier in tiers
    )


def reset(argv: Sequence[str]) -> int:
    """Make every chunk of a namespace stale, for all engines in it."""
    parser = argparse.ArgumentParser(prog="kvquay reset", description=reset.__doc__)
    _socket_option(parser)
    parser.add_argument("namespace", help="in hex as `kvquay status` prints it, or its beginning")
    parser.add_argument("--weights-version", help="engines that name it later share again")
    arguments = parser.parse_args(argv)
    admin = Admin(wire.socket_path(arguments.socket))
    answer = admin.ask(
        wire.ResetNamespace(
            seq=1,
            namespace=arguments.namespace,
            weights_version=arguments.weights_version,
        )
    )
    admin.close()
    assert isinstance(answer, wire.ResetReply)
    print(f"{answer.sessions} engines moved on; what they had stored is stale", file=sys.stderr)
    return 0
