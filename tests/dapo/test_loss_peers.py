import json
from pathlib import Path

import pytest
import torch

from sextet.dapo.loss import Tokens, policy_loss, token_weights
from sextet.dapo.settings import METHODS, LossConfig

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "dapo_trl_losses.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_losses_and_gradients_are_those_of_trl(case):
    """Written by benchmarks/dapo_losses.py, which says where the conventions differ."""
    batch, fields = case["batch"], {name: value for name, value in METHODS[case["method"]].items() if name != "dynamic"}
    config = LossConfig(**fields | case["changes"])
    mask = torch.tensor(batch["mask"], dtype=torch.bool)
    answers, longest = mask.shape
    lengths, logp = mask.sum(1), torch.tensor(batch["logp"]).requires_grad_()
    weights = token_weights(lengths.tolist(), [0] * answers, config.aggregate, horizon=longest)
    old = torch.tensor(batch["old"])[mask]
    tokens = Tokens(
        old=old,
        rollout=old,
        advantage=torch.tensor(batch["advantage"]).repeat_interleave(lengths),
        weight=weights.float().repeat_interleave(lengths),
        answer=torch.arange(answers).repeat_interleave(lengths),
        reference=torch.tensor(batch["reference"])[mask],
    )
    loss, _ = policy_loss(logp[mask], torch.zeros(int(lengths.sum())), tokens, config)
    loss.backward()
    expected = torch.tensor(case["gradient"])
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(logp.grad, expected, atol=1e-6, rtol=0)
