"""Matrix games with several conventions, solved by exact policy gradient: five methods in seconds.

All games are two-player, symmetric and common-pay-off. The paper's own pay-off tables are not public, so the
games and their settings are our choice. Softmax policies climb the exact gradient, so that a result depends
on the initial logits alone (PBT's also on its mutations); every alpha, seed and member is one row of a tensor.

Legend: V alphas, then TrajeDi's weights, S seeds, n members, k partners, K actions.
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
    """One line of the result table: `values` maps a metric to its value for each seed.

    `alpha` is the weight of the method's diversity term: of TrajeDi's divergence, 0 where a method has none.
    """

    game: str
    method: str
    alpha: float
    beta: float | None
    values: dict[str, list[float]]


def train_population(
    game: MatrixGame,
    alphas: Sequence[float],
    weights: Sequence[float] = (),
    *,
    num_seeds: int = 20,
    size: int = 8,
    iterations: int = 3000,
    learning_rate: float = 0.5,
    seed: int = 0,
    keep_every: int = 25,
) -> Tensor:
    """Trains populations of self-playing members: MEP's for each alpha, then TrajeDi's for each weight.

    MEP: each seat earns payoff - alpha log pibar(a), pibar being the mean policy of all members before the
    step; alpha 0 is independent self-play, that is, SP and the seeds of FCP. TrajeDi: the members together
    climb the sum of their returns + weight * n * JSD for each seat, so that a weight has the unit of an alpha.
    A game of one step has one JSD for any discount, and n * JSD = sum_i KL(pi_i || pibar), whose gradient for
    pi_i is log pi_i - log pibar, the changes of all other terms through pibar included. So TrajeDi is MEP
    less the members' own entropy. All start from the same logits, drawn from N(0, 0.1^2).

    Returns:
        (H, V, S, n, K) log-probabilities at every `keep_every` iterations, the start first and the end last.
    """
    draw = _initial_logits(game, num_seeds, size, seed)
    logits = draw.expand(len(alphas) + len(weights), *draw.shape).clone()
    between = torch.tensor([*alphas, *weights], dtype=torch.float64).view(-1, 1, 1, 1)
    inside = torch.tensor([*[0.0] * len(alphas), *weights], dtype=torch.float64).view(-1, 1, 1, 1)
    history = []
    for iteration in range(iterations + 1):
        log_probs = logits.log_softmax(-1)
        if iteration % keep_every == 0 or iteration == iterations:
            history.append(log_probs)
        log_mean = mean_log_policy(log_probs.movedim(2, 0).flatten(1, 2)).view(len(logits), num_seeds, 1, -1)
        probs = log_probs.exp()
        value = probs @ game.payoff - between * log_mean + inside * log_probs
        logits += learning_rate * 2 * _softmax_gradient(probs, value)  # 2: both seats follow the same policy
    return torch.stack(history)


def train_pbt(
    game: MatrixGame,
    *,
    num_seeds: int = 20,
    size: int = 8,
    generations: int = 60,
    iterations: int = 50,
    learning_rate: float = 0.5,
    seed: int = 0,
) -> Tensor:
    """Population-based training: all pairs learn together, and each generation ends with `select_and_mutate`.

    A member's partners are all members, itself included, in both seats. As in the 2019 code its score is the
    mean return of its pairs; the learning rate is the only hyper-parameter an exact gradient has. Generations
    and iterations are our choice: as many steps as the other methods take.

    Returns:
        (S, n, K) log-probabilities of the members, the best first.
    """
    logits = _initial_logits(game, num_seeds, size, seed)
    rates = torch.full((num_seeds, size), learning_rate, dtype=torch.float64)
    for generation in range(generations):
        for _ in range(iterations):
            probs = logits.softmax(-1)
            value = probs.mean(1, keepdim=True) @ game.payoff
            logits += rates.unsqueeze(-1) * 2 * _softmax_gradient(probs, value)
        chance = torch.rand((num_seeds, 2), generator=torch_rng(seed, "update", "pbt", generation)).double()
        logits, rates = select_and_mutate(logits, rates, pair_scores(game, logits), chance)
    order = pair_scores(game, logits).argsort(dim=1, descending=True, stable=True)
    return logits.log_softmax(-1).take_along_dim(order.unsqueeze(-1), 1)


def pair_scores(game: MatrixGame, logits: Tensor) -> Tensor:
    """Mean return of each member over its pairs with all members: (S, n, K) logits -> (S, n)."""
    probs = logits.softmax(-1)
    return (probs @ game.payoff @ probs.mT).mean(-1)


def select_and_mutate(logits: Tensor, rates: Tensor, scores: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
    """Overwrites each seed's worst member with its best, weights and rate, and mutates the copy's rate.

    With probability 0.33 the rate is multiplied by 0.75 or 1.25, as in the 2019 code. (S, n, K) logits, (S, n)
    rates and scores, (S, 2) uniform `chance` -> new logits and rates.
    """
    seeds, best, worst = torch.arange(len(scores)), scores.argmax(1), scores.argmin(1)
    logits, rates = logits.clone(), rates.clone()
    logits[seeds, worst] = logits[seeds, best]
    factor = torch.where(chance[:, 1] < 0.5, 0.75, 1.25).where(chance[:, 0] < 0.33, 1.0)
    rates[seeds, worst] = rates[seeds, best] * factor
    return logits, rates


def _initial_logits(game: MatrixGame, num_seeds: int, size: int, seed: int) -> Tensor:
    return 0.1 * torch.randn((num_seeds, size, len(game.payoff)), generator=torch_rng(seed, "init")).double()


def _softmax_gradient(probs: Tensor, value: Tensor) -> Tensor:
    """Gradient of sum_a pi(a) value(a) for the logits of pi, `value` held fixed: (..., K) -> (..., K)."""
    return probs * (value - (probs * value).sum(-1, keepdim=True))


def conventions(game: MatrixGame, log_probs: Tensor) -> Tensor:
    """The convention of each policy's likeliest action: (..., K) -> (...)."""
    return game.convention[log_probs.argmax(-1)]


def population_row(game: MatrixGame, log_probs: Tensor, method: str, alpha: float = 0.0) -> Row:
    """Different conventions, entropies, self-play and cross-play of (S, n, K) populations, one for each seed."""
    probs = log_probs.exp()
    size = probs.shape[1]
    pairs = probs @ game.payoff @ probs.mT
    own = pairs.diagonal(dim1=-2, dim2=-1)
    crossed = (pairs.sum((-1, -2)) - own.sum(-1)) / max(size * (size - 1), 1)
    values = {
        "conventions": torch.tensor([float(row.unique().numel()) for row in conventions(game, log_probs)]),
        "population_entropy": population_entropy(log_probs.movedim(1, 0)),
        "entropy": entropy(log_probs).mean(-1),
        "self_play": own.mean(-1),
        "cross_play": crossed,
    }
    lists = {name: value.tolist() for name, value in values.items()}
    return Row(game=game.name, method=method, alpha=alpha, beta=None, values=lists)


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
    weights: Sequence[float] = (0.1, 0.3, 0.5, 1.0),
    seed: int = 0,
    between: Callable[[], None] = lambda: None,
) -> list[Row]:
    """All rows of the comparison: three one-shot games, then best responses in the repeated lever game.

    The rows of a one-shot game are SP and MEP by `alphas`, PBT, and TrajeDi by `weights`; alpha 0 is both SP and
    the population of FCP. In the repeated game (10 rounds of `lever_graded`) SP answers one member's final
    policy alone, PBT its best member alone, FCP the pool of alpha 0, MEP those of the other alphas and TrajeDi
    its own, as FCP does, with uniform weights (its authors train members and response together); each is
    tested with all eight pure conventions. `between` is called between games, where a caller may stop.
    """
    rows, several = [], len(alphas)
    for game in (lever_equal(), lever_graded(), blocks()):
        final = train_population(game, alphas, weights, num_seeds=num_seeds, seed=seed)[-1]
        rows += [population_row(game, final[i], "MEP" if alpha > 0 else "SP", alpha) for i, alpha in enumerate(alphas)]
        rows.append(population_row(game, train_pbt(game, num_seeds=num_seeds, seed=seed), "PBT"))
        rows += [population_row(game, final[several + i], "TrajeDi", weight) for i, weight in enumerate(weights)]
        between()
    game = lever_graded()
    history = train_population(game, alphas, weights, num_seeds=num_seeds, iterations=1500, seed=seed)
    evolved = train_pbt(game, num_seeds=num_seeds, generations=30, seed=seed)
    alone = torch.stack([history[-1, 0, :, :1], evolved[:, :1]]).exp()
    pool = partner_pool(game, history)

    def answers(labels: Sequence[tuple[str, float]], pool: Tensor, beta: float) -> list[Row]:
        scores = best_response(game, pool, beta=beta, seed=seed)
        return [
            Row(game="repeated_lever", method=method, alpha=alpha, beta=beta, values=values)
            for (method, alpha), score in zip(labels, scores, strict=True)
            for values in [{"return": score.mean(-1).tolist(), "worst": score.amin(-1).tolist()}]
        ]

    mep = [("MEP" if alpha > 0 else "FCP", alpha) for alpha in alphas]
    trajedi = [("TrajeDi", weight) for weight in weights]
    selfish, best = answers([("SP", alphas[0]), ("PBT", 0.0)], alone, 0.0)
    uniform = answers([*mep, *trajedi], pool, 0.0)
    prioritised = answers(mep, pool[:several], 3.0)
    return [*rows, selfish, *uniform[:several], *prioritised, best, *uniform[several:]]
