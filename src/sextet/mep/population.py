"""Population entropy: pure functions of the action log-probabilities of a population.

Shapes: n members, B states, A actions. `log_probs` is (n, B, A), normalised over the last axis, in nats. All
work is done in log space, so that an action no member plays (-inf) gives a finite answer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mean_log_policy(log_probs: Tensor) -> Tensor:
    """Log of the population's mean policy, log pibar(a|s): (n, B, A) -> (B, A).

    The mean is over probabilities: logsumexp - log n. The mean of the logs would train another objective.
    Source: MEP paper, definition of the mean policy.
    """
    if log_probs.dim() != 3:
        raise ValueError(f"log_probs must be (members, states, actions), got {tuple(log_probs.shape)}")
    return torch.logsumexp(log_probs, dim=0) - math.log(log_probs.shape[0])


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy over the last axis, with 0 log 0 = 0: (..., A) -> (...)."""
    result: Tensor = torch.special.entr(log_probs.exp()).sum(-1)
    return result


def population_entropy(log_probs: Tensor) -> Tensor:
    """PE(s), the entropy of the mean policy, between 0 and log A: (n, B, A) -> (B,). Source: MEP paper."""
    return entropy(mean_log_policy(log_probs))


def population_diversity(log_probs: Tensor) -> Tensor:
    """PD(s), mean entropy plus mean pairwise KL divergence, never below PE: (n, B, A) -> (B,).

    Costs n^2 and is infinite as soon as one member excludes an action that another plays. Source: MEP paper.
    """
    # mean_i H(pi_i) + mean_ij KL(pi_i || pi_j) = -mean_ij sum_a pi_i log pi_j ; 0 * -inf counts as 0.
    cross = log_probs.exp().unsqueeze(1) * log_probs.unsqueeze(0)
    return -torch.where(log_probs.unsqueeze(1).isneginf(), 0.0, cross).sum(-1).mean(dim=(0, 1))


def jensen_shannon(log_probs: Tensor) -> Tensor:
    """Jensen-Shannon divergence of the members, PE - mean entropy: (n, B, A) -> (B,)."""
    log_mean = mean_log_policy(log_probs)
    terms = torch.where(log_probs.isneginf(), 0.0, log_probs.exp() * (log_probs - log_mean))
    return terms.sum(-1).mean(0)


def entropy_bonus(log_probs: Tensor, actions: Tensor, *, reference_quirks: bool = False) -> Tensor:
    """Reward term -log pibar(a|s) of the sampled actions: (n, B, A), (B,) int64 -> (B,).

    `log_probs` holds every member once, the learner included. `reference_quirks` repeats a bug of the
    published code, which read every bonus from the first state's mean policy, to compare with its runs.
    Source: MEP paper, reward of the population stage.
    """
    log_mean = mean_log_policy(log_probs)
    if reference_quirks:
        return -log_mean.flatten()[actions]
    return -log_mean.gather(1, actions.unsqueeze(1)).squeeze(1)
