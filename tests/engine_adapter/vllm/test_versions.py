from __future__ import annotations

import ast
import sys
import warnings
from pathlib import Path

import pytest

from broker import doctor
from broker.config import ServeConfig
from broker.limits import read_limits
from engine_adapter.vllm import versions
from engine_adapter.vllm.versions import NEEDS, Need, UnsupportedVersion

ADAPTER = Path(versions.__file__).parent
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own, of its dependencies
    versions.missing()

BASE = "vllm.v1.kv_offload.base"


def test_this_vllm_has_all_that_is_needed() -> None:
    assert versions.missing() == []


def test_this_vllm_is_told_by_number_and_series() -> None:
    found = versions.check()
    assert found.series in versions.SUPPORTED
    assert found.number == versions.installed()
    assert found.number.startswith(found.series)


def _classes_that_we_import() -> set[str]:
    """What the adapter takes from vLLM where an offloading API may change, as module.name."""
    taken = set()
    for file in ADAPTER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                ("vllm.v1.kv_offload.", "vllm.distributed.kv_transfer.")
            ):
                taken |= {f"{node.module}.{alias.name}" for alias in node.names}
    return taken


HARMLESS_IMPORTS = {
    # Only named in annotations, or bases whose methods are needs of their own.
    f"{BASE}.LoadStoreSpec",
    f"{BASE}.OffloadKey",
    f"{BASE}.OffloadingMetricMetadata",
    "vllm.v1.kv_offload.config.OffloadingConfig",
    "vllm.distributed.kv_transfer.kv_connector.v1.KVConnectorRole",
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorMetadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorWorkerMetadata",
}


def test_the_table_holds_what_the_adapter_imports() -> None:
    needed = {f"{need.module}.{need.name}" for need in NEEDS}
    not_listed = {
        name
        for name in _classes_that_we_import() - HARMLESS_IMPORTS
        if not any(one == name or one.startswith(f"{name}.") for one in needed)
    }
    assert not not_listed


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "0.3", "0.310.0", "1.0.0", "0.34.0.dev1"])
def test_another_version_is_refused_with_those_that_work(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    with pytest.raises(UnsupportedVersion, match=version.replace(".", r"\.")) as refusal:
        versions.check()
    for one in versions.SUPPORTED:
        assert one in str(refusal.value)


def test_a_patched_vllm_is_refused_by_its_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"{BASE}.OffloadingManager.lookup")
    with pytest.raises(UnsupportedVersion, match=r"OffloadingManager\.lookup is not there"):
        versions.check()
    assert "OffloadingManager.lookup" in versions.describe()[0]


@pytest.mark.parametrize(
    ("need", "told"),
    [
        (Need(BASE, "OffloadingManager.lookup", ("keys",)), "takes ('key', 'req_context')"),
        (Need(BASE, "OffloadingManager.lookup", ("key", "req_context", "more")), "takes"),
        (Need(BASE, "Nothing"), "is not there"),
        (Need("vllm.no_such_module", "Nothing"), "is not there"),
        (Need(BASE, "LookupResult", attributes=("HIT", "PERHAPS")), "has no PERHAPS"),
    ],
)
def test_each_kind_of_lack_is_told(need: Need, told: str) -> None:
    (line,) = versions.missing([need])
    assert told in line


def test_an_older_vllm_does_without_what_came_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.31.0")
    assert versions.missing([Need(BASE, "Nothing", since="0.32")]) == []
    assert versions.missing([Need(BASE, "Nothing", since="0.31")])


def test_versions_of_one_set_are_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.kv_family("0.32.0") == "0.32.0"
    monkeypatch.setattr(versions, "COMPATIBLE", (frozenset({"0.32.0", "0.32.1"}),))
    assert versions.kv_family("0.32.1") == versions.kv_family("0.32.0")
    assert versions.kv_family("0.33.0") == "0.33.0"


def test_a_host_without_vllm_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "can't be imported" in versions.describe()[0]
    assert versions.installed() is None


def test_doctor_says_that_this_vllm_works() -> None:
    finding = doctor.check_vllm(ServeConfig(), read_limits())
    assert finding.verdict is doctor.Verdict.OK, finding
    assert str(versions.installed()) in finding.found
