"""The command: help, versions, mistakes; and doctor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker import doctor
from broker.cli import COMMANDS, _load, main
from broker.config import ServeConfig
from broker.doctor import Verdict, examine, file_system_of
from broker.limits import MemoryLimits, read_limits
from broker.version import VERSION


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_exists_and_tells_of_itself(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(_load(COMMANDS[name][0]))
    if name != "bench":
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert "usage: kvquay" in capsys.readouterr().out


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert VERSION in capsys.readouterr().out
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{VERSION}"' in text


def test_mistakes_are_told_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dance"]) == 2
    assert main(["status", "--socket", str(tmp_path / "none")]) == 1
    assert main(["replay", str(tmp_path / "none")]) == 1
    error = capsys.readouterr().err
    assert "'dance' is not a command" in error
    assert "kvquay serve" in error
    assert "Traceback" not in error


def test_doctor_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--socket", str(tmp_path / "b.sock")]
    assert main(["doctor", "--json", "--memory", "64MiB", *options]) == 0
    found = {item["check"]: item for item in json.loads(capsys.readouterr().out)}
    assert {"memory", "cgroup", "page tables", "memlock", "socket", "kernel", "versions"} <= set(
        found
    )
    assert main(["doctor", "--memory", "900TiB", *options]) == 1
    assert "--memory" in capsys.readouterr().out
    assert main(["doctor", "--memory", "64MiB", "--socket", "/" + "x" * 200]) == 1
    assert "shorter" in capsys.readouterr().out
    assert main(["doctor", "--memory", "lots"]) == 1


def test_doctor_survives_a_vllm_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('no libcuda here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = doctor.check_vllm(ServeConfig(), read_limits())
    assert finding.verdict is Verdict.WARN
    assert "no libcuda here" in finding.found


def test_doctor_judges_by_the_limits_it_reads(tmp_path: Path) -> None:
    tight = MemoryLimits(
        available_bytes=1 << 40,
        cgroup=None,
        memlock_bytes=65536,
        huge_free_bytes=0,
        transparent_huge=False,
    )
    config = ServeConfig(memory=1 << 30, huge_pages=False, socket=str(tmp_path / "b.sock"))
    verdicts = {finding.check: finding for finding in examine(config, tight)}
    assert verdicts["memlock"].verdict is Verdict.WARN
    assert "2.0 MiB for each process" in verdicts["page tables"].found
    mounts = tmp_path / "mounts"
    mounts.write_text("a / ext4 rw 0 0\nb /net nfs4 rw 0 0\nc /net/deep tmpfs rw 0 0\n")
    assert file_system_of(Path("/net/x"), mounts) == "nfs4"
    assert file_system_of(Path("/net/deep/x"), mounts) == "tmpfs"
    assert file_system_of(Path("/network"), mounts) == "ext4"
