"""Weights of others: what is read, renamed, dropped aloud and refused."""

import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sextet.core.errors import DataError
from sextet.reid.weights import load_weights, read_weights


class Small(nn.Module):
    def __init__(self, people=5):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, people)


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)


def state(seed=1, people=5):
    torch.manual_seed(seed)
    return {name: value + 1 for name, value in Small(people).state_dict().items()}


def same(module, expected):
    return all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("prefix", ["", "module.", "model.backbone.", "module.model."])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
@pytest.mark.parametrize("suffix", [".pth", ".pt", ".pth.tar"])
def test_state_dicts_load_whatever_wraps_them(tmp_path, prefix, wrapper, suffix):
    renamed = {prefix + name: value for name, value in state().items()}
    torch.save({wrapper: renamed, "epoch": 3} if wrapper else renamed, tmp_path / f"weights{suffix}")
    module = Small()
    assert load_weights(module, tmp_path / f"weights{suffix}") == []
    assert same(module, state())


def test_safetensors_load_from_the_file_and_from_its_folder(tmp_path):
    save_file(state(), tmp_path / "model.safetensors")
    for path in (tmp_path, str(tmp_path / "model.safetensors")):
        module = Small()
        assert load_weights(module, path) == []
        assert same(module, state())


def test_a_classifier_for_other_people_is_dropped_and_said(tmp_path):
    torch.save(state(people=9), tmp_path / "weights.pth")
    trunk = Trunk()
    (note,) = load_weights(trunk, tmp_path / "weights.pth")
    assert "dropped: fc.weight, fc.bias" in note
    module = Small(people=5)
    fresh = module.fc.weight.clone()
    dropped, anew = load_weights(module, tmp_path / "weights.pth")
    assert "dropped: fc.weight, fc.bias" in dropped and "initialised anew: fc.weight, fc.bias" in anew
    assert torch.equal(module.fc.weight, fresh)
    assert torch.equal(module.conv1.weight, state(people=9)["conv1.weight"])


def test_counters_of_batches_may_be_missing(tmp_path):
    older = {name: value for name, value in state().items() if not name.endswith("num_batches_tracked")}
    torch.save(older, tmp_path / "weights.pth")
    assert load_weights(Small(), tmp_path / "weights.pth") == []


def test_wrong_names_are_told_with_the_nearest_ones_and_change_nothing(tmp_path):
    renamed = {name.replace("conv1", "convv1"): value for name, value in state().items()}
    torch.save(renamed, tmp_path / "weights.pth")
    module = Small()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(DataError) as error:
        load_weights(module, tmp_path / "weights.pth")
    assert 'missing conv1.weight (did you mean "convv1.weight"?)' in str(error.value)
    assert 'unexpected convv1.weight (did you mean "conv1.weight"?)' in str(error.value)
    assert same(module, before)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s | {"conv1.weight": torch.zeros(4, 3, 5, 5)}, r"conv1.weight is \(4, 3, 5, 5\).*\(4, 3, 3, 3\)"),
        (lambda s: s | {"bn1.bias": torch.full((4,), torch.nan)}, "bn1.bias holds values that are not finite"),
        (lambda s: s | {"module.conv1.weight": s["conv1.weight"]}, "conv1.weight twice"),
        (lambda s: {}, "it is empty"),
        (lambda s: s | {"lr": 0.1}, "not a state dict: lr"),
        (lambda s: [s], "holds a list"),
    ],
)
def test_unfit_contents_are_refused(tmp_path, change, message):
    torch.save(change(state()), tmp_path / "weights.pth")
    module = Small()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(DataError, match=message):
        load_weights(module, tmp_path / "weights.pth")
    assert same(module, before)


class Harmful:
    def __reduce__(self):
        return print, ("run",)


def test_files_that_hold_code_are_refused_and_nothing_runs(tmp_path, capsys):
    torch.save({"conv1.weight": Harmful()}, tmp_path / "weights.pth")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Harmful()))
    for name in ("weights.pth", "plain.pt"):
        with pytest.raises(DataError, match="not a plain state dict"):
            read_weights(tmp_path / name)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"not weights at all, but text"])
def test_damaged_files_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        read_weights(tmp_path / name)


def test_a_missing_file_says_what_is_wanted(tmp_path):
    with pytest.raises(DataError, match="no such file; give the path of a .safetensors, .pth or .pt"):
        load_weights(Small(), tmp_path / "absent.pth")
