"""The demo: vLLM engines behind one broker on real text, then the trace replay table.

Where there is no vLLM, two engines of our own (`engine_adapter/toy`) take its place.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from broker.replay.generate import generate
from broker.replay.simulate import Setup, run
from broker.replay.trace import TraceRequest, read_trace
from engine_adapter.bench.servers import broker, wait_listening

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "wire.md"
PREFIX_BYTES = 3000
QUESTIONS = (
    "\n\nQuestion: what is a namespace?\nAnswer:",
    "\n\nQuestion: when is a message refused?\nAnswer:",
    "\n\nQuestion: who ends a hold?\nAnswer:",
)
PER_ENGINE_BLOCKS = 5859  # 3 million tokens each
GENERATED_REQUESTS = 12_000


class Engine:
    """One engine process."""

    def __init__(self, stack: ExitStack, name: str, socket: Path | None) -> None:
        command = [sys.executable, "-m", "engine_adapter.toy", "--engine-id", name]
        if socket is not None:
            command += ["--socket", str(socket)]
        self._process = stack.enter_context(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
        )
        self.name = name

    def ask(self, prompt: str) -> dict[str, Any]:
        """Its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "max_tokens": 32}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"engine {self.name} has ended; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def share_text() -> None:
    """One engine stores a long text, the other loads it; outputs are those without any cache."""
    document = DOCUMENT.read_text()[:PREFIX_BYTES]
    print(
        f"1. Two engines, one broker. Prompts: {PREFIX_BYTES} bytes of {DOCUMENT.name} (bytes are"
    )
    print("   tokens) and a question; the text is the same, the questions differ.\n")
    with tempfile.TemporaryDirectory(prefix="kvquay-demo-") as folder, ExitStack() as stack:
        socket = Path(folder, "broker.sock")
        options = ("--memory", "64MiB", "--log-level", "warning")
        wait_listening(stack.enter_context(broker(socket, *options)), socket)
        alone = Engine(stack, "without a cache", None)
        a, b = Engine(stack, "A", socket), Engine(stack, "B", socket)
        print(f"   {'engine':<16} {'question':<34} {'loaded':>7} {'computed':>9} {'seconds':>8}")
        saved: list[float] = []
        for number, (engine, question) in enumerate(zip((a, b, b), QUESTIONS, strict=True)):
            plain = alone.ask(document + question)
            answer = engine.ask(document + question)
            asked = question.split("\n")[2][10:]
            print(
                f"   {engine.name:<16} {asked:<34} {answer['loaded_blocks']:>7} "
                f"{answer['computed_blocks']:>9} {answer['seconds']:>8.2f}"
            )
            if answer["tokens"] != plain["tokens"]:
                raise SystemExit("the output differs from the one without a cache")
            if number:
                if not answer["loaded_blocks"]:
                    raise SystemExit("engine B found nothing of what engine A had stored")
                saved.append(plain["seconds"] / answer["seconds"])
        print("\n   Every output is, token for token, that of an engine without a cache.")
        print(
            f"   B had never seen the text: it loaded the blocks that A had computed, and answered "
            f"{min(saved):.1f} to {max(saved):.1f} times\n   as fast as without them.\n"
        )


def load_trace() -> list[TraceRequest]:
    """The published trace where it is at hand, else one made by the generator; says which."""
    path = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"
    if path.is_file():
        trace = read_trace(path)
        print(
            f"2. What sharing is worth: {len(trace):,} requests of a production chat service (the"
        )
        print("   trace published with Mooncake, FAST'25), blocks of 512 tokens, LRU.\n")
        return trace
    print(f"2. What sharing is worth: {GENERATED_REQUESTS:,} requests of the built-in generator of")
    print("   chats (the published trace is not at hand), blocks of 512 tokens, LRU.\n")
    return list(generate(GENERATED_REQUESTS, 1))


def replay_table() -> None:
    """Block hit rates of one cache per engine and of one shared cache of the same total."""
    trace = load_trace()
    print(f"   {'engines':>7} {'blocks in all':>14} {'private':>9} {'shared':>8} {'gain':>6}")
    gains = []
    for engines in (2, 4, 8):
        rates = {}
        for layout in ("private", "shared"):
            setup = Setup(
                policy="lru",
                engines=engines,
                layout=layout,
                memory_blocks=engines * PER_ENGINE_BLOCKS,
            )
            rates[layout] = run(trace, setup).block_hit_rate
        gains.append(rates["shared"] / rates["private"])
        print(
            f"   {engines:>7} {engines * PER_ENGINE_BLOCKS:>14,} {rates['private']:>9.3f} "
            f"{rates['shared']:>8.3f} {gains[-1]:>5.2f}x",
            flush=True,
        )
    print(
        f"\n   With the same memory in all, engines that share find {gains[0]:.1f} (two engines) "
        f"to {gains[-1]:.1f} (eight) times\n   as many of their prompts' blocks ready as engines "
        "that keep to themselves; each is a block less to compute."
    )


def main() -> int:
    """Run both parts."""
    if importlib.util.find_spec("vllm") is None:
        share_text()
    else:
        sys.path.insert(0, str(ROOT))
        importlib.import_module("demo_vllm").share(DOCUMENT)
    replay_table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
