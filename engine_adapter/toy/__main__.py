"""`python -m engine_adapter.toy`: an engine that answers prompts, one JSON line each way.

Reads `{"id": ..., "prompt": text, "max_tokens": n}`, writes `{"id", "tokens", "loaded_blocks",
"computed_blocks", "stored_blocks", "seconds"}`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import torch

from engine_adapter.toy.engine import OutOfBlocks, ToyEngine, open_cache
from engine_adapter.toy.model import ToyConfig

READY_S = 30.0


def main() -> int:
    """Answer until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m engine_adapter.toy", description=__doc__)
    parser.add_argument("--socket", help="of the broker; without it, no cache")
    parser.add_argument("--engine-id", default=f"toy-{os.getpid()}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = ToyConfig()
    cache = None
    if arguments.socket is not None:
        cache = open_cache(arguments.socket, arguments.engine_id, config)
        if not cache.wait_ready(READY_S):
            print(f"no broker within {READY_S:g} s: computing everything", file=sys.stderr)
    engine = ToyEngine(config, cache)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        try:
            answer = engine.generate(asked["prompt"].encode(), int(asked.get("max_tokens", 32)))
        except OutOfBlocks as error:
            print(json.dumps({"id": asked.get("id"), "error": str(error)}), flush=True)
            continue
        result = {
            "id": asked.get("id"),
            "tokens": answer.tokens,
            "loaded_blocks": answer.loaded_blocks,
            "computed_blocks": answer.computed_blocks,
            "stored_blocks": answer.stored_blocks,
            "seconds": round(time.perf_counter() - start, 4),
        }
        print(json.dumps(result), flush=True)
    if cache is not None:
        cache.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
