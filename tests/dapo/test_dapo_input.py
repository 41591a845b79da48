"""Bad input, through whole trainings and the command line: counted, named, and never silently right or wrong."""

import json
import subprocess
from dataclasses import replace

import pytest
import torch

from dapo.small_runs import rows, small, taught, trained
from sextet.cli import main
from sextet.core import checkpoint
from sextet.core.errors import DataError, DivergenceError, UsageError
from sextet.dapo import train as training
from sextet.dapo.data import read_problems
from sextet.dapo.evaluate import Reader, majority
from sextet.dapo.learner import Learner
from sextet.dapo.model import Characters
from sextet.dapo.rewards import Verdict
from sextet.dapo.settings import (
    Config,
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    SamplingConfig,
    TaskConfig,
)
from sextet.dapo.tasks import Problem, load_task
from sextet.dapo.train import Stalled, fitting
from sextet.dapo.verifier import Verifier


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return taught(tmp_path_factory.mktemp("start"))


# --- prompts and data ---


def jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class Told:
    """What `fitting` needs of a run."""

    def __init__(self):
        self.said, self.events = [], []

    def say(self, text):
        self.said.append(text)

    def event(self, name, **fields):
        self.events.append((name, fields))


def test_prompts_that_are_too_long_or_empty_are_left_out_and_counted():
    tokenizer = Characters("0123456789=")
    problems = [Problem(prompt=text, answer="1") for text in ("1=", "12345678=", "", "2=")]
    task = replace(load_task(TaskConfig(size=20), 0), train=problems)
    config = replace(small(), task=TaskConfig(size=20, max_prompt_tokens=4))
    run, reader = Told(), Reader.of(tokenizer, config.task, task)
    kept, prompts = fitting(problems, reader, config, run)
    assert [problem.prompt for problem in kept] == ["1=", "2="] and prompts == [[1, 10], [2, 10]]
    assert run.said == ["data: 2 of 4 prompts are empty or longer than 4 tokens; they are left out"]
    assert run.events[0][0] == "warning"
    with pytest.raises(DataError, match="1 of 1 prompts are empty or longer than 4 tokens: raise task.max_prompt_tok"):
        fitting(problems[1:2], reader, config, run)


def test_rows_that_cannot_be_used_are_told_in_a_training(tmp_path, capsys):
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
    bad = [
        {"prompt": "1="},
        {"prompt": "2=", "answer": None},
        {"prompt": "3=", "answer": [1]},
        {"prompt": "4=", "answer": 0.5},
    ]
    path = jsonl(
        tmp_path / "a.jsonl", *sums, *bad, *sums[:3], {"prompt": "", "answer": "1"}, {"prompt": "5=", "answer": ""}
    )
    task = load_task(TaskConfig(name="file", train=str(path), held_out=4), 0)
    assert len(task.train) == 32 and len(task.test) == 4
    told = "\n".join(task.notes)
    assert "3 without an answer (a.jsonl:37, a.jsonl:38, a.jsonl:45)" in told and "3 copies of 3 problems" in told
    assert "1 whose answer is neither text nor a number" in told and "1 whose answer is a float" in told
    assert "1 with an empty prompt" in told
    with pytest.raises(DataError, match="none of 4 rows can be used: 2 without an answer"):
        read_problems(jsonl(tmp_path / "b.jsonl", *bad))


@pytest.mark.parametrize("share, ends", [(0, True), (1, False)])
def test_ten_thousand_prompts_of_which_few_can_be_solved(tmp_path, start, monkeypatch, share, ends):
    """With 0 in 100 the run stops after the empty steps; with 1 in 100 it trains on what there is."""
    real = training.load_task

    def hopeless(config, seed):
        task = real(config, seed)
        keys = [problem for problem in task.train if problem.extra["kind"] == "hard"] or list(task.train)
        wrong = [replace(problem, answer="none") for problem in task.train]
        return replace(task, train=(wrong * 500)[: 10_000 - 100 * share] + keys[:1] * (100 * share))

    monkeypatch.setattr(training, "load_task", hopeless)
    config = small(steps=8, prompts=4, sampling={"max_rounds": 3, "max_empty": 3})
    if not ends:
        trained(config, tmp_path, start)
        found = rows(tmp_path)
        assert len(found) == 8 and all(0 <= row["groups/trained"] <= 4 for row in found)
        assert 0 < sum(row["groups/trained"] for row in found) < 32
        return
    with pytest.raises(Stalled, match=r"no group had a spread in 3 steps in a row \(the last: all 0 right, \d+ wrong"):
        trained(config, tmp_path, start)
    found = rows(tmp_path)
    assert len(found) == 2 and all(row["groups/trained"] == 0 and row["groups/wrong"] > 4 for row in found)
    assert Stalled.exit_code == 3
    events = (tmp_path / "events.jsonl").read_text()
    assert "give easier problems, a better starting model, or longer answers" in events


def test_the_command_line_ends_with_code_3_and_a_diagnosis_where_nothing_can_be_learnt(tmp_path, capsys):
    arguments = [
        *("train", "dapo", "--preset", "smoke", "--out", str(tmp_path), "--quiet", "--device", "cpu"),
        *("--task.size", "20", "--task.reward", "dapo.odd_rewards:always_raises", "--model.warm-steps", "5"),
        *("--sampling.max-empty", "2", "--sampling.max-rounds", "2"),
    ]
    assert main(arguments) == 3
    error = capsys.readouterr().err
    assert (
        "no group had a spread in 2 steps in a row" in error and "failed); the verifier fails: see `failure`" in error
    )
    assert "Traceback" not in error
    (row,) = rows(tmp_path / "dapo" / "smoke")
    assert row["failures/error"] == row["groups/failures"] == row["answers/number"] == 4 * row["groups/failed"]


def test_groups_that_are_all_right_ask_for_harder_problems(tmp_path, start, monkeypatch):
    config = small(steps=4, sampling={"max_rounds": 1, "max_empty": 1})
    config = replace(config, task=replace(config.task, reward="dapo.odd_rewards:right"))
    with pytest.raises(Stalled, match="0 wrong, 0 failed.*give harder problems"):
        trained(config, tmp_path, start)


# --- rewards ---


@pytest.mark.parametrize(
    ("reward", "failure"),
    [("raises", "error"), ("nan", "nan"), ("sleeps", "timeout"), ("hogs", "memory"), ("exits", "died"), ("forks", "")],
)
def test_a_reward_that_misbehaves_is_counted_and_the_training_goes_on(tmp_path, start, reward, failure):
    config = small(steps=2, sampling={"max_rounds": 2}, save_every=0)
    limits = {"reward_seconds": 0.5, "reward_workers": 2, "reward_mb": 300}
    if failure not in ("timeout", ""):
        limits["reward_seconds"] = 20.0
    config = replace(config, task=replace(config.task, reward=f"dapo.odd_rewards:{reward}", **limits))
    trained(config, tmp_path, start)
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [0, 1]
    failed = sum(row.get(f"failures/{failure}", 0) for row in found)
    assert sum(row["groups/failures"] for row in found) == failed
    assert (failed > 0) == (failure != "")
    assert all(row["answers/accuracy"] < 1 for row in found) and any(row["groups/trained"] for row in found)


def test_an_answer_without_a_verdict_is_neither_right_nor_wrong_in_the_test():
    failed = Verdict(score=-1.0, right=None, failure="timeout")
    right, wrong = Verdict(score=1.0, right=True, note="3"), Verdict(score=-1.0, right=False, note="4")
    assert majority([failed, failed, right], ["", "", "3"]) and not majority([failed, failed], ["", ""])
    assert not majority([wrong, wrong, right], ["4", "4", "3"]) and majority([right, wrong], ["3", "4"])
    silent = replace(right, note=""), replace(wrong, note="")
    assert majority([silent[1], silent[0], silent[0]], ["4", "3", "3"]), "without a note the texts are compared"


BOMBS = {
    "digits": "Answer: " + "7" * 10_000_000,
    "power": "Answer: $9^{9^{9^{9}}}$",
    "factorial": r"\boxed{(10^{10})!}",
    "fractions": "Answer: $" + r"\frac{1}{1+" * 900 + "1" + "}" * 900 + "$",
    "braces": r"\boxed" + "{" * 100_000,
    "empty": "",
}


@pytest.mark.parametrize("reward", ["dapo", "robust", "number", "math-verify"])
def test_bombs_are_judged_within_bounds_and_harm_no_other_answer(reward):
    if reward == "math-verify":
        pytest.importorskip("math_verify", reason="math-verify is not installed")
    texts = [text for bomb in BOMBS.values() for text in (bomb, "Answer: 34")]
    with Verifier(reward, seconds=4.0, megabytes=1024, workers=2) as verifier:
        found = verifier.verdicts([(text, "34", {}) for text in texts])
    assert not any(verdict.right for verdict in found[::2])
    if reward == "math-verify":  # on a busy machine even a good answer may be late, but never wrong
        assert all(verdict.right or verdict.failure == "timeout" for verdict in found[1::2])
    else:
        assert all(verdict.right for verdict in found[1::2]) and not any(verdict.failure for verdict in found)


# --- the learner and the disk ---


def test_a_gradient_that_is_not_finite_is_skipped_and_three_in_a_row_stop_the_run(tmp_path, start, monkeypatch):
    real, calls = Learner._forward, [0]

    def spoiled(self, scorer, pieces):
        logp, *rest = real(self, scorer, pieces)
        calls[0] += 1
        return (logp * float("nan") if calls[0] in bad else logp), *rest

    monkeypatch.setattr(Learner, "_forward", spoiled)
    bad = {1}
    trained(small(steps=2), tmp_path / "one", start)
    assert [row["train/skipped"] for row in rows(tmp_path / "one")] == [1, 0]
    assert "update skipped" in (tmp_path / "one" / "events.jsonl").read_text()
    calls[0], bad = 0, set(range(3, 100))
    with pytest.raises(DivergenceError):
        trained(small(steps=8), tmp_path / "three", start)
    assert (tmp_path / "three" / "events.jsonl").read_text().count("update skipped") == 3
    newest = checkpoint.load_newest(tmp_path / "three" / "checkpoints", lambda *_: None)
    assert all(value.isfinite().all() for value in _tensors(newest[0]))


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _tensors(item)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_disk_that_fills_up_loses_nothing_and_the_run_goes_on_when_there_is_space(
    tmp_path, small_disk, start, monkeypatch, capsys
):
    config = small(steps=6)
    whole = trained(config, tmp_path / "whole", start)
    real, filler = training.group_logs, small_disk / "filler"

    def filling(*arguments):
        if arguments[2] == 2 and not filler.exists():
            with filler.open("wb", buffering=0) as handle:
                for size in (65536, 512):
                    try:
                        while handle.write(bytes(size)) == size:
                            pass
                    except OSError:
                        continue
        return real(*arguments)

    monkeypatch.setattr(training, "group_logs", filling)
    with pytest.raises(DataError, match="No space left"):
        trained(config, small_disk / "run", start)
    kept = checkpoint.steps(small_disk / "run" / "checkpoints")
    assert kept and kept[-1] == 2 and checkpoint.verify(small_disk / "run" / "checkpoints" / "2")["step"] == 2
    filler.unlink()
    monkeypatch.setattr(training, "group_logs", real)
    trained(config, small_disk / "run", start)
    assert rows(small_disk / "run") == rows(whole)
    weights = "final/model.safetensors"
    assert (small_disk / "run" / weights).read_bytes() == (whole / weights).read_bytes()


# --- settings ---

REFUSED = {
    "one answer": (lambda: SamplingConfig(answers=1), "sampling.answers = 1 .* 2 or more: advantages and dynamic"),
    "torn batch": (lambda: OptimConfig(minibatches=7), "optim.minibatches = 7 .* a divisor of the 128 answers"),
    "bounds": (lambda: LossConfig(clip_low=0.3, clip_high=0.2), "loss.clip_high = 0.2 .* at least clip_low = 0.3"),
    "cache": (lambda: SamplingConfig(cache_tokens=32), "sampling.cache_tokens = 32 .* 0 to max_tokens = 16"),
    "greedy": (lambda: SamplingConfig(temperature=0.0), "sampling.temperature = 0.0 .* above 0: training needs chance"),
    "top-p": (lambda: SamplingConfig(top_p=1.5), "sampling.top_p = 1.5 .* above 0, at most 1"),
    "slices": (lambda: RolloutConfig(slice_tokens=4), "rollout.slice_tokens = 4 .* 0 while rollout.staleness is 0"),
    "no workers": (lambda: TaskConfig(reward_workers=0), "task.reward_workers = 0 .* 1 or more"),
    "nan reward": (lambda: TaskConfig(failed_reward=float("nan")), "task.failed_reward = nan .* a finite number"),
    "nothing held out": (lambda: TaskConfig(held_out=0), "task.held_out = 0 .* 1 or more"),
    "no samples": (lambda: EvaluationConfig(samples=0), "evaluation.samples = 0 .* 1 or more"),
    "heads": (lambda: ModelConfig(width=30, heads=4), "model.width = 30 .* a multiple of twice the heads = 8"),
    "rate": (lambda: OptimConfig(learning_rate=0.0), "optim.learning_rate = 0.0 .* above 0"),
    "dual clip": (lambda: LossConfig(dual_clip=0.5), r"loss.dual_clip = 0.5 .* 0 \(off\) or above 1"),
}
PART = {
    SamplingConfig: "sampling", OptimConfig: "optim", LossConfig: "loss", RolloutConfig: "rollout", TaskConfig: "task",
    EvaluationConfig: "evaluation", ModelConfig: "model",
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_work_are_refused_with_what_is_allowed(case):
    make, message = REFUSED[case]
    with pytest.raises(UsageError, match=message):
        part = make()
        Config(**{PART[type(part)]: part})


def test_a_part_of_the_tokens_does_not_go_with_importance_weights():
    with pytest.raises(
        UsageError, match=r"top_p = 0.9 cannot go with loss.importance = 'truncate'.*set sampling.top_p"
    ):
        Config(sampling=SamplingConfig(top_p=0.9), loss=LossConfig(importance="truncate"))
    assert Config(method="rloo", sampling=SamplingConfig(answers=1)).sampling.answers == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampling.answers", "1"], "sampling.answers = 1 is not allowed"),
        (["--task.name", "tabel"], 'unknown task "tabel" (did you mean "table"?)'),
        (["--task.name", "gym:chain_sums"], 'unknown task "gym:chain_sums"; nearest: chain_sum'),
        (["--task.reward", "robsut"], 'unknown reward "robsut" (did you mean "robust"?)'),
        (["--task.reward", "nowhere:judge"], 'cannot load the reward "nowhere:judge": ModuleNotFoundError'),
        (["--task.name", "math"], "task math needs a file: set task.train to a path"),
        (["--task.name", "file", "--task.train", "gone.jsonl"], "gone.jsonl: no such file or folder"),
        (["--task.size", "2000"], "task.size = 2000 is not allowed; it must be 1000 or less"),
        (["--task.name", "addition", "--task.held-out", "1600"], "task.held_out = 1600 is not allowed"),
        (["--model.source", "nowhere"], 'model.source "nowhere" is not tiny, smollm2 or a folder with a config.json'),
        (["--preset", "smok"], 'unknown preset "smok" (did you mean "smoke"?)'),
        (
            ["--method", "ablate", "--ablation", "tables"],
            'unknown task of the ablation "tables" (did you mean "table"?)',
        ),
    ],
)
def test_the_command_line_names_what_is_wrong_before_anything_is_written(tmp_path, capsys, arguments, message):
    if "gym:" in arguments[1]:
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    preset = [] if "--preset" in arguments else ["--preset", "smoke"]
    assert main(["train", "dapo", *preset, "--out", str(tmp_path), "--quiet", *arguments]) in (2, 3)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error
    assert not list(tmp_path.iterdir())


def test_an_unknown_method_is_answered_with_those_there_are(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "dapo", "--preset", "smoke", "--out", str(tmp_path), "--method", "dpao"])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert "dr_grpo" in told.err + told.out


# --- evaluation of any set ---

SETS = ["aime24", "amc23", "svamp", "gsm8k_test", "aime-2024", "math500", "gym:chain_sum"]


@pytest.mark.parametrize("name", SETS)
def test_a_model_is_tested_on_every_public_set(tmp_path, real_data, monkeypatch, capsys, name):
    pytest.importorskip("transformers")
    language = pytest.importorskip("dapo.test_language")
    if name.startswith("gym:"):
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    monkeypatch.setenv("SEXTET_DATA", str(real_data))
    folder = language.write_folder(tmp_path / "model")
    task = ["--task.name", name, "--task.size", "10"] if name.startswith("gym:") else ["--task.name", "math"]
    task += [] if name.startswith("gym:") else ["--task.test", name]
    options = ["--evaluation.samples", "3", "--evaluation.problems", "4", "--sampling.max-tokens", "8"]
    arguments = ["eval", "dapo", "--json", "--model.source", str(folder), *task, *options, "--device", "cpu"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"avg@3", "pass@3", "cons@3"} <= found.keys() and found["problems"] == 4
    assert found["avg@3"].keys() == {"mean", "low", "high", "n"} and found["avg@3"]["n"] == 4
