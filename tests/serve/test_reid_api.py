import io
import itertools
import re
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from PIL import Image

from serve.harness import listening
from serve.people import Colours, make_page
from sextet.core.errors import UsageError
from sextet.reid import demo
from sextet.reid.synthetic import draw_data
from sextet.serve import Options

DATA = draw_data("easy", (96, 32), people=12)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        run = tmp_path_factory.mktemp("runs") / "first"
        with listening(make_page(run, patch)) as client:
            yield client


def picture(split=DATA.query, index=0, format="PNG", **options):
    content = io.BytesIO()
    demo.picture(split, index).save(content, format, **options)
    return content.getvalue()


def search(client, query, **asked):
    answer = client.get("/api/search", params={"query": query, **asked})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_what_is_served(client):
    about = client.get("/api/about").json()
    assert about["run"] == "first" and about["max_upload"] == 10 * 2**20
    (model,) = about["models"]
    assert model["branches"] == ["part-2", "local-3"] and model["cameras"] == [0, 1, 2, 3, 4, 5]
    assert (model["query"], model["gallery"], model["size"]) == (60, 60, [96, 32])
    index = client.get("/")
    assert "Find a person again" in index.text and "default-src 'self'" in index.headers["content-security-policy"]


def test_people_come_by_person_and_camera_in_pages(client):
    pages = [client.get("/api/people", params={"page": page}).json() for page in range(4)]
    assert [len(page["pictures"]) for page in pages] == [24, 24, 12, 0] and pages[0]["pages"] == 3
    shown = [(item["id"], item["camera"]) for page in pages for item in page["pictures"]]
    assert shown == sorted(zip(DATA.query.ids.tolist(), DATA.query.cameras.tolist(), strict=True))
    for item in pages[1]["pictures"]:
        assert DATA.query.ids[item["index"]] == item["id"] and DATA.query.cameras[item["index"]] == item["camera"]


@pytest.mark.parametrize("cameras", [None, [3], [0, 5]])
@pytest.mark.parametrize("rerank", [False, True])
def test_a_ranking_is_that_of_the_features_and_scored_as_in_the_evaluation(client, cameras, rerank):
    features = Colours().embed(DATA.query.images.read(range(60))), Colours().embed(DATA.gallery.images.read(range(60)))
    settings = Colours().config.evaluation
    plain = 1 - features[0] @ features[1].T
    matrix = demo.rerank(*features, k1=settings.k1, k2=settings.k2, weight=settings.weight) if rerank else plain
    for query in (0, 20, 59):
        answer = search(client, query, rerank=rerank, count=200, **({"cameras": cameras} if cameras else {}))
        kept = [at for at in range(60) if cameras is None or DATA.gallery.cameras[at] in cameras]
        expected = sorted(kept, key=lambda at: (matrix[query, at], at))
        assert [hit["index"] for hit in answer["hits"]] == expected
        rank, right = itertools.count(1), []
        for hit in answer["hits"]:
            same = DATA.gallery.ids[hit["index"]] == DATA.query.ids[query]
            own = DATA.gallery.cameras[hit["index"]] == DATA.query.cameras[query]
            assert hit["distance"] == pytest.approx(matrix[query, hit["index"]], abs=1e-4)
            assert hit["mark"] == ("left_out" if same and own else "right" if same else "wrong")
            assert hit["rank"] == (None if same and own else next(rank))
            if hit["mark"] == "right":
                right.append(hit["rank"])
        assert answer["searched"] == next(rank) - 1
        if right:
            precisions = [(number + 1) / rank for number, rank in enumerate(right)]
            assert answer["scores"] == {
                "ap": pytest.approx(sum(precisions) / len(right)), "first": right[0], "right": len(right)
            }  # fmt: skip
        else:
            assert answer["scores"] is None


def test_the_first_so_many_places_with_those_left_out_between_them(client):
    whole, part = search(client, 7, count=200), search(client, 7, count=5)
    assert [hit["rank"] for hit in part["hits"] if hit["rank"]] == [1, 2, 3, 4, 5]
    assert part["hits"] == whole["hits"][: len(part["hits"])]
    assert part["scores"] == whole["scores"] and part["searched"] == 59


def test_a_query_without_a_right_picture_in_these_cameras_has_no_scores(client):
    answer = search(client, 0, cameras=[0])  # its own camera
    assert answer["scores"] is None and {hit["mark"] for hit in answer["hits"]} == {"wrong", "left_out"}
    assert search(client, 0, cameras=[77]) == answer | {"hits": [], "searched": 0}


def test_an_uploaded_picture_is_ranked_without_marks(client):
    answer = client.post("/api/search", content=picture(DATA.gallery, 12), params={"count": 3}).json()
    first = answer["hits"][0]
    assert (first["index"], first["rank"], first["mark"]) == (12, 1, None) and first["distance"] == 0
    assert answer["scores"] is None and answer["query"]["id"] is None
    assert answer["query"]["cuts"].keys() == {"global", "part-2", "local-3"}
    exif = Image.Exif()
    exif[0x0112] = 6
    sideways = io.BytesIO()
    demo.picture(DATA.gallery, 12).rotate(90, expand=True).save(sideways, "PNG", exif=exif)
    turned = client.post("/api/search", content=sideways.getvalue(), params={"count": 3}).json()
    assert turned["hits"] == answer["hits"], "phones lie on their side"
    ranked = client.post("/api/search", content=picture(DATA.gallery, 12), params={"rerank": True, "cameras": 2}).json()
    assert {hit["camera"] for hit in ranked["hits"]} == {2}


def white(width, height):
    """A picture of few bytes."""
    content = io.BytesIO()
    Image.new("1", (width, height), 1).save(content, "PNG")
    return content.getvalue()


BOMB = b"BM" + bytes(8) + struct.pack("<IIiiHHI", 54, 40, 100_000, 100_000, 1, 24, 0) + bytes(20)


@pytest.mark.parametrize(
    "content, status, text",
    [
        (b"", 400, "empty file"),
        (b"GIF89a and so on", 400, "not a readable JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 400, "not a readable JPEG, PNG"),
        (picture(format="JPEG")[:700], 400, "truncated"),
        (picture()[:900], 400, "truncated"),
        (white(6000, 5000), 400, "6000x5000 pixels are over the limit of 24,000,000"),
        (BOMB, 400, "more pixels than memory holds"),
        (bytes(10 * 2**20 + 1), 413, "over the limit of 10,485,760 bytes"),
    ],
    ids=["empty", "text", "svg", "half a jpeg", "half a png", "30 Mpx", "bomb", "huge"],
)
def test_what_is_no_picture_is_refused_in_words(client, content, status, text):
    answer = client.post("/api/search", content=content)
    assert answer.status_code == status and text in answer.json()["error"]
    assert "Traceback" not in answer.text and not re.search(r"/\w+/", answer.text)


def test_pictures_of_all_modes_are_read(client):
    image = demo.picture(DATA.gallery, 3)
    for mode, format in (
        ("CMYK", "JPEG"),
        ("L", "PNG"),
        ("P", "PNG"),
        ("RGBA", "WEBP"),
        ("I;16", "PNG"),
        ("1", "TIFF"),
    ):
        content = io.BytesIO()
        image.convert("I" if mode == "I;16" else mode).convert(mode).save(content, format)
        answer = client.post("/api/search", content=content.getvalue())
        assert answer.status_code == 200 and len(answer.json()["hits"]) == 30, mode


@pytest.mark.parametrize(
    "path, status, text",
    [
        ("/api/search", 400, "query: Field required"),
        ("/api/search?query=60", 404, "the last is number 59"),
        ("/api/search?query=-1", 404, "the last is number 59"),
        ("/api/search?query=1.5", 400, "query"),
        ("/api/search?query=0&count=100000", 400, "count"),
        ("/api/search?query=0&cameras=front", 400, "cameras"),
        ("/api/search?query=0&model=MNG", 404, 'did you mean "MGN"'),
        ("/api/people?page=-1", 400, "page"),
        ("/api/cuts?indices=60", 404, "the last is number 59"),
        ("/api/cuts", 400, "indices"),
        ("/api/crop/gallery/60.png", 404, "the last is number 59"),
        ("/api/crop/train/0.png", 400, "split"),
        ("/api/crop/gallery/..%2f..%2fconfig.png", 404, "Not Found"),
        ("/api/crop/gallery/x.png", 400, "index"),
    ],
)
def test_wrong_questions_are_answered_in_words(client, path, status, text):
    answer = client.get(path)
    assert answer.status_code == status and text in answer.json()["error"]


def test_pictures_and_their_cuts(client):
    answer = client.get("/api/crop/gallery/5.png")
    assert answer.headers["content-type"] == "image/png"
    with Image.open(io.BytesIO(answer.content)) as image:
        assert np.array_equal(np.asarray(image), DATA.gallery.images.read([5])[0].permute(1, 2, 0))
    cuts = client.get("/api/cuts", params={"indices": [5, 6]}).json()
    assert cuts == [Colours().cuts(demo.picture(DATA.gallery, at)) for at in (5, 6)]


def test_a_full_queue_is_said_so_and_empties(tmp_path, monkeypatch):
    embedder, go = Colours(), threading.Event()
    page = make_page(tmp_path, monkeypatch, embedder)
    embed = embedder.embed
    embedder.embed = lambda images: go.wait(20) and embed(images)
    with listening(page) as client, ThreadPoolExecutor(20) as pool:
        send = lambda _: httpx.post(f"{client.base_url}/api/search", content=picture(), timeout=30)  # noqa: E731
        sent = [pool.submit(send, number) for number in range(20)]
        while "sextet_calls_waiting 16.0" not in client.get("/metrics").text:
            assert not any(future.done() for future in sent)
        assert "sextet_calls_running 4.0" in client.get("/metrics").text
        for answer in (client.post("/api/search", content=picture()), client.get("/api/search?query=0")):
            assert (
                answer.status_code == 429
                and int(answer.headers["retry-after"]) > 0
                and "busy" in answer.json()["error"]
            )
        assert client.get("/api/crop/query/0.png").status_code == 200, "pictures need no model"
        go.set()
        assert {future.result().status_code for future in sent} == {200}
        assert client.get("/api/search?query=0").status_code == 200
        metrics = client.get("/metrics").text
    assert "sextet_calls_waiting 0.0" in metrics and "sextet_search_seconds_count 22.0" in metrics


def test_features_are_kept_until_weights_or_data_change(tmp_path, monkeypatch, capsys):
    embedder = Colours()

    def start(embedder=embedder):
        embedder.calls = 0
        with listening(make_page(tmp_path, monkeypatch, embedder)) as client:
            return embedder.calls, search(client, 3, rerank=True)

    calls, answer = start()
    assert calls > 0 and "features of MGN" in capsys.readouterr().err
    (kept,) = (tmp_path / "artifacts" / "features" / "MGN").iterdir()
    assert start() == (0, answer)
    kept.write_bytes(kept.read_bytes()[:-9])
    calls, again = start()
    assert calls > 0 and again == answer and "damaged" in capsys.readouterr().err
    calls, other = start(Colours(seed=5))
    assert calls > 0 and other != answer
    (new,) = kept.parent.iterdir()
    assert new != kept


def test_a_run_that_cannot_be_written_is_served(tmp_path, monkeypatch, capsys):
    (tmp_path / "artifacts").write_text("in the way")
    with listening(make_page(tmp_path, monkeypatch)) as client:
        assert search(client, 0)["hits"]
    assert "made again at the next start" in capsys.readouterr().err


def test_the_methods_of_a_comparison_can_be_chosen(tmp_path, monkeypatch):
    models = {"global": Colours(method="global", contrast=2.0), "mgn": Colours(), "rmgl": Colours(method="rmgl")}
    with listening(make_page(tmp_path, monkeypatch, models=models)) as client:
        models = client.get("/api/about").json()["models"]
        assert [model["name"] for model in models] == ["MGN", "global", "RMGL"]
        assert len({model["version"] for model in models}) == 1, "they rank the same pictures"
        assert search(client, 0) == search(client, 0, model="MGN") != search(client, 0, model="global")
        assert sorted(path.name for path in (tmp_path / "artifacts" / "features").iterdir()) == [
            *("MGN", "RMGL", "global")
        ]


def test_large_sets_are_reranked_among_the_nearest(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "RERANKED", 0)
    monkeypatch.setattr(demo, "NEAREST", 25)
    with listening(make_page(tmp_path, monkeypatch)) as client:
        plain, reranked = search(client, 8, count=200), search(client, 8, count=200, rerank=True)
    first, second = ([hit["index"] for hit in answer["hits"]] for answer in (plain, reranked))
    assert set(first[:25]) == set(second[:25]) and first[25:] == second[25:]
    distances = [hit["distance"] for hit in reranked["hits"]]
    assert distances == sorted(distances)


def test_runs_that_cannot_be_shown(tmp_path, monkeypatch):
    make_page(tmp_path / "a", monkeypatch)
    with pytest.raises(UsageError, match="gallery of one run"):
        demo.demo([tmp_path / "a", tmp_path / "b"], Options())
    (tmp_path / "a" / "final" / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="holds no finished model; finish it with: sextet resume"):
        demo.demo([tmp_path / "a"], Options())
