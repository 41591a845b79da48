import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from sextet.core import checkpoint
from sextet.core.config import RunConfig
from sextet.core.errors import DataError, DivergenceError, Interrupted, UsageError
from sextet.core.metrics import read_metrics
from sextet.core.run import Run

STEPS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    rate: float = 0.1
    """A setting that changes the result."""


def open_run(directory, resume=False, **fields):
    return Run.open(Config(**fields), recipe="toy", directory=directory, resume=resume, quiet=True)


def work(run, total=STEPS, at_step=lambda step: None):
    """Trains a small network on noise, with dropout: every kind of randomness a step can have."""
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(run.key("init") % 2**31)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=run.config.rate)
    run.track(model=model, optimiser=optimiser)
    for step in run.steps(total):
        inputs = torch.randn(16, 4) + float(run.rng("data", step).numpy.normal())
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        run.log({"train/loss": loss.detach()}, noise=float(inputs.mean()))
        at_step(step)
    run.finish({"completed": run.step}, weights=model.state_dict())
    return model.state_dict()


def final(directory):
    return (directory / "final" / "model.safetensors").read_bytes(), (directory / "metrics.jsonl").read_bytes()


def test_a_run_leaves_what_it_promises(tmp_path):
    directory = tmp_path / "ä run"
    with open_run(directory, log_every=4) as run:
        work(run)
    assert run.finished and run.summary == {"completed": STEPS}
    assert [row["step"] for row in read_metrics(directory / "metrics.jsonl")] == list(range(3, STEPS, 4))
    assert json.loads((directory / "config.json").read_text())["config"]["rate"] == 0.1
    assert "sextet.load" in (directory / "final" / "README.md").read_text()
    for name in ("env.json", "command.txt", "events.jsonl", "summary.json"):
        assert (directory / name).exists()


@pytest.mark.parametrize("log_every", [1, 7])
def test_stopping_by_signal_anywhere_changes_nothing(tmp_path, log_every):
    fields = {"log_every": log_every, "save_every": 6}
    with open_run(tmp_path / "straight", **fields) as run:
        work(run)
    stops = iter([3, 11, 12, 25, 39])
    while True:
        stop = next(stops, None)
        directory = tmp_path / "stopped"

        def at_step(step, stop=stop):
            if step == stop:
                os.kill(os.getpid(), signal.SIGTERM)

        try:
            with open_run(directory, resume=directory.exists(), **fields) as run:
                work(run, at_step=at_step)
            break
        except Interrupted as error:
            assert error.exit_code == 4 and f"sextet resume {directory}" in str(error)
            assert checkpoint.steps(directory / "checkpoints")[-1] == stop + 1
    assert final(tmp_path / "straight") == final(directory)


def test_handlers_are_restored_and_a_second_signal_ends_at_once(tmp_path):
    before = signal.getsignal(signal.SIGINT)

    def twice(step):
        if step == 5:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), open_run(tmp_path / "run", save_every=2) as run:
        work(run, at_step=twice)
    assert signal.getsignal(signal.SIGINT) is before
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == 4


def test_an_exception_is_recorded_and_leaves_no_new_checkpoint(tmp_path):
    def fail(step):
        if step == 5:
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError), open_run(tmp_path / "run", save_every=2) as run:
        work(run, at_step=fail)
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == 4
    assert '"RuntimeError: boom"' in (tmp_path / "run" / "events.jsonl").read_text()


def test_a_loss_that_is_not_finite_stops_without_a_checkpoint(tmp_path):
    with open_run(tmp_path / "run", save_every=1) as run:
        model = torch.nn.Linear(1, 1)
        run.track(model=model)
        with pytest.raises(DivergenceError, match="train/loss = nan"):
            for step in run.steps(10):
                run.log({"train/loss": float("nan") if step == 3 else 1.0})
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == 3


def test_the_directory_is_guarded(tmp_path):
    with open_run(tmp_path / "run") as run:
        with pytest.raises(UsageError, match="already holds a run"):
            open_run(tmp_path / "run")
        code = (
            "from sextet.core.run import Run\nfrom sextet.core.config import RunConfig\n"
            f"Run.open(RunConfig(), recipe='toy', directory={str(tmp_path / 'run')!r}, resume=True)"
        )
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert f"in use by process {os.getpid()}" in second.stderr
        work(run)
    with pytest.raises(UsageError, match=r"rate: 0\.1 -> 0\.2"):
        open_run(tmp_path / "run", resume=True, rate=0.2)
    with Run.open(Config(rate=0.2), recipe="toy", directory=tmp_path / "run", resume=True, force=True, quiet=True):
        pass
    assert '"forced": true' in (tmp_path / "run" / "events.jsonl").read_text()
    with pytest.raises(UsageError, match='recipe "toy"'):
        Run.open(Config(), recipe="other", directory=tmp_path / "run", resume=True)
    with pytest.raises(UsageError, match="holds no run"):
        open_run(tmp_path / "absent", resume=True)


def test_damage_to_the_newest_checkpoint_costs_only_time(tmp_path):
    with open_run(tmp_path / "straight") as run:
        work(run)

    def stop(step):
        if step == 21:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted), open_run(tmp_path / "hurt", save_every=6) as run:
        work(run, at_step=stop)
    file = tmp_path / "hurt" / "checkpoints" / "22" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)
    with open_run(tmp_path / "hurt", resume=True, save_every=6) as run:
        work(run)
    assert final(tmp_path / "hurt") == final(tmp_path / "straight")
    events = [json.loads(line) for line in (tmp_path / "hurt" / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events if "reason" in event] == [("quarantined", 22)]
    assert [event["step"] for event in events if event["event"] == "restored"] == [18]


def test_failed_saves_are_tolerated_twice_and_end_the_run_the_third_time(tmp_path, monkeypatch):
    with open_run(tmp_path / "run", save_every=2) as run:
        real, fail_from = checkpoint.save, 5

        def save(root, step, parts, **options):
            if step >= fail_from:
                raise DataError("disk full")
            return real(root, step, parts, **options)

        monkeypatch.setattr(checkpoint, "save", save)
        with pytest.raises(DataError, match="disk full"):
            work(run)
        assert run.step == 10
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [2, 4]


def test_parts_have_their_own_streams_steps_and_end(tmp_path):
    with open_run(tmp_path / "run") as run:
        one, two = run.child("one"), run.child("two")
        assert one.key("init") != two.key("init") != run.key("init")
        work(one)
        one.close()
        with pytest.raises(Interrupted, match=f"sextet resume {tmp_path / 'run'}$"):
            work(two, at_step=lambda step: step == 2 and os.kill(os.getpid(), signal.SIGTERM))
    with open_run(tmp_path / "run", resume=True) as run:
        assert run.child("one").finished and not run.child("two").finished
        work(run.child("two"))
    with open_run(tmp_path / "other") as run:
        work(run.child("two"))
    assert final(tmp_path / "run" / "parts" / "two") == final(tmp_path / "other" / "parts" / "two")


def test_tracking_something_that_cannot_be_saved_fails_at_once(tmp_path):
    class Odd:
        def state_dict(self):
            return {"callback": print}

    with open_run(tmp_path / "run") as run, pytest.raises(TypeError, match=r"odd\.callback"):
        run.track(odd=Odd())


def test_a_checkpoint_of_another_program_is_refused(tmp_path):
    with open_run(tmp_path / "run") as run:
        run.track(model=torch.nn.Linear(1, 1))
        for _ in run.steps(1):
            pass
    with open_run(tmp_path / "run", resume=True) as run:
        run.track(model=torch.nn.Linear(1, 1), other=torch.nn.Linear(1, 1))
        with pytest.raises(DataError, match="tracked are"):
            run.restore()


def test_idle_cost_of_a_step_and_flat_memory(tmp_path):
    resource = pytest.importorskip("resource")
    with open_run(tmp_path / "run", save_minutes=1e9) as run:
        run.track(model=torch.nn.Linear(1, 1))
        best, started = float("inf"), time.perf_counter()
        sizes = []
        for step in run.steps(10_000):
            if step % 500 == 499:
                best = min(best, (time.perf_counter() - started) / 500)
                sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
                started = time.perf_counter()
            run.log(loss=1.0)
    assert best <= 100e-6, f"{best * 1e6:.1f} microseconds"
    assert sizes[-1] <= 1.05 * sizes[4]
