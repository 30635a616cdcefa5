"""Configuration of a broker: one dataclass is the source of every default, flag and variable.

Values come from flags, then KVQUAY_* variables, then a TOML file, then the defaults here. Unknown
keys are refused by name. Nothing reads the environment later.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from broker.errors import ConfigError

GIB: Final = 1 << 30
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: object) -> int:
    """Bytes: a number, or text such as "512MiB" or "4g" (powers of 1024)."""
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise ValueError("must be a number of bytes, or text such as 512MiB")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(text).lower())
    if match is None:
        raise ValueError("must be a number of bytes, or text such as 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_seconds(text: object) -> float:
    """Seconds: a number, or text such as "20ms" or "2s"."""
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        raise ValueError("must be seconds, or text such as 20ms")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|)\s*", str(text).lower())
    if match is None:
        raise ValueError("must be seconds, or text such as 20ms")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def parse_fraction(text: object) -> float:
    """A number from 0 to 1."""
    value = float(str(text))
    if not 0 <= value <= 1:
        raise ValueError("must lie between 0 and 1")
    return value


def parse_flag(text: object) -> bool:
    """true or false, in the usual spellings."""
    if isinstance(text, bool):
        return text
    word = str(text).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("must be true or false")


def parse_table(text: object) -> dict[str, Any]:
    """A table: of TOML, or JSON text."""
    value = text
    if isinstance(text, str):
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("must be a table (JSON object)")
    return value


def _option(
    default: Any, text: str, parse: Callable[[object], Any] = str, *, many: bool = False
) -> Any:
    return field(default=default, metadata={"help": text, "parse": parse, "many": many})


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What `kvquay serve` takes. Sizes in bytes, times in seconds."""

    socket: str | None = _option(
        None, "Unix socket; default $XDG_RUNTIME_DIR/kvquay/broker.sock, or under /tmp per user"
    )
    socket_group: str | None = _option(None, "group that may attach too (mode 0660)")
    memory: int = _option(4 * GIB, "bytes of shared memory, e.g. 64GiB", parse_size)
    pool: tuple[int, ...] = _option(
        (), "memory of one pool; repeat for several row sizes", parse_size, many=True
    )
    huge_pages: bool = _option(False, "try pages of 2 MiB; status says what was got", parse_flag)
    policy: str = _option("lru", "eviction policy: lru, arc, or a dotted path to a class")
    tier: tuple[dict[str, Any], ...] = _option(
        (), 'a secondary tier as JSON, e.g. {"type": "memory"}; repeatable', parse_table, many=True
    )
    backpressure: dict[str, Any] | None = _option(
        None, "back-pressure settings for all tiers, as JSON", parse_table
    )
    share_total: float = _option(0.75, "part of a pool that may be busy at once", parse_fraction)
    share_tiers: float = _option(0.15, "part of a pool that tiers' jobs may use", parse_fraction)
    share_peers: float = _option(0.10, "part of a pool that other hosts may use", parse_fraction)
    share_sure: float = _option(
        0.5, "part of a pool that all engines together are sure of", parse_fraction
    )
    pending_deadline: float = _option(2.0, "longest wait for a store or promotion", parse_seconds)
    retry_deadline: float = _option(
        0.5, "longest wait for a tier that does not know", parse_seconds
    )
    request_wait: float = _option(3.0, "longest wait of one request in all", parse_seconds)
    outbound_limit: int = _option(
        4 << 20, "bytes queued for an engine before it is given up", parse_size
    )
    notice_limit: int = _option(
        1 << 20, "bytes queued for an engine before notices become a resync", parse_size
    )
    restart_wait: float = _option(
        10.0, "after a restart: longest wait for engines of before", parse_seconds
    )
    grace: float = _option(5.0, "longest wait for a clean end", parse_seconds)
    zero_on_reuse: bool = _option(False, "overwrite rows before they are given out", parse_flag)
    log_level: str = _option("info", "debug, info, warning or error")

    def as_json(self) -> str:
        """For handing it to another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServeConfig:
        """What as_json gave."""
        values = json.loads(text)
        values["pool"] = tuple(values["pool"])
        values["tier"] = tuple(values["tier"])
        return cls(**values)


_VARIABLE_PREFIX: Final = "KVQUAY_"
_OTHER_VARIABLES: Final = {"KVQUAY_CONFIG", "KVQUAY_TRACE", "KVQUAY_MACHINE_EXAMPLES"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field; their values stay text until `load`."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with these keys")
    for item in fields(ServeConfig):
        flag = "--" + item.name.replace("_", "-")
        shown = "" if item.default in (None, (), False) else f" (default: {item.default})"
        text = (item.metadata["help"] + shown).replace("%", "%%")
        if item.metadata["parse"] is parse_flag:
            parser.add_argument(flag, nargs="?", const="true", metavar="BOOL", help=text)
        elif item.metadata["many"]:
            parser.add_argument(flag, action="append", help=text)
        else:
            parser.add_argument(flag, help=text)


def load(flags: Mapping[str, Any], environ: Mapping[str, str]) -> ServeConfig:
    """The configuration of these flags (by field name; None: not given) and variables.

    ConfigError names the flag, variable or key that is wrong, and what it must be.
    """
    known = {item.name: item for item in fields(ServeConfig)}
    values: dict[str, tuple[str, object]] = {}
    path = flags.get("config") or environ.get("KVQUAY_CONFIG")
    if path:
        for key, value in _read_toml(Path(path)).items():
            name = key.replace("-", "_")
            if name not in known:
                raise ConfigError(f"{path}: {key}", value, _unknown(name, known))
            values[name] = (f"{path}: {key}", value)
    for variable, text in environ.items():
        if not variable.startswith(_VARIABLE_PREFIX) or variable in _OTHER_VARIABLES:
            continue
        name = variable[len(_VARIABLE_PREFIX) :].lower()
        if name not in known:
            raise ConfigError(variable, text, _unknown(name, known))
        values[name] = (variable, text)
    for name in known:
        if flags.get(name) is not None:
            values[name] = ("--" + name.replace("_", "-"), flags[name])
    parsed: dict[str, Any] = {}
    for name, (source, raw) in values.items():
        metadata = known[name].metadata
        try:
            if metadata["many"]:
                items: Sequence[object] = raw if isinstance(raw, list) else [raw]
                parsed[name] = tuple(metadata["parse"](item) for item in items)
            else:
                parsed[name] = metadata["parse"](raw)
        except (ValueError, TypeError) as error:
            raise ConfigError(source, raw, str(error)) from None
    config = ServeConfig(**parsed)
    _check(config)
    return config


def _check(config: ServeConfig) -> None:
    if config.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError("log_level", config.log_level, "must be debug, info, warning or error")
    if config.share_tiers + config.share_peers > config.share_total:
        raise ConfigError(
            "share_total",
            config.share_total,
            f"must be at least share_tiers + share_peers = "
            f"{config.share_tiers + config.share_peers:g}",
        )
    if config.pool and sum(config.pool) > config.memory:
        raise ConfigError("pool", sum(config.pool), f"all pools exceed memory = {config.memory}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError("config", str(path), f"cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config", str(path), f"is not TOML: {error}") from None


def _unknown(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"is not a setting{hint} (see `kvquay serve --help`)"
