"""Population entropy: hand-computed values, bound, identity, and the two mistakes to avoid."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sextet.core.priority import rank_probabilities
from sextet.mep.population import (
    entropy,
    entropy_bonus,
    jensen_shannon,
    mean_log_policy,
    population_diversity,
    population_entropy,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "population.json").read_text())
LOGITS = arrays(np.float64, (4, 3, 6), elements=st.floats(-8, 8))


def log_probs(rows: list[list[float]]) -> torch.Tensor:
    """Members that each have one state: (n, 1, A) log-probabilities, -inf where the probability is 0."""
    return torch.tensor(rows, dtype=torch.float64).log().unsqueeze(1)


def test_golden_values_of_two_members() -> None:
    case = GOLDEN["two_members"]
    policies = log_probs(case["policies"])
    np.testing.assert_allclose(mean_log_policy(policies).exp()[0], case["mean_policy"], atol=1e-12)
    assert population_entropy(policies).item() == pytest.approx(case["population_entropy"], abs=1e-4)
    assert entropy(policies).mean().item() == pytest.approx(case["mean_entropy"], abs=1e-4)
    assert jensen_shannon(policies).item() == pytest.approx(case["jensen_shannon"], abs=1e-4)
    assert math.isinf(population_diversity(policies).item())


def test_single_uniform_member() -> None:
    uniform = log_probs([[1 / 6] * 6])
    assert entropy_bonus(uniform, torch.tensor([3])).item() == pytest.approx(math.log(6))
    assert population_entropy(uniform).item() == pytest.approx(entropy(uniform[0]).item())


@pytest.mark.parametrize("case", GOLDEN["rank_probabilities"])
def test_partner_probabilities(case: dict) -> None:
    found = rank_probabilities(np.array(case["returns"]), case["beta"])
    np.testing.assert_allclose(found, np.array(case["weights"]) / sum(case["weights"]), atol=1e-12)


@given(LOGITS)
@settings(max_examples=60, deadline=None)
def test_bound_and_identity(logits: np.ndarray) -> None:
    policies = torch.from_numpy(logits).log_softmax(-1)
    pe = population_entropy(policies)
    assert (pe <= population_diversity(policies) + 1e-9).all()
    assert (pe <= math.log(6) + 1e-9).all()
    torch.testing.assert_close(pe, entropy(policies).mean(0) + jensen_shannon(policies))


@given(LOGITS)
@settings(max_examples=30, deadline=None)
def test_bonus_is_an_unbiased_sample_of_population_entropy(logits: np.ndarray) -> None:
    """Averaged over members and their own actions, the bonus is PE; the mean of the logs gives PD."""
    policies = torch.from_numpy(logits).log_softmax(-1)
    actions = torch.arange(6).repeat(3)
    states = policies.repeat_interleave(6, dim=1)
    bonus = entropy_bonus(states, actions).view(3, 6)
    expected = (policies.exp() * bonus).sum(-1).mean(0)
    torch.testing.assert_close(expected, population_entropy(policies))
    mean_of_logs = -(policies.exp().mean(0) * policies.mean(0)).sum(-1)
    torch.testing.assert_close(mean_of_logs, population_diversity(policies))


def test_bonus_gathers_per_state_and_the_quirk_does_not() -> None:
    case = GOLDEN["flattened_take"]
    policies = torch.tensor([case["states"]], dtype=torch.float64).log()
    actions = torch.tensor(case["actions"])
    right = (-entropy_bonus(policies, actions)).exp()
    wrong = (-entropy_bonus(policies, actions, reference_quirks=True)).exp()
    np.testing.assert_allclose(right, case["per_state"])
    np.testing.assert_allclose(wrong, case["flattened"])


def test_wrong_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="members, states, actions"):
        mean_log_policy(torch.zeros(3, 6))
