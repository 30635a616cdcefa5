"""For the conftest of a folder whose tests need vLLM: without it every file is reported as skipped,
with why."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Never

import pytest

_MISSING = ""
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, of its dependencies
        import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
        import vllm.v1.kv_offload.cpu.gpu_worker  # noqa: F401
except ImportError as error:
    _MISSING = f"VLLM IS NOT TESTED: {type(error).__name__}: {error}"


class _Skipped(pytest.Module):
    """A file that is there but can't run."""

    def collect(self) -> Never:
        pytest.skip(_MISSING)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """A hook of pytest, called for the files of the folder whose conftest has it."""
    return _Skipped.from_parent(parent, path=module_path) if _MISSING else None
