"""Log-probabilities and entropies of tokens without keeping the logits of more than a few tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 2**24  # logits at a time: 64 MB in float32


def token_scores(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of tokens and entropies of the distributions they are drawn from, both (n,) float32.

    Args:
        hidden: (n, H) states from which the tokens are predicted.
        head: (V, H) weights of the logits.
        targets: (n,) the tokens.
        temperature: Divides the logits.
    """
    return _Scores.apply(hidden, head, targets, temperature)  # type: ignore[no-any-return, no-untyped-call]


class _Scores(torch.autograd.Function):
    """The backward pass computes the logits again, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        matrix = _cast(head)
        states = hidden.to(matrix.dtype)
        logp, entropy, totals = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(3))
        for part in _parts(len(targets), len(head)):
            logits = _logits(states[part], matrix, temperature)
            highest = logits.amax(-1)
            p = logits.sub_(highest[:, None]).exp()  # times the sum
            total = p.sum(-1)
            rest = total.log()
            logp[part] = logits.gather(-1, targets[part, None])[:, 0] - rest
            entropy[part] = rest - torch.linalg.vecdot(p, logits) / total
            totals[part] = highest + rest
        ctx.save_for_backward(states, head, targets, totals, entropy)
        ctx.temperature, ctx.dtype = temperature, hidden.dtype
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        states, head, targets, totals, entropy = ctx.saved_tensors
        by_logp, by_entropy = gradients
        matrix, with_entropy = _cast(head, states.dtype), bool(by_entropy.any())
        back = torch.empty_like(states, dtype=ctx.dtype)
        out = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _parts(len(targets), len(head)):
            slope = _logits(states[part], matrix, ctx.temperature).sub_(totals[part, None])
            if with_entropy:
                factor = slope.add(entropy[part, None]).mul_(-by_entropy[part, None]).sub_(by_logp[part, None])
                slope.exp_().mul_(factor)
            else:
                slope.exp_().mul_(-by_logp[part, None])
            slope.scatter_add_(-1, targets[part, None], by_logp[part, None])
            slope = _cooled(slope, ctx.temperature).to(matrix.dtype)
            back[part] = (slope @ matrix).to(ctx.dtype)
            if out is not None:
                if slope.dtype == out.dtype:
                    out.addmm_(slope.T, states[part])
                else:
                    out += slope.T @ states[part]
        return back, None if out is None else out.to(head.dtype), None, None


def _cast(head: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    kind = head.device.type
    if dtype is None:
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.dtype
    return head.detach().to(dtype)


def _logits(states: Tensor, matrix: Tensor, temperature: float) -> Tensor:
    return _cooled((states @ matrix.T).float(), temperature)


def _cooled(values: Tensor, temperature: float) -> Tensor:
    return values if temperature == 1 else values.div_(temperature)


def _parts(number: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK // vocabulary)
    return [slice(start, start + size) for start in range(0, number, size)]
