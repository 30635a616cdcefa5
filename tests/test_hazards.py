"""docs/hazards.md has a row for every hazard of its classes, and every test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "hazards.md").read_text()
CLASSES = {"A": 11, "B": 9, "C": 11, "D": 11, "E": 10, "F": 3, "I": 9}


def test_every_hazard_has_one_row() -> None:
    rows = re.findall(r"^\| ([A-Z]\d+) \|", TEXT, re.MULTILINE)
    assert sorted(rows) == sorted(
        f"{c}{n}" for c, last in CLASSES.items() for n in range(1, last + 1)
    )


def test_every_test_it_names_exists() -> None:
    named = re.findall(r"`((?:[\w/]+\.py)?(?:::\w+)?)`", TEXT)
    file = ""
    seen = 0
    for name in named:
        path, _, test = name.partition("::")
        file = path or file
        place = ROOT / ("" if file.startswith("tiers/manager") else "tests") / file
        assert place.is_file(), name
        if test:
            assert f"def {test}(" in place.read_text(), name
        seen += 1
    assert seen > 60
