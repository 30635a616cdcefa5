"""A real vLLM engine in a process of its own, told what to do line by line.

`python -m tests.e2e.engine OPTIONS`: OPTIONS is a JSON object of vLLM's `LLM`. Each line read is a
JSON list, what to do and with what; each line written is the answer. vLLM's log is on stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class Engine:
    """What can be asked of it: the methods without an underscore."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**options)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 16,
        kv_transfer_params: dict[str, Any] | None = None,
        salt: str | None = None,
    ) -> list[dict[str, Any]]:
        """All prompts at once: of each the tokens, their log-probabilities, and how many tokens of
        the prompt were not computed."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            detokenize=False,
            ignore_eos=True,
            logprobs=1,
            extra_args=None
            if kv_transfer_params is None
            else {"kv_transfer_params": kv_transfer_params},
        )
        asked: list[Any] = [
            {"prompt_token_ids": prompt, **({} if salt is None else {"cache_salt": salt})}
            for prompt in prompts
        ]
        began = time.perf_counter()
        outputs = self._llm.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        return [
            {
                "cached": output.num_cached_tokens,
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    round(next(iter(each.values())).logprob, 5)
                    for each in output.outputs[0].logprobs
                ],
                "seconds": seconds,
            }
            for output in outputs
        ]

    def flush(self) -> None:
        """What the last request leaves to store is handed over at the next step of an engine."""
        self.generate([[5, 6, 7]], max_tokens=2)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of its `/metrics` by name, summed over labels."""
        from prometheus_client import REGISTRY

        figures: dict[str, float] = {}
        for metric in REGISTRY.collect():
            if metric.type in ("counter", "gauge"):
                for sample in metric.samples:
                    if not sample.name.endswith("_created"):
                        figures[metric.name] = figures.get(metric.name, 0) + sample.value
        return figures

    def forget(self) -> bool:
        """Empty the engine's own prefix cache, and nothing else."""
        return bool(self._llm.reset_prefix_cache())

    def reset(self) -> bool:
        """Empty the engine's own prefix cache and declare what it has stored stale."""
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    # ---- faults: of engines in one process only ----------------------------------------------

    def stall(self, kind: str, gate: str) -> None:
        """From now on copies ("load" or "store") wait at a gate (`tests.e2e.engines.Gate`)."""
        from engine_adapter.vllm.copying import HostPages

        copy = getattr(HostPages, kind)

        def stalled(*arguments: Any) -> Any:
            with open(gate) as opened:
                opened.read()
            return copy(*arguments)

        setattr(HostPages, kind, stalled)

    def spoil_loads(self) -> None:
        """From now on, of each load the second row is another's by the time it is copied."""
        from engine_adapter.client import SchedulerClient

        prepare_load = SchedulerClient.prepare_load

        def spoiled(*arguments: Any) -> Any:
            refs = prepare_load(*arguments)
            if refs is not None and len(refs) > 1:
                refs = refs.copy()
                refs["generation"][1] += 1
            return refs

        setattr(SchedulerClient, "prepare_load", spoiled)  # noqa: B010  a fault


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout, too
    engine = Engine(json.loads(sys.argv[1]))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(engine, name)(**arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
