"""Every field of a resolved configuration counts, or is listed as harmless."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from broker import wire

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own, of its dependencies
    from vllm import envs
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        SlidingWindowSpec,
    )

    from engine_adapter.vllm import harmless, namespace, versions
    from engine_adapter.vllm.namespace import (
        Namespace,
        SharingRefused,
        differences,
        engine_namespace,
    )

LLAMA = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128,
"intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 4096,
"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false,
"torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
"kvquay_unknown": 1}"""
ROOT = Path(__file__).parents[3]
ABSENT = object()


def build(folder: Path, **options: Any) -> Any:
    """A resolved VllmConfig of a tiny model in this folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(LLAMA)
    given: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "block_size": 32,
        "dtype": "float32",
        "max_model_len": 2048,
        "kv_transfer_config": {
            "kv_connector": "KvquayConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"blocks_per_chunk": 2, "socket": "/run/b.sock"},
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own
        return EngineArgs(**{**given, **options}).create_engine_config()


def kv_caches(blocks: int = 100) -> KVCacheConfig:
    """Two groups of two layers each, over the same memory, as of a hybrid model."""
    sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full, windowed = FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=64)
    page = full.page_size_bytes
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=2 * page * blocks,
                layers=layers,
                layer_stride=page * blocks,
                block_stride=page,
            )
            for layers in (["l0", "l1"], ["l2", "l3"])
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(["l0", "l1"], full),
            KVCacheGroupSpec(["l2", "l3"], windowed),
        ],
    )


def made(config: Any, caches: Any = None, **options: Any) -> Namespace:
    caches = kv_caches() if caches is None else caches
    return engine_namespace(config, caches, build_offloading_config(config, caches), **options)


@pytest.fixture(autouse=True)
def no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build(tmp_path_factory.mktemp("model"))


@contextmanager
def having(owner: Any, name: str, value: Any) -> Iterator[None]:
    """The owner with another value, past its validators."""
    before = getattr(owner, name, ABSENT)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is ABSENT:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)


# ---- every field ------------------------------------------------------------------------------


def other(value: Any) -> Any:
    """A value of the same type that differs."""
    if isinstance(value, enum.Enum):
        return next((one for one in type(value) if one is not value), None)
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, torch.dtype):
        return torch.float16
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, dict):
        return {**value, "flipped": 1}
    if isinstance(value, (list, tuple)):
        if value and dataclasses.is_dataclass(value[-1]):
            return value[:-1]
        return type(value)([*value, "flipped"])
    if isinstance(value, (set, frozenset)):
        return {*value, "flipped"}
    return "flipped" if value is None else None


def parts(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """All parts of a configuration that are dataclasses, with their place."""
    yield where, value
    for name in vars(value) if hasattr(value, "__dict__") else []:
        inner = getattr(value, name)
        for at, one in enumerate(inner if isinstance(inner, list) else [inner]):
            if dataclasses.is_dataclass(one) and not hasattr(one, "to_dict"):
                index = f"[{at}]" if isinstance(inner, list) else ""
                yield from parts(one, f"{where}.{name}{index}".lstrip("."))


def flipped(root: Any, digest: Any) -> tuple[list[str], list[str]]:
    """Fields that should have changed the digest and did not, and the other way round."""
    base, silent, loud = digest(), [], []
    for where, part in parts(root):
        for name in dict.fromkeys([f.name for f in dataclasses.fields(part)] + [*vars(part)]):
            if isinstance(getattr(type(part), name, None), functools.cached_property):
                continue
            if f"{type(part).__name__}.{name}" in harmless.PRESENCE_IS_HARMLESS:
                continue  # its fields are flipped where it is there
            listed = harmless.is_harmless(type(part), name)
            with having(part, name, other(getattr(part, name, None))):
                try:
                    same = digest() == base
                except SharingRefused:
                    same = False
            if same and not listed:
                silent.append(f"{where}.{name}")
            if listed and not same:
                loud.append(f"{where}.{name}")
    assert digest() == base
    return silent, loud


def test_each_field_of_the_configuration_counts_or_is_listed(config: Any) -> None:
    caches = kv_caches()
    offloading = build_offloading_config(config, caches)

    # What a field decides beyond itself, as a path its files, has tests of its own.
    def described() -> bytes:
        into: dict[str, Any] = {}
        namespace._describe(config, "", into)
        return wire.namespace_digest(into)

    assert described() == described()
    silent, loud = flipped(config, described)
    assert silent == []
    assert loud == []
    assert engine_namespace(config, caches, offloading).digest == made(config).digest


def test_each_field_of_the_caches_counts_or_is_listed(config: Any) -> None:
    caches = kv_caches()
    offloading = build_offloading_config(config, caches)

    def digest() -> bytes:
        return engine_namespace(config, caches, offloading).digest

    silent, loud = flipped(caches, digest)
    assert silent == []
    # Only what grows with the number of blocks may be other, and only together.
    assert {name.rpartition(".")[2] for name in loud} <= {"layer_stride", "offset", "num_blocks"}


def test_each_field_of_offloading_counts_or_is_listed(config: Any) -> None:
    caches = kv_caches()
    offloading = build_offloading_config(config, caches)

    def digest() -> bytes:
        with_weights = dataclasses.replace(offloading, extra_config={})
        return engine_namespace(config, caches, with_weights).digest

    silent, loud = flipped(offloading, digest)
    assert silent == []
    assert loud == []


def test_a_field_of_a_vllm_to_come_counts(config: Any) -> None:
    base = made(config)
    with having(config.scheduler_config, "of_the_future", 1):
        found = made(config)
    assert found.digest != base.digest
    assert differences(base.described, found.described) == [
        "scheduler_config.of_the_future: '(absent)' here, 1 there"
    ]


def test_each_line_of_the_list_names_a_field_and_a_reason(config: Any) -> None:
    elsewhere = {  # of other versions that are supported
        "CacheConfig.simple_cpu_offload_num_blocks",
        "CacheConfig.user_specified_mamba_block_size",
        *(f"CacheConfig.{name}" for name in ("hash_block_size", "cache_hit_alignment_tokens")),
        "LoggingConfig.formatter",
        "ObservabilityConfig.custom_histogram_buckets",
        *(f"KVTransferConfig.{name}" for name in ("kv_rank", "kv_parallel_size", "kv_ip")),
        "KVTransferConfig.kv_buffer_size",
        *(f"WatchdogConfig.{name}" for name in ("timeout", "check_interval", "dump_dir")),
    }
    known = {f"env.{name}" for name in envs.environment_variables}
    classes = {type(part) for _, part in parts(config)} | {
        type(part) for _, part in parts(kv_caches())
    }
    known |= {
        f"{one.__name__}.{field.name}" for one in classes for field in dataclasses.fields(one)
    }
    known |= {f"{type(part).__name__}.{name}" for _, part in parts(config) for name in vars(part)}
    named = {one.__name__ for one in classes}
    for line, reason in harmless.HARMLESS.items():
        owner, field = line.split(".")[:2]
        assert reason
        if owner in {*named, "env"} and line not in elsewhere:
            assert f"{owner}.{field}" in known, line


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rope_parameters", {"rope_theta": 1e6, "rope_type": "default"}),
        ("rms_norm_eps", 1e-6),
        ("kvquay_unknown", 2),
    ],
)
def test_the_models_own_configuration_counts(config: Any, path: str, value: Any) -> None:
    base = made(config)
    with having(config.model_config.hf_config, path, value):
        found = made(config)
    assert found.digest != base.digest
    assert any(path in line for line in differences(base.described, found.described))


# ---- what must not part engines ---------------------------------------------------------------


def print_digest(folder: str) -> None:
    """For another process."""
    found = made(build(Path(folder)))
    print(json.dumps([found.digest.hex(), list(found.warnings)]))


def _in_another_process(folder: Path, **environ: str) -> tuple[str, list[str]]:
    code = f"from {__name__} import print_digest; print_digest({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "VLLM_LOGGING_LEVEL": "ERROR",
            **environ,
        },
    )
    digest, warned = json.loads(done.stdout.splitlines()[-1])
    return digest, warned


def test_two_processes_make_one_digest(config: Any, tmp_path: Path) -> None:
    mine = made(config)
    theirs = _in_another_process(
        tmp_path / "elsewhere",
        HOME=str(tmp_path),
        CUDA_VISIBLE_DEVICES="",
        VLLM_CPU_OMP_THREADS_BIND="0",
    )
    assert theirs == (mine.digest.hex(), [])


def test_another_seed_of_hashes_is_another_namespace(config: Any, tmp_path: Path) -> None:
    digest, warned = _in_another_process(tmp_path / "m", PYTHONHASHSEED="0")
    assert digest != made(config).digest.hex()
    assert "PYTHONHASHSEED" in warned[0]


def test_sizes_of_one_engine_do_not_count(config: Any, tmp_path: Path) -> None:
    smaller = build(
        tmp_path / "other",
        max_num_seqs=7,
        max_num_batched_tokens=4096,
        gpu_memory_utilization=0.5,
        seed=5,
        served_model_name="me",
        disable_log_stats=True,
        kv_transfer_config={
            "kv_connector": "KvquayConnector",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "blocks_per_chunk": 2,
                "socket": "/elsewhere",
                "offload_prompt_only": False,
            },
        },
    )
    mine, theirs = made(config), made(smaller, kv_caches(blocks=77))
    assert differences(mine.described, theirs.described) == []
    assert mine.digest == theirs.digest


# ---- keys, weights, versions ------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "length"), [("sha256", 36), ("sha256_cbor", 36)])
def test_the_length_of_keys(config: Any, algorithm: str, length: int) -> None:
    with having(config.cache_config, "prefix_caching_hash_algo", algorithm):
        assert made(config).key_bytes == length == namespace.key_bytes(config)


def test_random_keys_are_shared_with_nobody(config: Any) -> None:
    with having(config.cache_config, "prefix_caching_hash_algo", "xxhash"):
        one, another = made(config), made(config)
    assert one.key_bytes == 20
    assert one.digest != another.digest
    assert "shares with nobody" in one.warnings[0]


def test_an_unknown_hash_is_refused(config: Any) -> None:
    with (
        having(config.cache_config, "prefix_caching_hash_algo", "md5"),
        pytest.raises(SharingRefused, match="md5"),
    ):
        namespace.key_bytes(config)


def test_scales_of_one_process_are_refused(config: Any) -> None:
    with (
        having(config.cache_config, "calculate_kv_scales", True),
        pytest.raises(SharingRefused, match=r"cache_config\.calculate_kv_scales"),
    ):
        made(config)


def test_weights_count_by_content(config: Any, tmp_path: Path) -> None:
    config.load_config.load_format = "auto"
    try:
        digests = []
        for name, weights in (("a", b"1" * 100), ("b", b"1" * 100), ("c", b"2" * 100)):
            folder = tmp_path / name
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(weights)
            with having(config.model_config, "model", str(folder)):
                digests.append(made(config).digest)
    finally:
        config.load_config.load_format = "dummy"
    assert digests[0] == digests[1] != digests[2]


def test_quantisation_beside_the_weights_counts(config: Any, tmp_path: Path) -> None:
    config.load_config.load_format = "auto"
    try:
        with having(config.model_config, "model", str(tmp_path)):
            before = made(config).digest
            (tmp_path / "hf_quant_config.json").write_text("{}")
            assert made(config).digest != before
    finally:
        config.load_config.load_format = "dummy"


def test_weights_that_nothing_names_are_shared_with_nobody(config: Any) -> None:
    config.load_config.load_format = "auto"
    try:
        with having(config.model_config, "model", "someone/model"):
            one, another = made(config), made(config)
            assert one.digest != another.digest
            assert "someone/model" in one.warnings[0]
            extra = config.kv_transfer_config.kv_connector_extra_config
            named = []
            for version in ("1", "2"):
                with having(
                    config.kv_transfer_config,
                    "kv_connector_extra_config",
                    extra | {"weights_version": version},
                ):
                    named.append(made(config))
            with having(config.model_config, "revision", "0" * 40):
                assert made(config).digest == made(config).digest
    finally:
        config.load_config.load_format = "dummy"
    assert named[0].digest == named[1].digest  # told apart by the versions they attach with
    assert not named[0].warnings


def test_a_salt_counts_and_the_version_of_the_weights_is_told_apart_elsewhere(config: Any) -> None:
    extra = config.kv_transfer_config.kv_connector_extra_config
    base = made(config).digest
    with having(config.kv_transfer_config, "kv_connector_extra_config", extra | {"salt": "x"}):
        assert made(config).digest != base
    with having(
        config.kv_transfer_config, "kv_connector_extra_config", extra | {"weights_version": 2}
    ):
        assert made(config).digest == base


def test_the_version_of_vllm_counts_unless_listed(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = made(config).digest
    mine = versions.installed()
    assert mine is not None
    monkeypatch.setattr("vllm.__version__", "0.32.99")
    assert made(config).digest != base
    monkeypatch.setattr(versions, "COMPATIBLE", (frozenset({mine, "0.32.99"}),))
    assert made(config).digest == base or min(mine, "0.32.99") != mine


@pytest.mark.parametrize(
    ("variable", "counts"),
    [("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", True), ("VLLM_DP_MASTER_PORT", False)],
)
def test_variables_count_unless_listed(
    config: Any, variable: str, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = made(config).digest
    monkeypatch.setenv(variable, "1")
    assert (made(config).digest != base) == counts


def test_passwords_are_not_described(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {**envs.environment_variables, "VLLM_NEW_TOKEN": lambda: "hush"}
    monkeypatch.setattr(envs, "environment_variables", variables)
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    with having(config.model_config, "hf_token", "hush"):
        assert "hush" not in repr(made(config).described)


def test_a_part_that_only_watches_may_be_there_or_not(config: Any, tmp_path: Path) -> None:
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    assert made(build(tmp_path / "m", kv_events_config=events)).digest == made(config).digest


def test_a_draft_counts(config: Any, tmp_path: Path) -> None:
    drafting = build(
        tmp_path / "m",
        speculative_config={"model": str(tmp_path / "m"), "num_speculative_tokens": 2},
    )
    found = made(drafting)
    assert found.digest != made(config).digest
    assert "files" in found.described["draft_weights"]


# ---- what can't be put into words ---------------------------------------------------------------


class Thing:
    def method(self) -> None: ...


@pytest.mark.parametrize(
    "value",
    [
        Thing(),
        Thing().method,
        lambda config: config,
        functools.partial(print),
        print_digest,
        float("nan"),
        1 << 9999,
        "\ud800",
        {"inside": [object()]},
    ],
    ids=["object", "method", "lambda", "partial", "function", "nan", "huge", "text", "inside"],
)
def test_what_has_no_words_is_refused_by_name(config: Any, value: Any) -> None:
    with (
        having(config.model_config, "model_class_overrides", value),
        pytest.raises(SharingRefused, match=r"model_config\.model_class_overrides"),
    ):
        made(config)


@pytest.mark.parametrize(
    ("one", "another"),
    [
        ({1: "a"}, {"1": "a"}),
        ({"a"}, ["a"]),
        (None, ""),
        (0, False),
        (torch.float16, "float16"),
        ({1: 2}, [[1, 2]]),
    ],
)
def test_what_looks_alike_is_told_apart(config: Any, one: Any, another: Any) -> None:
    digests = []
    for value in (one, another):
        with having(config.model_config, "model_class_overrides", value):
            digests.append(made(config).digest)
    assert digests[0] != digests[1]


def test_a_loop_is_refused(config: Any) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with (
        having(config.model_config, "model_class_overrides", loop),
        pytest.raises(SharingRefused, match="nested"),
    ):
        made(config)
