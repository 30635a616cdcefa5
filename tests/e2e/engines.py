"""vLLM engines as processes, and what they are to be compared with."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.e2e.models import VOCABULARY

ROOT = Path(__file__).parents[2]
ANSWER_S = 120.0
"""Enough to start two engines of five processes each on two cores."""
ENDED_S = 30.0
BLOCK_TOKENS = 32
PREFIX_TOKENS = 1500
LLM: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": BLOCK_TOKENS,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "disable_log_stats": False,
}


def prompt(prefix: int, tail: int, prefix_tokens: int = PREFIX_TOKENS) -> list[int]:
    """A long prefix, the same for the same number, and 20 tokens of its own."""
    shared, own = random.Random(prefix), random.Random(f"{prefix} {tail}")
    return [shared.randrange(3, VOCABULARY) for _ in range(prefix_tokens)] + [
        own.randrange(3, VOCABULARY) for _ in range(20)
    ]


@dataclass
class Answer:
    """What an engine made of one prompt. `cached`: tokens of the prompt it did not compute."""

    cached: int
    tokens: list[int]
    logprobs: list[float]
    seconds: float = field(compare=False)


CLOSE = {"float32": 1e-4, "bfloat16": 0.1}
"""Of a log-probability: a prompt computed whole and one computed in parts are summed in another
order. A wrong row changes them by more than one."""


def agree(one: Answer, other: Answer, dtype: str = "float32") -> bool:
    """The same tokens, and log-probabilities as close as the type allows."""
    return one.tokens == other.tokens and bool(
        np.allclose(one.logprobs, other.logprobs, rtol=0, atol=CLOSE[dtype])
    )


class Gate:
    """A FIFO: who reads it waits until it is opened, in any process, and from then on nobody."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR)

    def open(self) -> None:
        """Let all pass."""
        Path(self.path + ".open").touch()
        os.rename(self.path + ".open", self.path)
        os.close(self._fd)


class VllmEngine:
    """An engine that is starting; `ready` waits for it. A context manager: at the end it is gone
    with all its processes."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        socket: str | None = None,
        *,
        processes: bool = False,
        extra: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        transfer: dict[str, Any] | None = None,
        **llm: Any,
    ) -> None:
        """`socket`: of the broker; None: an engine without any cache, not even its own.
        `processes`: vLLM's engine core and workers in processes of their own."""
        options = {**LLM, "model": str(model), **llm}
        if socket is None:
            options["enable_prefix_caching"] = False
        else:
            options["kv_transfer_config"] = {
                "kv_connector": "KvquayConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "socket": socket,
                    "blocks_per_chunk": 2,
                    **(extra or {}),
                },
                **(transfer or {}),
            }
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("engine-*.log")))
        self.log = folder / f"engine-{number}.log"
        self._sockets = tempfile.TemporaryDirectory(prefix="kvquay-")  # a path short enough
        self._ready = False
        self._heard = b""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.engine", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={
                    **{k: v for k, v in os.environ.items() if k != "VLLM_CPU_KVCACHE_SPACE"},
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(ROOT),
                    "TORCH_COMPILE_DISABLE": "1",
                    "TMPDIR": str(folder),
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
                    "VLLM_NO_USAGE_STATS": "1",
                    "VLLM_RPC_BASE_PATH": self._sockets.name,
                    **(environment or {}),
                },
            )

    def ready(self) -> VllmEngine:
        """This engine, once it takes requests."""
        if not self._ready:
            assert self.heard() == "ready"
            self._ready = True
        return self

    def tell(self, name: str, **arguments: Any) -> None:
        """Do something; `heard` is the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def heard(self) -> Any:
        """The next answer. AssertionError, with the end of its log, if none comes."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        end = time.monotonic() + ANSWER_S
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        while b"\n" not in self._heard:
            left_s = end - time.monotonic()
            assert left_s > 0, f"no answer in {ANSWER_S:.0f} s: {self._end_of_log()}"
            if poller.poll(1000 * left_s):
                piece = os.read(fd, 1 << 16)
                assert piece, f"the engine has ended: {self._end_of_log()}"
                self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def _end_of_log(self) -> str:
        return self.log.read_text()[-6000:]

    def ask(self, name: str, **arguments: Any) -> Any:
        """Do something and wait for the answer."""
        self.ready().tell(name, **arguments)
        return self.heard()

    def answers(self) -> list[Answer]:
        """Those to a `generate` that was told."""
        return [Answer(**each) for each in self.heard()]

    def generate(self, prompts: Sequence[list[int]], **how: Any) -> list[Answer]:
        """Answers to these prompts, all given to vLLM at once."""
        self.ready().tell("generate", prompts=list(prompts), **how)
        return self.answers()

    def store(self, prompts: Sequence[list[int]], **how: Any) -> list[Answer]:
        """As `generate`, and all that is to be stored has been handed over."""
        answers = self.generate(prompts, **how)
        self.ask("flush")
        return answers

    def figure(self, name: str) -> float:
        """One of the figures of its `/metrics`."""
        return float(self.ask("metrics")[name])

    def own_figures(self) -> dict[str, float]:
        """The adapter's own among them that are not 0."""
        figures = self.ask("metrics").items()
        return {name: value for name, value in figures if name.startswith("kvquay:") and value}

    def children(self) -> list[psutil.Process]:
        """vLLM's own processes under the first one."""
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def workers(self) -> list[psutil.Process]:
        """The processes that its engine core has started to compute in."""
        cores = psutil.Process(self.process.pid).children()
        return [p for core in cores for p in core.children() if "spawn_main" in str(p.cmdline())]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """All its processes, at once, but Python's own trackers: they remove from /dev/shm what the
        dead have left, and then end."""
        for process in [psutil.Process(self.process.pid), *self.children()]:
            if "resource_tracker" not in str(process.cmdline()):
                process.send_signal(number)

    def end(self) -> None:
        """As a user ends it; what is left after a while is killed."""
        family = self.children() if self.process.poll() is None else []
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(ENDED_S)
        self.process.stdout.close()
        _, left = psutil.wait_procs(family, ENDED_S)
        for process in left:
            process.kill()
        psutil.wait_procs(left, ENDED_S)
        self._sockets.cleanup()

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
