"""Settings: where they come from, which one wins, and what is refused by name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from broker.config import ServeConfig, load, parse_seconds, parse_size
from broker.errors import ConfigError
from broker.wire import default_socket_path


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('memory = "1GiB"\npolicy = "arc"\ngrace = 9\n[[tier]]\ntype = "memory"\n')
    environ = {"KVQUAY_CONFIG": str(file), "KVQUAY_MEMORY": "2GiB", "KVQUAY_GRACE": "20ms"}
    config = load({"memory": "3GiB"}, environ)
    assert config.memory == 3 << 30
    assert config.grace == 0.02
    assert config.policy == "arc"
    assert config.tier == ({"type": "memory"},)
    assert config.notice_limit == ServeConfig().notice_limit
    assert ServeConfig.from_json(config.as_json()) == config


@pytest.mark.parametrize(
    ("flags", "environ", "toml", "named"),
    [
        ({}, {"KVQUAY_MEMROY": "1"}, "", r"KVQUAY_MEMROY.*did you mean memory"),
        ({}, {}, "polcy = 'lru'", r"c\.toml: polcy.*did you mean policy"),
        ({"memory": "big"}, {}, "", r"--memory.*512MiB"),
        ({"pool": ["1GiB", "x"]}, {}, "", r"--pool"),
        ({}, {"KVQUAY_SHARE_TOTAL": "1.5"}, "", r"KVQUAY_SHARE_TOTAL.*between 0 and 1"),
        ({}, {"KVQUAY_HUGE_PAGES": "perhaps"}, "", r"KVQUAY_HUGE_PAGES.*true or false"),
        ({"tier": ["[1]"]}, {}, "", r"--tier.*table"),
        ({"log_level": "loud"}, {}, "", r"log_level"),
        ({"share_tiers": "0.9"}, {}, "", r"share_total.*at least"),
        ({"memory": "1MiB", "pool": ["2MiB"]}, {}, "", r"pool.*exceed"),
        ({}, {}, "memory = [", r"not TOML"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, flags: dict[str, object], environ: dict[str, str], toml: str, named: str
) -> None:
    if toml:
        file = tmp_path / "c.toml"
        file.write_text(toml)
        flags = {**flags, "config": str(file)}
    with pytest.raises(ConfigError, match=named):
        load(flags, environ)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load({"config": "/nowhere/c.toml"}, {})


@pytest.mark.parametrize(
    ("text", "size"),
    [(5, 5), ("5", 5), ("4KiB", 4096), ("1.5g", 3 << 29), ("2TB", 2 << 40), ("16 MiB", 16 << 20)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [(2, 2.0), ("2", 2.0), ("20ms", 0.02), ("1.5 s", 1.5)]
)
def test_seconds(text: object, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("bad", [True, None, "", "-1", "1 parsec", [], "MiB"])
def test_what_is_no_size_or_time_is_refused(bad: object) -> None:
    with pytest.raises(ValueError):
        parse_size(bad)
    with pytest.raises(ValueError):
        parse_seconds(bad)


def test_every_setting_has_help_and_a_default() -> None:
    for item in fields(ServeConfig):
        assert item.metadata["help"]
    assert load({}, {}) == ServeConfig()


def test_the_socket_lies_in_the_users_own_folder() -> None:
    assert default_socket_path({"XDG_RUNTIME_DIR": "/run/user/5"}) == Path(
        "/run/user/5/kvquay/broker.sock"
    )
    assert default_socket_path({}).parent.parent == Path("/tmp")
