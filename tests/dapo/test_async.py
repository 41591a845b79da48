"""Generation beside training: how old what is trained on gets, what it saves, and what a restart leaves of it."""

import json
import time
from collections import Counter

import numpy as np
import pytest

from dapo.slow_generators import make_slow_generator
from faults.harness import result
from sextet.core.metrics import read_metrics
from sextet.dapo import generators
from sextet.dapo import train as training
from sextet.dapo.samples import read_samples, steps_with_samples
from sextet.launch import launch, resume_run

pytestmark = pytest.mark.timeout(900)


def fields(steps=4, **rollout):
    return {
        "device": "cpu",
        "save_every": 1,
        "task": {"name": "chain", "size": 64, "reward": "dapo.chance_rewards:even"},
        "model": {"warm_steps": 1, "width": 16, "layers": 1},
        "sampling": {"prompts": 3, "answers": 4, "max_tokens": 10},
        "optim": {"steps": steps, "minibatches": 1},
        "rollout": rollout,
        "evaluation": {"problems": 2, "samples": 1},
    }


def trained(folder, workers="inline", **others):
    return launch("dapo", "smoke", {**fields(**others), "workers": workers}, directory=folder, quiet=True).directory


def outcome(folder):
    """Weights and metrics, but for times."""
    found = result(folder)
    for name, content in found.items():
        if name.endswith(".jsonl"):
            rows = [json.loads(line) for line in content.splitlines()]
            found[name] = [{key: value for key, value in row.items() if "time/" not in key} for row in rows]
    return found


def answers_of(folder):
    """(step, draw, answer) of all answers that were trained on."""
    return [
        (step, group["draw"], answer)
        for step in steps_with_samples(folder)
        for group in read_samples(folder, step)["groups"]
        if group["trained"]
        for answer in group["answers"]
    ]


def check_ages(folder, steps, bound):
    """No token is older than the bound, by the logs and by the tokens; no draw is trained on twice."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "groups/trained" in row]
    assert len(rows) == steps and all(row["groups/trained"] == 3 for row in rows)
    assert all(row.get("async/staleness_max", 0) <= bound for row in rows)
    answers = answers_of(folder)
    assert all(step - bound <= version <= step for step, _, answer in answers for version in answer["versions"])
    assert all(answer["versions"] == sorted(answer["versions"]) for _, _, answer in answers)
    assert all(len(answer["logp"]) == len(answer["versions"]) == answer["length"] for _, _, answer in answers)
    assert all(answer["stopped"] or answer["length"] == 10 for _, _, answer in answers)
    groups = Counter(draw for _, draw, _ in answers)
    assert len(groups) == 3 * steps and set(groups.values()) == {4}
    return answers


def test_with_a_bound_of_0_processes_give_the_inline_run_bit_by_bit(tmp_path):
    inline = trained(tmp_path / "inline", steps=3)
    assert outcome(inline) == outcome(trained(tmp_path / "process", "process:1", steps=3))
    check_ages(inline, 3, 0)


def test_answers_run_ahead_and_go_on_under_newer_weights_within_the_bound(tmp_path):
    folder = trained(tmp_path / "run", steps=6, staleness=2, slice_tokens=3, tasks=2)
    answers = check_ages(folder, 6, 2)
    spanning = [answer for _, _, answer in answers if len(set(answer["versions"])) > 1]
    assert spanning, "some answers were begun under one version and ended under another"
    for answer in spanning:
        assert all(count % 3 == 0 for count in list(Counter(answer["versions"]).values())[:-1]), "whole slices"
    assert max(step - min(answer["versions"]) for step, _, answer in answers) >= 1


def test_a_restart_trains_on_nothing_twice_and_loses_no_step(tmp_path, monkeypatch):
    update, wanted = training.Learner.update, {2, 4}

    def interrupted(self, samples, run):
        if run.step in wanted:
            wanted.remove(run.step)
            raise ZeroDivisionError
        return update(self, samples, run)

    monkeypatch.setattr(training.Learner, "update", interrupted)
    folder = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        trained(folder, steps=6, staleness=1, slice_tokens=4, tasks=3)
    with pytest.raises(ZeroDivisionError):
        resume_run(folder, {}, quiet=True)
    resume_run(folder, {}, quiet=True)
    check_ages(folder, 6, 1)


def timed(folder, monkeypatch, seconds, *, steps=5, **rollout):
    """Trains with a generator and updates that take ``seconds`` each; returns both's intervals and seconds a step."""
    monkeypatch.setenv("SLOW_SECONDS", str(seconds))
    monkeypatch.setenv("SLOW_NOTES", str(folder.with_suffix(".notes")))
    monkeypatch.setattr(generators, "make_generator", make_slow_generator)
    updates, real = [], training.Learner.update

    def update(self, samples, run):
        started = time.monotonic()
        logs = real(self, samples, run)
        time.sleep(seconds)
        updates.append((started, time.monotonic()))
        return logs

    with monkeypatch.context() as patch:
        patch.setattr(training.Learner, "update", update)
        trained(folder, "process:1", steps=steps, **rollout)
    made = [json.loads(line) for line in folder.with_suffix(".notes").read_text().splitlines()]
    return made, updates, float(np.median(np.diff([end for _, end in updates])))


def shared(made, updates):
    """Share of the updates' time in which answers were generated; the last update has nothing ahead of it to do."""
    both = sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in updates[:-1] for start, stop in made)
    return both / sum(end - begin for begin, end in updates[:-1])


def test_answers_are_generated_while_the_policy_learns(tmp_path, monkeypatch):
    made, updates, _ = timed(tmp_path / "ahead", monkeypatch, 0.5, steps=4, staleness=1)
    assert shared(made, updates) > 0.5
    check_ages(tmp_path / "ahead", 4, 1)


@pytest.mark.slow
def test_a_step_takes_two_thirds_of_the_time_where_generation_takes_as_long_as_learning(tmp_path, monkeypatch):
    made, updates, synchronous = timed(tmp_path / "in-turn", monkeypatch, 2.0)
    assert shared(made, updates) == 0
    _, _, asynchronous = timed(tmp_path / "ahead", monkeypatch, 2.0, staleness=1)
    assert asynchronous <= 0.65 * synchronous
