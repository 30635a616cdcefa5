"""A decoder-only transformer over bytes, with seeded weights and a KV cache in blocks.

Rotary positions, grouped-query attention, gated feed-forward. One call computes the tokens of one
block, always in the same shape for the same prompt, so that it makes no difference to a single bit
whether the blocks before were computed here or loaded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyConfig:
    """Sizes and the seed of the weights."""

    layers: int = 3
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 256
    block_tokens: int = 16
    num_blocks: int = 512
    seed: int = 7

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """KV of one block: layers, key or value, tokens, KV heads, head dimension."""
        return self.layers, 2, self.block_tokens, self.kv_heads, self.head_dim

    def kv_depends_on(self) -> dict[str, str | int]:
        """Everything that changes the bytes of a block, for the namespace."""
        sizes = {name: value for name, value in asdict(self).items() if name != "num_blocks"}
        # Sums depend on the order of their parts: on how many threads and what instructions.
        machine = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }
        return {"model": "kvquay toy", "dtype": "float32", **machine, **sizes}


class ToyModel:
    """Weights and the forward pass. `kv` holds all blocks: (num_blocks, *block_shape), float32."""

    def __init__(self, config: ToyConfig) -> None:
        self.config = config
        source = torch.Generator().manual_seed(config.seed)

        def weight(rows: int, columns: int) -> Tensor:
            drawn: Tensor = torch.randn(rows, columns, generator=source)
            scaled: Tensor = drawn * (1.6 / columns**0.5)
            return scaled

        c = config
        self._embedding = torch.randn(c.vocab, c.hidden, generator=source)
        self._layers = [
            {
                "q": weight(c.heads * c.head_dim, c.hidden),
                "k": weight(c.kv_heads * c.head_dim, c.hidden),
                "v": weight(c.kv_heads * c.head_dim, c.hidden),
                "o": weight(c.hidden, c.heads * c.head_dim),
                "gate": weight(2 * c.hidden, c.hidden),
                "up": weight(2 * c.hidden, c.hidden),
                "down": weight(c.hidden, 2 * c.hidden),
            }
            for _ in range(c.layers)
        ]
        self._head = weight(c.vocab, c.hidden)
        self.kv = torch.zeros(c.num_blocks, *c.block_shape)

    @torch.inference_mode()
    def forward(self, tokens: list[int], start: int, table: list[int]) -> Tensor:
        """Logits of the last of `tokens`, which lie in one block from position `start` on.

        `table`: blocks of the sequence, in order; KV of the tokens is written to it.
        """
        c = self.config
        positions = torch.arange(start, start + len(tokens))
        end = start + len(tokens)
        block, offset = table[start // c.block_tokens], start % c.block_tokens
        mask = torch.arange(end)[None, :] > positions[:, None]
        x = self._embedding[torch.tensor(tokens)]
        for number, layer in enumerate(self._layers):
            h = _norm(x)
            q = _rotate((h @ layer["q"].T).view(-1, c.heads, c.head_dim), positions)
            k = _rotate((h @ layer["k"].T).view(-1, c.kv_heads, c.head_dim), positions)
            v = (h @ layer["v"].T).view(-1, c.kv_heads, c.head_dim)
            self.kv[block, number, 0, offset : offset + len(tokens)] = k
            self.kv[block, number, 1, offset : offset + len(tokens)] = v
            past = self.kv[table, number].transpose(0, 1).flatten(1, 2)[:, :end]
            repeat = c.heads // c.kv_heads
            keys, values = (part.repeat_interleave(repeat, dim=1) for part in past)
            scores = torch.einsum("thd,shd->hts", q, keys) / c.head_dim**0.5
            weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
            mixed = torch.einsum("hts,shd->thd", weights, values).flatten(1)
            x = x + mixed @ layer["o"].T
            h = _norm(x)
            gate = torch.nn.functional.silu(h @ layer["gate"].T)
            x = x + (gate * (h @ layer["up"].T)) @ layer["down"].T
        logits: Tensor = _norm(x[-1]) @ self._head.T
        return logits


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None] / 10_000 ** (torch.arange(half) / half)
    sin, cos = angles.sin()[:, None], angles.cos()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
