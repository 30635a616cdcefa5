"""The trace format, its generator and its statistics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.cli import main
from broker.replay.generate import generate
from broker.replay.simulate import BadReplay
from broker.replay.statistics import statistics_of
from broker.replay.trace import (
    BadTrace,
    TraceFileError,
    TraceRequest,
    parse_lines,
    read_trace,
)

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
        (GOOD.replace("600", "32"), "does not fit"),
        (GOOD.replace("600", "512"), "does not fit"),
        (GOOD.replace("7]", f"{2**63}]"), "numbers from 0"),
        (GOOD.replace("600", f"{2**63}"), "input_length"),
        (GOOD.replace("7]", "9" * 5000 + "]"), "too long"),
        ("[" * 200_000, "too deeply"),
        ("\ufffd", "not JSON"),
        (GOOD.replace("1,", "null,", 1), "timestamp"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(line: str, why: str) -> None:
    with pytest.raises(BadTrace, match=f"t, line 2: .*{why}"):
        list(parse_lines([GOOD, line], "t"))


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="cannot be read"):
        read_trace(tmp_path / "none")
    (tmp_path / "empty").write_text("")
    with pytest.raises(BadTrace, match="no request"):
        read_trace(tmp_path / "empty")


def test_bytes_that_are_no_text_are_refused_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(GOOD.encode() + b"\n\xff\xfe\n")
    with pytest.raises(BadTrace, match="line 2: not JSON"):
        read_trace(path)


def test_a_message_does_not_repeat_a_long_value() -> None:
    with pytest.raises(BadTrace) as caught:
        list(parse_lines([GOOD.replace("1,", json.dumps(["x"] * 9999) + ",", 1)], "t"))
    assert len(str(caught.value)) < 200


def test_the_generator_gives_the_same_for_the_same_seed() -> None:
    first, second, other = ([r.as_line() for r in generate(500, seed)] for seed in (3, 3, 4))
    assert first == second
    assert first != other
    assert list(parse_lines(first, "made")) == list(generate(500, 3))
    with pytest.raises(BadReplay):
        list(generate(0, 1))


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.all_combinations) for n in (0, 2, 3, 4))]
)
def test_generated_chats_look_like_the_published_trace(seed: int) -> None:
    found = statistics_of(list(generate(12_031, seed)))
    published = {
        "requests per second": 3.40,
        "distinct blocks": 182_790,
        "distinct blocks per request": 15.19,
        "blocks seen once": 0.7585,
        "input mean": 12_035,
        "input p50": 6_909,
        "input p90": 27_367,
        "output mean": 343,
        "output p50": 350,
        "output p90": 597,
        "requests that continue": 0.387,
        "turns per session": 1.632,
        "sessions of one turn": 0.694,
        "block hit rate, no limit": 0.366,
    }
    for name, value in published.items():
        assert found[name] == pytest.approx(value, rel=0.10), name


def test_prefixes_name_what_came_before() -> None:
    followers: dict[int, int] = {}
    for request in generate(2_000, 5):
        for before, block in zip(request.hash_ids, request.hash_ids[1:], strict=False):
            assert followers.setdefault(block, before) == before


def test_statistics_count_turns_and_blocks() -> None:
    def request(at: int, *blocks: int) -> TraceRequest:
        return TraceRequest(
            timestamp=at, input_length=512 * len(blocks), output_length=9, hash_ids=blocks
        )

    # A chat of three turns, one whose first block is everybody's, and one branching off the first.
    trace = [
        request(4000, 0, 1),
        request(1000, 0, 9),
        request(5000, 0, 1, 2),
        request(6000, 0, 1, 2, 3),
        request(7000, 0, 1, 5),
    ]
    found = statistics_of(trace)
    assert found["sessions"] == 2
    assert found["turns per session"] == 2.5
    assert found["sessions of one turn"] == 0.5
    assert found["most turns"] == 4
    assert found["distinct blocks"] == 6
    assert found["blocks seen once"] == pytest.approx(3 / 6)
    assert found["block hit rate, no limit"] == pytest.approx((0 + 1 + 2 + 3 + 2) / 14)
    assert found["seconds"] == 6.0


def test_an_output_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "no" / "t.jsonl"
    assert main(["trace", "generate", "--requests", "5", "-o", str(place)]) == 1
    assert f"{place} cannot be written" in capsys.readouterr().err


def test_the_command_makes_and_compares_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "t.jsonl"
    assert main(["trace", "generate", "--requests", "50", "-o", str(made)]) == 0
    assert len(read_trace(made)) == 50
    assert main(["trace", "stats", str(made), str(made)]) == 0
    assert "block hit rate, no limit" in capsys.readouterr().out
