"""A recall table of 20 keys, a model that is taught it in seconds, and runs on it."""

from dataclasses import replace

from sextet.core.metrics import read_metrics
from sextet.core.run import Run
from sextet.dapo.settings import Config, EvaluationConfig, ModelConfig, OptimConfig, SamplingConfig, TaskConfig
from sextet.dapo.train import start_part, train

WATCHED = {
    *("reward/mean", "reward/std", "reward/length_penalty", "answers/accuracy", "answers/score"),
    *("answers/length", "answers/length_min", "answers/length_max", "answers/truncated", "answers/unreadable"),
    *("answers/number", "policy/entropy", "policy/probability", "policy/clip_low", "policy/clip_high"),
    *("policy/dual_clip", "policy/kl_old", "policy/kl", "policy/rollout_difference", "policy/rollout_kl"),
    *("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens", "train/skipped"),
    *("groups/judged", "groups/mixed", "groups/trained", "groups/rounds", "groups/tokens", "groups/failures"),
    *("groups/carried", "groups/surplus", "async/staleness", "async/staleness_max"),
    *("time/collect", "time/verdicts", "time/update", "time/publish", "time/test", "time/tokens_per_second"),
}
"""What every step's row has."""


def small(method="dapo", *, steps=4, prompts=4, sampling=None, optim=None, **fields):
    """Settings on the table; ``sampling`` and ``optim`` are fields of these."""
    return Config(
        **{
            "method": method,
            "task": TaskConfig(size=20),
            "model": ModelConfig(width=32, layers=1, warm_steps=250),
            "sampling": SamplingConfig(**{"prompts": prompts, "answers": 4, "max_tokens": 4} | (sampling or {})),
            "optim": OptimConfig(**{"steps": steps, "learning_rate": 5e-4, "minibatches": 2} | (optim or {})),
            "evaluation": EvaluationConfig(problems=20, samples=2),
            "save_every": 1,
            "device": "cpu",
        }
        | fields
    )


def taught(directory):
    """Teaches the model that runs of `small` may start from; returns its folder."""
    with Run.open(replace(small(), save_every=0), recipe="dapo", directory=directory, quiet=True) as part:
        start_part(part.config, part)
    return directory


def trained(config, directory, start=None):
    """Trains in a run of its own, or goes on with the one that is there."""
    again = (directory / "config.json").exists()
    with Run.open(config, recipe="dapo", directory=directory, resume=again, quiet=True) as run:
        train(config, run, start)
    return directory


def rows(directory):
    """The rows of the metrics without what a clock measured."""
    return [
        {name: value for name, value in row.items() if not name.startswith("time/")}
        for row in read_metrics(directory / "metrics.jsonl")
    ]


def left(directory):
    """What must not depend on interruptions: weights, optimiser, position in the data, summary, metrics."""
    newest = max((directory / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    return {
        "weights": (directory / "final" / "model.safetensors").read_bytes(),
        "policy": (newest / "policy.safetensors").read_bytes(),
        "summary": (directory / "summary.json").read_text().split('"summary"')[1],
        "rows": rows(directory),
    }
