import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sextet.core.errors import UsageError
from sextet.dapo.config import Config, LossConfig, SamplingConfig, resolve
from sextet.dapo.loss import (
    Tokens,
    advantages,
    importance_weights,
    k3,
    overlong_penalty,
    policy_loss,
    token_weights,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/dapo_losses.json").read_text())
LENGTHS = GOLDEN["lengths"]
ANSWER = torch.tensor([0] * 4 + [1] * 3 + [2] * 2)


def flat(rows):
    return torch.tensor([value for row, length in zip(rows, LENGTHS, strict=True) for value in row[:length]])


def full(**fields):
    return resolve(Config(method="dapo", loss=LossConfig(**fields), sampling=SamplingConfig(answers=8))).loss


def golden_tokens(config, rollout=None):
    weights = token_weights(LENGTHS, [0, 0, 0], config.aggregate, horizon=4)
    old = flat(GOLDEN["old"])
    return Tokens(
        old=old,
        rollout=old if rollout is None else rollout,
        advantage=torch.tensor(GOLDEN["advantage"])[ANSWER],
        weight=weights[ANSWER].float(),
        answer=ANSWER,
    )


@pytest.mark.parametrize("kind", ["group", "mean", "rloo"])
def test_advantages_are_those_of_verl(kind):
    rewards = torch.tensor(GOLDEN["advantages"]["rewards"])
    found = advantages(rewards, torch.arange(16) // 4, kind)
    torch.testing.assert_close(found, torch.tensor(GOLDEN["advantages"][kind]), atol=1e-6, rtol=0)


def test_advantages_of_the_batch_and_of_single_answers():
    rewards, groups = torch.tensor([1.0, -1, 1, 1, -1, 0.5]), torch.tensor([0, 0, 1, 1, 2, 2])
    centred = torch.tensor([1.0, -1, 0, 0, -0.75, 0.75])
    torch.testing.assert_close(advantages(rewards, groups, "batch"), centred / centred.std(), atol=1e-5, rtol=0)
    single = torch.tensor([0, 1])
    assert advantages(torch.tensor([1.0, -1]), single, "rloo").tolist() == [1, -1]
    assert advantages(torch.tensor([1.0, -1]), single, "group").tolist() == [0, 0]
    with pytest.raises(UsageError, match="group, mean, rloo, batch"):
        advantages(rewards, groups, "median")


@pytest.mark.parametrize("case", GOLDEN["losses"], ids=lambda case: "-".join(map(str, list(case.values())[:3])))
def test_losses_and_gradients_are_those_of_verl(case):
    fields = {name: value for name, value in case.items() if name not in ("loss", "gradient")}
    config = full(**fields)
    rollout = flat(GOLDEN["old"]) - 0.3 * flat(GOLDEN["rollout_minus"]) if "importance" in case else None
    logp = flat(GOLDEN["new"]).requires_grad_()
    loss, sums = policy_loss(logp, torch.zeros(9), golden_tokens(config, rollout), config)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    if "gradient" in case:
        torch.testing.assert_close(logp.grad, flat(case["gradient"]), atol=1e-6, rtol=0)
    if config.objective == "clip":
        clipped = (sums["clip_low"] + sums["clip_high"]) / sums["tokens"]
        assert clipped.item() == pytest.approx(GOLDEN["clip_fraction"], abs=1e-6)
        assert (sums["kl_old"] / sums["tokens"]).item() == pytest.approx(GOLDEN["k1"], abs=1e-6)
        if config.dual_clip == 1.05:
            assert (sums["dual_clip"] / sums["tokens"]).item() == pytest.approx(GOLDEN["dual_clip_fraction"], abs=1e-6)


def test_importance_weights_and_k3_are_those_of_verl():
    config = full(importance="truncate")
    found = importance_weights(0.3 * flat(GOLDEN["rollout_minus"]), ANSWER, config)
    torch.testing.assert_close(found, flat(GOLDEN["importance_weights"]), atol=1e-5, rtol=0)
    torch.testing.assert_close(k3(flat(GOLDEN["new"]), flat(GOLDEN["old"])), flat(GOLDEN["k3"]), atol=1e-6, rtol=0)


def test_masking_and_sequence_weights():
    log_weight = torch.tensor([0.0, 1.0, -1.0, 0.5, 0.5])
    answer = torch.tensor([0, 0, 0, 1, 1])
    masked = importance_weights(log_weight, answer, full(importance="mask", importance_cap=2))
    torch.testing.assert_close(masked, torch.tensor([1.0, 0, 0, math.exp(0.5), math.exp(0.5)]))
    mean = importance_weights(log_weight, answer, full(importance="sequence", importance_cap=1.5))
    torch.testing.assert_close(mean, torch.tensor([1.0, 1, 1, 1.5, 1.5]))


@pytest.mark.parametrize("length, penalty", GOLDEN["overlong"]["penalties"])
def test_the_soft_overlong_punishment(length, penalty):
    assert overlong_penalty(length, 20480, 4096) == penalty
    assert overlong_penalty(length, 20480, 0) == 0


def test_the_punishment_of_a_small_zone():
    assert overlong_penalty(90, 100, 20) == -0.5 and overlong_penalty(80, 100, 20) == 0


# --- an independent reference in float64, written with loops over padded arrays ---


def reference(logp, old, rollout, rewards_advantage, lengths, groups, kept, config, horizon):
    """The loss of DAPO, GRPO, Dr. GRPO, CISPO, GSPO and SAPO by the letter, answer by answer."""
    answers = []
    for index, length in enumerate(lengths):
        terms, advantage = [], rewards_advantage[index]
        sequence_ratio = math.exp(sum(logp[index][t] - old[index][t] for t in range(length)) / length)
        for t in range(length):
            ratio = math.exp(logp[index][t] - old[index][t])
            low, high = 1 - config.clip_low, 1 + config.clip_high
            if config.objective == "cispo":
                value = -min(max(ratio, low), high) * advantage * logp[index][t]
            elif config.objective == "sapo":
                tau = config.tau_positive if advantage > 0 else config.tau_negative
                value = -(4 / tau) / (1 + math.exp(-tau * (ratio - 1))) * advantage
            else:
                r = sequence_ratio if config.objective == "gspo" else ratio
                value = -min(r * advantage, min(max(r, low), high) * advantage)
                if config.dual_clip and advantage < 0 and config.objective == "clip":
                    value = min(value, -config.dual_clip * advantage)
            if config.importance == "truncate":
                value *= min(math.exp(old[index][t] - rollout[index][t]), config.importance_cap)
            terms.append(value)
        answers.append(terms)
    used = [index for index in range(len(lengths)) if kept[index]]
    if not used:
        return 0.0
    if config.aggregate == "token":
        return sum(sum(answers[i]) for i in used) / sum(lengths[i] for i in used)
    if config.aggregate == "sequence":
        return sum(sum(answers[i]) / lengths[i] for i in used) / len(used)
    if config.aggregate == "sequence-sum":
        return sum(sum(answers[i]) for i in used) / len(used)
    if config.aggregate == "constant":
        return sum(sum(answers[i]) for i in used) / len(used) / horizon
    by_group = {}
    for i in used:
        by_group.setdefault(groups[i], []).append(i)
    return sum(
        sum(sum(answers[i]) for i in members) / sum(lengths[i] for i in members) for members in by_group.values()
    ) / len(by_group)


CASES = st.tuples(
    st.sampled_from(["clip", "gspo", "cispo", "sapo"]),
    st.sampled_from(["token", "group", "sequence", "sequence-sum", "constant"]),
    st.sampled_from([0.0, 1.05, 10.0]),
    st.sampled_from(["none", "truncate"]),
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
    st.integers(0, 2**31),
)


@settings(deadline=None)
@given(CASES)
def test_every_loss_equals_an_independent_one_however_it_is_split(case):
    objective, aggregate, dual, importance, lengths, seed = case
    config = full(objective=objective, aggregate=aggregate, dual_clip=dual, importance=importance)
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    number, horizon = len(lengths), 7
    old = -draw(number, 6).abs()
    new, rollout = old + 0.4 * draw(number, 6), old + 0.4 * draw(number, 6)
    advantage, groups = draw(number), sorted((torch.arange(number) % 3).tolist())
    kept = (torch.rand(number, generator=rng) > 0.2).tolist()
    expected = reference(
        new.tolist(), old.tolist(), rollout.tolist(), advantage.tolist(), lengths, groups, kept, config, horizon
    )
    weights = token_weights(lengths, groups, aggregate, horizon=horizon, kept=kept)

    def loss_of(members):
        logp = torch.cat([new[i, : lengths[i]] for i in members]).requires_grad_()
        answer = torch.tensor([i for i in members for _ in range(lengths[i])])
        tokens = Tokens(
            old=torch.cat([old[i, : lengths[i]] for i in members]),
            rollout=torch.cat([rollout[i, : lengths[i]] for i in members]),
            advantage=advantage[answer],
            weight=weights[answer],
            answer=answer,
        )
        loss, _ = policy_loss(logp, torch.zeros_like(logp), tokens, config)
        loss.backward()
        return loss.item(), dict(zip(members, logp.grad.split([lengths[i] for i in members]), strict=True))

    whole, gradient = loss_of(range(number))
    assert whole == pytest.approx(expected, abs=1e-9)
    parts = [loss_of(list(range(start, number, 2))) for start in range(min(2, number))]
    assert sum(loss for loss, _ in parts) == pytest.approx(expected, abs=1e-9)
    for _, gradients in parts:
        for index, found in gradients.items():
            torch.testing.assert_close(found, gradient[index])


def test_an_answer_has_the_share_of_the_gradient_that_its_length_is_of_all_tokens():
    lengths = [2, 20]
    for aggregate, share in (("token", 20 / 22), ("sequence", 0.5)):
        weights = token_weights(lengths, [0, 0], aggregate)
        total = weights * torch.tensor(lengths)
        assert (total[1] / total.sum()).item() == pytest.approx(share)


def test_a_batch_of_cut_off_answers_has_no_loss_and_no_gradient():
    weights = token_weights([3, 4], [0, 0], "token", kept=[False, False])
    assert weights.tolist() == [0, 0]
    for aggregate in ("group", "sequence", "sequence-sum"):
        assert token_weights([3, 4], [0, 1], aggregate, kept=[False, False]).tolist() == [0, 0]


def test_an_update_can_raise_a_probability_by_the_upper_bound_only():
    for high in (0.2, 0.28):
        config = full(clip_high=high)
        logp = torch.log(torch.tensor([0.0119, 0.0121, 0.0127, 0.0129], dtype=torch.float64)).requires_grad_()
        old = torch.full((4,), math.log(0.01), dtype=torch.float64)
        ones = torch.ones(4, dtype=torch.float64)
        tokens = Tokens(old=old, rollout=old, advantage=ones, weight=ones / 4, answer=torch.arange(4))
        loss, sums = policy_loss(logp, torch.zeros(4, dtype=torch.float64), tokens, config)
        loss.backward()
        moves = [gradient != 0 for gradient in logp.grad.tolist()]
        assert moves == ([True, False, False, False] if high == 0.2 else [True, True, True, False])
        assert sums["clip_high"].item() == moves.count(False)
