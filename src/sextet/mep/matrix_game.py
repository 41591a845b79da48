"""Matrix games with several conventions, solved by exact policy gradient: MEP's effect in seconds.

All games are two-player, symmetric and common-pay-off. The paper's own pay-off tables are not public, so the
games and their settings are our choice. Softmax policies climb the exact gradient, so that a result depends
on the initial logits alone; every alpha, seed and member is one row of a single tensor.

Legend: V alphas, S seeds, n members, k partners, K actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from scipy.stats import rankdata
from torch import Tensor

from sextet.core.seeding import torch_rng
from sextet.mep.population import entropy, mean_log_policy, population_entropy


@dataclass(frozen=True, kw_only=True)
class MatrixGame:
    """A symmetric game: `payoff` (K, K) for both players, `convention` (K,) to which each action belongs."""

    name: str
    payoff: Tensor
    convention: Tensor


def lever_equal(size: int = 8) -> MatrixGame:
    """Players score 1 when they pull the same of `size` levers."""
    return MatrixGame(name="lever_equal", payoff=torch.eye(size).double(), convention=torch.arange(size))


def lever_graded(size: int = 8) -> MatrixGame:
    """As `lever_equal`, with pay-offs falling evenly from 1 to 0.5: greedy learners crowd on the best."""
    payoff = torch.diag(torch.linspace(1.0, 0.5, size, dtype=torch.float64))
    return MatrixGame(name="lever_graded", payoff=payoff, convention=torch.arange(size))


def blocks() -> MatrixGame:
    """Sixteen actions in blocks of 8, 4, 2, 1, 1; small blocks pay more and are harder to find."""
    sizes = torch.tensor([8, 4, 2, 1, 1])
    pays = (0.6, 0.7, 0.8, 0.9, 1.0)
    convention = torch.repeat_interleave(torch.arange(5), sizes)
    same = convention.unsqueeze(0) == convention.unsqueeze(1)
    payoff = same * torch.tensor(pays, dtype=torch.float64)[convention]
    return MatrixGame(name="blocks", payoff=payoff, convention=convention)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the result table: `values` maps a metric to its value for each seed."""

    game: str
    method: str
    alpha: float
    beta: float | None
    values: dict[str, list[float]]


def train_population(
    game: MatrixGame,
    alphas: Sequence[float],
    *,
    num_seeds: int = 20,
    size: int = 8,
    iterations: int = 3000,
    learning_rate: float = 0.5,
    seed: int = 0,
    keep_every: int = 25,
) -> Tensor:
    """Trains populations of self-playing members with the population-entropy bonus.

    Each seat earns payoff - alpha log pibar(a), pibar being the mean policy of all members before the
    step; alpha 0 is independent self-play, that is, SP and the seeds of FCP. Every alpha starts from the
    same logits, drawn from N(0, 0.1^2).

    Returns:
        (H, V, S, n, K) log-probabilities at every `keep_every` iterations, the start first and the end last.
    """
    draw = 0.1 * torch.randn((num_seeds, size, len(game.payoff)), generator=torch_rng(seed, "init")).double()
    logits = draw.expand(len(alphas), *draw.shape).clone()
    weight = torch.tensor(alphas, dtype=torch.float64).view(-1, 1, 1, 1)
    history = []
    for iteration in range(iterations + 1):
        log_probs = logits.log_softmax(-1)
        if iteration % keep_every == 0 or iteration == iterations:
            history.append(log_probs)
        log_mean = mean_log_policy(log_probs.movedim(2, 0).flatten(1, 2)).view(len(alphas), num_seeds, 1, -1)
        probs = log_probs.exp()
        value = probs @ game.payoff - weight * log_mean
        logits += learning_rate * 2 * _softmax_gradient(probs, value)  # 2: both seats follow the same policy
    return torch.stack(history)


def _softmax_gradient(probs: Tensor, value: Tensor) -> Tensor:
    """Gradient of sum_a pi(a) value(a) for the logits of pi, `value` held fixed: (..., K) -> (..., K)."""
    return probs * (value - (probs * value).sum(-1, keepdim=True))


def population_row(game: MatrixGame, history: Tensor, alphas: Sequence[float], index: int) -> Row:
    """Conventions (distinct likeliest actions), entropies, self-play and cross-play of one alpha."""
    final = history[-1, index]
    probs = final.exp()
    found = game.convention[probs.argmax(-1)]
    size = probs.shape[1]
    pairs = probs @ game.payoff @ probs.mT
    own = pairs.diagonal(dim1=-2, dim2=-1)
    crossed = (pairs.sum((-1, -2)) - own.sum(-1)) / max(size * (size - 1), 1)
    values = {
        "conventions": torch.tensor([float(row.unique().numel()) for row in found]),
        "population_entropy": population_entropy(final.movedim(1, 0)),
        "entropy": entropy(final).mean(-1),
        "self_play": own.mean(-1),
        "cross_play": crossed,
    }
    alpha = alphas[index]
    lists = {name: value.tolist() for name, value in values.items()}
    return Row(game=game.name, method="MEP" if alpha > 0 else "SP", alpha=alpha, beta=None, values=lists)


def partner_pool(game: MatrixGame, history: Tensor) -> Tensor:
    """Init, mid (return nearest to half of the final) and final policies of all members: (V, S, 3n, K)."""
    probs = history.exp()
    returns = ((probs @ game.payoff) * probs).sum(-1)
    middle = (returns - returns[-1] / 2).abs().argmin(0)
    mid = probs.gather(0, middle[None, ..., None].expand(1, *probs.shape[1:]))[0]
    return torch.cat([probs[0], mid, probs[-1]], dim=2)


def best_response(
    game: MatrixGame,
    pool: Tensor,
    *,
    beta: float,
    rounds: int = 10,
    iterations: int = 600,
    learning_rate: float = 0.5,
    seed: int = 0,
) -> Tensor:
    """Trains an agent that sees its partner's last action against a pool of memoryless partners.

    `pool` is (V, S, k, K) probabilities. Partners are weighted by rank(1 / return)^beta, recomputed at every
    iteration; beta 0 is uniform.

    Returns:
        (V, S, K) return with each pure convention of a lever game, divided by the best possible.
    """
    size = len(game.payoff)
    draw = 0.1 * torch.randn((pool.shape[1], size + 1, size), generator=torch_rng(seed, "response")).double()
    logits = draw.expand(len(pool), *draw.shape).clone()  # row 0: the first round; row 1 + a: the partner played a
    gain = pool @ game.payoff
    for _ in range(iterations):
        probs = logits.softmax(-1)
        later = ((pool @ probs[..., 1:, :]) * gain).sum(-1)
        returns = (gain @ probs[..., 0, :, None])[..., 0] + (rounds - 1) * later
        weight = torch.from_numpy(rankdata(1 / (returns.numpy() + 1e-6), method="dense", axis=-1)) ** beta
        weight = (weight / weight.sum(-1, keepdim=True)).unsqueeze(-1)
        first = (weight * gain).sum(-2, keepdim=True)
        value = torch.cat([first, (rounds - 1) * (weight * pool).mT @ gain], dim=-2)
        logits += learning_rate * _softmax_gradient(probs, value)
    probs = logits.softmax(-1)
    return (probs[..., 0, :] + (rounds - 1) * probs[..., 1:, :].diagonal(dim1=-2, dim2=-1)) / rounds


def run_matrix_games(
    *,
    num_seeds: int = 20,
    alphas: Sequence[float] = (0.0, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0),
    seed: int = 0,
    between: Callable[[], None] = lambda: None,
) -> list[Row]:
    """All rows of the comparison: three one-shot games, then best responses in the repeated lever game.

    In the repeated game (10 rounds of `lever_graded`) SP trains with one member's final policy alone, FCP
    with the pool of alpha 0 and MEP with those of the other alphas; each is tested with all eight pure
    conventions. The row of alpha 0 of the one-shot games is both SP and the population of FCP.
    `between` is called between games, where a caller may stop.
    """
    rows = []
    for game in (lever_equal(), lever_graded(), blocks()):
        history = train_population(game, alphas, num_seeds=num_seeds, seed=seed)
        rows += [population_row(game, history, alphas, index) for index in range(len(alphas))]
        between()
    game = lever_graded()
    history = train_population(game, alphas, num_seeds=num_seeds, iterations=1500, seed=seed)
    pools = {"SP": (history[-1, :1, :, :1].exp(), (0.0,)), "MEP": (partner_pool(game, history), (0.0, 3.0))}
    for method, (pool, betas) in pools.items():
        for beta in betas:
            scores = best_response(game, pool, beta=beta, seed=seed)
            for alpha, score in zip(alphas, scores, strict=False):
                values = {"return": score.mean(-1).tolist(), "worst": score.amin(-1).tolist()}
                name = "FCP" if method == "MEP" and alpha == 0 else method
                rows.append(Row(game="repeated_lever", method=name, alpha=alpha, beta=beta, values=values))
    return rows
