"""The tree is the architecture: imports point one way, files stay readable."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("tiers", "broker", "engine_adapter")
MODULES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
MOST_LINES = 400


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def allowed(path: Path, name: str) -> bool:
    place = path.relative_to(ROOT).as_posix()
    top = name.split(".")[0]
    if top == "torch":
        return place.startswith(("engine_adapter/toy/", "engine_adapter/vllm/"))
    if top not in PACKAGES:
        return True
    if place.startswith("tiers/"):
        return top == "tiers"
    if place.startswith("broker/wire/"):
        return name.startswith("broker.wire")
    if place.startswith("broker/"):
        return top in ("broker", "tiers")
    return top == "engine_adapter" or name.startswith("broker.wire")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    wrong = [name for name in imported(path) if not allowed(path, name)]
    assert not wrong, f"{path.relative_to(ROOT)} may not import {wrong}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_says_what_it_is_and_stays_readable(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MOST_LINES
    assert source == "" or ast.get_docstring(ast.parse(source))


def test_an_arrow_that_points_back_is_seen() -> None:
    assert not allowed(ROOT / "tiers/slots.py", "broker.pool")
    assert not allowed(ROOT / "broker/pool.py", "engine_adapter.client")
    assert not allowed(ROOT / "broker/pool.py", "torch")
    assert not allowed(ROOT / "broker/wire/codec.py", "broker.pool")
    assert not allowed(ROOT / "engine_adapter/client.py", "broker.pool")
    assert not allowed(ROOT / "engine_adapter/client.py", "tiers.base")
    assert allowed(ROOT / "engine_adapter/client.py", "broker.wire")
