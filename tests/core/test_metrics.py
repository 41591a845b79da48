import json
import time

import pytest
import torch

from sextet.core.errors import DataError, DivergenceError
from sextet.core.metrics import Metrics, check_finite, read_metrics


def open_metrics(path, warnings=None):
    return Metrics(path, (warnings if warnings is not None else []).append)


def test_rows_hold_means_since_the_last_row(tmp_path):
    metrics = open_metrics(tmp_path / "m.jsonl")
    metrics.log({"train/loss": 1.0, "n": 2})
    metrics.log({"train/loss": torch.tensor(3.0)})
    assert metrics.row(1) == {"train/loss": 2.0, "n": 2.0}
    assert metrics.row(2) == {}
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "train/loss": 2.0, "n": 2.0}]


def test_a_half_finished_row_survives_a_resume_exactly(tmp_path):
    values = [0.1, 1 / 3, 2**-40, 7.7]
    straight = open_metrics(tmp_path / "a.jsonl")
    for value in values:
        straight.log({"x": value})
    straight.row(3)
    first = open_metrics(tmp_path / "b.jsonl")
    for value in values[:2]:
        first.log({"x": value})
    second = open_metrics(tmp_path / "b.jsonl")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for value in values[2:]:
        second.log({"x": value})
    second.row(3)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_truncation_drops_later_rows_and_a_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    metrics = open_metrics(path)
    for step in range(5):
        metrics.write({"step": step})
    with path.open("ab") as handle:
        handle.write(b'{"step": 5, "x"')
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]
    metrics = open_metrics(path)
    metrics.truncate(3)
    metrics.write({"step": 3})
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]


def test_a_damaged_row_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\nrubbish\n{"step": 2}\n')
    with pytest.raises(DataError, match="m.jsonl:2"):
        read_metrics(path)


def test_a_full_disk_loses_rows_with_one_warning(tmp_path):
    warnings = []
    metrics = open_metrics(tmp_path / "m.jsonl", warnings)
    metrics.write({"step": 0})

    class Full:
        def __init__(self, handle):
            self.handle = handle

        def write(self, data):
            return self.handle.write(data[:3])

        def truncate(self, size):
            self.handle.truncate(size)

    working, metrics._handle = metrics._handle, Full(metrics._handle)
    metrics.write({"step": 1})
    metrics.write({"step": 2})
    metrics._handle = working
    metrics.write({"step": 3})
    assert len(warnings) == 1 and "rows are being lost" in warnings[0]
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [0, 3]


def test_check_finite_names_the_first_bad_value():
    check_finite("here", a=1.0, b=torch.ones(3))
    with pytest.raises(DivergenceError, match="member 2, update 5: gradient is not finite"):
        check_finite("member 2, update 5", loss=torch.tensor(1.0), gradient=torch.tensor([1.0, float("nan")]))
    with pytest.raises(DivergenceError, match="loss = inf"):
        check_finite("x", loss=float("inf"))


def test_a_row_costs_at_most_50_microseconds(tmp_path):
    metrics = open_metrics(tmp_path / "m.jsonl")
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for step in range(400):
            metrics.log({"train/loss": 0.123456, "train/entropy": 1.5, "eval/return": 100.0, "clip": 0.1})
            metrics.row(step)
        best = min(best, (time.perf_counter() - started) / 400)
    assert best <= 50e-6, f"{best * 1e6:.1f} microseconds"
