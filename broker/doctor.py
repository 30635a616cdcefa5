"""`kvquay doctor`: checks this machine for a broker, and says what to do about what is amiss.

Changes nothing. Settings are read as `kvquay serve` reads them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Final

from broker.config import ServeConfig, add_flags, load
from broker.errors import MIB, BrokerError, MemoryTooLarge
from broker.limits import OVERHEAD_BYTES, MemoryLimits, page_table_bytes, read_limits
from broker.listener import MAX_PATH_BYTES
from broker.processes import PeerSource, peer_identity
from broker.version import VERSION
from broker.wire import default_socket_path

ENGINES_ASSUMED: Final = 4
VLLM_IMPORT_S: Final = 120.0
PACKAGES: Final = ("msgpack", "numpy", "psutil", "pyzmq", "xxhash")
NETWORK_FILE_SYSTEMS: Final = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs")


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was found, and what to do about it (empty if nothing)."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""


def check_memory(config: ServeConfig, limits: MemoryLimits) -> Finding:
    """Whether the region and the broker fit the machine and its cgroup."""
    wanted = f"{config.memory / MIB:,.0f} MiB asked, and {OVERHEAD_BYTES // MIB} MiB for the broker"
    try:
        limits.check(config.memory, huge=config.huge_pages)
    except MemoryTooLarge as error:
        return Finding("memory", Verdict.FAIL, str(error), "give a smaller --memory")
    room = limits.available_bytes
    if limits.cgroup is not None:
        room = min(room, limits.cgroup.room_bytes)
    return Finding("memory", Verdict.OK, f"{wanted}; {room / MIB:,.0f} MiB available")


def check_cgroup(config: ServeConfig, limits: MemoryLimits) -> Finding:
    """What limits this container."""
    if limits.cgroup is None:
        return Finding("cgroup", Verdict.OK, "no memory limit")
    return Finding(
        "cgroup",
        Verdict.OK,
        f"limit {limits.cgroup.limit_bytes / MIB:,.0f} MiB at {limits.cgroup.path}; the region is "
        "charged to whoever reserves it, which is the broker",
    )


def check_page_tables(config: ServeConfig, limits: MemoryLimits) -> Finding:
    """What mapping the region costs each engine."""
    each = page_table_bytes(config.memory, huge=config.huge_pages)
    advice = "" if each < 512 * MIB else "consider --huge-pages: a 512th of it"
    return Finding(
        "page tables",
        Verdict.OK if not advice else Verdict.WARN,
        f"{each / MIB:,.1f} MiB for each process that maps the region, "
        f"{ENGINES_ASSUMED * each / MIB:,.1f} MiB for {ENGINES_ASSUMED} workers",
        advice,
    )


def check_memlock(config: ServeConfig, limits: MemoryLimits) -> Finding:
    """Whether engines may pin the region for a GPU."""
    if limits.memlock_bytes is None or limits.memlock_bytes >= config.memory:
        return Finding("memlock", Verdict.OK, "enough to pin the region for a GPU")
    return Finding(
        "memlock",
        Verdict.WARN,
        f"{limits.memlock_bytes / MIB:,.1f} MiB may be locked, the region has "
        f"{config.memory / MIB:,.0f} MiB",
        "engines with a GPU copy slower without pinning: ulimit -l unlimited, or docker run "
        "--ulimit memlock=-1",
    )


def check_huge_pages(config: ServeConfig, limits: MemoryLimits) -> Finding:
    """Whether huge pages can be had."""
    if config.huge_pages and limits.huge_free_bytes < config.memory:
        return Finding(
            "huge pages",
            Verdict.WARN,
            f"{limits.huge_free_bytes / MIB:,.0f} MiB of huge pages free",
            f"sysctl vm.nr_hugepages={-(-config.memory // (2 * MIB))}, or go without",
        )
    state = "transparent" if limits.transparent_huge else "none for shared memory"
    return Finding("huge pages", Verdict.OK, f"{limits.huge_free_bytes // MIB} MiB free; {state}")


def check_socket(config: ServeConfig, limits: MemoryLimits) -> Finding:
    """Whether the socket can be where it is to be."""
    path = Path(config.socket) if config.socket else default_socket_path()
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        return Finding(
            "socket",
            Verdict.FAIL,
            f"{path} has {size} bytes, {MAX_PATH_BYTES} are possible",
            "give a shorter --socket",
        )
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding(
            "socket", Verdict.FAIL, f"{folder} cannot be written", "give another --socket"
        )
    kind = file_system_of(folder)
    if kind in NETWORK_FILE_SYSTEMS:
        return Finding(
            "socket",
            Verdict.WARN,
            f"{folder} is on {kind}",
            "a Unix socket belongs on a local file system, /run say",
        )
    return Finding("socket", Verdict.OK, f"{path} on {kind or 'an unknown file system'}")


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that holds `path`; empty if unknown."""
    best, kind = "", ""
    resolved = str(path.resolve())
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split(" ")
        point = fields[1].encode().decode("unicode_escape")
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def check_kernel(config: ServeConfig, limits: MemoryLimits) -> Finding:
    """Whether the kernel names the other end of a socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer = peer_identity(ours)
        if peer.pidfd is not None:
            os.close(peer.pidfd)
    finally:
        ours.close()
        theirs.close()
    release = platform.release()
    if peer.source is PeerSource.SOCKET:
        return Finding("kernel", Verdict.OK, f"Linux {release}: names processes across containers")
    return Finding(
        "kernel",
        Verdict.WARN,
        f"Linux {release}: names processes only within one PID namespace",
        "for engines in other containers use Linux 6.5 or newer",
    )


def check_versions(config: ServeConfig, limits: MemoryLimits) -> Finding:
    """Whether every package is there."""
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    python = f"kvquay {VERSION}, Python {platform.python_version()}, {', '.join(found)}"
    if missing:
        return Finding(
            "versions", Verdict.FAIL, f"{python}; missing: {', '.join(missing)}", "pip install them"
        )
    return Finding("versions", Verdict.OK, python)


def check_vllm(config: ServeConfig, limits: MemoryLimits) -> Finding:
    """Whether the vLLM of this environment, if there is one, works with ours. In a process of its
    own: a broker imports no engine."""
    if importlib.util.find_spec("vllm") is None:
        return Finding("vllm", Verdict.OK, "not in this environment; engines may be in another")
    try:
        asked = subprocess.run(
            [sys.executable, "-m", "engine_adapter.vllm.versions"],
            capture_output=True,
            text=True,
            timeout=VLLM_IMPORT_S,
        )
    except subprocess.TimeoutExpired:
        return Finding("vllm", Verdict.WARN, f"does not say in {VLLM_IMPORT_S:.0f} s what it is")
    told = [line for line in asked.stdout.splitlines() if line]
    if asked.returncode or not told:
        last = asked.stderr.strip().splitlines()[-1:] or ["no reason given"]
        return Finding("vllm", Verdict.WARN, f"can't be imported: {last[0]}")
    found = "; ".join(told[:-1])
    if told[-1] == "fit":
        return Finding("vllm", Verdict.OK, found)
    return Finding("vllm", Verdict.WARN, found, "see docs/vllm.md")


CHECKS: Final[tuple[Callable[[ServeConfig, MemoryLimits], Finding], ...]] = (
    check_memory,
    check_cgroup,
    check_page_tables,
    check_memlock,
    check_huge_pages,
    check_socket,
    check_kernel,
    check_versions,
    check_vllm,
)


def examine(config: ServeConfig, limits: MemoryLimits) -> list[Finding]:
    """All checks."""
    return [check(config, limits) for check in CHECKS]


def main(argv: Sequence[str]) -> int:
    """Print every check; exit status 1 if one has failed."""
    parser = argparse.ArgumentParser(
        prog="kvquay doctor",
        description="Check this machine before serving. Takes the options of `kvquay serve`.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON array")
    add_flags(parser)
    given = vars(parser.parse_args(argv))
    as_json = given.pop("json")
    try:
        config = load(given, os.environ)
    except BrokerError as error:
        findings = [Finding("settings", Verdict.FAIL, str(error), "correct the setting")]
    else:
        findings = examine(config, read_limits())
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.verdict:<5} {finding.check:<12} {finding.found}")
            if finding.advice:
                print(f"{'':<18} -> {finding.advice}")
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        print("kvquay doctor: not fit to serve like this", file=sys.stderr)
        return 1
    return 0
