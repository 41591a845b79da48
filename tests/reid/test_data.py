"""Readers of the public layouts: names, splits, ids, cameras, order; what is refused; what load_data makes of it."""

import csv
import json
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import DUKE, MARKET, draw, png_header, truncate, write
from PIL import Image

from sextet.core.errors import DataError, UsageError
from sextet.reid.cuhk03 import extract_cuhk03
from sextet.reid.data import load_data
from sextet.reid.readers import LAYOUTS, detect, scan
from sextet.reid.scan import natural
from sextet.reid.settings import DataConfig

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "reid_names.json").read_text())
SIZE = (32, 16)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def load(format, root, **options):
    return load_data(DataConfig(format=format, root=str(root), **options), SIZE)


def rows(found, split):
    return [(row.name.rpartition("/")[2], row.person, row.camera) for row in found.rows if row.split == split]


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def adds_up(found):
    assert found.seen == len(found.rows) + len(found.dropped)
    return True


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["format"] + ":" + Path(case["files"][0]).name)
def test_names_tell_person_and_camera(tmp_path, case):
    touch(tmp_path, *case["files"])
    for name, text in case.get("lists", {}).items():
        (tmp_path / name).write_text("\n".join(text) + "\n")
    found = scan(case["format"], tmp_path, case.get("variant", ""))
    assert {split: [list(row) for row in rows(found, split)] for split in case["rows"]} == case["rows"]
    assert dict(found.dropped) == case["dropped"]
    assert adds_up(found)


def test_scanning_opens_no_image(tmp_path, monkeypatch):
    write(tmp_path, MARKET)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("an image was opened"))
    assert len(scan("market1501", tmp_path).rows) == 14


def test_market_is_loaded_with_sorted_labels_and_multi_query(tmp_path):
    data = load("market1501", write(tmp_path / "Market-1501-v15.09.15", MARKET).parent)
    assert data.name == "Market-1501"
    assert data.train.ids.tolist() == [2, 2, 7, 7]
    assert data.train.cameras.tolist() == [0, 1, 2, 9]
    assert data.train.names[2:] == (
        "bounding_box_train/0007_c3s3_077419_03.jpg",
        "bounding_box_train/0007_c10s3_077419_03.jpg",
    )
    assert data.classes.tolist() == [2, 7]
    assert data.query.ids.tolist() == [1, 3]
    assert data.gallery.ids.tolist() == [0, 1, 1, 3]
    assert data.multi_query.ids.tolist() == [1, 1]
    assert data.multi_query.cameras.tolist() == [0, 0]
    assert "2 files left out: id -1: junk" in data.notes
    assert "1 files left out: id 0 in train: distractors belong to the gallery" in data.notes
    for split in (data.train, data.query, data.gallery):
        assert len(split.images) == len(split.ids) == len(split.cameras) == len(split.names)
        batch = split.images.read(range(len(split.ids)))
        assert (batch.shape, batch.dtype) == ((len(split.ids), 3, *SIZE), torch.uint8)


def test_the_500k_distractors_are_added_as_distractors(tmp_path):
    write(
        tmp_path, MARKET | {"images": ["0000_c1s1_000001_00.jpg", "1501_c4s1_000002_00.jpg", "-1_c1s1_000003_00.jpg"]}
    )
    found = scan("market1501", tmp_path, "500k")
    assert rows(found, "gallery")[-2:] == [("0000_c1s1_000001_00.jpg", 0, 0), ("1501_c4s1_000002_00.jpg", 0, 3)]
    assert len(rows(scan("market1501", tmp_path), "gallery")) == 4
    with pytest.raises(DataError, match="500k distractors are not there"):
        scan("market1501", write(tmp_path / "without", MARKET), "500k")


def test_duke_carries_the_notice_of_its_withdrawal(tmp_path):
    data = load("dukemtmc", write(tmp_path, DUKE))
    assert any("withdrawn by its authors" in note for note in data.notes)
    assert (data.query.ids.tolist(), data.query.cameras.tolist()) == ([5], [1])


def cuhk03_protocol(path, names, labels, **places):
    from scipy.io import savemat

    cells = np.empty((len(names), 1), object)
    cells[:, 0] = names
    table = {f"{split}_idx": np.array(indices)[:, None] for split, indices in places.items()}
    savemat(path, table | {"filelist": cells, "labels": np.array(labels)[:, None]})


@pytest.mark.parametrize("variant, kind", [("", "detected"), ("detected", "detected"), ("labelled", "labeled")])
def test_cuhk03_by_its_new_protocol(tmp_path, variant, kind):
    names = ["1_001_1_01.png", "1_001_2_06.png", "1_002_1_01.png", "1_002_2_07.png", "5_010_1_02.png"]
    write(tmp_path, {f"images_{kind}": [*names[:4], "9_999_1_01.png"]})
    protocol = tmp_path / f"cuhk03_new_protocol_config_{kind}.mat"
    cuhk03_protocol(protocol, names, [0, 0, 1, 1, 2], train=[1, 2], query=[3], gallery=[4, 5])
    found = scan("cuhk03_np", tmp_path, variant)
    assert rows(found, "train") == [("1_001_1_01.png", 1, 0), ("1_001_2_06.png", 1, 1)]
    assert rows(found, "query") == [("1_002_1_01.png", 2, 0)]
    assert rows(found, "gallery") == [("1_002_2_07.png", 2, 1)]
    assert dict(found.dropped) == {
        f"images_{kind}/5_010_1_02.png": "listed, but there is no such file",
        f"images_{kind}/9_999_1_01.png": "in no list of the data set",
    }
    assert adds_up(found)
    protocol.write_bytes(b"MATLAB 5.0 MAT-file")
    with pytest.raises(DataError, match="not the new protocol of CUHK03"):
        scan("cuhk03_np", tmp_path, variant)


def test_cuhk03_as_folders_and_what_is_said_without_images(tmp_path):
    boxes = {f"labeled/{folder}": names for folder, names in MARKET.items()}
    assert len(rows(scan("cuhk03_np", write(tmp_path / "np", boxes), "labelled"), "query")) == 2
    touch(tmp_path / "raw", "cuhk03_release/cuhk-03.mat")
    with pytest.raises(DataError, match=r"images_detected.*extract_cuhk03"):
        scan("cuhk03_np", tmp_path / "raw")


def test_cuhk03_images_are_extracted_from_its_archive(tmp_path):
    h5py = pytest.importorskip("h5py")
    picture = np.asarray(draw(0))
    with h5py.File(tmp_path / "cuhk-03.mat", "w") as file:
        reference = h5py.special_dtype(ref=h5py.Reference)
        empty = file.create_dataset("empty", data=np.zeros(2, np.uint64)).ref
        image = file.create_dataset("image", data=picture.T).ref
        for kind in ("detected", "labeled"):
            pair = file.create_dataset(f"{kind}_pair", (10, 2), reference)
            for place in np.ndindex(10, 2):
                pair[place] = empty
            pair[0, 0] = pair[7, 1] = image
            file.create_dataset(kind, (1, 1), reference)[0, 0] = pair.ref
    assert extract_cuhk03(tmp_path / "cuhk-03.mat", tmp_path / "out") == {"detected": 2, "labeled": 2}
    found = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.png"))
    assert found == [
        f"images_{kind}/{name}.png" for kind in ("detected", "labeled") for name in ("1_001_1_01", "1_002_2_08")
    ]
    assert np.array_equal(Image.open(tmp_path / "out" / "images_labeled" / "1_002_2_08.png"), picture)
    with pytest.raises(DataError, match=r"broken\.mat: not the archive of CUHK03"):
        extract_cuhk03(touch(tmp_path, "broken.mat") / "broken.mat", tmp_path / "out")


def test_msmt17_of_both_versions_side_by_side(tmp_path):
    for version, train, test in (("V1", "train", "test"), ("V2", "mask_train_v2", "mask_test_v2")):
        home = tmp_path / f"MSMT17_{version}"
        write(
            home, {train: ["0000/0000_000_01_0303morning_0008_0.jpg"], test: ["0000/0000_000_02_0303noon_0008_0.jpg"]}
        )
        (home / "list_train.txt").write_text("0000/0000_000_01_0303morning_0008_0.jpg 0\n")
        for split in ("query", "gallery"):
            (home / f"list_{split}.txt").write_text("0000/0000_000_02_0303noon_0008_0.jpg 0\n")
    for variant, folder in (("", "train"), ("v1", "train"), ("v2", "mask_train_v2")):
        data = load("msmt17", tmp_path, variant=variant)
        assert data.train.names == (f"{folder}/0000/0000_000_01_0303morning_0008_0.jpg",)
        assert (data.classes.tolist(), data.query.ids.tolist()) == ([1], [2])
    (tmp_path / "MSMT17_V1" / "list_train.txt").write_text("0000/0000_000_01_0303morning_0008_0.jpg\n")
    with pytest.raises(DataError, match=r"list_train\.txt:1: not a line like"):
        load("msmt17", tmp_path, variant="v1")


def test_randperson_is_for_training_only(tmp_path):
    names = ["000000_s00_c00_f000264.jpg", "000003_s01_c00_f000264.jpg"]
    data = load("randperson", write(tmp_path, {"randperson_subset": names}))
    assert data.classes.tolist() == [1, 4]
    assert len(data.query.ids) == len(data.gallery.ids) == 0
    assert any("only be trained with" in note for note in data.notes)


def test_personx_in_one_folder_for_each_camera(tmp_path):
    parts = {f"{camera}/bounding_box_train": [f"0001_c{camera}_1.jpg"] for camera in range(1, 7)}
    parts |= {"1/query": ["0002_c1_1.jpg"], "2/bounding_box_test": ["0002_c2_1.jpg"]}
    data = load("personx", write(tmp_path, parts))
    assert data.train.cameras.tolist() == [0, 1, 2, 3, 4, 5]
    assert (data.query.cameras.tolist(), data.gallery.cameras.tolist()) == ([0], [1])


def test_a_folder_of_people_with_names_beyond_ascii(tmp_path):
    write(tmp_path, {
        "train/Zoë": ["c2_0001.JPG", "c10_0002.jpeg"], "train/Åsa": ["c2_1.png"],
        "query/山田": ["c2_1.webp"], "gallery/山田": ["c10_1.bmp"], "gallery/0000": ["c3_1.jpg"],
    })  # fmt: skip
    data = load("folder", tmp_path)
    assert data.train.names == ("train/Zoë/c2_0001.JPG", "train/Zoë/c10_0002.jpeg", "train/Åsa/c2_1.png")
    assert data.train.cameras.tolist() == [2, 10, 2]
    assert len(data.classes) == 2 and set(data.classes) & set(data.query.ids) == set()
    assert data.gallery.ids.tolist() == [0, *data.query.ids]


def test_names_in_either_unicode_form_are_read(tmp_path):
    for form in ("NFC", "NFD"):
        name = unicodedata.normalize(form, "Müller")
        write(
            tmp_path / form,
            {f"train/{name}": ["1_1.jpg"], f"query/{name}2": ["1_1.jpg"], f"gallery/{name}2": ["2_1.jpg"]},
        )
        assert load("folder", tmp_path / form).train.images.read([0]).shape == (1, 3, *SIZE)


def test_cameras_are_unknown_when_one_name_has_none(tmp_path):
    write(tmp_path, {"train/7": ["1_a.jpg", "2_a.jpg"], "query/8": ["1_a.jpg"], "gallery/8": ["photo.jpg"]})
    data = load("folder", tmp_path)
    assert {*data.train.cameras, *data.query.cameras, *data.gallery.cameras} == {-1}
    assert any("cameras unknown: gallery/8/photo.jpg" in note for note in data.notes)


COLUMNS = ("path", "pid", "camid", "split", "is_junk", "x1", "y1", "x2", "y2")
TABLE = [
    ("a/10.png", 7, 3, "train", "", "", "", "", ""),
    ("a/9.png", 7, 11, "train", "", 2, 4, 10, 20),
    ("b/1.png", 8, 3, "query", "", "", "", "", ""),
    ("b/2.png", 8, 4, "gallery", "", "", "", "", ""),
    ("b/3.png", 8, 4, "gallery", "true", "", "", "", ""),
    ("b/4.png", -1, 4, "gallery", "", "", "", "", ""),
    ("b/5.png", 0, 4, "gallery", "", "", "", "", ""),
    ("b/6.png", 8, 4, "gallery", "", "", "", "", ""),
]


def table(path, columns=COLUMNS, lines=TABLE):
    write(path.parent, {"a": ["9.png", "10.png"], "b": ["1.png", "2.png", "3.png", "4.png", "5.png"]})
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow.parquet import write_table

        numbers = {name for name in columns if name in ("pid", "camid", "x1", "y1", "x2", "y2")}
        cells = [
            {k: (None if v == "" else v) if k in numbers else str(v) for k, v in zip(columns, line, strict=True)}
            for line in lines
        ]
        write_table(pyarrow.Table.from_pylist(cells), path)
    else:
        with path.open("w", newline="") as handle:
            csv.writer(handle, delimiter=";" if "semicolon" in path.name else ",").writerows([columns, *lines])
    return path


@pytest.mark.parametrize("name", ["people.csv", "semicolon.csv", "people.parquet"])
def test_tables_give_people_cameras_splits_and_boxes(tmp_path, name):
    data = load("table", table(tmp_path / name))
    assert data.train.names == ("a/9.png[2,4,10,20]", "a/10.png")
    assert (data.train.ids.tolist(), data.train.cameras.tolist()) == ([7, 7], [11, 3])
    assert data.gallery.ids.tolist() == [8, 0]
    assert set(data.notes) == {f"1 files left out: {reason}" for reason in
                               ("marked as junk", "id -1: junk", "listed, but there is no such file")}  # fmt: skip
    cut = draw(0).crop((2, 4, 10, 20)).resize((16, 32), Image.Resampling.BILINEAR)
    assert np.abs(data.train.images.read([0])[0].permute(1, 2, 0).numpy().astype(int) - np.asarray(cut)).max() <= 1


def test_tables_of_open_metric_learning(tmp_path):
    columns = ("label", "path", "split", "is_query", "is_gallery", "category", "sequence")
    lines = [
        ("3.0", "a/9.png", "train", "", "", "x", ""),
        ("4.0", "b/1.png", "validation", "True", "True", "x", "walk"),
        ("4.0", "b/2.png", "validation", "False", "True", "x", "run"),
        ("4.0", "b/3.png", "validation", "", "", "x", "run"),
    ]
    data = load("table", table(tmp_path / "oml.csv", columns, lines))
    assert (data.train.ids.tolist(), data.train.cameras.tolist()) == ([3], [-1])
    assert (data.query.names, data.query.cameras.tolist()) == (("b/1.png",), [1])
    assert (data.gallery.names, data.gallery.cameras.tolist()) == (("b/1.png", "b/2.png"), [1, 0])
    lines[1] = (*lines[1][:6], "")
    with pytest.raises(DataError, match=r"oml\.csv:3: a query that finds itself"):
        load("table", table(tmp_path / "oml.csv", columns, lines))


@pytest.mark.parametrize(
    "line, reason",
    [
        (("../secret.png", 7, 1, "train", "", "", "", "", ""), "leads out of the data set"),
        (("/etc/passwd", 7, 1, "train", "", "", "", "", ""), "leads out of the data set"),
        (("link.png", 7, 1, "train", "", "", "", "", ""), "a link that leads out of the data set"),
    ],
)
def test_tables_cannot_reach_other_files(tmp_path, line, reason):
    draw(0).save(tmp_path / "secret.png")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "secret.png")
    found = scan("table", table(tmp_path / "data" / "people.csv", lines=[*TABLE, line]))
    assert reason in dict(found.dropped).values()
    assert all(row.name.startswith(("a/", "b/")) for row in found.rows)


@pytest.mark.parametrize(
    "line, message",
    [
        (("a/9.png", "", 1, "train", "", "", "", "", ""), "2: needs path, pid"),
        (("a/9.png", 7, 1, "tarin", "", "", "", "", ""), r'2: unknown split "tarin" \(did you mean "train"'),
        (("a/9.png", 7, 1, "train", "", "x", 1, 2, 3), "2: the box x, 1, 2, 3 is not four numbers"),
    ],
)
def test_bad_lines_of_tables_are_named(tmp_path, line, message):
    with pytest.raises(DataError, match=rf"people\.csv:{message}"):
        scan("table", table(tmp_path / "people.csv", lines=[line]))


def test_bad_tables_are_named(tmp_path):
    (tmp_path / "people.csv").write_text("file,pid\na,1\n")
    with pytest.raises(DataError, match="names no column path"):
        scan("table", tmp_path / "people.csv")
    pytest.importorskip("pyarrow")
    (tmp_path / "people.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        scan("table", tmp_path / "people.parquet")


def test_links_out_of_the_data_set_are_refused(tmp_path):
    root = write(tmp_path / "market", MARKET)
    draw(0).save(tmp_path / "outside.jpg")
    (root / "query" / "0004_c1s1_000001_00.jpg").symlink_to(tmp_path / "outside.jpg")
    (root / "query" / "0005_c1s1_000001_00.jpg").symlink_to(root / "query" / "0001_c1s1_001051_00.jpg")
    (root / "query" / "0006_c1s1_000001_00.jpg").symlink_to(root / "nowhere.jpg")
    (root / "query" / "0007_c1s1_000001_00.jpg").symlink_to(root / "bounding_box_test")
    found = scan("market1501", root)
    dropped = dict(found.dropped)
    assert dropped["query/0004_c1s1_000001_00.jpg"] == "a link that leads out of the data set"
    assert dropped["query/0006_c1s1_000001_00.jpg"] == dropped["query/0007_c1s1_000001_00.jpg"] == "not a file"
    assert ("0005_c1s1_000001_00.jpg", 5, 0) in rows(found, "query")
    assert adds_up(found)
    (root / "query").rename(tmp_path / "elsewhere")
    (root / "query").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="query: a link that leads out"):
        scan("market1501", root)


def test_a_link_as_the_root_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(write(tmp_path / "market", MARKET))
    assert len(scan("market1501", tmp_path / "link").rows) == 14
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "market1501").symlink_to(tmp_path / "market")
    with pytest.raises(DataError, match=r"market1501: a link that leads out of .*; give the folder it leads to"):
        scan("market1501", tmp_path / "data")


@pytest.mark.parametrize("format", LAYOUTS)
def test_a_missing_data_set_says_what_is_expected_found_and_possible(tmp_path, format):
    touch(tmp_path, "readme.txt", "notes/x.txt")
    with pytest.raises(DataError) as caught:
        load(format, tmp_path)
    text = str(caught.value)
    assert LAYOUTS[format].expected in text
    assert "found notes/, readme.txt" in text
    assert "--data.format synthetic" in text
    with pytest.raises(DataError, match="no such file or folder"):
        load(format, tmp_path / "nowhere")


def test_unknown_variants_and_formats_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match='variant of MSMT17 "v3"'):
        load("msmt17", tmp_path, variant="v3")
    with pytest.raises(UsageError, match='unknown format "market"'):
        scan("market", tmp_path)


def test_people_in_training_and_test_are_an_error(tmp_path):
    write(tmp_path, MARKET | {"query": ["0002_c1s1_001051_00.jpg"], "bounding_box_test": ["0007_c1s1_001051_00.jpg"]})
    with pytest.raises(DataError, match=r"2 people are in training and test \(id 2, 7\)"):
        load("market1501", tmp_path)


@pytest.mark.parametrize("lacking", ["train", "gallery"])
def test_a_split_without_images_is_an_error(tmp_path, lacking):
    write(
        tmp_path,
        {f"{split}/{split[0] != 't'}": ["1_1.jpg"] for split in ("train", "query", "gallery") if split != lacking},
    )
    (tmp_path / lacking).mkdir()
    with pytest.raises(DataError, match=f"no usable image in {lacking}"):
        load("folder", tmp_path)


def test_layouts_are_detected(tmp_path):
    write(tmp_path / "market", MARKET)
    write(tmp_path / "duke", DUKE)
    write(tmp_path / "personx", {"bounding_box_train": ["0001_c1_1.jpg"]})
    write(tmp_path / "folder", {"train/a": ["1.jpg"]})
    touch(tmp_path / "msmt", "MSMT17_V1/list_train.txt")
    touch(tmp_path / "cuhk", "detected/bounding_box_train/x.jpg")
    touch(tmp_path / "rand", "000000_s00_c00_f000264.jpg")
    touch(tmp_path, "people.csv")
    expected = {
        "market": "market1501", "duke": "dukemtmc", "personx": "personx", "folder": "folder", "msmt": "msmt17",
        "cuhk": "cuhk03_np", "rand": "randperson", "people.csv": "table",
    }  # fmt: skip
    assert {name: detect(tmp_path / name) for name in expected} == expected
    with pytest.raises(DataError, match="no data set of a known layout"):
        detect(touch(tmp_path / "other", "a.txt"))


def spoil(root):
    """Damages three of the images and adds what other systems leave; returns what must be named."""
    write(root, MARKET)
    train = root / "bounding_box_train"
    draw(0, (64, 128)).save(train / "0007_c3s3_077419_03.jpg")
    truncate(train / "0007_c3s3_077419_03.jpg")
    (root / "query" / "0003_c2s1_001051_00.jpg").write_bytes(b"")
    png_header(root / "bounding_box_test" / "0009_c1s1_000001_00.png", 100_000, 100_000)
    (train / "._0002_c1s1_000451_03.jpg").write_bytes(b"\0\5\x16\7")
    (train / "Thumbs.db").write_bytes(b"\xd0\xcf")
    return ["0007_c3s3_077419_03.jpg", "0003_c2s1_001051_00.jpg", "0009_c1s1_000001_00.png"]


def test_damaged_images_are_left_out_and_named_or_stop_the_run(tmp_path):
    damaged = spoil(tmp_path)
    data = load("market1501", tmp_path)
    assert data.train.ids.tolist() == [2, 2, 7]
    assert data.query.ids.tolist() == [1]
    (note,) = (note for note in data.notes if "cannot be used as images" in note)
    assert all(f"{name}: " in note for name in damaged)
    assert "2 files left out: left by a file browser" in data.notes
    for split in (data.train, data.query, data.gallery):
        split.images.read(range(len(split.ids)))
    with pytest.raises(DataError, match="3 files cannot be used as images") as caught:
        load("market1501", tmp_path, bad_images="stop")
    assert all(name in str(caught.value) for name in damaged)


def test_a_person_without_a_sound_image_is_no_class(tmp_path):
    write(tmp_path, MARKET)
    for name in MARKET["bounding_box_train"][:2]:
        (tmp_path / "bounding_box_train" / name).write_bytes(b"")
    assert load("market1501", tmp_path).classes.tolist() == [7]


def test_the_order_does_not_depend_on_the_order_of_the_disk(tmp_path, monkeypatch):
    write(tmp_path, MARKET)
    first, listed = load("market1501", tmp_path), os.scandir

    class Reversed:
        def __init__(self, path):
            self.entries = listed(path)

        def __enter__(self):
            return iter(sorted(self.entries, key=lambda entry: entry.name, reverse=True))

        def __exit__(self, *_):
            self.entries.close()

    monkeypatch.setattr(os, "scandir", Reversed)
    second = load("market1501", tmp_path)
    for split in ("train", "query", "gallery", "multi_query"):
        assert getattr(first, split).names == getattr(second, split).names
    assert first.train.names == tuple(sorted(first.train.names, key=natural))


def test_numbers_in_names_count_by_value():
    assert sorted(["c10_1", "c2_1", "c2_01", "b", "7", "c2"], key=natural) == ["7", "b", "c2", "c2_01", "c2_1", "c10_1"]
