"""What a replay prints: rows, the table, and progress that only a person sees."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest

from broker.replay.report import Row, end_progress, progress_printer, table

LIVE_FIGURES = {
    "load_gb_per_s": 4.0,
    "store_gb_per_s": 2.5,
    "lookup_p50_ms": 0.25,
    "lookup_p99_ms": 1.5,
}


def row(mode: str, extra: dict[str, Any]) -> Row:
    return Row(
        policy="lru",
        engines=2,
        layout="shared",
        mode=mode,
        memory_blocks=23_436,
        requests=12_031,
        block_hit_rate=0.3038234,
        token_hit_rate=0.3097971,
        seconds=2.5,
        extra=extra,
    )


def test_the_table_has_a_line_per_combination_and_live_figures_below() -> None:
    head, simulated, live, figures = table(
        [row("simulate", {}), row("live", LIVE_FIGURES)]
    ).splitlines()
    assert head.split()[:4] == ["policy", "engines", "layout", "mode"]
    assert simulated.split() == [
        *("lru", "2", "shared", "simulate", "23,436", "12,031", "0.3038", "0.3098", "2.50")
    ]
    assert live.split()[3] == "live"
    assert "load 4.00 GB/s, store 2.50 GB/s" in figures
    assert "p50 0.25 ms, p99 1.50 ms" in figures
    assert len(head) == len(simulated) == len(live)


def test_a_row_in_json_keeps_what_only_its_mode_knows() -> None:
    line = row("live", LIVE_FIGURES).as_json()
    assert "\n" not in line
    value = json.loads(line)
    assert value["block_hit_rate"] == 0.303823
    assert LIVE_FIGURES.items() <= value.items()


@pytest.mark.parametrize("person", [True, False])
def test_progress_is_told_twice_a_second_and_only_to_a_person(
    person: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: person, raising=False)
    tell = progress_printer("lru", 1000)
    for done in range(100):
        now += 0.05
        tell(done)
    end_progress()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("of 1,000") <= 10
    assert ("of 1,000" in said.err) is person
