"""What `sextet data check` reports: counts that add up, every bad file by name, people and contents in two splits."""

import shutil

import numpy as np
import pytest
import tyro
from pictures import DUKE, MARKET, draw, png_header, truncate, write
from PIL import Image

from sextet.cli import main
from sextet.core.errors import DataError
from sextet.reid.check import check


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def adds_up(report):
    files = report["files"]
    assert files["seen"] == files["used"] + sum(n for name, n in files.items() if name.startswith("not used, "))
    assert files["used"] == sum(row["images"] for row in report["images"])
    assert len(report.get("not used", [])) == files["seen"] - files["used"]
    return True


def test_a_sound_set_is_counted_by_split_and_camera(tmp_path):
    report = check(write(tmp_path, MARKET))
    assert report["data set"] == f"Market-1501 in {tmp_path}"
    assert report["verdict"] == "ready"
    counts = {row.pop("split"): row for row in report["images"]}
    assert counts == {
        "train": {"images": 4, "people": 2, "cameras": 4, "distractors": 0},
        "query": {"images": 2, "people": 2, "cameras": 2, "distractors": 0},
        "gallery": {"images": 4, "people": 2, "cameras": 3, "distractors": 1},
        "multi_query": {"images": 4, "people": 2, "cameras": 2, "distractors": 0},
    }
    assert report["cameras"] == [
        {"camera": 0, "train": 1, "query": 1, "gallery": 2},
        {"camera": 1, "train": 1, "query": 1, "gallery": 1},
        {"camera": 2, "train": 1, "query": 0, "gallery": 1},
        {"camera": 9, "train": 1, "query": 0, "gallery": 0},
    ]
    first = {"file": "bounding_box_train/0002_c1s1_000451_03.jpg", "split": "train", "person": 2, "camera": 0}
    assert report["first names"][0] == first
    assert [row["split"] for row in report["first names"]].count("train") == 3
    assert report["files"] == {
        "seen": 17,
        "used": 14,
        "not used, id -1: junk": 2,
        "not used, id 0 in train: distractors belong to the gallery": 1,
    }
    assert "bounding_box_test/-1_c1s1_000401_03.jpg: id -1: junk" in report["not used"]
    assert report["warnings"] == []
    assert adds_up(report)


def bad_files(folder):
    """Every kind of bad file, as the name, a maker and the reason in the report."""
    exif = Image.Exif()
    exif[0x0112] = 8

    def outside(path):
        draw(70).save(folder.parent.parent / "outside.jpg")
        path.symlink_to(folder.parent.parent / "outside.jpg")

    return [
        ("0010_c1s1_1.jpg", lambda p: (draw(50, (64, 128)).save(p), truncate(p)), "not used", "truncated"),
        ("0010_c1s1_2.jpg", lambda p: draw(51).convert("CMYK").save(p), "converted to RGB", "CMYK"),
        ("0010_c1s1_3.png", lambda p: Image.fromarray(np.arange(512, dtype=np.uint16).reshape(32, 16)).save(p),
         "converted to RGB", "16-bit"),
        ("0010_c1s1_4.jpg", lambda p: draw(53).save(p, exif=exif), "converted to RGB", "EXIF-rotated"),
        ("0010_c1s1_5.png", lambda p: png_header(p, 100_000, 100_000), "not used", "pixels"),
        ("0010_c1s1_6.png", lambda p: draw(54, (1, 1)).save(p), "not used", "1x1 pixels"),
        ("0010_c1s1_7.jpg", lambda p: p.write_bytes(b""), "not used", "empty file"),
        ("0010_c1s1_8.jpg", lambda p: draw(55).convert("L").save(p), "converted to RGB", "greyscale"),
        ("0010_c1s1_9.png", lambda p: draw(56).convert("RGBA").save(p), "converted to RGB", "transparent"),
        ("0010_c1s1_10.jpg", outside, "not used", "leads out of the data set"),
        ("._0010_c1s1_11.jpg", lambda p: p.write_bytes(b"\0\5\x16\7"), "not used", "file browser"),
        ("Thumbs.db", lambda p: p.write_bytes(b"\xd0\xcf"), "not used", "file browser"),
        ("-1_c1s1_12.jpg", lambda p: draw(57).save(p), "not used", "id -1"),
        ("0000_c1s1_13.jpg", lambda p: draw(58).save(p), "not used", "id 0 in train"),
        ("holiday.jpg", lambda p: draw(59).save(p), "not used", "tells no person and camera"),
        ("list.txt", lambda p: p.write_text("x"), "not used", "not an image by its name"),
    ]  # fmt: skip


def test_every_kind_of_bad_file_is_named_in_one_line(tmp_path):
    root = tmp_path / "Datensätze für Zoë"
    folder = write(root, MARKET) / "bounding_box_train"
    kinds = bad_files(folder)
    for name, make, _, _ in kinds:
        make(folder / name)
    report = check(root, files=0)
    for name, _, part, reason in kinds:
        (line,) = (line for line in report[part] if line.startswith(f"bounding_box_train/{name}: "))
        assert reason in line and "\n" not in line
    assert len(report["converted to RGB"]) == 5
    assert report["images"][0]["images"] == 4 + 5
    assert report["files"]["seen"] == 17 + len(kinds)
    assert report["verdict"] == "ready"
    assert adds_up(report)


def test_only_some_files_are_named_unless_all_are_asked_for(tmp_path):
    write(tmp_path, MARKET)
    for index in range(30):
        (tmp_path / "query" / f"0003_c1s1_{index}.jpg").write_bytes(b"")
    lines = check(tmp_path)["not used"]
    assert len(lines) == 21 and lines[-1] == "... 13 more; --files 0 names all"
    assert len(check(tmp_path, files=0)["not used"]) == 33


def test_without_decoding_damage_stays_unseen(tmp_path):
    (write(tmp_path, MARKET) / "query" / "0003_c2s1_001051_00.jpg").write_bytes(b"")
    assert check(tmp_path, decode=False)["files"]["used"] == 14
    assert check(tmp_path)["files"]["used"] == 13


def test_people_in_training_and_test_stop_the_training(tmp_path):
    write(tmp_path, MARKET | {"query": ["0002_c1s1_001051_00.jpg"]})
    with pytest.raises(DataError, match="1 person is in training and test") as caught:
        check(tmp_path)
    assert caught.value.report["verdict"] == "training would stop: 1 person is in training and test (id 2)"


def test_the_command_prints_the_report_and_fails_where_training_would(tmp_path, capsys):
    write(tmp_path, MARKET)
    assert main(["data", "check", str(tmp_path)]) == 0
    assert "verdict: ready" in capsys.readouterr().out
    write(tmp_path, {"query": ["0002_c1s1_001051_00.jpg"]})
    assert main(["data", "check", str(tmp_path)]) == 3
    printed = capsys.readouterr()
    assert "verdict: training would stop: 1 person" in printed.out and "1 person is in training" in printed.err


def test_a_split_that_lacks_stops_the_training(tmp_path):
    write(tmp_path, {"train/1": ["1_1.jpg"], "query/2": ["1_1.jpg"]})
    with pytest.raises(DataError, match="no usable image in gallery"):
        check(tmp_path)


def test_equal_files_in_two_splits_are_leakage(tmp_path):
    write(tmp_path, MARKET)
    train, query, gallery = (tmp_path / name for name in ("bounding_box_train", "query", "bounding_box_test"))
    shutil.copy(train / "0002_c1s1_000451_03.jpg", gallery / "0011_c1s1_000001_00.jpg")
    shutil.copy(query / "0001_c1s1_001051_00.jpg", gallery / "0001_c4s1_000002_00.jpg")
    shutil.copy(query / "0003_c2s1_001051_00.jpg", gallery / "0003_c2s1_000003_00.jpg")
    warnings = check(tmp_path)["warnings"]
    assert [text.split(" (such as")[0] for text in sorted(warnings)] == [
        "1 test images are equal in query and gallery",
        "1 test images are equal in query and gallery of one person and camera, which the usual protocol ignores",
        "1 test images are equal in training and test",
    ]
    assert any("0002_c1s1_000451_03.jpg = bounding_box_test/0011_c1s1_000001_00.jpg" in text for text in warnings)
    assert check(tmp_path, leakage=False)["warnings"] == []


def test_the_withdrawn_set_and_unknown_cameras_are_warnings(tmp_path):
    assert any("withdrawn" in text for text in check(write(tmp_path / "duke", DUKE))["warnings"])
    folder = write(tmp_path / "own", {"train/1": ["a.jpg"], "query/2": ["a.jpg"], "gallery/2": ["b.jpg"]})
    report = check(folder)
    assert any("cameras unknown" in text for text in report["warnings"])
    assert report["cameras"] == [{"camera": "unknown", "train": 1, "query": 1, "gallery": 1}]


def test_it_is_a_command_with_a_position_and_options(tmp_path):
    write(tmp_path, MARKET)
    report = tyro.cli(check, args=[str(tmp_path), "--no-decode", "--no-leakage", "--rows", "1"])
    assert len(report["first names"]) == 4
    with pytest.raises(DataError, match="no data set of a known layout"):
        check(tmp_path / "query")


def test_nothing_is_written_into_the_data_set(tmp_path):
    write(tmp_path, MARKET)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    check(tmp_path)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
