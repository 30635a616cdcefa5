"""Tiny models with real random weights: what they say depends on every token of their context, so
that a wrong byte in the cache changes the output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 1024
_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA: dict[str, Any] = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
GEMMA: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "rms_norm_eps": 1e-6,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 32,
    "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
"""Full and windowed attention in turns: three groups of layers in vLLM."""


def write(folder: Path, config: dict[str, Any], seed: int = 1) -> Path:
    """A model as Hugging Face lays it out; `seed` decides its weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, np.random.default_rng(seed)), folder / "model.safetensors")
    return folder


def _weights(config: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    hidden, inner, head = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    queries = config["num_attention_heads"] * head
    values = config["num_key_value_heads"] * head
    gemma = config["model_type"] == "gemma3_text"

    def matrix(rows: int, columns: int) -> Any:
        return random.normal(0.0, 0.25, (rows, columns)).astype(np.float32)

    def norm(size: int) -> Any:
        """Of no effect: Gemma adds one to what is in the file."""
        return np.full(size, 0.0 if gemma else 1.0, dtype=np.float32)

    weights = {
        # Gemma's is its output layer, too: as large as the others it would repeat one token.
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden) / (5 if gemma else 1),
        "model.norm.weight": norm(hidden),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        for name, rows in (("q_proj", queries), ("k_proj", values), ("v_proj", values)):
            weights[f"{layer}self_attn.{name}.weight"] = matrix(rows, hidden)
        weights[layer + "self_attn.o_proj.weight"] = matrix(hidden, queries)
        weights[layer + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        weights[layer + "mlp.up_proj.weight"] = matrix(inner, hidden)
        weights[layer + "mlp.down_proj.weight"] = matrix(hidden, inner)
        for name in norms:
            weights[f"{layer}{name}.weight"] = norm(hidden)
        if gemma:
            for name in ("q_norm", "k_norm"):
                weights[f"{layer}self_attn.{name}.weight"] = norm(head)
    return weights
