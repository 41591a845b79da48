"""The page of a language model's training in a browser: ask it, look through its answers, read its curves."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=alert(1)>"
PARTS = ("table-grpo-0.0001-0", "table-dapo-0.0001-0")


def answer(text: str, pieces: list[str], logp: list[float], **fields: Any) -> dict[str, Any]:
    right = fields.get("right")
    return {
        "text": text, "pieces": pieces, "logp": logp, "versions": [2] * len(pieces), "stopped": True,
        "length": len(pieces), "score": 1.0 if right else -1.0, "penalty": 0.0, "reward": 1.0 if right else -1.0,
        "advantage": None, "right": right, "note": text, "failure": "",
    } | fields  # fmt: skip


def group(draw: int, kind: str, prompt: str, *answers: dict[str, Any], trained: bool = False) -> dict[str, Any]:
    return {
        "draw": draw, "problem": draw, "kind": kind, "trained": trained, "prompt": prompt, "answer": "42",
        "answers": list(answers),
    }  # fmt: skip


def kinds() -> list[dict[str, Any]]:
    """A group of every kind; the first has tokens of known probabilities, the last strange texts."""
    right = answer("42", ["4", "2", ""], [-0.01, -0.7, 0.0], right=True, advantage=0.9, versions=[1, 2, 2])
    wrong = answer("40", ["4", "0", ""], [-0.01, -5.0, 0.0], right=False, advantage=-0.9, penalty=-0.25, reward=-1.25)
    long = [f"word{number} " for number in range(3000)]
    cut = answer("".join(long), long, [-0.1] * 3000, right=False, stopped=False)
    silent = answer("?", ["?"], [-1.0], failure="timeout", note="no verdict within 5 s")
    odd = answer(HOSTILE + "\u202e\x07", [HOSTILE, "\u202e", "\x07"], [-1.0] * 3, right=True)
    huge = answer("x" * 30_000, ["x" * 30_000], [-1.0], right=True)
    return [
        group(7, "mixed", "Sum: 40 + 2 =", right, wrong, trained=True),
        group(8, "right", "Sum: 41 + 1 =", right, right),
        group(9, "wrong", "Sum: 39 + 3 =", wrong, cut),
        group(10, "failed", "Sum: 38 + 4 =", silent, silent),
        group(11, "right", HOSTILE, odd, huge),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two trainings; the newest step of the second has a group of every kind."""
    for needed in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(needed, reason=f"{needed} is missing: pip install sextet[serve]")
    from sextet.launch import launch

    folder = tmp_path_factory.mktemp("runs") / "all"
    launch("dapo", "smoke", {}, directory=folder / "parts" / PARTS[1], quiet=True)
    shutil.copytree(folder / "parts" / PARTS[1], folder / "parts" / PARTS[0])
    shutil.rmtree(folder / "parts" / PARTS[0] / "final")
    (folder / "parts" / PARTS[0] / "summary.json").unlink()
    shutil.copy(folder / "parts" / PARTS[1] / "config.json", folder / "config.json")
    document = json.dumps({"step": 2, "groups": kinds()}).encode()
    (folder / "parts" / PARTS[1] / "artifacts" / "samples" / "000002.json.gz").write_bytes(gzip.compress(document))
    return folder


def settled(page: Any, **facts: Any) -> None:
    """Waits until the page is done, and says these things of itself."""
    wanted = "".join(f'[data-{name}="{value}"]' for name, value in {"state": "done", **facts}.items())
    page.wait_for_selector(f"html{wanted}", state="attached")


@pytest.fixture
def page(server: str, new_page: Callable[..., Any]) -> Any:
    """The page as it opens: the newest samples of the last row."""
    page = new_page()
    page.goto(server)
    settled(page, view="samples", step=2, draw=7)
    return page


def luminance(colour: list[float]) -> float:
    parts = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(first: list[float], second: list[float]) -> float:
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def colours(page: Any, selector: str, name: str) -> list[list[float]]:
    """A colour of each element as it is painted, from 0 to 1."""
    return page.evaluate(
        """([selector, name]) => [...document.querySelectorAll(selector)].map((element) => {
            const pen = document.createElement('canvas').getContext('2d');
            pen.fillStyle = getComputedStyle(element)[name];
            pen.fillRect(0, 0, 1, 1);
            return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
        })""",
        [selector, name],
    )


def pick(page: Any, kind: str) -> None:
    page.locator(f"input[name=filter][value={kind}]").check(force=True)
    settled(page, filter=kind)


def test_groups_are_filtered_and_shown_with_all_that_is_known(page: Any) -> None:
    assert page.locator("#parts select").input_value() == PARTS[1]
    assert page.locator("#parts option:checked").inner_text() == "table: DAPO (rate 0.0001, seed 0)"
    counts = {"all": 5, "mixed": 1, "right": 2, "wrong": 1, "truncated": 1, "failed": 1}
    for kind, count in counts.items():
        pick(page, kind)
        settled(page, groups=count)
        assert page.locator(".list .group").count() == count
        chip = page.locator(f".chip:has([value={kind}])").inner_text()
        assert chip.split()[-1] == str(count)
    assert "no verdict (timeout)" in page.locator(".answer").first.inner_text()
    assert "why: no verdict within 5 s" in page.locator(".answer").first.inner_text()
    pick(page, "all")
    page.get_by_label("Search").fill("39 +")
    settled(page, groups=1, draw=9)
    page.get_by_label("Search").fill("nowhere")
    settled(page, groups=0)
    assert "No group" in page.locator(".detail").inner_text()
    page.get_by_label("Search").fill("")
    settled(page, groups=5)
    page.locator("input[name=group][value='7']").check(force=True)
    settled(page, draw=7)
    assert "40 + 2" in page.locator(".list .group").first.inner_text()
    first, second = page.locator(".answer").all()
    assert "✓ right" in first.inner_text() and "+0.9" in first.inner_text() and "1 to 2" in first.inner_text()
    text = second.inner_text()
    assert "✗ wrong" in text and "-1.25" in text and "-0.25" in text and "verifier read: 40" in text
    assert page.locator(".head .gold").inner_text() == "42" and "Trained on" in page.locator(".head").inner_text()
    assert page.url.endswith("#samples=2/7")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tokens_are_shaded_by_probability_and_stay_readable(
    server: str, new_page: Callable[..., Any], scheme: str
) -> None:
    page = new_page(color_scheme=scheme)
    page.goto(f"{server}#samples=2/7")
    settled(page, draw=7)
    tokens = ".answers .answer:nth-child(2) .token"
    grounds, inks = colours(page, tokens, "backgroundColor"), colours(page, tokens, "color")
    assert grounds[0] != grounds[1] and len(grounds) == 3
    paper = colours(page, ".answer", "backgroundColor")[0]
    shaded = [contrast(ground, paper) for ground in grounds]
    assert shaded[1] > shaded[0] > shaded[2] == pytest.approx(1), "the less probable, the stronger"
    assert all(contrast(ground, ink) >= 4.5 for ground, ink in zip(grounds, inks, strict=True))
    page.locator(tokens).nth(1).hover()
    assert page.locator("#tip").inner_text() == "“0”: 0.67 % (token 2 of 3)"
    for selector in ("#state", ".head .soft", ".legend", "dt", ".verdict"):
        ink = colours(page, selector, "color")
        ground = colours(page, {"#state": "body", ".legend": "body"}.get(selector, ".card"), "backgroundColor")
        assert contrast(ink[0], ground[0]) >= 4.5, selector


def test_everything_is_reached_by_keyboard(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.locator("input[name=group]:checked").focus()
    page.keyboard.press("ArrowDown")
    settled(page, draw=8)
    page.keyboard.press("ArrowUp")
    settled(page, draw=7)
    page.keyboard.press("ArrowLeft")
    settled(page, step=1)
    page.keyboard.press("ArrowRight")
    settled(page, step=2)
    page.locator("input[name=group][value='7']").focus()
    page.keyboard.press("Space")
    settled(page, draw=7)
    page.keyboard.press("Tab")
    focused = "document.activeElement.className + document.activeElement.textContent"
    assert page.evaluate(focused) == "token4"
    assert "“4”: 99.0 % (token 1 of 3, weights of step 1)" in page.locator("#tip").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == "token2" and "49.7 %" in page.locator("#tip").inner_text()
    page.keyboard.press("End")
    assert "end of the answer" in page.locator("#tip").inner_text()
    settled(page, step=2)
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.answer').querySelector('h3').textContent").startswith(
        "Answer 2"
    )
    page.locator("#step").focus()
    page.keyboard.press("Home")
    settled(page, step=0)


def test_long_answers_are_folded_and_strange_ones_are_text(page: Any) -> None:
    page.on("dialog", lambda dialog: pytest.fail("a text of a model ran"))
    pick(page, "truncated")
    assert "cut off" in page.locator(".answer").nth(1).inner_text()
    tokens, fold = page.locator(".answer:nth-child(2) .token"), page.locator(".fold")
    assert tokens.count() == 520 and tokens.last.inner_text() == "word2999 "
    assert "2,480 more tokens" in fold.inner_text()
    fold.click()
    assert tokens.count() == 2520 and "480 more tokens" in fold.inner_text()
    fold.click()
    assert tokens.count() == 3000 and fold.count() == 0
    assert tokens.nth(1234).inner_text() == "word1234 "
    pick(page, "all")
    page.locator("input[name=group][value='11']").check(force=True)
    settled(page, draw=11)
    assert page.locator(".head .text").inner_text() == HOSTILE and page.locator("#view img").count() == 0
    assert page.locator(".answer:nth-child(1) .token").all_inner_texts() == [HOSTILE, "⟨202E⟩", "⟨0007⟩"]
    huge = page.locator(".answer").nth(1)
    assert huge.locator(".token").inner_text() == "x" * 1000 + "…"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_model_is_asked(server: str, new_page: Callable[..., Any]) -> None:
    page = new_page(expect="422")
    page.goto(f"{server}#ask")
    settled(page, view="ask")
    assert "0123456789=" in page.locator(".question").inner_text()
    example = page.locator(".examples button").nth(2)
    example.click()
    assert page.get_by_label("Prompt", exact=True).input_value() == example.inner_text()
    page.locator(".slide input").first.fill("6")
    page.get_by_role("button", name="Ask", exact=True).click()
    settled(page, answers=6, seed=0)
    assert "of 6 right" in page.locator(".detail p").first.inner_text()
    assert page.locator(".answer").count() == 6 and page.locator(".answer .token").count() >= 6
    assert all(mark in ("✓ right", "✗ wrong") for mark in page.locator(".verdict").all_inner_texts())
    page.get_by_role("button", name="Ask again").click()
    settled(page, answers=6, seed=1)
    page.get_by_label("Prompt", exact=True).fill("1=1=")
    page.get_by_label("Prompt", exact=True).press("Control+Enter")
    page.locator(".detail").get_by_text("nothing is judged").wait_for()
    assert page.locator(".verdict").count() == 0
    page.get_by_label("Prompt", exact=True).fill(HOSTILE)
    page.get_by_role("button", name="Ask", exact=True).click()
    page.get_by_role("alert").get_by_text("lacks").wait_for()
    page.locator("#parts select").select_option(PARTS[0])
    settled(page, part=PARTS[0])
    assert "no finished model yet" in page.locator("#view").inner_text()


def test_curves_are_drawn_read_and_compared(page: Any) -> None:
    page.get_by_role("link", name="Curves").click()
    settled(page, view="curves")
    page.wait_for_selector("html[data-charts]", state="attached")
    entropy = page.locator(".chart", has=page.get_by_role("heading", name="Entropy", exact=True))
    assert entropy.locator("path.curve").get_attribute("d").count("L") == 2
    assert page.locator(".chart").count() >= 14 and page.locator(".chart path.curve").count() >= 20
    assert "step 2" in entropy.inner_text() and "fall slowly" in entropy.inner_text()
    last = entropy.locator("b").inner_text()
    box = entropy.locator("svg").bounding_box()
    entropy.locator("svg").hover(position={"x": box["width"] * 0.15, "y": 40})
    settled(page, cursor=0)
    assert "step 0" in entropy.inner_text() and entropy.locator("b").inner_text() != last
    others = page.locator(".chart .when").all_inner_texts()
    assert others.count("step 0") == len(others), "all charts share the cursor"
    page.mouse.move(5, 5)
    entropy.get_by_role("slider").focus()
    page.keyboard.press("ArrowLeft")
    settled(page, cursor=1)
    assert entropy.get_by_role("slider").get_attribute("aria-valuetext").startswith("step 1: per token ")
    page.get_by_text("All other series").click()
    assert "time/collect" in page.locator(".rest").inner_text()
    page.get_by_label("to compare").select_option(PARTS[0])
    settled(page, compared=PARTS[0])
    assert entropy.locator("path.curve.run-1").count() == 1 and entropy.locator("b").count() == 2
    page.get_by_role("link", name="Settings").click()
    settled(page, view="run")
    assert "loss.clip_high 0.28 as the method has it" in " ".join(page.locator("#view").inner_text().split())
    assert "avg@2" in page.locator("#view").inner_text()
    stray = (
        "[...document.querySelector('.view').childNodes].filter((node) => node.nodeType === 3).map((node) => node.data)"
    )
    assert "".join(page.evaluate(stray)) == ""


def test_a_training_is_followed(server: str, new_page: Callable[..., Any]) -> None:
    page = new_page()

    def before(route: Any) -> None:
        route.fulfill(
            json=route.fetch().json() | {"step": 2, "finished": False, "samples": [0, 1], "why_not": "not yet"}
        )

    page.route("**/api/part?*", before)
    page.clock.install()
    page.goto(f"{server}#samples")
    settled(page, step=1)
    assert "step 2 of 3, not finished" in page.locator("#state").inner_text()
    page.unroute("**/api/part?*")
    page.clock.fast_forward(11_000)
    settled(page, step=2)
    assert "finished" in page.locator("#state").inner_text() and "not" not in page.locator("#state").inner_text()


def test_a_narrow_screen(server: str, new_page: Callable[..., Any]) -> None:
    page = new_page(viewport={"width": 360, "height": 700}, has_touch=True, is_mobile=True, color_scheme="dark")
    page.goto(server)
    settled(page, view="samples")
    for hash, view in (
        ("#samples=2/11", "samples"),
        ("#samples=2/9", "samples"),
        ("#ask", "ask"),
        ("#curves", "curves"),
        ("#run", "run"),
    ):
        page.goto(f"{server}{hash}")
        settled(page, view=view)
        page.wait_for_function("document.querySelector('#view').innerText.length > 100")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, hash
        small = page.evaluate(
            """[...document.querySelectorAll('button, .chip, nav a, summary')]
                .filter((it) => it.offsetParent && it.offsetHeight < 44).length"""
        )
        assert small == 0, hash
    page.goto(f"{server}#samples=2/7")
    settled(page, draw=7)
    page.locator(".answer .token").nth(1).tap()
    assert "49.7 %" in page.locator("#tip").inner_text()


def test_a_server_that_goes_away_is_told_in_words(server: str, new_page: Callable[..., Any]) -> None:
    page = new_page(expect="net::ERR_FAILED")
    page.goto(server)
    settled(page, view="samples")
    page.route("**/api/samples*", lambda route: route.abort())
    page.get_by_role("button", name="Step before").click()
    page.get_by_text("The server cannot be reached.").wait_for()
    page.unroute("**/api/samples*")
    page.get_by_role("button", name="Next step").click()
    settled(page, step=2)
    assert page.locator("#problem").is_hidden()
