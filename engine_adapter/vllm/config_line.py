"""`kvquay vllm-config`: what to give `vllm serve` so that it uses the broker of this host.

Needs no vLLM here: engines often live in another environment, or another container.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from broker import wire
from engine_adapter.vllm import plugin

ANSWER_DEADLINE_S = 5.0
BLOCKS_PER_CHUNK = 4
"""vLLM hashes and asks for each chunk; with its usual blocks of 16 tokens this is one per 64."""

EXIT_NO_BROKER = 1
_NOTES = """\
offload_prompt_only=false: answers are cached too, so that the next turn of a chat finds them. Set
  it to true where answers never come back as prompts.
kv_load_failure_policy=recompute: what can't be loaded is computed. With vLLM's default, fail, a
  request fails with its load; kvquay refuses to start under it.
blocks_per_chunk={blocks}: must be equal in all engines that are to share, as must the block size,
  the data type, parallelism and vLLM's version. Each engine logs its namespace: equal ones share.
reset: reset_prefix_cache(reset_connector=True) in Python; over HTTP vLLM calls the same
  `POST /reset_prefix_cache?reset_external=true` (with VLLM_SERVER_DEV_MODE=1). Without it stale
  KV stays in the broker.
weights that change in place: name them by weights_version in kv_connector_extra_config.
PYTHONHASHSEED: leave it unset, or give all engines one value; keep --prefix-caching-hash-algo at
  sha256 or sha256_cbor.
vLLM must find kvquay: install it into vLLM's own environment."""


def main(argv: Sequence[str]) -> int:
    """Print the configuration; exit status 1, and a word on standard error, without a broker."""
    parser = argparse.ArgumentParser(
        prog="kvquay vllm-config",
        description="Print --kv-transfer-config for the running broker and the `vllm serve` line. "
        "It is printed without a broker too (exit status 1): engines attach when there is one.",
    )
    parser.add_argument(
        "--socket",
        help="Unix socket; default $KVQUAY_SOCKET, else $XDG_RUNTIME_DIR/kvquay/broker.sock, or "
        "under /tmp per user",
    )
    parser.add_argument("--model", help="a name or folder for the `vllm serve` line")
    parser.add_argument(
        "--blocks-per-chunk",
        type=_positive,
        default=BLOCKS_PER_CHUNK,
        metavar="N",
        help="GPU blocks that are cached as one (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="only the JSON, on one line")
    arguments = parser.parse_args(argv)
    path = wire.absolute_socket_path(arguments.socket)
    configuration = json.dumps(transfer_config(path, arguments.blocks_per_chunk))
    if arguments.json:
        print(configuration)
    else:
        print(f"--kv-transfer-config {shlex.quote(configuration)}\n")
        print(f"{serve_line(arguments.model or 'MODEL', configuration)}\n")
        print(_NOTES.format(blocks=arguments.blocks_per_chunk))
    try:
        found = wire.ask_status(path, "kvquay vllm-config", ANSWER_DEADLINE_S)
    except (OSError, wire.WireError) as error:
        why = getattr(error, "strerror", None) or str(error)
        print(
            f"kvquay vllm-config: no broker answers at {path}: {why}; start one with `kvquay "
            "serve`, or name its socket with --socket",
            file=sys.stderr,
        )
        return EXIT_NO_BROKER
    if not arguments.json:
        print(f"\n{_summary(found, path)}")
    return 0


def transfer_config(path: str, blocks_per_chunk: int = BLOCKS_PER_CHUNK) -> dict[str, Any]:
    """What --kv-transfer-config takes. `path` of the broker's socket."""
    return {
        "kv_connector": plugin.CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "socket": path,
            "offload_prompt_only": False,
            "blocks_per_chunk": blocks_per_chunk,
        },
    }


def serve_line(model: str, configuration: str) -> str:
    """The command of a shell, quoted."""
    return shlex.join(["vllm", "serve", model, "--kv-transfer-config", configuration])


def _summary(found: Mapping[str, Any], path: str) -> str:
    health = "healthy" if found.get("healthy") else "NOT HEALTHY (see `kvquay status`)"
    memory = found.get("memory_bytes", 0) / (1 << 20)
    return (
        f"A broker answers at {path}: kvquay {found.get('version')}, {health}, {memory:,.0f} MiB, "
        f"{len(found.get('engines', ()))} engines."
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
