"""A decoder for Llama, Qwen2 and Qwen3, whose weights have the names that transformers gives them.

It is our own because both uses here want another layout than batches of padded texts: training on rows in which the
answers to a prompt share it (:mod:`sextet.dapo.packing`), and generation in slots (:mod:`sextet.dapo.rollout`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

KINDS = ("llama", "qwen2", "qwen3")


class Cache(Protocol):
    """Where keys and values of earlier tokens are kept."""

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds those of new tokens, (B, kv heads, L, D); returns those to attend to, (B, kv heads, S, D)."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a decoder, by the names of transformers' configurations."""

    kind: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True

    @staticmethod
    def of(config: Mapping[str, Any]) -> Shape | None:
        """Returns the shape in a ``config.json``, or None where it has parts that this decoder lacks."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind, heads = config.get("model_type"), config.get("num_attention_heads")
        plain = (
            kind in KINDS
            and rope.get("rope_type", rope.get("type", "default")) == "default"
            and rope.get("partial_rotary_factor", 1.0) == 1.0
            and config.get("hidden_act", "silu") == "silu"
            and not config.get("use_sliding_window")
            and not config.get("attention_bias")
            and not config.get("mlp_bias")
        )
        if not plain or not heads:
            return None
        return Shape(
            kind=str(kind),
            **{name: config[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
        )


class Norm(nn.Module):
    """Root-mean-square normalisation, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> the same, in the dtype of x."""
        return functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


def rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of (B, heads, L, D) by cosines and sines (B, 1, L, D)."""
    first, second = x.float().chunk(2, -1)
    return (x * turns[0] + torch.cat((-second, first), -1) * turns[1]).to(x.dtype)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of grouped queries.

    Args:
        queries: (B, heads, L, D).
        keys: (B, kv heads, S, D); each serves the queries of heads / kv heads heads.
        values: The same.
        mask: (B or 1, 1, L, S), added to the scores.

    Returns:
        (B, heads, L, D).
    """
    batch, heads, length, size = queries.shape
    shared = heads // keys.shape[1]
    if shared > 1:  # the queries of a key's heads become further rows, so that no key is copied
        queries = queries.reshape(batch, -1, shared * length, size)
        mask = mask.unsqueeze(2).expand(-1, -1, shared, -1, -1).flatten(2, 3)
    found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    return found.reshape(batch, heads, length, size)


class Attention(nn.Module):
    """Self-attention with rotary positions."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.layer, self.size = layer, shape.head_dim
        biased = shape.kind == "qwen2"
        wide, narrow = shape.num_attention_heads * self.size, shape.num_key_value_heads * self.size
        self.q_proj = nn.Linear(shape.hidden_size, wide, bias=biased)
        self.k_proj = nn.Linear(shape.hidden_size, narrow, bias=biased)
        self.v_proj = nn.Linear(shape.hidden_size, narrow, bias=biased)
        self.o_proj = nn.Linear(wide, shape.hidden_size, bias=False)
        normed = shape.kind == "qwen3"
        self.q_norm = Norm(self.size, shape.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = Norm(self.size, shape.rms_norm_eps) if normed else nn.Identity()

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor, cache: Cache | None) -> Tensor:
        """(B, L, H) -> (B, L, H)."""
        queries, keys, values = (
            projection(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = rotate(self.q_norm(queries), turns), rotate(self.k_norm(keys), turns)
        if cache is not None:
            keys, values = cache.update(self.layer, keys, values)
        mixed = attend(queries, keys, values, mask.to(queries.dtype))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, H) -> (B, L, H)."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and feed-forward layer, each normalised before and added after."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape, layer), MLP(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor, cache: Cache | None) -> Tensor:
        """(B, L, H) -> (B, L, H)."""
        x = x + self.self_attn(self.input_layernorm(x), turns, mask, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Embeddings, layers and the last normalisation."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, layer) for layer in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Decoder(nn.Module):
    """The language model without its softmax: tokens to hidden states, and the matrix that makes logits of them."""

    checkpointing = False

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        if not shape.tie_word_embeddings:
            self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    @property
    def head(self) -> Tensor:
        """The weights (V, H) of the logits."""
        layer = self.model.embed_tokens if self.shape.tie_word_embeddings else self.lm_head
        weight: Tensor = layer.weight
        return weight

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None = None) -> Tensor:
        """Returns the hidden states (B, L, H) of tokens.

        Args:
            tokens: (B, L) ids.
            positions: (B, L) places in their texts.
            mask: (B or 1, 1, L, S) float, 0 where a token attends and -inf where not.
            cache: Of keys and values; S is L without one.
        """
        x = self.model.embed_tokens(tokens).float()
        turns = self._turns(positions)
        for layer in self.model.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, turns, mask, cache, use_reentrant=False)
            else:
                x = layer(x, turns, mask, cache)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        size = self.shape.head_dim
        steps = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
        angles = positions[:, None, :, None].float() / self.shape.rope_theta**steps
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()
