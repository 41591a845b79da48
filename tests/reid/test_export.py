"""Exported networks give the vectors of the network they came from, or are not written."""

import importlib.util
import json
import sys
from dataclasses import replace

import pytest
import torch

import sextet
from sextet.core.errors import DataError, UsageError
from sextet.core.records import write_final
from sextet.reid import export as module
from sextet.reid.config import MGN_PRESETS, RMGL_PRESETS
from sextet.reid.export import export
from sextet.reid.model import build_model

needs_onnx = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")),
    reason='ONNX is not installed: pip install "sextet[export]"',
)


def smoke(recipe):
    return {"mgn": MGN_PRESETS, "rmgl": RMGL_PRESETS}[recipe]["smoke"]()


def finished(folder, recipe, **model):
    """A final folder of an untrained network whose batch normalisations have seen some pixels."""
    config = smoke(recipe)
    config = replace(config, model=replace(config.model, **model))
    torch.manual_seed(3)
    network = build_model(config.method, config.model, 5).train()
    for _ in range(3):
        network(torch.randn(8, 3, *config.size))
    write_final(folder, recipe, config, {"mAP": 1.0}, network.state_dict())
    return folder


@pytest.fixture
def run(tmp_path, request):
    return finished(tmp_path / "final", request.param)


BOTH = pytest.mark.parametrize("run", ["mgn", "rmgl"], indirect=True)


def pictures(model, batch):
    rows = torch.linspace(0, 255, batch * 3 * model.size[0] * model.size[1])
    return rows.view(batch, 3, *model.size).flip(0).to(torch.uint8)


@needs_onnx
@BOTH
def test_onnx_gives_the_vectors_of_the_network_for_any_batch(run, tmp_path):
    import onnxruntime

    report = export(run, "onnx", tmp_path / "out")
    assert report["largest_difference"] <= 1e-4
    session = onnxruntime.InferenceSession(report["file"], providers=["CPUExecutionProvider"])
    model = sextet.load(str(run))
    for batch in (1, 7):
        images = pictures(model, batch)
        (vectors,) = session.run(None, {"pixels": images.float().numpy()})
        assert abs(vectors - model.embed(images)).max() <= 1e-4
    about = session.get_modelmeta().custom_metadata_map
    assert about["sextet"] == sextet.__version__ and about["height"] == str(model.size[0])
    assert about["feature_size"] == str(model.feature_size)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.onnx"]


@BOTH
def test_torch_export_gives_the_vectors_of_the_network_for_any_batch(run, tmp_path):
    report = export(run, "torch", tmp_path / "out")
    extra = {"sextet.json": ""}
    program = torch.export.load(report["file"], extra_files=extra).module()
    model = sextet.load(str(run))
    for batch in (1, 7):
        images = pictures(model, batch)
        assert (program(images.float()) - torch.from_numpy(model.embed(images))).abs().max() <= 1e-4
    assert json.loads(extra["sextet.json"])["width"] == str(model.size[1])


@pytest.mark.parametrize("run", ["rmgl"], indirect=True)
def test_safetensors_is_a_folder_that_loads(run, tmp_path):
    report = export(run, "safetensors", tmp_path / "out")
    assert report["largest_difference"] <= 1e-6
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    images = pictures(sextet.load(str(run)), 2)
    assert (sextet.load(str(tmp_path / "out")).embed(images) == sextet.load(str(run)).embed(images)).all()


@pytest.mark.parametrize("run", ["mgn"], indirect=True)
def test_a_file_that_differs_is_not_left(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    export(run, "safetensors", out)
    before = (out / "model.safetensors").read_bytes()
    monkeypatch.setattr(module, "difference", lambda model, run, batch: 2e-4 if batch == 5 else 0.0)
    for name in ("safetensors", "torch"):
        with pytest.raises(DataError, match="would differ from the network by 2.0e-04"):
            export(run, name, out)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("run", ["mgn"], indirect=True)
def test_the_check_sees_a_difference_and_no_number_at_all(run):
    model = sextet.load(str(run))
    same = module.Exported(model)
    assert module.difference(model, same, 2) <= 1e-6
    assert module.difference(model, lambda pixels: same(pixels).detach().roll(1, 0), 2) > 1e-4
    assert not module.difference(model, lambda pixels: same(pixels) * float("nan"), 2) <= 1e-4


@pytest.mark.parametrize("run", ["mgn"], indirect=True)
def test_wrong_formats_and_missing_packages_are_told(run, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match='unknown format "onxx".*did you mean "onnx"'):
        export(run, "onxx", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match=r'needs the package onnx.*pip install "sextet\[export\]"'):
        export(run, "onnx", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
