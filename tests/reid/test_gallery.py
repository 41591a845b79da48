"""The gallery: exact order, filters, what is refused, readers beside a writer, a writer that is killed, damage."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sextet.core.errors import DataError, UsageError

pytest.importorskip("lancedb")
from sextet.reid.gallery import Gallery

MODEL = "a" * 64


def unit(rng, *shape):
    vectors = rng.standard_normal(shape).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def child(code, *arguments):
    """A Python process that runs `code` with a gallery's folder and block size."""
    head = "import sys, numpy as np\nfrom sextet.reid.gallery import Gallery\npath = sys.argv[1]\n"
    command = [sys.executable, "-c", head + code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """400 vectors of small whole numbers, many of them parallel, so that many distances are equal."""
    rng = np.random.default_rng(0)
    vectors = rng.integers(-1, 2, (400, 4)).astype(np.float32)
    vectors[np.abs(vectors).sum(axis=1) == 0] = 1
    about = {
        "names": [f"{'ü' * (place % 2)}o'neill {place}" for place in range(400)],
        "ids": rng.integers(0, 9, 400).tolist(),
        "cameras": rng.integers(-1, 4, 400),
        "times": [None if place % 5 == 0 else float(place) for place in range(400)],
        "tags": [[word for word in ("day", "it's", "ü") if rng.random() < 0.5] for _ in range(400)],
    }
    with Gallery.open(tmp_path_factory.mktemp("crowd"), 4) as gallery:
        for start in range(0, 400, 150):
            rows = slice(start, start + 150)
            gallery.add(vectors[rows], **{key: values[rows] for key, values in about.items()})
        yield gallery, vectors, about


def brute_force(vectors, about, query, k, cameras, exclude_cameras, times, tags, exclude_names):
    """Names and distances by a stable sort of ``1 - q.g`` over all unit vectors."""
    vectors, query = (
        (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32).astype(np.float64)
        for rows in (vectors.astype(np.float64), query)
    )
    distances = (1 - (vectors * query).sum(axis=1)).round(12)
    keep = []
    for place in np.argsort(distances, kind="stable"):
        time, camera = about["times"][place], about["cameras"][place]
        fits = (
            (cameras is None or camera in cameras)
            and (exclude_cameras is None or camera not in exclude_cameras)
            and (times is None or (time is not None and times[0] <= time <= times[1]))
            and set(tags or ()) <= set(about["tags"][place])
            and about["names"][place] not in (exclude_names or ())
        )
        keep += [place] if fits else []
    return [about["names"][place] for place in keep[:k]], distances[keep[:k]]


@settings(max_examples=60, deadline=None)
@given(
    query=st.lists(st.integers(-3, 3), min_size=4, max_size=4).filter(any),
    k=st.sampled_from([1, 3, 10, 500]),
    cameras=st.none() | st.lists(st.integers(-1, 4), max_size=3),
    exclude_cameras=st.none() | st.lists(st.integers(-1, 4), max_size=3),
    times=st.none() | st.tuples(st.integers(0, 200), st.integers(150, 400)),
    tags=st.none() | st.lists(st.sampled_from(["day", "it's", "ü", "night"]), max_size=2),
    excluded=st.lists(st.integers(0, 399), max_size=5),
)
def test_search_is_a_stable_sort_of_all_distances_whatever_the_filters(
    crowd, query, k, cameras, exclude_cameras, times, tags, excluded
):
    gallery, vectors, about = crowd
    query, names = np.array(query, np.float64), [about["names"][place] for place in excluded]
    filters = {"cameras": cameras, "exclude_cameras": exclude_cameras, "times": times, "tags": tags}
    expected, distances = brute_force(vectors, about, query, k, exclude_names=names, **filters)
    (hits,) = gallery.search(query, k, exclude_names=names, **filters)
    np.testing.assert_allclose([hit.distance for hit in hits], distances, atol=1e-11)
    assert [hit.name for hit in hits] == expected
    for hit in hits:
        place = about["names"].index(hit.name)
        assert (hit.id, hit.camera) == (about["ids"][place], about["cameras"][place])
        assert (hit.time, hit.tags) == (about["times"][place], tuple(about["tags"][place]))


def test_the_order_is_that_of_evaluation(tmp_path):
    rng = np.random.default_rng(1)
    vectors, queries = unit(rng, 3000, 128), unit(rng, 20, 128)
    vectors[1000:1040] = vectors[7]  # one image many times
    queries[0] = vectors[7]
    expected = np.argsort(1 - queries @ vectors.T, axis=1, kind="stable")
    with Gallery.open(tmp_path, 128) as gallery:
        gallery.add(vectors, names=[str(place) for place in range(3000)])
        found = gallery.search(queries, 100)
    assert [[int(hit.name) for hit in hits] for hits in found] == expected[:, :100].tolist()


def test_half_precision_gives_the_order_of_the_rounded_vectors(tmp_path):
    rng = np.random.default_rng(2)
    vectors, queries = unit(rng, 2000, 64), unit(rng, 10, 64)
    with Gallery.open(tmp_path, 64, half=True) as gallery:
        gallery.add(vectors, names=[str(place) for place in range(2000)])
        found = gallery.search(queries, 50)
        assert gallery.info()["dtype"] == "float16"
    rounded = vectors.astype(np.float16).astype(np.float64)
    expected = np.argsort(1 - queries.astype(np.float64) @ rounded.T, axis=1, kind="stable")
    assert [[int(hit.name) for hit in hits] for hits in found] == expected[:, :50].tolist()


def test_a_name_added_again_keeps_its_place_and_removal_is_by_name_or_person(tmp_path):
    vectors = np.eye(4, dtype=np.float32)[[0, 0, 0, 1]]
    with Gallery.open(tmp_path, 4) as gallery:
        gallery.add(vectors, names=["a", "b", "c", "d"], ids=[1, 1, 2, None], stamps=["1", "2", "3", "4"])
        gallery.add(vectors[[0, 3]], names=["a", "e"], cameras=[3, 0], stamps=["5", "6"])
        hits = gallery.search(vectors[0], 3)[0]
        assert [(hit.name, hit.camera, hit.id) for hit in hits] == [("a", 3, None), ("b", -1, 1), ("c", -1, 2)]
        assert gallery.stamps() == {"a": "5", "b": "2", "c": "3", "d": "4", "e": "6"}
        assert gallery.remove(names=["d", "unknown"]) == 1 and gallery.remove(ids=[1]) == 1
        assert len(gallery) == 3 and list(gallery.stamps()) == ["a", "c", "e"]
        gallery.add(vectors[:1], names=["b"])
        assert [hit.name for hit in gallery.search(vectors[0], 9)[0]] == ["a", "c", "b", "e"]
    with Gallery.open(tmp_path) as gallery:
        assert [hit.name for hit in gallery.search(vectors[0], 9)[0]] == ["a", "c", "b", "e"]


def test_lengths_do_not_matter_but_directions_must_exist(tmp_path):
    with Gallery.open(tmp_path, 3) as gallery:
        gallery.add([[0, 0, 5e-20], [1e4, 0, 0]], names=["up", "right"])
        (hits,) = gallery.search([0, 0, 300.0])
        assert [(hit.name, hit.distance) for hit in hits] == [("up", 0), ("right", 1)]
        for vectors, text in (
            ([[1, 0, 0], [0, 0, 0]], "vector 1 is zero"),
            ([[np.nan, 0, 0]], "vector 0 has a number that is not finite"),
            ([[np.inf, 0, 0]], "not finite"),
            ([[1, 2]], "rows of 3"),
        ):
            with pytest.raises(UsageError, match=text):
                gallery.add(vectors, names=[str(place) for place in range(len(vectors))])
            with pytest.raises(UsageError, match=text):
                gallery.search(vectors)
        with pytest.raises(UsageError, match="2 names, but 1 of camera"):
            gallery.add(np.eye(3)[:2], names=["x", "y"], cameras=[1])
        with pytest.raises(UsageError, match='the name "x" is given more than once'):
            gallery.add(np.eye(3)[:2], names=["x", "x"])
        for wrong in ({"cameras": ["north"]}, {"cameras": [2**40]}, {"times": ["noon"]}, {"tags": [7]}):
            with pytest.raises(UsageError, match="cannot be stored"):
                gallery.add(np.eye(3)[:1], names=["x"], **wrong)
        with pytest.raises(UsageError, match="cannot be stored"):
            gallery.add(np.eye(3)[:1], names=["\udcff"])
        with pytest.raises(UsageError, match="k is 0"):
            gallery.search([0, 0, 1.0], 0)
        with pytest.raises(UsageError, match="either names or ids"):
            gallery.remove()
        assert len(gallery) == 2


def test_vectors_of_two_models_do_not_mix(tmp_path):
    with pytest.raises(UsageError, match="sextet reid index"):
        Gallery.open(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with Gallery.open(tmp_path / "new", 8, model=MODEL) as gallery:
        gallery.add(np.eye(8), names=list("abcdefgh"))
    for dim, model in ((8, "b" * 64), (9, MODEL)):
        with pytest.raises(UsageError) as caught:
            Gallery.open(tmp_path / "new", dim, model=model)
        assert all(text in str(caught.value) for text in (MODEL[:12], model[:12], " 8 numbers", f"with {dim};"))
    with Gallery.open(tmp_path / "new") as gallery:
        assert gallery.info() == gallery.info() | {"vectors": 8, "dim": 8, "model": MODEL, "dtype": "float32"}


def test_one_writer_at_a_time_and_readers_go_on(tmp_path):
    with Gallery.open(tmp_path, 2) as first, Gallery.open(tmp_path) as second:
        first.add([[1, 0]], names=["a"])
        with pytest.raises(UsageError, match=f"in use by process {os.getpid()}"):
            second.add([[0, 1]], names=["b"])
        with pytest.raises(UsageError, match="in use"):
            second.remove(names=["a"])
        assert len(second) == 1 and second.search([1.0, 0])[0][0].name == "a"
        first.close()
        second.add([[0, 1]], names=["b"])
        assert len(first) == 2


READER = """
gallery, counts = Gallery.open(path), []
query = np.zeros(16); query[3] = 1
while not counts or counts[-1] < 2000:
    counts.append(len(gallery))
    hits = gallery.search(query, 5)[0]
    assert [hit.name for hit in hits] == ["3", "19", "35", "51", "67"], hits
    if len(counts) == 1: print("started", flush=True)
assert counts == sorted(counts) and all(count % 100 == 0 for count in counts), counts
print(len(set(counts)), flush=True)
"""


def test_several_processes_read_while_one_writes(tmp_path):
    names = [str(place) for place in range(2000)]
    vectors = np.eye(16, dtype=np.float32)[np.arange(2000) % 16]
    with Gallery.open(tmp_path, 16) as gallery:
        gallery.add(vectors[:100], names=names[:100])
        readers = [child(READER, tmp_path) for _ in range(2)]
        assert [reader.stdout.readline() for reader in readers] == ["started\n"] * 2
        for start in range(100, 2000, 100):
            gallery.add(vectors[start : start + 100], names=names[start : start + 100])
            if start == 1000:
                gallery.close()  # joins the small files under the readers
    for reader in readers:
        out, err = reader.communicate(timeout=60)
        assert reader.returncode == 0, err
        assert int(out) > 1, "the reader saw nothing of the writing"


WRITER = """
gallery = Gallery.open(path, 32)
rng = np.random.default_rng(0)
for block in range(10 ** 6):
    gallery.add(rng.standard_normal((200, 32)), names=[f"{block}-{place}" for place in range(200)])
    print(block, flush=True)
"""


def test_a_killed_writer_loses_nothing_it_has_reported(tmp_path):
    least = 0
    for _ in range(2):
        writer = child(WRITER.replace('f"{block}', f'f"{least}-{{block}}'), tmp_path)
        reported = [writer.stdout.readline() for _ in range(7)]
        writer.send_signal(signal.SIGKILL)
        reported += writer.stdout.readlines()
        writer.communicate()
        assert "6\n" in reported
        least += 200 * sum(line.endswith("\n") for line in reported)
        with Gallery.open(tmp_path, 32) as gallery:
            count = len(gallery)
            assert count >= least and count % 200 == 0
            assert len(gallery.stamps()) == count and len(gallery.search(np.ones(32), 5)[0]) == 5
            gallery.add(
                np.ones((200, 32)), names=[f"after-{least}-{place}" for place in range(200)]
            )  # the lock is free
        least = count + 200


@pytest.mark.parametrize("what", ["data/*.lance", "_versions/*.manifest"])
@pytest.mark.parametrize("damage", ["cut", "emptied", "absent"])
def test_damaged_files_are_named_as_such(tmp_path, what, damage):
    with Gallery.open(tmp_path, 64) as gallery:
        gallery.add(unit(np.random.default_rng(0), 500, 64), names=[str(place) for place in range(500)])
    for path in (tmp_path / "gallery.lance").glob(what):
        content = path.read_bytes()
        path.unlink() if damage == "absent" else path.write_bytes(
            content[: len(content) // 2 if damage == "cut" else 0]
        )
    with pytest.raises(DataError, match=f"{tmp_path}.*gallery"), Gallery.open(tmp_path, 64) as gallery:
        gallery.search(np.ones(64))


def test_overwritten_vectors_are_noticed_when_found(tmp_path):
    with Gallery.open(tmp_path, 64) as gallery:
        vectors = unit(np.random.default_rng(0), 500, 64)
        gallery.add(vectors, names=[str(place) for place in range(500)])
    (path,) = (tmp_path / "gallery.lance" / "data").glob("*.lance")
    content = path.read_bytes()
    assert content.count(vectors[9].tobytes()) == 1
    path.write_bytes(content.replace(vectors[9].tobytes(), np.full(64, 3, np.float32).tobytes()))
    with Gallery.open(tmp_path) as gallery, pytest.raises(DataError, match="not of unit length"):
        gallery.search(np.ones(64))


def test_a_folder_of_something_else_is_no_gallery(tmp_path):
    import lancedb

    lancedb.connect(tmp_path).create_table("gallery", [{"name": "x", "vector": [1.0, 2.0]}])
    with pytest.raises(DataError, match="not a gallery of sextet"):
        Gallery.open(tmp_path)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lancedb", None)
    with pytest.raises(UsageError, match=r"sextet\[reid\]"):
        Gallery.open(tmp_path, 2)
