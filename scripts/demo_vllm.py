"""The demo's first part: three real vLLM engines behind one broker, and one without any cache."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from engine_adapter.bench.servers import broker
from tests.e2e import models
from tests.e2e.engines import Answer, VllmEngine, agree

TEXT_BYTES = 1500
QUESTIONS = ("what is a namespace?", "when is a message refused?", "who ends a hold?")
MODEL = {
    **models.LLAMA,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 8,
}
OUTPUT_TOKENS = 16


def tokens(text: str) -> list[int]:
    """Bytes are tokens; the first three are taken."""
    return [3 + byte for byte in text.encode()]


def share(document: Path) -> None:
    """One engine stores a long text, two load it at the same time; outputs are those of an engine
    without a cache."""
    text = document.read_text()[:TEXT_BYTES]
    prompts = [tokens(f"{text}\n\nQuestion: {q}\nAnswer:") for q in QUESTIONS]
    print("1. Three vLLM engines, one broker. A model of eight layers with random weights on the")
    print(
        f"   CPU; prompts: {TEXT_BYTES} bytes of {document.name} (bytes are tokens) and a question;"
    )
    print("   the text is the same, the questions differ. Starting takes half a minute.\n")
    with tempfile.TemporaryDirectory(prefix="kvquay-demo-") as made, ExitStack() as stack:
        folder = Path(made)
        model = models.write(folder / "model", MODEL)
        socket = str(folder / "broker.sock")
        stack.enter_context(broker(Path(socket), "--memory", "256MiB", "--log-level", "warning"))
        with (
            VllmEngine(folder, model) as alone,
            VllmEngine(folder, model, socket) as a,
        ):
            warm_up(alone)
            plain = [alone.generate([asked], max_tokens=OUTPUT_TOKENS)[0] for asked in prompts]
            warm_up(a)
            answers = a.store([prompts[0]], max_tokens=OUTPUT_TOKENS)
        with VllmEngine(folder, model, socket) as b, VllmEngine(folder, model, socket) as c:
            for engine in (b, c):
                warm_up(engine)
            for engine, asked in ((b, prompts[1]), (c, prompts[2])):
                engine.tell("generate", prompts=[asked], max_tokens=OUTPUT_TOKENS)
            answers += [*b.answers(), *c.answers()]
    report(prompts, plain, answers)


def warm_up(engine: VllmEngine) -> None:
    """The first request of a process pays for what is set up only once."""
    engine.ready().generate([[5] * TEXT_BYTES], max_tokens=2)


def report(
    prompts: Sequence[list[int]], plain: Sequence[Answer], answers: Sequence[Answer]
) -> None:
    """The table, and what it means. SystemExit if the cache has changed an output or was not
    used."""
    print(
        f"   {'engine':<8} {'question':<28} {'loaded':>7} {'computed':>9} {'s':>6} {'s alone':>8}"
    )
    for name, question, asked, without, answer in zip(
        ("A", "B", "C"), QUESTIONS, prompts, plain, answers, strict=True
    ):
        print(
            f"   {name:<8} {question:<28} {answer.cached:>7} {len(asked) - answer.cached:>9} "
            f"{answer.seconds:>6.2f} {without.seconds:>8.2f}"
        )
        if not agree(answer, without):
            raise SystemExit("the output differs from the one without a cache")
    if min(answer.cached for answer in answers[1:]) == 0:
        raise SystemExit("an engine found nothing of what engine A had stored")
    computed = [len(asked) - answer.cached for asked, answer in zip(prompts, answers, strict=True)]
    print("\n   Every output is, token for token, that of an engine without a cache. B and C had")
    print("   never seen the text: they loaded, at the same time, what A had computed (in whole")
    print(f"   chunks of 64 tokens), and computed {computed[1]} and {computed[2]} tokens.\n")
