"""The version of the distribution, in one place for all of it."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
