"""The parts of the paper, each with a gate of its own, on models of which all can be known."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dapo.learning import Bigram, FakeRun, by_hand, learner, practise, settings, updated
from sextet.dapo.learner import samples_of

SIZES = (3, 11)


def columns(model_logits, config, groups):
    """Gradient of the logits after each token: (token before, token)."""
    found, logs, _ = updated(Bigram(model_logits), config, groups)
    return found.reshape(len(model_logits), -1).T, logs


# --- token-level loss ---


def by_length(method):
    """Gradients that answers of 3 and 11 tokens give, which repeat a token each, with the same advantage."""
    even = [[0.0] * 3] * 3
    third = [1 / 3] * max(SIZES)
    group = by_hand([0], *(([token] * size, third[:size], -1) for token, size in zip((1, 2), SIZES, strict=True)),
                    ([0], [1 / 3], 1), ([0], [1 / 3], 1))  # fmt: skip
    slopes, _ = columns(even, settings(method, loss={"overlong_punishment": 0.0}), [group])
    return slopes[1].norm().item(), slopes[2].norm().item()


def test_under_the_token_level_loss_an_answer_weighs_as_much_as_it_is_long():
    short, long = by_length("dapo")
    assert long / short == pytest.approx((SIZES[1] - 1) / (SIZES[0] - 1), rel=1e-5)


def test_under_the_sample_level_loss_answers_weigh_the_same():
    short, long = by_length("grpo")
    assert long * SIZES[1] / (SIZES[1] - 1) == pytest.approx(short * SIZES[0] / (SIZES[0] - 1), rel=1e-5)


# --- soft overlong punishment ---

PROMPT, RIGHT, WRONG, MORE, STOP = range(5)


def talker():
    """First RIGHT or WRONG, half each, then MORE again and again, or STOP with 1/10."""
    never = -30.0
    table = [[never] * 5 for _ in range(5)]
    table[PROMPT][RIGHT] = table[PROMPT][WRONG] = 0.0
    for token in (RIGHT, WRONG, MORE):
        table[token][MORE], table[token][STOP] = math.log(0.9), math.log(0.1)
    return Bigram(table)


def talk(punishment):
    """Mean tokens over L_max - L_cache = 8 at the beginning and the end, and accuracies."""
    config = settings(
        loss={"overlong_punishment": punishment},
        sampling={"prompts": 8, "answers": 8, "max_tokens": 16, "cache_tokens": 8, "max_rounds": 4},
        optim={"learning_rate": 0.05, "minibatches": 2},
    )
    answers = practise(talker(), config, [PROMPT], lambda _, answer: answer.tokens[0] == RIGHT, steps=20, stop=(STOP,))
    over = np.array([max(0, len(answer.tokens) - 8) for _, answer, _ in answers])
    right = np.array([verdict.right for _, _, verdict in answers])
    steps = np.array([step for step, _, _ in answers])
    parts = steps < 2, steps >= 17
    return [over[part].mean() for part in parts], [right[part].mean() for part in parts]


def test_the_soft_punishment_makes_long_answers_shorter_and_not_wrong():
    (before, after), (start, end) = talk(1.0)
    assert after < 0.6 * before and end >= start + 0.1
    (_, unpunished), (_, accuracy) = talk(0.0)
    assert after < 0.7 * unpunished and end > accuracy - 0.1


# --- overlong filtering ---


def cut_off(filtered):
    even = [[0.0] * 3] * 3
    group = by_hand([0], ([1, 1, 1], [1 / 3] * 3, -1), ([2, 2], [1 / 3] * 2, 1), ([0], [1 / 3], -1))
    answers = [replace(answer, stopped=answer.tokens[0] != 1) for answer in group.answers]
    config = settings(loss={"overlong_filter": filtered, "overlong_punishment": 0.0})
    slopes, logs = columns(even, config, [replace(group, answers=answers)])
    samples, _ = samples_of([replace(group, answers=answers)], config)
    return slopes, logs, [sample.advantage for sample in samples]


def test_overlong_filtering_takes_the_loss_of_answers_that_were_cut_off_but_not_their_place_in_the_group():
    plain, _, advantages = cut_off(False)
    filtered, logs, same = cut_off(True)
    assert plain[1].norm() > 0.01 and filtered[1].norm() == 0, "only the answer that was cut off has tokens after 1"
    assert same == advantages and advantages[0] < 0
    torch.testing.assert_close(filtered[2] * 3, plain[2] * 6)  # 3 of 6 tokens are left to share the weight
    assert logs["train/tokens"] == 3


# --- clip-higher ---


def test_a_rare_token_rises_to_the_bound_of_the_clipping_and_no_further():
    """A token of probability 0.01 may rise to 0.012 in a rollout step with 0.2, to 0.0128 with 0.28 (the paper's)."""
    for high, bound in ((0.2, 0.012), (0.28, 0.0128)):
        table = [[math.log(0.01), math.log(0.49), math.log(0.5)]] * 3
        # the wrong answer was sampled with a higher probability than it has now: clipped from below, without gradient
        group = by_hand([1], ([0], [0.01], 1), ([2], [0.99], -1))
        config = settings(loss={"clip_high": high, "clip_low": 0.2}, optim={"passes": 300, "learning_rate": 1e-3})
        model = Bigram(table)
        found = learner(model, config)
        logs = found.update(samples_of([group], config)[0], FakeRun())
        chance = model.head.detach().T[1].softmax(-1)[0].item()
        assert bound <= chance < 1.05 * bound
        assert logs["policy/clip_high"] > 0.1 and logs["policy/clip_high_probability"] == pytest.approx(
            chance, rel=0.05
        )


def bandit(high, seed):
    """Probability of the right one of ten arms, 1 % at first, after 50 rollout steps of 16 updates."""
    table = [[math.log(0.01)] + [math.log(0.11)] * 9] * 10
    config = settings(
        loss={"clip_high": high, "clip_low": 0.2},
        sampling={"prompts": 1, "answers": 8, "max_tokens": 1, "max_rounds": 1},
        optim={"learning_rate": 0.015, "passes": 16},
    )
    model = Bigram(table)
    practise(model, config, [1], lambda _, answer: answer.tokens[0] == 0, steps=50, stop=range(10), seed=seed)
    return model.head.detach().T[1].softmax(-1)[0].item()


def test_clip_higher_finds_a_rare_right_answer_sooner():
    pairs = [(bandit(0.28, seed), bandit(0.2, seed)) for seed in range(4)]
    assert all(higher > lower > 0.01 for higher, lower in pairs)
    assert np.mean([math.log(higher / lower) for higher, lower in pairs]) > 0.2


# --- dual clip ---


def test_the_dual_clip_bounds_what_a_stale_wrong_answer_does():
    """An answer that was all but impossible when sampled, and is likely now, has a ratio of 500."""
    group = by_hand([1], ([0], [0.001], -1), ([2], [0.5], 1))
    table = [[0.0, -30.0, 0.0]] * 3
    plain, logs = columns(table, settings(loss={"dual_clip": 0.0}), [group])
    clipped, others = columns(table, settings(loss={"dual_clip": 10.0}), [group])
    right_only = math.sqrt(0.5) / 2 * 0.5
    assert plain[1, 0].item() > 50 and clipped[1, 0].item() == pytest.approx(right_only, abs=1e-4)
    assert logs["train/loss"] > 100 and others["train/loss"] == pytest.approx(math.sqrt(0.5) * (10 - 1) / 2, rel=1e-4)
    assert (logs["policy/dual_clip"], others["policy/dual_clip"]) == (0, 0.5)


# --- dynamic sampling ---


def drill(dynamic, seed):
    """Accuracy on hard prompts, right with 1/10 at first, after 20 steps among four times as many that are easy."""
    easy = [[0.0, -6.0]] * 16
    table = [row + [-30.0] * 18 for row in [*easy, *[[-2.2, 0.0]] * 4]]
    config = settings(
        "dapo" if dynamic else "grpo",
        loss={"clip_high": 0.28, "aggregate": "token"},
        sampling={"prompts": 8, "answers": 8, "max_tokens": 1, "max_rounds": 10},
        optim={"learning_rate": 0.1},
    )
    model = Bigram(table)
    practise(
        model, config, list(range(20)), lambda _, answer: answer.tokens[0] == 0, steps=20, stop=range(20), seed=seed
    )
    return model.head.detach().T[16:].softmax(-1)[:, 0].mean().item()


def test_dynamic_sampling_learns_what_is_hard_in_fewer_updates():
    pairs = [(drill(True, seed), drill(False, seed)) for seed in range(3)]
    assert np.mean([with_it - without for with_it, without in pairs]) > 0.1
    assert all(with_it > without for with_it, without in pairs)
