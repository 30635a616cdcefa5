"""The trace format, its generator and its statistics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.cli import main
from broker.replay.generate import generate
from broker.replay.simulate import BadReplay
from broker.replay.statistics import statistics_of
from broker.replay.trace import BadTrace, TraceRequest, parse_lines, read_trace

GOOD = '{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}'


def test_a_request_is_read_and_written_the_same() -> None:
    (request,) = parse_lines([GOOD, "\n"], "t")
    assert request == TraceRequest(timestamp=1, input_length=600, output_length=5, hash_ids=(0, 7))
    assert json.loads(request.as_line()) == json.loads(GOOD)
    assert [request.tokens_in(n) for n in range(3)] == [0, 512, 600]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        (GOOD.replace("[0, 7]", "[]"), "empty"),
        (GOOD.replace("[0, 7]", "[0, -7]"), "numbers from 0"),
        (GOOD.replace("[0, 7]", "[7, 7]"), "twice"),
        (GOOD.replace("600", "-1"), "input_length"),
        (GOOD.replace("600", "6000"), "does not fit"),
        (GOOD.replace("1,", "null,", 1), "timestamp"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(line: str, why: str) -> None:
    with pytest.raises(BadTrace, match=f"t, line 2: .*{why}"):
        list(parse_lines([GOOD, line], "t"))


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="cannot be read"):
        read_trace(tmp_path / "none")
    (tmp_path / "empty").write_text("")
    with pytest.raises(BadTrace, match="no request"):
        read_trace(tmp_path / "empty")


def test_the_generator_gives_the_same_for_the_same_seed() -> None:
    first, second, other = ([r.as_line() for r in generate(500, seed)] for seed in (3, 3, 4))
    assert first == second
    assert first != other
    assert list(parse_lines(first, "made")) == list(generate(500, 3))
    with pytest.raises(BadReplay):
        list(generate(0, 1))


def test_generated_chats_look_like_the_published_trace() -> None:
    found = statistics_of(list(generate(12_031, 1)))
    published = {
        "requests per second": 3.40,
        "distinct blocks per request": 15.19,
        "input mean": 12_035,
        "input p50": 6_909,
        "output mean": 343,
        "requests that continue": 0.387,
        "block hit rate, no limit": 0.366,
    }
    for name, value in published.items():
        assert found[name] == pytest.approx(value, rel=0.10), name


def test_prefixes_name_what_came_before() -> None:
    followers: dict[int, int] = {}
    for request in generate(2_000, 5):
        for before, block in zip(request.hash_ids, request.hash_ids[1:], strict=False):
            assert followers.setdefault(block, before) == before


def test_the_command_makes_and_compares_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "t.jsonl"
    assert main(["trace", "generate", "--requests", "50", "-o", str(made)]) == 0
    assert len(read_trace(made)) == 50
    assert main(["trace", "stats", str(made), str(made)]) == 0
    assert "block hit rate, no limit" in capsys.readouterr().out
