"""The page to search for people in a browser, against the real server with trained networks, from pick to upload."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from PIL import Image

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison as the page finds it: MGN trained for a few steps, and RMGL as it begins."""
    for needed in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(needed, reason=f"{needed} is missing: pip install sextet[serve]")
    from sextet.core.records import write_final
    from sextet.launch import launch
    from sextet.reid.config import rmgl_smoke
    from sextet.reid.model import build_model

    folder = tmp_path_factory.mktemp("runs") / "crowd"
    launch("mgn", "smoke", {}, directory=folder, quiet=True)
    shutil.copytree(folder / "final", folder / "models" / "mgn")
    config = rmgl_smoke()
    write_final(folder / "models" / "rmgl", "rmgl", config, {}, build_model("rmgl", config.model, 12).state_dict())
    return folder


@pytest.fixture
def page(server: str, new_page: Callable[..., Any]) -> Any:
    """The page with the answer for its first person."""
    page = new_page()
    page.goto(server)
    settled(page)
    return page


def settled(page: Any, **facts: Any) -> None:
    """Waits until the page has its answer, and says these things of itself."""
    wanted = "".join(f'[data-{name}="{value}"]' for name, value in {"state": "done", **facts}.items())
    page.wait_for_selector(f"html{wanted}", state="attached")


def pick(page: Any, index: int) -> None:
    page.locator(f"#people input[value='{index}']").check(force=True)
    settled(page, query=index)


def api(server: str, path: str, **asked: Any) -> Any:
    with urlopen(f"{server}api/{path}?{urlencode(asked, doseq=True)}", timeout=60) as answer:
        return json.load(answer)


def picture(server: str, split: str, index: int, format: str = "PNG") -> bytes:
    content = io.BytesIO()
    with urlopen(f"{server}api/crop/{split}/{index}.png", timeout=60) as answer:
        Image.open(io.BytesIO(answer.read())).save(content, format)
    return content.getvalue()


def shown(page: Any) -> list[dict[str, Any]]:
    """What a visitor sees of each place in the ranking."""
    return page.evaluate(
        """[...document.querySelectorAll('#hits li')].filter((item) => item.offsetParent).map((item) => ({
            index: Number(item.dataset.index), text: item.innerText, border: getComputedStyle(item).borderTopStyle,
            loaded: item.querySelector('img').alt}))"""
    )


def rows(page: Any, frame: str) -> dict[str, list[float]]:
    """Where lines cross a picture by branch, in shares of its height, measured on the screen."""
    found = page.evaluate(
        """(frame) => [...document.querySelectorAll(`${frame} line[data-branch]`)].map((line) => {
            const picture = line.closest('.frame').getBoundingClientRect(), box = line.getBoundingClientRect();
            return [line.dataset.branch, ((box.top + box.bottom) / 2 - picture.top) / picture.height];
        })""",
        frame,
    )
    branches: dict[str, list[float]] = {}
    for branch, row in found:
        branches.setdefault(branch, []).append(row)
    return branches


def near(cuts: dict[str, list[float]], *branches: str) -> dict[str, Any]:
    """What `rows` should measure for these cuts."""
    return {name: pytest.approx(rows[1:-1], abs=0.012) for name, rows in cuts.items() if name in branches}


def test_the_ranking_of_a_person_is_marked_and_scored(page: Any, server: str) -> None:
    assert "sorts the 60 pictures" in page.locator("#intro").inner_text()
    pick(page, 7)
    answer = api(server, "search", query=7)
    person, camera = answer["query"]["id"], answer["query"]["camera"] + 1
    assert page.locator("#facts h2").inner_text() == f"Person {person}, camera {camera}"
    assert f"{answer['scores']['ap']:.3f}" in page.locator("#facts").inner_text()
    assert ("✓ right" if answer["scores"]["first"] == 1 else "✗ wrong") in page.locator("#facts dl").inner_text()
    looks = {"right": ("✓ same person", "solid"), "wrong": ("✗ someone else", "dashed")}
    counted = [hit for hit in answer["hits"] if hit["mark"] != "left_out"]
    assert len(counted) == 30 and {hit["mark"] for hit in counted} == {"right", "wrong"}
    for item, hit in zip(shown(page), counted, strict=True):
        sign, border = looks[hit["mark"]]
        assert item["index"] == hit["index"] and item["border"] == border
        lines = item["text"].split("\n")
        assert lines[0].split() == [str(hit["rank"])] or lines[0] == str(hit["rank"])
        assert f"{hit['distance']:.3f}" in item["text"] and sign in item["text"]
        assert f"person {hit['id']}, camera {hit['camera'] + 1}" in item["text"]
        assert item["loaded"].startswith(f"Rank {hit['rank']}: person {hit['id']}")
    page.get_by_role("button", name="Show more").click()
    settled(page, hits=answer["searched"])
    assert page.get_by_role("button", name="Show more").is_hidden()
    assert len(shown(page)) == 59
    page.get_by_label("show those not counted").check()
    (extra,) = [item for item in shown(page) if "same camera, not counted" in item["text"]]
    assert extra["border"] == "dotted" and len(shown(page)) == 60
    page.get_by_role("button", name="Next").click()
    page.wait_for_selector('html[data-page="1"]', state="attached")
    assert page.locator("#people input").first.get_attribute("value") == "24"
    page.locator("#pager input").fill("99")
    page.locator("#pager input").press("Enter")
    page.wait_for_selector('html[data-page="2"]', state="attached")
    assert page.get_by_role("button", name="Next").is_disabled()
    page.goto(f"{server}#query=3")
    page.reload()
    settled(page, query=3)


def test_stripes_are_drawn_at_the_rows_where_the_model_cuts(page: Any, server: str) -> None:
    pick(page, 4)
    cuts = api(server, "search", query=4)["query"]["cuts"]
    assert rows(page, "#picture") == near(cuts, "part-2", "part-3") and len(cuts["part-3"]) == 4
    assert rows(page, "#hits") == {}
    page.get_by_label("3 stripes").uncheck()
    assert rows(page, "#picture") == near(cuts, "part-2")
    page.get_by_label("Model").select_option("RMGL")
    settled(page, query=4, model="RMGL")
    page.get_by_label("on the gallery too").check()
    settled(page, cuts=2)
    own = api(server, "search", query=4, model="RMGL")
    branches = ("part-2", "part-3")
    assert rows(page, "#picture") == near(own["query"]["cuts"], *branches)
    first = [hit["index"] for hit in own["hits"] if hit["rank"]][:3]
    for index, expected in zip(first, api(server, "cuts", indices=first, model="RMGL"), strict=True):
        assert rows(page, f"#hits li[data-index='{index}']") == near(expected, *branches)
    page.get_by_label("2 stripes").uncheck()
    page.wait_for_selector('html[data-cuts="1"]', state="attached")
    assert rows(page, f"#hits li[data-index='{first[0]}']").keys() == {"part-3"}
    page.get_by_label("on the gallery too").uncheck()
    page.wait_for_selector('html[data-cuts="0"]', state="attached")
    assert rows(page, "#hits") == {}


def test_cameras_and_ranking_are_chosen_by_keyboard(page: Any, server: str) -> None:
    def tab(role: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.closest('label')?.innerText ?? document.activeElement.id") == role:
                return
        raise AssertionError(f"{role} cannot be reached")

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the answer"
    page.locator("#drop input").focus()
    page.keyboard.press("Tab")
    for index in (1, 2):
        page.keyboard.press("ArrowRight")
        settled(page, query=index)
    tab("4")
    page.keyboard.press("Space")
    settled(page, hits=30)
    rest = api(server, "search", query=2, cameras=[0, 1, 2, 4, 5], count=200)
    counted = [hit["index"] for hit in rest["hits"] if hit["rank"]]
    page.wait_for_function("!document.querySelector('#hits').innerText.includes('camera 4')")
    assert [item["index"] for item in shown(page)] == counted[:30]
    assert page.evaluate("document.activeElement.type") == "checkbox", "the focus stays"
    tab("re-rank by shared neighbours")
    page.keyboard.press("Space")
    settled(page, rerank="true")
    reranked = api(server, "search", query=2, cameras=[0, 1, 2, 4, 5], rerank=True)
    assert [item["index"] for item in shown(page)] == [hit["index"] for hit in reranked["hits"] if hit["rank"]]
    assert f"first is at rank {reranked['scores']['first']}" in page.locator("#live").inner_text()
    for camera in ("1", "2", "3", "5", "6"):
        page.get_by_role("checkbox", name=camera, exact=True).uncheck()
    assert page.get_by_role("alert").inner_text() == "Choose at least one camera."
    page.get_by_role("checkbox", name="3", exact=True).check()
    settled(page)
    assert page.locator("#problem").is_hidden()
    assert all("camera 3" in item["text"] for item in shown(page))


def drop(page: Any, name: str, kind: str, content: bytes) -> None:
    page.evaluate(
        """([name, type, bytes]) => {
            const files = new DataTransfer();
            files.items.add(new File([new Uint8Array(bytes)], name, { type }));
            for (const step of ['dragover', 'drop']) {
                document.querySelector('#drop').dispatchEvent(
                    new DragEvent(step, { dataTransfer: files, bubbles: true, cancelable: true }));
            }
        }""",
        [name, kind, list(content)],
    )


def test_a_picture_of_ones_own(server: str, new_page: Callable[..., Any]) -> None:
    page = new_page(expect="400 (Bad Request)")
    page.goto(server)
    settled(page)
    own = {"name": "me.png", "mimeType": "image/png", "buffer": picture(server, "gallery", 12)}
    page.locator("#drop input").set_input_files(own)
    settled(page, query="file")
    assert page.locator("#facts h2").inner_text() == "Your picture"
    assert "Nothing is known" in page.locator("#facts").inner_text() and page.locator("#facts dl").count() == 0
    items = shown(page)
    assert items[0]["index"] == 12 and "0.000" in items[0]["text"]
    assert not any("✓" in item["text"] or "✗" in item["text"] for item in items)
    assert rows(page, "#picture").keys() == {"part-2", "part-3"}
    assert page.locator("#people :checked").count() == 0 and "query" not in page.url
    drawn = page.evaluate(
        "[...document.querySelector('#picture canvas').getContext('2d').getImageData(30, 90, 1, 1).data]"
    )
    assert drawn[3] == 255 and sum(drawn[:3]) > 0

    drop(page, "notes.txt", "text/plain", b"not a picture")
    page.get_by_text("not a readable").wait_for()
    pick(page, 5)
    assert page.locator("#problem").is_hidden()
    drop(page, "again.jpg", "image/jpeg", picture(server, "gallery", 20, "JPEG"))
    settled(page, query="file")
    assert shown(page)[0]["index"] == 20
    drop(page, "scan.tif", "image/tiff", picture(server, "gallery", 21, "TIFF"))
    page.get_by_text("scan.tif (a kind that this browser does not show)").wait_for()
    assert shown(page)[0]["index"] == 21
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url))
    large = {"name": "huge.png", "mimeType": "image/png", "buffer": bytes(10 * 2**20 + 1)}
    page.locator("#drop input").set_input_files(large)
    page.get_by_text("huge.png has 10.0 MB; the limit is 10.0 MB.").wait_for()
    assert sent == []


def test_a_narrow_screen_and_names_that_are_code(server: str, new_page: Callable[..., Any]) -> None:
    page = new_page(viewport={"width": 380, "height": 700}, has_touch=True, is_mobile=True, color_scheme="dark")

    def change(route: Any) -> None:
        about = route.fetch().json()
        for model in about["models"]:
            model["data"] += HOSTILE
        route.fulfill(json=about | {"run": HOSTILE})

    page.route("**/api/about*", change)
    page.goto(server)
    settled(page)
    assert HOSTILE in page.locator("header").inner_text() and HOSTILE in page.locator("#intro").inner_text()
    page.locator("#people label").nth(3).tap()
    settled(page, query=3)
    page.get_by_label("on the gallery too").check()
    page.get_by_label("show those not counted").check()
    settled(page, cuts=2)
    assert page.evaluate("document.documentElement.scrollWidth <= 380")
    small = page.evaluate(
        "[...document.querySelectorAll('button, .box')].filter((it) => it.offsetParent && it.offsetHeight < 44).length"
    )
    assert small == 0


def test_a_server_that_goes_away_is_told_in_words(server: str, new_page: Callable[..., Any]) -> None:
    page = new_page(expect="net::ERR_FAILED")
    page.goto(server)
    settled(page)
    page.route("**/api/search*", lambda route: route.abort())
    page.locator("#people input[value='2']").check(force=True)
    page.get_by_text("The server cannot be reached.").wait_for()
    page.unroute("**/api/search*")
    pick(page, 3)
    assert page.locator("#problem").is_hidden()
