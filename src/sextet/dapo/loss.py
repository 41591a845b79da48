"""Advantages and losses, as pure functions of flat token tensors.

A mini-batch is S answers with N tokens in all; everything that belongs to a token is flat (N,), and ``answer`` (N,)
names each token's answer. The loss is a sum of ``weight * loss`` over tokens, where :func:`token_weights` has put
the whole normaliser into the weights, from the lengths of the whole mini-batch. So the gradient does not depend on
how the mini-batch is cut into micro-batches, packed, or shared among ranks, as long as no answer is torn.

Equations are those of the DAPO paper (arXiv 2503.14476) unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sextet.core.errors import UsageError
from sextet.dapo.config import LossConfig

STD_EPS = 1e-6  # as in verl; TRL has 1e-4
MAX_LOG_RATIO = 20.0  # as in verl: exp() of more says nothing and may overflow


def advantages(rewards: Tensor, groups: Tensor, kind: str) -> Tensor:
    """Returns the advantage of each answer.

    Args:
        rewards: (S,) final rewards.
        groups: (S,) number of each answer's group, from 0.
        kind: ``group``: (R - mean) / (std + 1e-6) with the unbiased std, as verl and TRL have it (the paper does
            not say which). ``mean``: R - mean (Dr. GRPO, arXiv 2503.20783). ``rloo``: R minus the mean of the others
            (arXiv 2402.14740). ``batch``: (R - group mean) over the std of the batch (REINFORCE++ with its baseline).

    Returns:
        (S,) float32; zeros for groups without spread. A group of one has its reward under ``rloo``, else zero.
    """
    values = rewards.double()
    number = int(groups.max()) + 1 if len(groups) else 0
    sizes = torch.zeros(number, dtype=torch.float64).index_add_(0, groups, torch.ones_like(values))
    means = torch.zeros_like(sizes).index_add_(0, groups, values) / sizes
    centred = values - means[groups]
    if kind == "rloo":
        size = sizes[groups]
        return torch.where(size > 1, centred * size / (size - 1).clamp(min=1), values).float()
    if kind == "group":
        squares = torch.zeros_like(sizes).index_add_(0, groups, centred.square())
        std = (squares / (sizes - 1).clamp(min=1)).sqrt()
        centred = centred / (std[groups] + STD_EPS)
    elif kind == "batch":
        centred = centred / (centred.std() + STD_EPS) if len(values) > 1 else centred
    elif kind != "mean":
        raise UsageError(f'advantage "{kind}" is not one of group, mean, rloo, batch')
    return centred.float()


def token_weights(
    lengths: Sequence[int], groups: Sequence[int], kind: str, *, horizon: int = 0, kept: Sequence[bool] | None = None
) -> Tensor:
    """Returns the weight of every token of each answer in the loss of a mini-batch.

    Args:
        lengths: (S,) tokens of each answer, the stop token included.
        groups: (S,) number of each answer's group.
        kind: ``token``: one over all tokens of the mini-batch (eq. 8 as every implementation has it). ``group``: over
            the tokens of a group, then over groups (eq. 8 to the letter). ``sequence``: over the answer's tokens, then
            over answers (GRPO, eq. 4-6). ``sequence-sum``: over answers. ``constant``: over answers and ``horizon``
            tokens (Dr. GRPO).
        horizon: Most tokens of an answer, for ``constant``.
        kept: (S,) False for answers whose loss is masked (overlong filtering); they count nowhere.

    Returns:
        (S,) float64; all zero when nothing is kept.
    """
    length = torch.as_tensor(lengths, dtype=torch.float64)
    mask = torch.ones(len(length), dtype=torch.bool) if kept is None else torch.as_tensor(kept, dtype=torch.bool)
    mask = mask & (length > 0)
    answers = mask.sum().clamp(min=1)
    if kind == "token":
        weights = torch.ones_like(length) / length[mask].sum().clamp(min=1)
    elif kind == "sequence":
        weights = 1 / (length.clamp(min=1) * answers)
    elif kind == "sequence-sum":
        weights = torch.ones_like(length) / answers
    elif kind == "constant":
        weights = torch.ones_like(length) / (answers * horizon)
    elif kind == "group":
        _, index = torch.as_tensor(groups).unique(return_inverse=True)
        tokens = torch.zeros(int(index.max()) + 1 if len(index) else 0, dtype=torch.float64)
        tokens.index_add_(0, index[mask], length[mask])
        weights = 1 / (tokens[index].clamp(min=1) * (tokens > 0).sum().clamp(min=1))
    else:
        raise UsageError(f'aggregate "{kind}" is not one of token, group, sequence, sequence-sum, constant')
    return weights * mask


MONITORED = (
    "tokens", "clip_low", "clip_high", "clip_high_probability", "dual_clip", "kl_old", "kl", "entropy", "probability",
    "rollout_difference", "rollout_kl",
)  # fmt: skip
"""What :func:`policy_loss` sums up."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What the loss needs of the tokens of some answers; all (N,), in the same order, ``answer`` non-decreasing."""

    old: Tensor
    """Log-probabilities before the update: the centre of the clipping."""
    rollout: Tensor
    """Log-probabilities with which the tokens were sampled; the same as ``old`` unless engines or versions differ."""
    advantage: Tensor
    weight: Tensor
    answer: Tensor
    """Number of each token's answer."""
    reference: Tensor | None = None
    """Log-probabilities of the reference model, where there is a KL term."""


def policy_loss(logp: Tensor, entropy: Tensor, tokens: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss, a sum of weighted tokens, and sums of what is monitored, by name.

    Args:
        logp: (N,) log-probabilities now, with their graph.
        entropy: (N,) entropies now; used with its graph where ``config.entropy`` is not 0.
        tokens: The rest.
        config: With no field left to the method (see :func:`sextet.dapo.config.resolve`).

    Returns:
        The loss (), and detached sums over tokens: ``tokens``, ``clip_low``, ``clip_high``, ``clip_high_probability``
        (of tokens clipped from above), ``dual_clip``, ``kl_old`` (k1), ``kl`` (k3, to the reference), ``entropy``,
        ``probability`` (of the sampled tokens), and of ``rollout_*`` the difference to the sampler's log-probabilities.
    """
    advantage = tokens.advantage
    log_ratio = (logp - tokens.old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high  # type: ignore[operator]
    dual = torch.zeros_like(advantage, dtype=torch.bool)
    if config.objective == "clip":
        capped = ratio.clamp(max=config.ratio_cap) if config.ratio_cap else ratio
        per_token = -torch.minimum(capped * advantage, ratio.clamp(low, high) * advantage)
        if config.dual_clip:
            bound = -config.dual_clip * advantage
            dual = (advantage < 0) & (per_token > bound)
            per_token = torch.where(dual, bound, per_token)
    elif config.objective == "gspo":
        mean = answer_means(log_ratio, tokens.answer)
        # the value is the answer's ratio, the gradient that of each token's log-probability
        level = (mean.detach() + logp - logp.detach()).clamp(max=10).exp()
        ratio = mean.exp()
        per_token = -torch.minimum(level * advantage, level.clamp(low, high) * advantage)
    elif config.objective == "cispo":
        floor = low if config.clip_low else 0.0
        per_token = -ratio.detach().clamp(floor, high) * advantage * logp
    elif config.objective == "sapo":
        positive, negative = (advantage.new_tensor(tau) for tau in (config.tau_positive, config.tau_negative))
        tau = torch.where(advantage > 0, positive, negative)
        per_token = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
    else:
        per_token = -advantage * logp
    values = ratio.detach()
    above, below = (advantage > 0) & (values > high), (advantage < 0) & (values < low)
    if config.importance != "none":
        per_token = per_token * importance_weights(tokens.old - tokens.rollout, tokens.answer, config)
    loss = (per_token * tokens.weight).sum()
    sums = {
        "tokens": torch.ones_like(logp),
        "clip_low": below,
        "clip_high": above,
        "clip_high_probability": above * logp.detach().exp(),
        "dual_clip": dual,
        "kl_old": -log_ratio,
        "entropy": entropy,
        "probability": logp.exp(),
        "rollout_difference": (tokens.old - tokens.rollout).abs(),
        "rollout_kl": k3(tokens.rollout, tokens.old),
        "kl": torch.zeros_like(logp),
    }
    if config.kl and tokens.reference is not None:
        divergence = k3(logp, tokens.reference)
        loss = loss + config.kl * (divergence * tokens.weight).sum()
        sums["kl"] = divergence
    if config.entropy:
        loss = loss - config.entropy * (entropy * tokens.weight).sum()
    return loss, {name: value.detach().double().sum() for name, value in sums.items()}


def answer_means(values: Tensor, answer: Tensor) -> Tensor:
    """Returns for each token (N,) the mean of ``values`` over the tokens of its answer."""
    _, index = answer.unique_consecutive(return_inverse=True)
    number = int(index[-1]) + 1 if len(index) else 0
    sums = values.new_zeros(number).index_add(0, index, values)
    counts = values.new_zeros(number).index_add(0, index, torch.ones_like(values))
    return (sums / counts)[index]


def importance_weights(log_weight: Tensor, answer: Tensor, config: LossConfig) -> Tensor:
    """Returns the constant factor (N,) for tokens that another engine, or an older version, sampled.

    ``truncate``: min(pi_old / mu, cap) of each token (truncated importance sampling). ``mask``: tokens whose weight is
    over the cap or under its inverse have no loss. ``sequence``: the answer's geometric mean, truncated.
    """
    if config.importance == "sequence":
        log_weight = answer_means(log_weight, answer)
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    cap = config.importance_cap
    if config.importance == "mask":
        return weight * ((weight <= cap) & (weight >= 1 / cap))
    return weight.clamp(max=cap)


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    """Returns the estimator exp(d) - d - 1 with d = reference - logp of KL(logp || reference), per token (N,).

    As in verl, d is held in -20..20 and the value in -10..10.
    """
    difference = (reference - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (difference.exp() - difference - 1).clamp(-10, 10)


def overlong_penalty(length: int, max_tokens: int, cache_tokens: int) -> float:
    """Returns the soft overlong punishment of an answer of ``length`` tokens, from 0 to -1."""
    if not cache_tokens:
        return 0.0
    return -min(1.0, max(0, length - (max_tokens - cache_tokens)) / cache_tokens)
