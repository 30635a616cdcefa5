"""Tests of the vLLM side need vLLM: without it every file here is reported as skipped, with why."""

from __future__ import annotations

from tests.without_vllm import pytest_pycollect_makemodule as pytest_pycollect_makemodule
