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
