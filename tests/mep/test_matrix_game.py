"""Matrix games: known solutions, the gradient against autograd, and that MEP finds more conventions."""

import numpy as np
import pytest
import torch
from scipy.stats import ttest_ind

from sextet.mep import matrix_game
from sextet.mep.matrix_game import Row, best_response, blocks, lever_equal, lever_graded, train_population


def find(rows: list[Row], **fields: object) -> Row:
    (row,) = [row for row in rows if all(getattr(row, name) == value for name, value in fields.items())]
    return row


def test_games() -> None:
    assert torch.equal(lever_equal(3).payoff, torch.eye(3).double())
    assert lever_graded(8).payoff.diagonal()[[0, -1]].tolist() == [1.0, 0.5]
    game = blocks()
    assert game.payoff.shape == (16, 16) and game.convention.max() == 4
    assert game.payoff[0, 7] == 0.6 and game.payoff[0, 8] == 0 and game.payoff[15, 15] == 1.0


def test_update_is_the_gradient_of_the_bonus_objective() -> None:
    game = lever_graded(4)
    history = train_population(game, (0.3,), num_seeds=2, size=3, iterations=1, learning_rate=0.1, keep_every=1)
    start, after = history[0, 0], history[1, 0]
    logits = start.clone().requires_grad_()
    probs = logits.log_softmax(-1).exp()
    fixed = probs.detach()
    value = fixed @ game.payoff - 0.3 * fixed.mean(1, keepdim=True).log()
    (gradient,) = torch.autograd.grad(2 * (probs * value).sum(), logits)
    torch.testing.assert_close(after, (start + 0.1 * gradient).log_softmax(-1))


def test_result_depends_on_the_seed_alone() -> None:
    runs = [train_population(lever_equal(4), (0.0, 0.5), num_seeds=2, iterations=20, seed=seed) for seed in (3, 3, 4)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    alone = train_population(lever_equal(4), (0.5,), num_seeds=2, iterations=20, seed=3)
    torch.testing.assert_close(alone[:, 0], runs[0][:, 1])


def test_best_response_imitates_a_full_pool_and_ignores_absent_conventions() -> None:
    pool = torch.eye(8).double().expand(1, 2, 8, 8)
    full = best_response(lever_graded(), pool, beta=0.0)
    partial = best_response(lever_graded(), pool[:, :, :2], beta=0.0)
    assert full.min() > 0.85
    assert partial[..., :2].min() > 0.85 and partial[..., 2:].max() < 0.3


def test_priority_favours_the_hard_partner() -> None:
    """Two partners that cannot both be met in the first round: beta leans to the worse-paid one."""
    pool = torch.eye(8).double()[[0, 7]].expand(1, 1, 2, 8)
    uniform, hard = (best_response(lever_graded(), pool, beta=beta, rounds=1, iterations=200) for beta in (0.0, 5.0))
    assert hard[0, 0, 7] > uniform[0, 0, 7]


def test_mep_finds_more_conventions_than_self_play() -> None:
    """Acceptance at full size: 20 seeds, 8 members; about 5 s on one core."""
    rows = matrix_game.run_matrix_games(alphas=(0.0, 0.3, 0.5))
    graded = {alpha: find(rows, game="lever_graded", alpha=alpha).values["conventions"] for alpha in (0.0, 0.3)}
    assert np.mean(graded[0.3]) >= 7.0 and np.mean(graded[0.0]) <= 3.5
    assert ttest_ind(graded[0.3], graded[0.0], equal_var=False).pvalue < 1e-6
    equal = find(rows, game="lever_equal", alpha=0.5)
    assert sum(count == 8 for count in equal.values["conventions"]) >= 19
    assert max(equal.values["entropy"]) < 0.04, "diversity must lie between the members, not inside them"
    for beta in (0.0, 3.0):
        repeated = {
            method: find(rows, game="repeated_lever", method=method, alpha=alpha, beta=beta)
            for method, alpha in (("FCP", 0.0), ("MEP", 0.5))
        }
        assert np.mean(repeated["MEP"].values["return"]) >= 0.78
        assert np.mean(repeated["FCP"].values["return"]) <= 0.45
    assert np.mean(find(rows, game="repeated_lever", method="SP").values["return"]) <= 0.30


@pytest.mark.slow
def test_small_alpha_pays_with_entropy_inside_a_block() -> None:
    """The known weakness: in `blocks` a small alpha raises PE without one new convention."""
    rows = matrix_game.run_matrix_games(alphas=(0.0, 0.1, 0.3))
    plain, small, large = (find(rows, game="blocks", alpha=alpha).values for alpha in (0.0, 0.1, 0.3))
    assert np.mean(small["population_entropy"]) > np.mean(plain["population_entropy"]) + 0.2
    assert np.mean(small["conventions"]) == 1.0 and np.mean(large["conventions"]) > 3.5
