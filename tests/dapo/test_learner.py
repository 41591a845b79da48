"""The update: its gradient, what it skips, what it does with numbers that are not finite."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

from dapo.learning import (
    Bigram,
    FakeRun,
    answered_groups,
    by_hand,
    close,
    learner,
    moved,
    plain_gradient,
    plain_loss,
    settings,
    text_scores,
    updated,
)
from dapo.lm import small_decoder
from sextet.core.errors import DivergenceError
from sextet.dapo import learner as module
from sextet.dapo.decoder import Decoder, Shape
from sextet.dapo.generators import Pool
from sextet.dapo.learner import samples_of
from sextet.dapo.model import Characters, Language, add_adapters, plain_weights
from sextet.dapo.packing import pack
from sextet.dapo.rollout import Limits, Request


@pytest.fixture(scope="module")
def sampler():
    return small_decoder()


@pytest.fixture(scope="module")
def groups(sampler):
    return answered_groups(sampler, flat=(2, 5))


def policy(sampler):
    return moved(copy.deepcopy(sampler))


def state(found):
    weights = [parameter.detach().clone() for parameter in found.parameters]
    return weights, copy.deepcopy(found.optimiser.state_dict()["state"])


def same(one, other):
    return (
        all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        and one[1].keys() == other[1].keys()
        and all(torch.equal(one[1][key][name], other[1][key][name]) for key in one[1] for name in one[1][key])
    )


# --- the gradient ---


CASES = [
    ("dapo", {}, {}),
    ("dapo", {}, {"cache_tokens": 8}),
    ("dapo", {"overlong_filter": True}, {}),
    ("dapo", {"entropy": 0.05}, {"temperature": 0.7}),
    ("dapo", {"dual_clip": 1.05}, {}),
    ("grpo", {}, {}),
    ("grpo", {"kl": 0.1}, {}),
    ("dapo", {"old": "recompute", "importance": "truncate", "importance_cap": 1.02}, {}),
    ("dapo", {"old": "recompute", "importance": "mask", "importance_cap": 1.1}, {}),
    ("grpo", {"old": "recompute", "importance": "sequence", "importance_cap": 1.01, "kl": 0.1, "entropy": 0.01}, {}),
]


@pytest.mark.parametrize("method, loss, sampling", CASES, ids=str)
def test_the_gradient_is_that_of_the_loss_written_token_by_token(sampler, groups, method, loss, sampling):
    config = settings(method, loss=loss, sampling=sampling)
    model = policy(sampler)
    others = {"old": copy.deepcopy(model)} if config.loss.old == "recompute" else {}
    others |= {"reference": copy.deepcopy(model)} if config.loss.kl else {}
    expected = plain_gradient(copy.deepcopy(model), groups, config, **others)
    value = plain_loss(model, groups, config, **others).item()
    found, logs, _ = updated(model, config, groups)
    close(found, expected, 2e-5)
    assert logs["train/loss"] == pytest.approx(value, rel=1e-4, abs=1e-6)
    assert logs["train/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)


@pytest.mark.parametrize("method", ["dapo", "grpo", "dr_grpo", "rloo", "gspo", "cispo", "sapo"])
def test_the_gradient_does_not_depend_on_how_a_batch_is_cut(sampler, groups, monkeypatch, method):
    loss = {"clip_low": 0.02, "clip_high": 0.02} if method == "gspo" else {}
    whole, logs, _ = updated(policy(sampler), settings(method, loss=loss), groups)
    assert whole.norm() > 1e-3
    for micro, row, order in ((1, 1, None), (64, 40, None), (300, 256, [5, 0, 7, 2, 1, 6, 4, 3]), (4096, 10_000, None)):
        monkeypatch.setattr(module, "best_rows", lambda pieces, *_, row=row: pack(pieces, row))
        config = settings(method, loss=loss, optim={"micro_tokens": micro})
        found, others, _ = updated(policy(sampler), config, groups, order=order)
        close(found, whole, 5e-6)
        assert others == pytest.approx(logs, rel=1e-4, abs=1e-6)


def test_answers_without_an_advantage_need_not_be_computed(sampler, groups, monkeypatch):
    rows = []
    build = module.build
    monkeypatch.setattr(module, "build", lambda pieces: rows.extend(map(len, pieces)) or build(pieces))
    skipped, logs, _ = updated(policy(sampler), settings("grpo"), groups)
    few = sum(rows)
    computed, others, _ = updated(policy(sampler), settings("grpo", loss={"entropy": 1e-30}), groups)
    close(skipped, computed, 1e-6)
    assert few == 24 and sum(rows) - few == 32
    assert logs["train/loss"] == pytest.approx(others["train/loss"], rel=1e-5)


def test_recomputed_activations_give_the_same_gradient(sampler, groups):
    kept, _, _ = updated(policy(sampler), settings(), groups)
    again, _, found = updated(policy(sampler), settings(optim={"checkpointing": True}), groups)
    assert found.model.checkpointing
    close(again, kept, 1e-6)


def test_an_answer_of_two_versions_by_hand():
    """After each token the next is 0 with 1/4 and 1 with 3/4. Advantages are +-1/sqrt(2), ratios 1.5, 1.25 and 1."""
    root = math.sqrt(0.5)
    spanning = by_hand([0], ([1, 0], [0.5, 0.2], 1, [4, 5]), ([0], [0.25], -1))
    table = [[0.0, math.log(3)]] * 2

    def loss_of(**fields):
        config = settings(loss=fields, sampling={"answers": 2})
        found, logs, _ = updated(Bigram(table), config, [spanning])
        return logs["train/loss"], found.reshape(2, 2)

    loss, slopes = loss_of()
    assert loss == pytest.approx(-root * (1.28 + 1.25 - 1) / 3, abs=1e-5), "the first ratio is clipped at 1.28"
    # no gradient from the first; after token 1, of 0: 1.25 A / 3 times (1 - 1/4); after 0, of 0: -A / 3 times (1 - 1/4)
    assert slopes[0, 1].item() == pytest.approx(-root * 1.25 / 3 * 0.75, abs=1e-5)
    assert slopes[0, 0].item() == pytest.approx(root / 3 * 0.75, abs=1e-5)
    loss, slopes = loss_of(old="recompute", importance="truncate", importance_cap=1.4)
    assert loss == pytest.approx(-root * (1.4 + 1.25 - 1) / 3, abs=1e-5), "ratios are 1, weights 1.4 (cut), 1.25, 1"
    assert slopes[0, 1].item() == pytest.approx(-root * 1.25 / 3 * 0.75, abs=1e-5)
    assert slopes[1, 0].item() == pytest.approx(-root * 1.4 / 3 * 0.25 - root / 3 * 0.75, abs=1e-5)


# --- rollouts and updates agree ---


@pytest.mark.parametrize("shape", [{}, {"kind": "qwen3", "tie_word_embeddings": False}], ids=["llama", "qwen3"])
def test_the_sampler_s_log_probabilities_are_the_learner_s(shape):
    model = small_decoder(**shape)
    groups = answered_groups(model, number=12, max_tokens=30)
    config = settings(loss={"old": "recompute"}, sampling={"max_tokens": 30})
    found = learner(model, config)
    samples, _ = samples_of(groups, config)
    scores = found._scores(found.scorer, samples)
    differences = torch.cat([scores[i] - torch.tensor(sample.answer.logp) for i, sample in enumerate(samples)])
    assert differences.abs().max() < 1e-5 and (differences.exp() - 1).abs().max() < 1e-5
    logs = found.update(samples, FakeRun())
    assert 0 < logs["policy/rollout_difference"] < 1e-5
    assert logs["policy/clip_high"] == logs["policy/clip_low"] == 0 and abs(logs["policy/kl_old"]) < 1e-6


def test_later_updates_of_a_step_leave_the_sampler_behind(sampler, groups):
    model = copy.deepcopy(sampler)
    _, logs, _ = updated(model, settings(optim={"minibatches": 4, "passes": 2, "learning_rate": 1e-2}), groups)
    assert logs["policy/clip_high"] > 0 and logs["policy/clip_low"] > 0 and logs["policy/kl_old"] > 1e-3
    assert 0 < logs["policy/clip_high_probability"] < 1


# --- what has no loss ---


def test_a_batch_cut_off_everywhere_changes_nothing_under_overlong_filtering(sampler):
    groups = answered_groups(sampler, max_tokens=2)
    groups = [replace(group, answers=[replace(answer, stopped=False) for answer in group.answers]) for group in groups]
    config = settings(loss={"overlong_filter": True}, sampling={"max_tokens": 2}, optim={"minibatches": 4})
    found = learner(copy.deepcopy(sampler), config)
    before = state(found)
    samples, means = samples_of(groups, config)
    logs = found.update(samples, FakeRun())
    assert same(before, state(found)) and not found.optimiser.state_dict()["state"]
    assert logs["train/loss"] == 0 and logs["train/idle"] == 4 and logs["train/skipped"] == 0
    assert all(math.isfinite(value) for value in {**logs, **means}.values())
    assert any(sample.advantage for sample in samples), "they still count in their groups"


def test_mini_batches_without_a_loss_are_counted_and_the_others_learn(sampler, groups):
    found = learner(policy(sampler), settings("grpo", optim={"minibatches": 8}))
    samples, _ = samples_of(groups, found.config)
    logs = found.update(samples, FakeRun())
    assert logs["train/idle"] == 2, "the groups without a spread"
    assert int(next(iter(found.optimiser.state_dict()["state"].values()))["step"]) == 6


# --- numbers that are not finite ---


def poisoned(found, value=math.nan):
    """Makes the next gradients not finite; returns what ends it."""
    return found.parameters[0].register_hook(lambda slope: torch.full_like(slope, value))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_update_that_is_not_finite_is_skipped_and_kept_for_people(sampler, groups, tmp_path, value):
    config = settings()
    found, run = learner(policy(sampler), config), FakeRun(tmp_path, step=41)
    samples, _ = samples_of(groups, config)
    found.update(samples, FakeRun())
    before = state(found)
    hook = poisoned(found, value)
    logs = found.update(samples, run)
    assert same(before, state(found)) and logs["train/skipped"] == 1 and logs["train/loss"] == 0
    (event,) = run.events
    assert event["event"] == "update skipped" and event["step"] == 41 and "norm is" in event["error"]
    batch = json.loads((tmp_path / "artifacts" / event["batch"]).read_text())
    assert len(batch) == len(samples)
    by_text = {(tuple(row["prompt"]), tuple(row["answer"]["tokens"]), row["advantage"]) for row in batch}
    assert by_text == {(tuple(s.prompt), tuple(s.answer.tokens), s.advantage) for s in samples}
    assert all(len(row["answer"]["logp"]) == len(row["answer"]["versions"]) for row in batch)
    hook.remove()
    assert found.update(samples, run)["train/skipped"] == 0 and not same(before, state(found))


def test_logits_that_are_not_finite_skip_the_update(groups, sampler, tmp_path):
    model = policy(sampler)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = math.nan
    config = settings(optim={"max_bad": 9})
    found = learner(model, config)
    before = [parameter.detach().clone() for parameter in found.parameters]
    logs = found.update(samples_of(groups, config)[0], FakeRun(tmp_path))
    assert logs["train/skipped"] == 1
    for one, other in zip(before, found.parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_three_in_a_row_end_the_run_and_a_good_one_between_does_not(sampler, groups, tmp_path):
    config = settings(optim={"minibatches": 2})
    found, run = learner(policy(sampler), config), FakeRun(tmp_path)
    samples, _ = samples_of(groups, config)
    for run.step in range(3):
        hook = poisoned(found)
        assert found.update(samples, run)["train/skipped"] == 2
        hook.remove()
        assert found.update(samples, run)["train/skipped"] == 0
    poisoned(found)
    run.events.clear()
    with pytest.raises(DivergenceError, match="nothing was applied"):
        for run.step in (7, 8):
            found.update(samples, run)
    assert [event["step"] for event in run.events] == [7, 7, 8]


def test_a_full_disk_does_not_stop_the_training(sampler, groups, tmp_path):
    config = settings()
    found, run = learner(policy(sampler), config), FakeRun(tmp_path)
    (tmp_path / "artifacts").write_text("not a folder")
    poisoned(found)
    assert found.update(samples_of(groups, config)[0], run)["train/skipped"] == 1
    assert [event["event"] for event in run.events] == ["update skipped", "batch lost"]


def test_a_generator_with_weights_that_diverged_says_so():
    characters = Characters("0123456789=")
    model = small_decoder(vocab_size=characters.size)
    shape = {**vars(model.shape), "model_type": "llama"}
    config = settings()
    with Pool(config, Language(model=model, tokenizer=characters, record=shape)) as pool:
        asked = [Request(key=("test", 0), prompt=[1, 2], numbers=(0, 1))]
        pool.publish(model.state_dict(), 0)
        assert len(pool.run(asked, Limits(max_tokens=4, stop=()))[0]) == 2
        with torch.no_grad():
            model.model.norm.weight.fill_(math.nan)
        pool.publish(model.state_dict(), 1)
        with pytest.raises(DivergenceError, match="^the logits of a sampled token are not finite"):
            pool.run(asked, Limits(max_tokens=4, stop=()))


# --- settings of the update ---


def test_the_warm_up_counts_rollout_steps(sampler, groups):
    config = settings(optim={"minibatches": 4, "warmup": 5, "learning_rate": 1e-3})
    found = learner(copy.deepcopy(sampler), config)
    samples, _ = samples_of(groups, config)
    rates = [found.update(samples, FakeRun(step=step))["train/learning_rate"] for step in range(7)]
    assert rates == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3, 1e-3, 1e-3])


def test_mini_batches_keep_groups_together_and_have_a_seeded_order(sampler, groups, monkeypatch):
    def batches(step):
        config = settings(optim={"minibatches": 4})
        found, chosen = learner(copy.deepcopy(sampler), config), []
        monkeypatch.setattr(found, "_step", lambda samples, part, *_: chosen.append(part) or (0.0, 0.0, {"tokens": 1}))
        samples, _ = samples_of(groups, config)
        found.update(samples, FakeRun(step=step))
        assert sorted(index for part in chosen for index in part) == list(range(len(samples)))
        assert all(len({samples[index].group for index in part}) == 2 for part in chosen)
        return chosen

    assert batches(0) == batches(0) != batches(1)


def test_the_entropy_bonus_keeps_entropy_up_and_the_kl_term_the_policy_near(sampler, groups):
    def after(**loss):
        config = settings("grpo", loss=loss, optim={"learning_rate": 3e-3})
        model = copy.deepcopy(sampler)
        found = learner(model, config)
        samples, _ = samples_of(groups, config)
        for step in range(8):
            logs = found.update(samples, FakeRun(step=step))
        return logs

    plain, entropy, near = after(), after(entropy=1.0), after(kl=5.0)
    assert entropy["policy/entropy"] > plain["policy/entropy"] + 0.1
    assert near["policy/kl"] > 0 and near["policy/kl_old"] < 0.5 * plain["policy/kl_old"]


# --- adapters ---


def test_adapters_are_all_that_is_trained_and_are_merged_when_published(sampler, groups):
    pytest.importorskip("peft")
    model = copy.deepcopy(sampler)
    add_adapters(model, 4, 16)
    config = settings(loss={"kl": 0.1}, optim={"learning_rate": 1e-2, "minibatches": 2})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = learner(model, config)
    assert sum(map(torch.numel, found.parameters)) < 0.5 * sum(map(torch.numel, sampler.parameters()))
    samples, _ = samples_of(groups, config)
    for step in range(3):
        found.update(samples, FakeRun(step=step))
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(".lora_" in name for name in changed)
    published = plain_weights(model)
    assert published.keys() == sampler.state_dict().keys()
    merged = Decoder(Shape(**vars(sampler.shape)))
    merged.load_state_dict(published)
    prompt, answer = groups[0].prompt, groups[0].answers[0].tokens
    adapted, _ = text_scores(model, prompt, answer)
    torch.testing.assert_close(text_scores(merged, prompt, answer)[0], adapted, atol=1e-5, rtol=0)
    assert (adapted - text_scores(sampler, prompt, answer)[0]).abs().max() > 1e-3
