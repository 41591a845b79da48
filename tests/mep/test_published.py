"""Published agents: an export against its own arithmetic in numpy, hostile exports, and the published returns."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sextet.core.errors import DataError
from sextet.core.seeding import numpy_rng
from sextet.mep.evaluate import play
from sextet.mep.overcooked import LAYOUTS, Layout, Overcooked
from sextet.mep.policy import PolicyAgent
from sextet.mep.published import METHODS, find_published, load_published

SAME_SEED = {  # self-play of the exported seeds in the study's result files, kitchens in the order of LAYOUTS
    "ppo_sp": (205.5, 175.5, 196.5, 163.5, 131.0),
    "pbt": (213.5, 223.5, 223.0, 199.5, 179.0),
}
LAYERS = ("conv_initial", "conv_0", "conv_1", "dense", "dense_1", "dense_2")
Edit = Callable[[dict[str, Any]], object]


def write_export(folder: Path, layout: str = "coordination_ring") -> dict[str, np.ndarray[Any, Any]]:
    """Writes a random agent in the published format; returns its tensors."""
    kitchen, rng = Layout.load(layout), np.random.default_rng(1)
    kernels = [(5, 5, 20, 25), (3, 3, 25, 25), (3, 3, 25, 25)]
    kernels += [(25 * (kitchen.width - 2) * (kitchen.height - 2), 64), (64, 64), (64, 64)]
    shapes: dict[str, tuple[int, ...]] = {"b": (6,), "w": (64, 6)}
    for layer, shape in reversed([*zip(LAYERS, kernels, strict=True)]):
        shapes |= {f"{layer}/bias": shape[-1:], f"{layer}/kernel": shape}
        if layer == "dense":
            shapes["flatten/Reshape/shape"] = (2,)
    tensors = {name: rng.normal(0, 0.2, shape).astype("<f4") for name, shape in shapes.items()}
    tensors["flatten/Reshape/shape"] = np.array([-1, kernels[3][0]], "<i4")
    listed = [
        {"name": f"agent0/ppo2_model/pi/{name}", "shape": list(value.shape), "dtype": value.dtype.name}
        for name, value in tensors.items()
    ]
    folder.mkdir(parents=True)
    manifest = [{"paths": ["group1-shard1of1"], "weights": listed}]
    (folder / "model.json").write_text(json.dumps({"modelTopology": {}, "weightsManifest": manifest}))
    (folder / "group1-shard1of1").write_bytes(b"".join(value.tobytes() for value in tensors.values()))
    return tensors


def reference_logits(tensors: dict[str, np.ndarray[Any, Any]], planes: Any) -> Any:
    """The published network on (N, W, H, 20) counts, in the published axes."""

    def leaky(value: Any) -> Any:
        return np.where(value > 0, value, 0.2 * value)

    hidden = planes.astype(float)
    for layer, margin in zip(LAYERS[:3], (2, 1, 0), strict=True):
        kernel = tensors[f"{layer}/kernel"]
        padded = np.pad(hidden, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[:2], axis=(1, 2))
        hidden = leaky(np.einsum("nxyiab,abio->nxyo", windows, kernel) + tensors[f"{layer}/bias"])
    hidden = hidden.reshape(len(hidden), -1)
    for layer in LAYERS[3:]:
        hidden = leaky(hidden @ tensors[f"{layer}/kernel"] + tensors[f"{layer}/bias"])
    return hidden @ tensors["w"] + tensors["b"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_import_computes_what_the_export_does(tmp_path: Path, layout: str) -> None:
    tensors = write_export(tmp_path / f"pbt_{layout}", layout)
    policy = load_published(tmp_path / f"pbt_{layout}")
    _, height, width = policy.input_shape
    planes = np.random.default_rng(0).integers(0, 21, (8, 20, height, width), np.uint8)
    inputs = torch.empty(8, *policy.input_shape)
    policy.encode(planes, inputs)
    with torch.no_grad():
        outputs = policy(inputs).numpy()
    expected = reference_logits(tensors, planes.transpose(0, 3, 2, 1))
    np.testing.assert_allclose(outputs[:, :6], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert not outputs[:, 6].any(), "the value is 0"


def test_agents_are_found_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEXTET_DATA", str(tmp_path))
    assert find_published() == {}
    for name in ("pbt_cramped_room", "ppo_sp_cramped_room", "other"):
        write_export(tmp_path / "overcooked" / "agents" / name, "cramped_room")
    found = find_published()
    assert list(found) == ["pbt_cramped_room", "ppo_sp_cramped_room"]
    assert found == find_published(tmp_path / "overcooked" / "agents")


def entry(model: dict[str, Any], name: str) -> Any:
    return next(e for e in model["weightsManifest"][0]["weights"] if e["name"].endswith("/pi/" + name))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.pop("weightsManifest"), "one group of weights"),
        (lambda m: m["weightsManifest"].append({}), "one group of weights"),
        (lambda m: m["weightsManifest"][0].update(paths=["../secret"]), "expected one file, group1-shard1of1"),
        (lambda m: entry(m, "w").update(dtype="uint8"), '"w" is uint8'),
        (lambda m: entry(m, "w").update(shape=[6, 64]), r'"w" is float32 \[6, 64\]; expected float32 \[64, 6\]'),
        (lambda m: entry(m, "w").update(shape=-1), '"w" is float32 -1'),
        (lambda m: entry(m, "w").update(name=7), "one group of weights"),
        (lambda m: entry(m, "w").update(quantization={"scale": 1}), "expected name, shape and dtype"),
        (lambda m: entry(m, "w").update(name="agent0/ppo2_model/pi/v"), '"v" is float32'),
        (lambda m: entry(m, "w").update(name="agent0/ppo2_model/vf/w"), 'unexpected or repeated tensor "agent0'),
        (lambda m: entry(m, "w").update(name="agent0/ppo2_model/pi/b"), "unexpected or repeated"),
        (lambda m: m["weightsManifest"][0]["weights"].pop(), 'no tensor "conv_initial/kernel"'),
    ],
)
def test_an_unexpected_export_is_refused(tmp_path: Path, edit: Edit, message: str) -> None:
    folder = tmp_path / "pbt_coordination_ring"
    write_export(folder)
    model = json.loads((folder / "model.json").read_text())
    edit(model)
    (folder / "model.json").write_text(json.dumps(model))
    with pytest.raises(DataError, match=message) as caught:
        load_published(folder)
    assert str(folder / "model.json") in str(caught.value)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "pbt_coordination_ring"
    write_export(folder)
    path = folder / "group1-shard1of1"
    data = path.read_bytes()
    for content, message in ((data[:-4], "bytes; model.json lists"), (b"\0\0\xc0\x7f" + data[4:], '"b" is not finite')):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_published(folder)
    path.unlink()
    with pytest.raises(DataError, match="group1-shard1of1: cannot read"):
        load_published(folder)
    with pytest.raises(DataError, match=r"name must be one of ppo_sp_cramped_room"):
        load_published(tmp_path / "pbt_somewhere")
    folder.rename(tmp_path / "pbt_cramped_room")
    with pytest.raises(DataError, match=r"\[225, 64\]; expected float32 \[150, 64\]"):
        load_published(tmp_path / "pbt_cramped_room")


@pytest.fixture(scope="module")
def published(real_data: Path) -> dict[str, Path]:
    """The agents' folders; the test skips without them."""
    found = find_published(real_data / "overcooked" / "agents")
    if not found:
        pytest.skip(f"no published agents in {real_data / 'overcooked' / 'agents'}")
    return found


def test_all_published_agents_load(published: dict[str, Path]) -> None:
    assert len(published) == len(METHODS) * len(LAYOUTS)
    for folder in published.values():
        assert load_published(folder).encoding == "planes20_legacy"


@pytest.mark.parametrize("method", SAME_SEED)
def test_self_play_is_as_published(published: dict[str, Path], method: str) -> None:
    """Acceptance: within 10 % of the study's value for the same seed; about 5 s of 60 games in each kitchen."""
    for layout, expected in zip(LAYOUTS, SAME_SEED[method], strict=True):
        agent = PolicyAgent(load_published(published[f"{method}_{layout}"]))
        rng = numpy_rng(0, "evaluate", method, layout)
        returns = play(Overcooked(layout, 60), (agent, agent), episodes=60, rng=rng)
        assert returns.mean() == pytest.approx(expected, rel=0.1), layout
