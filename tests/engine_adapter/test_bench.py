"""Every benchmark runs and prints its figures, at a size that takes a moment."""

from __future__ import annotations

import pytest

from broker.cli import main


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["step", "--keys", "8,1500", "--steps", "50"], "1500 keys:"),
        (
            [
                "transfer",
                "--chunk-bytes",
                "8192",
                "--chunks",
                "8",
                "--batches",
                "4",
                "--rounds",
                "2",
            ],
            "store",
        ),
        (
            ["lookup", "--chunks", "2000", "--small", "1000", "--calls", "100", "--clients", "1,2"],
            "growth of p50",
        ),
    ],
    ids=["step", "transfer", "lookup"],
)
def test_a_benchmark_prints_its_figures(
    arguments: list[str], printed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 0
    assert printed in capfd.readouterr().out


def test_an_unknown_benchmark_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "dance"]) == 2
    assert "lookup" in capsys.readouterr().err
