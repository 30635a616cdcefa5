"""The body of a RealEngine: reads commands as JSON lines, answers each with a JSON line."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

from engine_adapter.answers import Transfer
from tests.engines import Engine, data_of, key


def run(engine: Engine, command: list[Any]) -> Any:
    """One command; the answer."""
    verb, *rest = command
    client, worker = engine.client, engine.worker
    if verb == "store":
        request, numbers = rest
        return engine.store(request, [key(n) for n in numbers])
    if verb == "reserve":  # prepare_store without an end
        request, numbers = rest
        offer = client.prepare_store(request, [key(n) for n in numbers], range(1, len(numbers) + 1))
        return list(offer.accepted)
    if verb == "write":  # half of what was reserved, then nothing
        request, numbers = rest
        state = client._requests[request]
        for n in numbers:
            _, ref = state.transfers[Transfer.STORE, key(n)][0]
            row = int(ref["row"])
            assert worker.memory is not None
            worker.memory.rows[row, :2048] = data_of(key(n))[:2048]
        return "written"
    if verb == "lookup":
        request, numbers = rest
        return engine.lookup(request, [key(n) for n in numbers])
    if verb == "load":
        request, numbers = rest
        refs = client.prepare_load(request, [key(n) for n in numbers])
        if refs is None:
            return "recompute"
        buffers = [np.empty(4096, dtype=np.uint8) for _ in numbers]
        good = worker.load(refs, buffers)
        wrong = sum(
            bool(ok) and not np.array_equal(buffer, data_of(key(n)))
            for ok, buffer, n in zip(good.tolist(), buffers, numbers, strict=True)
        )
        client.complete_load(request, [key(n) for n in numbers])
        return {"good": int(good.sum()), "wrong": int(wrong)}
    if verb == "take":  # prepare_load without an end
        request, numbers = rest
        return client.prepare_load(request, [key(n) for n in numbers]) is not None
    if verb == "finish":
        client.finish(rest[0])
        return None
    if verb == "step":
        client.step()
        worker.step()
        ready = client.is_ready and worker.memory is not None and client.attached is not None
        return client.attached.incarnation if ready and client.attached is not None else 0
    if verb == "fork":  # a child that lives on with everything inherited
        pid = os.fork()
        if pid == 0:
            sys.stdin.close()
            os.execvp("sleep", ["sleep", "60"])
        return pid
    raise ValueError(verb)


def main() -> None:
    """Attach, then obey."""
    engine = Engine(sys.argv[1], sys.argv[2])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
