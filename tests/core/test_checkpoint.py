import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sextet.core import checkpoint
from sextet.core.errors import DataError

JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=12,
)


@given(JSON_VALUE)
def test_json_values_come_back_equal(value):
    state = checkpoint.split_state(value, {}, "part")
    assert checkpoint.join_state(json.loads(json.dumps(state)), {}) == value


def parts():
    optimiser = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))], fused=True)
    optimiser.param_groups[0]["params"][0].grad = torch.ones(3)
    optimiser.step()
    shared = torch.arange(6.0)
    return {
        "model": {"w": shared[:3], "v": shared.view(2, 3).T, "bits": torch.tensor([True])},
        "optimiser": optimiser.state_dict(),
    }


def test_tensors_and_optimisers_come_back_equal(tmp_path):
    saved = parts()
    checkpoint.save(tmp_path, 7, saved, info={"score": 1.5})
    loaded, manifest = checkpoint.load(tmp_path / "7")
    assert manifest["step"] == 7 and manifest["info"] == {"score": 1.5}
    for name, tensor in saved["model"].items():
        assert torch.equal(loaded["model"][name], tensor)
    fresh = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))], fused=True)
    fresh.load_state_dict(loaded["optimiser"])
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], saved["optimiser"]["state"][0]["exp_avg"])


def test_other_values_are_refused_by_path():
    with pytest.raises(TypeError, match="sampler.rng.0 is a ndarray"):
        import numpy as np

        checkpoint.split_state({"rng": [np.zeros(2)]}, {}, "sampler")


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "flipped byte": (lambda folder: _flip(folder / "model.safetensors"), "was altered"),
    "flipped state": (lambda folder: _flip(folder / "state.json"), "was altered"),
    "truncated": (lambda folder: os.truncate(folder / "model.safetensors", 40), "bytes instead of"),
    "file missing": (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
    "manifest missing": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    "emptied": (lambda folder: [entry.unlink() for entry in folder.iterdir()], "manifest.json is missing"),
    "manifest torn": (lambda folder: os.truncate(folder / "manifest.json", 30), "not JSON"),
    "other format": (
        lambda folder: (folder / "manifest.json").write_text('{"format": 99, "files": {}}'),
        "format 99 is not supported",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path, damage):
    hurt, reason = DAMAGE[damage]
    for step in (1, 2):
        checkpoint.save(tmp_path, step, parts())
    hurt(tmp_path / "2")
    reports = []
    loaded, manifest = checkpoint.load_newest(tmp_path, lambda step, why: reports.append((step, why)))
    assert manifest["step"] == 1 and "w" in loaded["model"]
    assert reports[0][0] == 2 and reason in reports[0][1]
    assert reason in (tmp_path / "quarantine" / "2-0.txt").read_text()
    assert checkpoint.steps(tmp_path) == [1]


def test_no_valid_checkpoint_is_an_error_and_never_a_fresh_start(tmp_path):
    assert checkpoint.load_newest(tmp_path, print) is None
    checkpoint.save(tmp_path, 1, parts())
    _flip(tmp_path / "1" / "model.safetensors")
    with pytest.raises(DataError, match="none of the 1 checkpoints is valid"):
        checkpoint.load_newest(tmp_path, lambda *_: None)


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, parts())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match="previous checkpoint is kept"):
        checkpoint.save(tmp_path, 2, parts())
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]
    (tmp_path / ".3.1234.tmp").mkdir()
    checkpoint.load_newest(tmp_path, print)
    assert not (tmp_path / ".3.1234.tmp").exists()


def test_the_newest_and_the_best_are_retained(tmp_path):
    for step, score in enumerate([0.1, 0.9, 0.3, 0.2, 0.5]):
        checkpoint.save(tmp_path, step, {"a": {}}, info={"score": score})
    checkpoint.retain(tmp_path, 2)
    assert checkpoint.steps(tmp_path) == [1, 3, 4]
