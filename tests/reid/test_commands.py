"""Folders of images into a gallery and out of it, with a small stand-in for the network."""

import os
import sys

import numpy as np
import pytest
import tyro
from PIL import Image

import sextet
from sextet.core.errors import DataError, UsageError

pytest.importorskip("lancedb")
from sextet.reid import commands
from sextet.reid.gallery import Gallery
from sextet.reid.images import decode


class Thumbnails:
    """Vectors that are the image itself at 4x2, around its mean."""

    feature_size = 24

    def __init__(self):
        self.seen = 0

    def embed(self, images, *, batch=64):
        images = [decode(image)[0] for image in images]
        assert 0 < len(images) <= batch
        self.seen += len(images)
        rows = np.stack(
            [np.asarray(image.resize((2, 4), Image.Resampling.BOX), np.float32).ravel() for image in images]
        )
        rows -= 127.4
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder with weights; `sextet.load` gives the stand-in for it."""
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "model.safetensors").write_bytes(b"weights")
    embedder = Thumbnails()
    monkeypatch.setattr(sextet, "load", lambda path: embedder)
    monkeypatch.chdir(tmp_path)
    embedder.path = tmp_path / "run"
    return embedder


def draw(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 2, 3), np.uint8)
    Image.fromarray(pixels).resize((16, 32), Image.Resampling.NEAREST).save(path)


@pytest.fixture
def photos(tmp_path):
    """Five images in two folders, named as in Market-1501."""
    root = tmp_path / "photos"
    names = [
        "0002_c1s1_2.png",
        "0002_c1s1_10.PNG",
        "monday/0007_c3s1_1.bmp",
        "monday/nö_camera.webp",
        "0007_c12s1_1.png",
    ]
    for seed, name in enumerate(names):
        draw(root / name, seed)
    return root


def test_a_folder_is_indexed_in_natural_order_with_cameras_people_and_tags(run, photos):
    result = commands.index(photos, run=run.path, batch=2, person=r"^(\d+)_")
    expected = {"files": 5, "added": 5, "replaced": 0, "unchanged": 0, "removed": 0, "vectors": 5, "skipped": []}
    assert result == expected | {"gallery": "gallery"}
    with Gallery.open("gallery") as gallery:
        order = [
            "0002_c1s1_2.png",
            "0002_c1s1_10.PNG",
            "0007_c12s1_1.png",
            "monday/0007_c3s1_1.bmp",
            "monday/nö_camera.webp",
        ]
        assert list(gallery.stamps()) == order
        hits = {hit.name: hit for hit in gallery.search(np.ones(24), 9)[0]}
    assert [hits[name].camera for name in order] == [0, 0, 11, 2, -1]
    assert [hits[name].id for name in order] == [2, 2, 7, 7, None]
    assert [hits[name].tags for name in order] == [(), (), (), ("monday",), ("monday",)]
    assert all(hits[name].time == pytest.approx((photos / name).stat().st_mtime, abs=1e-3) for name in order)


def test_every_file_is_counted_and_every_skipped_one_has_its_reason(run, photos, tmp_path):
    draw(tmp_path / "outside.png", 9)
    (photos / "out.png").symlink_to(tmp_path / "outside.png")
    (photos / "in.png").symlink_to(photos / "0002_c1s1_2.png")
    (photos / "gone.png").symlink_to(photos / "nowhere.png")
    (photos / "loop").symlink_to(photos)
    (photos / "._0002_c1s1_2.png").write_bytes(b"finder")
    (photos / "Thumbs.db").write_bytes(b"explorer")
    (photos / "notes.txt").write_text("none")
    (photos / "cut.png").write_bytes((photos / "0002_c1s1_2.png").read_bytes()[:60])
    (photos / "empty.jpg").write_bytes(b"")
    if sys.platform == "linux":
        (photos / os.fsdecode(b"\xff.png")).write_bytes((photos / "0002_c1s1_2.png").read_bytes())
    result = commands.index(photos, run=run.path)
    reasons = {item["file"]: item["reason"] for item in result["skipped"]}
    assert len(reasons) == len(result["skipped"])
    texts = {
        "out.png": "a link that leads out",
        "gone.png": "not a file",
        "loop": "not an image by its name",
        "._0002_c1s1_2.png": "left by a file browser",
        "Thumbs.db": "left by a file browser",
        "notes.txt": "not an image by its name",
        "cut.png": "image file is truncated",
        "empty.jpg": "empty file",
    }
    if sys.platform == "linux":
        texts["\\udcff.png"] = "its name is not UTF-8"
    assert reasons.keys() == texts.keys()
    assert all(reasons[name].startswith(text) for name, text in texts.items()), reasons
    assert result["added"] == result["vectors"] == 6
    assert (
        result["files"] == 6 + len(texts) == sum(result[key] for key in ("added", "replaced", "unchanged")) + len(texts)
    )


def test_only_what_changed_is_read_again(run, photos):
    commands.index(photos, run=run.path)
    assert commands.index(photos, run=run.path)["unchanged"] == run.seen == 5
    draw(photos / "0002_c1s1_2.png", 77)
    os.utime(photos / "0002_c1s1_2.png", ns=(1, 1))
    (photos / "monday" / "nö_camera.webp").unlink()
    result = commands.index(photos, run=run.path)
    assert run.seen == 6 and result["replaced"] == 1 and result["unchanged"] == 3 and result["vectors"] == 5
    result = commands.index(photos, run=run.path, remove_missing=True)
    assert run.seen == 6 and result["removed"] == 1 and result["vectors"] == 4
    assert commands.search(photos / "0002_c1s1_2.png", run=run.path, k=1)[0]["distance"] == pytest.approx(0, abs=1e-6)


def test_search_gives_rows_nearest_first_and_filters(run, photos):
    commands.index(photos, run=run.path)
    image = photos / "0007_c12s1_1.png"
    rows = commands.search(image, run=run.path, k=3)
    assert [row["rank"] for row in rows] == [1, 2, 3]
    assert rows[0]["name"] == "0007_c12s1_1.png" and rows[0]["distance"] == pytest.approx(0, abs=1e-6)
    assert [row["distance"] for row in rows] == sorted(row["distance"] for row in rows)
    assert list(rows[0]) == ["rank", "name", "distance", "id", "camera", "time", "tags"]
    assert {row["camera"] for row in commands.search(image, run=run.path, camera=(0, 2))} == {0, 2}
    assert {row["camera"] for row in commands.search(image, run=run.path, exclude_camera=(0, 2))} == {11, -1}
    assert {row["tags"] for row in commands.search(image, run=run.path, tag=("monday",))} == {"monday"}
    assert commands.search(image, run=run.path, between=(0, 1)) == []


def test_wrong_use_is_explained(run, photos, tmp_path):
    with pytest.raises(UsageError, match="not a folder"):
        commands.index(tmp_path / "no", run=run.path)
    with pytest.raises(UsageError, match="--batch 0"):
        commands.index(photos, run=run.path, batch=0)
    for pattern, text in (("_c(", "not usable"), ("_c", "0 groups")):
        with pytest.raises(UsageError, match=text):
            commands.index(photos, run=run.path, camera=pattern)
    with pytest.raises(UsageError, match="sextet reid index"):
        commands.search(photos / "0002_c1s1_2.png", run=run.path)
    commands.index(photos, run=run.path)
    with pytest.raises(DataError, match="notes.png"):
        commands.search(photos / "notes.png", run=run.path)
    (run.path / "final" / "model.safetensors").write_bytes(b"other weights")
    for call in (
        lambda: commands.index(photos, run=run.path),
        lambda: commands.search(photos / "0002_c1s1_2.png", run=run.path),
    ):
        with pytest.raises(UsageError, match="made by model .* not by model"):
            call()
    with pytest.raises(UsageError, match="no finished run"):
        commands.fingerprint(tmp_path)


def test_the_command_line_gives_the_arguments(run, photos):
    arguments = [str(photos), "--run", str(run.path), "--camera", r"_c(\d+)s", "--remove-missing"]
    assert tyro.cli(commands.index, args=arguments)["added"] == 5
    arguments = [str(photos / "0007_c12s1_1.png"), "--run", str(run.path), "--k", "2", "--exclude-camera", "0", "2"]
    arguments += ["--between", "0", "1e11"]
    assert [row["name"] for row in tyro.cli(commands.search, args=arguments)] == [
        "0007_c12s1_1.png",
        "monday/nö_camera.webp",
    ]


def test_a_real_network_gives_the_order_of_evaluation(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from sextet.core.records import write_final
    from sextet.reid.evaluate import extract
    from sextet.reid.images import FileImages
    from sextet.reid.model import build_model
    from sextet.reid.settings import Config, ModelConfig

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = Config(method="global", height_px=32, width_px=16, model=ModelConfig(width=0.25, feature_size=16))
    network = build_model("global", config.model, 3)
    write_final(tmp_path / "run", "mgn", config, {}, network.state_dict())
    names = [f"0001_c{1 + seed % 2}s1_{seed}.png" for seed in range(12)]
    for seed, name in enumerate(names):
        draw(tmp_path / "photos" / name, seed)
    result = commands.index(tmp_path / "photos", run=tmp_path / "run", batch=5)
    features = extract(network, FileImages(tmp_path / "photos", names, config.size), batch=12)
    expected = np.argsort(1 - features[3] @ features.T, kind="stable")
    rows = commands.search(tmp_path / "photos" / names[3], run=tmp_path / "run", k=12)
    assert result["added"] == 12 and rows[0]["distance"] == pytest.approx(0, abs=1e-5)
    assert [row["name"] for row in rows] == [names[place] for place in expected]
