"""Real vLLM engines and a real broker; without vLLM every file here is reported as skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import Answer, VllmEngine
from tests.faults.brokers import RealBroker, real_broker
from tests.without_vllm import pytest_pycollect_makemodule as pytest_pycollect_makemodule


class Models:
    """Folders of the models, made when they are first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, name: str = "llama", seed: int = 1, **config: Any) -> Path:
        from tests.e2e import models

        base = models.GEMMA if name == "gemma" else models.LLAMA
        folder = self._root / "-".join([name, str(seed), *map(str, config.values())])
        return folder if folder.exists() else models.write(folder, {**base, **config}, seed)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The folder of a model, by name, seed of its weights, and changes to its configuration."""
    return Models(tmp_path_factory.mktemp("models"))


class Baseline:
    """What engines without any cache say; each kind of engine is started once, when needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Answer] = {}

    def __call__(self, model: Path, prompts: list[list[int]], **how: Any) -> list[Answer]:
        kind = f"{model} {sorted(how.items())}"
        unknown = [p for p in prompts if f"{kind} {p}" not in self._known]
        if unknown:
            with VllmEngine(self._folder, model, **how) as engine:
                for prompt, answer in zip(unknown, engine.generate(unknown), strict=True):
                    assert answer.cached == 0
                    self._known[f"{kind} {prompt}"] = answer
        return [self._known[f"{kind} {p}"] for p in prompts]


@pytest.fixture(scope="session")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Answers of an engine without any cache."""
    return Baseline(tmp_path_factory.mktemp("baseline"))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RealBroker]:
    """A broker with room for some hundred chunks."""
    with real_broker(tmp_path, "--memory", "64MiB") as running:
        yield running
