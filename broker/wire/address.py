"""Where broker and engines meet unless something else is said."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def default_socket_path(environ: Mapping[str, str] | None = None) -> Path:
    """Where the socket is unless something else is said."""
    environ = os.environ if environ is None else environ
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime, "kvquay", "broker.sock")
    return Path("/tmp", f"kvquay-{os.getuid()}", "broker.sock")


def socket_path(given: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Where a broker is looked for: what was given, else KVQUAY_SOCKET, else the default."""
    known = os.environ if environ is None else environ
    return given or known.get("KVQUAY_SOCKET") or str(default_socket_path(known))


def absolute_socket_path(given: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """As socket_path, for a process that may run in another folder than the one who said it."""
    return os.path.abspath(os.path.expanduser(socket_path(given, environ)))
