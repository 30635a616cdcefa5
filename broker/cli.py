"""The command `kvquay`: a table of subcommands, each loaded only when it is asked for."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from broker.errors import BrokerError
from broker.version import VERSION

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "serve": ("broker.commands:serve", "run the broker of this host"),
    "status": ("broker.commands:status", "show what a running broker does"),
    "reset": ("broker.commands:reset", "make all chunks of a namespace stale"),
    "doctor": ("broker.doctor:main", "check this machine before serving"),
    "vllm-config": ("engine_adapter.vllm.config_line:main", "say how to start vLLM beside it"),
    "replay": ("broker.replay.cli:replay_main", "replay a trace of requests"),
    "trace": ("broker.replay.cli:trace_main", "make a trace, or show its statistics"),
    "bench": ("engine_adapter.bench.cli:main", "measure beside a limit of the same run"),
}
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(_usage(), flush=True)
            return 0 if arguments else EXIT_USAGE
        if arguments[0] in ("-V", "--version"):
            print(f"kvquay {VERSION}", flush=True)
            return 0
        if arguments[0] not in COMMANDS:
            print(f"kvquay: {arguments[0]!r} is not a command\n\n{_usage()}", file=sys.stderr)
            return EXIT_USAGE
        return _load(COMMANDS[arguments[0]][0])(arguments[1:])
    except BrokerError as error:
        from broker.supervisor import exit_code

        print(f"kvquay {arguments[0]}: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _load(place: str) -> Callable[[Sequence[str]], int]:
    module, _, name = place.partition(":")
    function: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), name)
    return function


def _usage() -> str:
    lines = [f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kvquay COMMAND [OPTION ...]",
            "",
            *lines,
            "",
            "kvquay COMMAND --help tells of its options; kvquay --version of this program.",
        ]
    )


def set_up_logging(level: str) -> None:
    """Log lines to standard error."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
