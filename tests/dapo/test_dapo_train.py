"""Whole trainings: what a run leaves, the same after any interruption, every method, the ablation."""

import json
from dataclasses import replace

import pytest

import sextet
from dapo.small_runs import WATCHED, left, rows, small, taught, trained
from sextet.core.metrics import read_metrics
from sextet.core.run import Run
from sextet.dapo import ablate, groups
from sextet.dapo import train as training
from sextet.dapo.evaluate import evaluate
from sextet.dapo.samples import read_samples, steps_with_samples
from sextet.dapo.settings import METHODS, EvaluationConfig, LossConfig, RolloutConfig, TaskConfig
from sextet.dapo.tasks import load_task


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return taught(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run through the Python interface, start and all."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    fields = {
        "task": {"size": 20}, "model": {"warm_steps": 120}, "evaluation": {"every": 2, "problems": 20},
        "sampling": {"prompts": 8}, "device": "cpu",
    }  # fmt: skip
    assert sextet.train("dapo", "smoke", directory=str(directory), **fields) == str(directory)
    return directory


def test_every_step_has_a_row_with_all_that_is_to_be_watched(finished):
    found = read_metrics(finished / "metrics.jsonl")
    assert [row["step"] for row in found] == [0, 1, 2]
    for row in found:
        assert row.keys() >= WATCHED, WATCHED - row.keys()
        assert row["groups/judged"] == sum(row.get(f"groups/{kind}", 0) for kind in ("mixed", "right", "wrong"))
        assert row["answers/number"] == 4 * row["groups/judged"]
        assert 0 < row["groups/trained"] <= row["groups/mixed"]
        assert row["answers/length_min"] <= row["answers/length"] <= row["answers/length_max"] <= 4
        assert row["policy/rollout_difference"] < 1e-5 and 0 < row["policy/probability"] < 1
    assert [("eval/avg@2" in row) for row in found] == [True, True, False]


def test_a_run_has_its_model_summary_samples_and_report(finished):
    document = json.loads((finished / "summary.json").read_text())["summary"]
    for name in ("avg@2", "avg@2, easy", "avg@2, hard", "pass@2", "cons@2", "p(right)"):
        assert document[name].keys() == {"mean", "low", "high", "n"}, name
    assert document["problems"] == 20 and document["steps"] == 3
    assert steps_with_samples(finished) == [0, 1, 2]
    sample = read_samples(finished, 0)
    assert {group["trained"] for group in sample["groups"]} == {True, False}
    for group in sample["groups"]:
        assert group["trained"] <= (group["kind"] == "mixed") and len(group["answers"]) == 4
        for answer in group["answers"]:
            assert answer["length"] == len(answer["pieces"]) == len(answer["logp"]) == len(answer["versions"])
            assert (answer["advantage"] is not None) == group["trained"]
    assert "p(right)" in (finished / "report.html").read_text()


def test_a_finished_run_answers_and_is_tested_again(finished):
    policy = sextet.load(str(finished))
    prompt = load_task(TaskConfig(size=20), 0).train[0].prompt
    answers = policy.generate([prompt, prompt], samples=3, seed=1)
    assert [len(group) for group in answers] == [3, 3] and answers == policy.generate(
        [prompt, prompt], samples=3, seed=1
    )
    (greedy,) = policy.generate([prompt], samples=4, temperature=0)
    assert len(set(greedy)) == 1 and len(greedy[0]) <= 4
    assert policy.generate([prompt], max_tokens=1, seed=2)[0][0] in "0123456789="
    again = evaluate(policy.config, finished)
    assert again == evaluate(policy.config, finished / "final") and again["problems"] == 20
    more = replace(policy.config, evaluation=EvaluationConfig(samples=5, problems=3, temperature=0))
    assert {"avg@5", "pass@5", "cons@5"} <= (found := evaluate(more, finished)).keys() and found["problems"] == 3
    assert found["pass@5"] == found["cons@5"], "the likeliest answers to a problem are all the same"


VARIANTS = {
    "plain": {},
    "carry": {"sampling": {"surplus": "carry", "candidates": 2.0}},
    "curriculum": {"sampling": {"curriculum": 1.0}},
    "passes": {"optim": {"passes": 2, "minibatches": 4, "warmup": 3}},
    "reference": {"method": "grpo", "loss": LossConfig(kl=0.1, entropy=0.01, old="recompute")},
    "ahead": {"rollout": RolloutConfig(staleness=1, slice_tokens=2, tasks=2)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_cut_off_anywhere_and_resumed_equals_one_that_was_not(tmp_path, start, monkeypatch, variant):
    config = small(**VARIANTS[variant])
    whole = left(trained(config, tmp_path / "whole", start))
    assert [row["step"] for row in whole["rows"]] == [0, 1, 2, 3]
    assert variant != "carry" or any(row["groups/carried"] for row in whole["rows"])
    for place in ("before the update", "after the update", "while collecting"):
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            _cut(patch, place)
            trained(config, tmp_path / place, start)
    for place in ("before the update", "after the update", "while collecting"):
        assert not (tmp_path / place / "summary.json").exists()
        trained(config, tmp_path / place, start)
        if variant == "ahead":  # what was on its way is computed in other batches, so rounding differs
            assert [row["groups/trained"] for row in rows(tmp_path / place)] == [4.0] * 4
        else:
            assert left(tmp_path / place) == whole, place
        assert "restored" in (tmp_path / place / "events.jsonl").read_text()


def _cut(patch, place):
    """Ends a training in its third step, as a power cut would."""
    owner, name = {
        "before the update": (training, "samples_of"),
        "after the update": (training, "group_logs"),
        "while collecting": (groups.Collector, "_judge"),
    }[place]
    real, current = getattr(owner, name), [0]
    collect = groups.Collector.collect

    def counted(self, step, *rest):
        current[0] = step
        return collect(self, step, *rest)

    def cut(*arguments):
        if current[0] >= 2:
            raise ZeroDivisionError
        return real(*arguments)

    patch.setattr(groups.Collector, "collect", counted)
    patch.setattr(owner, name, cut)


def test_two_workers_leave_what_one_inline_does(tmp_path, start):
    config = small(steps=2, rollout=RolloutConfig(tasks=4))
    whole = left(trained(config, tmp_path / "inline", start))
    assert left(trained(replace(config, workers="process:2"), tmp_path / "process", start)) == whole


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(tmp_path, start, method):
    trained(small(method, steps=2, prompts=8), tmp_path, start)
    found = rows(tmp_path)
    assert len(found) == 2 and all(row["train/grad_norm"] > 0 and not row["train/skipped"] for row in found)
    before, after = (directory / "final" / "model.safetensors" for directory in (start, tmp_path))
    assert before.read_bytes() != after.read_bytes()
    dynamic = METHODS[method]["dynamic"]
    assert all((row["groups/trained"] == row["groups/judged"]) != dynamic for row in found)


def test_dapo_learns_the_table(tmp_path, start):
    config = small(steps=20, prompts=8, sampling={"answers": 8}, optim={"weight_decay": 0.0}, save_every=0)
    trained(config, tmp_path, start)
    summary = json.loads((tmp_path / "summary.json").read_text())["summary"]
    assert summary["p(right)"]["mean"] > 8 + rows(tmp_path)[0]["eval/p(right)"]  # 68.8 -> 82.8 measured


@pytest.mark.slow
def test_an_ablation_trains_every_row_and_compares_them(tmp_path, monkeypatch):
    real = ablate.benches

    def tiny(base):
        found = real(base)
        for name in ("table", "hard_table"):
            config = found[name].config
            config = replace(
                config, optim=replace(config.optim, steps=2, minibatches=2), model=small().model, task=small().task,
                sampling=replace(config.sampling, prompts=4, answers=4), save_every=0,
                evaluation=replace(config.evaluation, every=1, problems=8),
            )  # fmt: skip
            rows = found[name].rows if name == "table" else ("grpo", "dapo")
            rates = found[name].rates[:1]
            found[name] = replace(found[name], config=config, rates=rates, rows=rows, measure="p(right)")
        return found

    monkeypatch.setattr(ablate, "benches", tiny)
    config = replace(small(), method="ablate", ablation="table,hard_table", num_seeds=2)
    with Run.open(config, recipe="dapo", directory=tmp_path, quiet=True) as run:
        training.train(config, run)
    assert len(list(tmp_path.glob("parts/*/summary.json"))) == 2 * (1 + 6) + 2 * (1 + 2)
    table = json.loads((tmp_path / "artifacts" / "00-table.json").read_text())
    assert [row[0] for row in table["rows"]] == [title for title, *_ in ablate.ROWS.values()]
    assert table["columns"][0] == "row" and table["columns"][-1] == "direction"
    assert all(row[-1] in ("better", "worse", "no clear effect") for row in table["rows"][1:])
    rates = json.loads((tmp_path / "artifacts" / "01-table-rates.json").read_text())["rows"]
    assert len({row[2]["mean"] for row in rates}) == 1, "all rows start from the same weights"
    summary = json.loads((tmp_path / "summary.json").read_text())["summary"]
    for row in ("naive GRPO", "+ dynamic sampling (DAPO)"):
        assert {f"recall table, {row}, after 2 updates", f"recall table, hard keys, {row}, after 2 updates"} <= set(
            summary
        )
    assert "recall table, DAPO over GRPO, after 2 updates" in summary
    policy = sextet.load(str(tmp_path))
    assert policy.config.method == "dapo" and policy.config.loss.aggregate == "token" and policy.config.sampling.dynamic
    changed = replace(config, evaluation=replace(config.evaluation, samples=7))
    found = evaluate(changed, tmp_path)
    assert "avg@7" in found and found["problems"] == 8, "what was changed counts for the ablation's model"
    done = [part.stat().st_mtime_ns for part in sorted(tmp_path.glob("parts/*/summary.json"))]
    with Run.open(config, recipe="dapo", directory=tmp_path, resume=True, quiet=True) as run:
        training.train(config, run)
    assert done == [part.stat().st_mtime_ns for part in sorted(tmp_path.glob("parts/*/summary.json"))]
