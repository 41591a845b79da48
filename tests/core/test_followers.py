import json
import os
import subprocess
import sys
import time
import types

import pytest

from sextet.core import followers
from sextet.core.errors import UsageError
from sextet.core.files import read_json, write_json
from sextet.core.followers import follow, start_follower


class FakeWandB(types.ModuleType):
    """Records what is sent, and refuses what the real one refuses."""

    def __init__(self):
        super().__init__("wandb")
        self.inits, self.rows, self.axes, self.finished = [], [], {}, 0

    def init(self, **options):
        self.inits.append(options)
        self.axes = {}
        return self

    def define_metric(self, name, step_metric):
        assert name not in self.axes
        self.axes[name] = step_metric

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished += 1


class FakeMLflow(types.ModuleType):
    def __init__(self):
        super().__init__("mlflow")
        self.calls = []

    def set_experiment(self, name):
        self.calls.append(("experiment", name))

    def start_run(self, run_id, run_name):
        self.calls.append(("start", run_id, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "from-server"))

    def log_params(self, params):
        self.calls.append(("params", params))

    def log_metrics(self, metrics, step):
        self.calls.append((step, metrics))

    def end_run(self):
        self.calls.append(("end",))


class FakeTrackio(types.ModuleType):
    def __init__(self):
        super().__init__("trackio")
        self.inits, self.rows, self.finished = [], [], 0

    def init(self, **options):
        self.inits.append(options)

    def log(self, metrics, step):
        self.rows.append((step, metrics))

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    module = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(followers, "POLL_SECONDS", 0.01)
    return module


def append(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        for row in rows:
            handle.write(json.dumps(row) + "\n")


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "my run ü"
    write_json(folder / "config.json", {"recipe": "mep", "config": {"seed": 1, "ppo": {"lr": 0.1}}})
    append(
        folder / "metrics.jsonl", {"step": 0, "train/loss": 2.0, "text": "no number"}, {"step": 1, "train/loss": 1.0}
    )
    append(folder / "parts" / "sp" / "metrics.jsonl", {"step": 0, "train/loss": 5})
    return folder


def test_wandb_rows_have_a_step_axis_per_part(run, wandb):
    follow(run, "wandb", once=True)
    assert wandb.rows == [
        {"train/loss": 2.0, "step": 0},
        {"train/loss": 1.0, "step": 1},
        {"sp/train/loss": 5.0, "sp/step": 0},
    ]
    assert wandb.axes == {"train/loss": "step", "sp/train/loss": "sp/step"}
    assert wandb.inits[0]["config"] == {"seed": 1, "ppo": {"lr": 0.1}}
    assert wandb.finished == 1


def test_a_later_session_continues_and_sends_nothing_twice(run, wandb):
    follow(run, "wandb", once=True)
    metrics = run / "metrics.jsonl"
    metrics.write_text("")  # the run is resumed at step 0 and writes its rows again
    append(metrics, {"step": 0, "train/loss": 2.0}, {"step": 1, "train/loss": 1.0}, {"step": 2, "train/loss": 0.5})
    follow(run, "wandb", once=True)
    assert [row["step"] for row in wandb.rows if "step" in row] == [0, 1, 2]
    assert wandb.inits[0]["id"] == wandb.inits[1]["id"] == read_json(run / "tracker.json")["wandb"]["id"]
    assert wandb.inits[1]["resume"] == "allow"


def test_truncation_while_following(run, wandb):
    metrics = run / "metrics.jsonl"
    passes = iter(
        [
            lambda: append(metrics, {"step": 2, "train/loss": 0.5}),
            lambda: metrics.write_text(json.dumps({"step": 0, "train/loss": 2.0}) + "\n"),  # cut back
            lambda: append(metrics, {"step": 1, "train/loss": 1.0}, {"step": 2, "train/loss": 0.5}),
            lambda: append(metrics, {"step": 3, "train/loss": 0.25}, {"step": 3, "eval/return": 7.0}),
            lambda: metrics.write_bytes(b'{"step": 99, "torn'),
            lambda: metrics.write_text(  # cut back and grown past what was read, between two looks
                "".join(json.dumps({"step": step, "long_name": 1.0}) + "\n" for step in range(20))
            ),
            lambda: write_json(run / "summary.json", {}),
        ]
    )

    def alive():
        next(passes)()
        return True

    follow(run, "wandb", alive=alive)
    steps = [row["step"] for row in wandb.rows if "step" in row]
    assert steps == [0, 1, 2, 3, 3, *range(4, 20)]
    assert wandb.finished == 1


def test_rows_written_just_before_the_end_are_sent(run, wandb):
    def alive():
        append(run / "metrics.jsonl", {"step": 2, "train/loss": 0.5})
        return False

    follow(run, "wandb", alive=alive)
    assert [row["step"] for row in wandb.rows if "step" in row] == [0, 1, 2]


def test_mlflow(run, monkeypatch):
    module = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    follow(run, "mlflow", once=True)
    append(run / "metrics.jsonl", {"step": 2, "train/loss": 0.5})
    follow(run, "mlflow", once=True)
    assert module.calls == [
        ("experiment", "sextet"),
        ("start", None, "my run ü"),
        ("params", {"seed": 1, "ppo.lr": 0.1}),
        (0, {"train/loss": 2.0}),
        (1, {"train/loss": 1.0}),
        (0, {"sp/train/loss": 5.0}),
        ("end",),
        ("experiment", "sextet"),
        ("start", "from-server", "my run ü"),
        (2, {"train/loss": 0.5}),
        ("end",),
    ]


def test_trackio(run, monkeypatch):
    module = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", module)
    follow(run, "trackio", once=True)
    follow(run, "trackio", once=True)
    assert module.rows == [(0, {"train/loss": 2.0}), (1, {"train/loss": 1.0}), (0, {"sp/train/loss": 5.0})]
    assert module.inits[0] == module.inits[1]
    assert (module.inits[0]["project"], module.inits[0]["resume"], module.finished) == ("sextet", "allow", 2)


def test_tensorboard_reads_back_what_was_logged(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    follow(run, "tensorboard", once=True)
    follow(run, "tensorboard", once=True)
    read = []
    for path in sorted((run / "tensorboard").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                read.append((value.tag, event.step, value.tensor.float_val[0]))
    assert read == [("train/loss", 0, 2.0), ("train/loss", 1, 1.0), ("sp/train/loss", 0, 5.0)]


def test_unknown_and_missing_trackers(run, monkeypatch):
    with pytest.raises(UsageError, match='unknown tracker "wandbb" .did you mean "wandb"'):
        start_follower(run, "wandbb")
    monkeypatch.setattr(followers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with pytest.raises(UsageError, match="pip install mlflow"):
        start_follower(run, "mlflow")
    with pytest.raises(UsageError, match="pip install mlflow"):
        follow(run, "mlflow")


TRACKER = """
import os, time
class _Run:
    def define_metric(self, *args, **options): pass
    def log(self, row): open(os.environ["SENT"], "a").write(repr(row) + "\\n")
    def finish(self): {finish}
def init(**options):
    {init}
    return _Run()
"""


@pytest.fixture
def real(run, tmp_path, monkeypatch):
    """Starts a real follower process with a tracker package whose init and finish run the given code."""
    processes = []

    def start(init="pass", finish="pass"):
        (tmp_path / "wandb.py").write_text(TRACKER.format(init=init, finish=finish))
        monkeypatch.setenv("SENT", str(tmp_path / "sent"))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.syspath_prepend(str(tmp_path))
        processes.append(start_follower(run, "wandb"))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
    sys.modules.pop("wandb", None)


def wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


def test_follower_process_ends_with_the_run(run, tmp_path, real):
    process = real()
    sent = tmp_path / "sent"
    wait_for(lambda: sent.exists() and sent.read_text().count("\n") == 3)
    assert process.poll() is None
    append(run / "metrics.jsonl", {"step": 2, "train/loss": 0.5})
    write_json(run / "summary.json", {"state": "finished"})
    assert process.wait(timeout=30) == 0
    assert "'step': 2" in sent.read_text()
    assert not (run / "follower.log").exists()


def test_broken_tracker_leaves_one_line_in_the_log(run, real):
    process = real(init="raise ConnectionError('server not\\n reachable')")
    assert process.wait(timeout=30) == 1
    lines = (run / "follower.log").read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("wandb: stopped, training is not affected: ConnectionError: server not reachable")


def test_follower_of_a_killed_run_ends_even_if_the_tracker_hangs(run, tmp_path, real):
    real().kill()  # writes the fake package
    (tmp_path / "wandb.py").write_text(TRACKER.format(init="pass", finish="time.sleep(1000)"))
    main = "from sextet.core import followers; followers.GRACE_SECONDS = 0.5; import sys; followers.main(*sys.argv[1:])"
    program = (
        "import subprocess, sys, os, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {main!r}, {str(run)!r}, 'wandb', str(os.getpid())])\n"
        "print(child.pid, flush=True); time.sleep(1000)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    wait_for(lambda: (tmp_path / "sent").exists())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: (run / "follower.log").exists())
    assert "gave up" in (run / "follower.log").read_text()

    def gone():
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return True
        with open(f"/proc/{child}/stat") as stat:  # noqa: PTH123 - an orphan nobody has waited for counts as gone
            return stat.read().rpartition(")")[2].split()[0] == "Z"

    wait_for(gone)
