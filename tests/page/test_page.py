"""The page in a browser, against the real server: games by keyboard, by touch and by two, the study, replays."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sextet.mep.overcooked import Overcooked

pytestmark = pytest.mark.browser
KEYS = {"N": "ArrowUp", "S": "s", "E": "ArrowRight", "W": "a", ".": "p", "I": "Space"}
CODES = "NSEW.I"
ONION = "WWIENI"  # in cramped_room, from below the pot and back
SOUP = ONION * 3 + "WSSINEN" + "." * 14 + "ISESI"  # the wait is for the 20 steps of cooking
SOUPS = "N" + SOUP[1:] + ("WN" + SOUP) * 9
HOSTILE = "<img src=x onerror=alert(1)>"


def read(page: Any, name: str) -> str:
    return str(page.locator("html").get_attribute(f"data-{name}"))


def reach(page: Any, name: str, value: str) -> None:
    page.wait_for_selector(f'html[data-{name}="{value}"]', state="attached")


def passed(page: Any, step: int) -> int:
    """Waits until the game is past a step; returns the step it is at."""
    page.wait_for_function("step => Number(document.documentElement.dataset.step) > step", arg=step)
    return int(read(page, "step"))


def begin(
    page: Any, address: str, *, partner: str = "Nobody (stands still)", seat: str = "0", seconds: str = "10"
) -> None:
    """Opens a game from the first page and waits until it can start."""
    page.goto(address)
    page.check("input[value=cramped_room]", force=True)
    page.check(f"input[name=seat][value='{seat}']", force=True)
    page.select_option("#partner", label=partner)
    page.select_option("#seconds", seconds)
    page.get_by_role("button", name="Start").click()
    reach(page, "phase", "waiting")


def watch(page: Any) -> list[dict[str, Any]]:
    """Returns the list to which every state of the game is added that the page receives from now on."""
    states: list[dict[str, Any]] = []

    def note(text: str) -> None:
        message = json.loads(text)
        if message["type"] == "state":
            states.append(message)

    page.on("websocket", lambda line: line.on("framereceived", note))
    return states


def cook(page: Any, states: list[dict[str, Any]], script: str, until: Callable[[dict[str, Any]], bool]) -> None:
    """Types a script in seat 0, the next key when the last one has had its effect, however late that is."""
    env = Overcooked("cramped_room", 1)
    page.keyboard.press("Space")
    reach(page, "phase", "playing")
    for letter in script:
        if until(states[-1]):
            break
        if letter == ".":  # the soup cooks
            env.state.pot_cook[env.state.pot_onions == 3] = 20
            wait(page, lambda: until(states[-1]) or any(pot["cooking"] == 20 for pot in states[-1]["pots"]))
            continue
        env.step(np.array([[CODES.index(letter), 4]]))
        page.keyboard.press(KEYS[letter])
        wait(page, lambda: until(states[-1]) or seen(states[-1]) == expected(env))


def seen(state: dict[str, Any]) -> tuple[Any, ...]:
    """The cook in seat 0 and the onions in the pot, as the page was told."""
    player = state["players"][0]
    return player["x"], player["y"], player["facing"], player["held"], sum(pot["onions"] for pot in state["pots"])


def expected(env: Overcooked) -> tuple[Any, ...]:
    """The same in a game of one's own."""
    cell, width = int(env.state.pos[0, 0]), env.layout.width
    held = (None, "onion", "dish", "soup")[int(env.state.held[0, 0])]
    return cell % width, cell // width, int(env.state.orient[0, 0]), held, int(env.state.pot_onions.sum())


def wait(page: Any, condition: Callable[[], bool], seconds: float = 20) -> None:
    """Lets the page go on until the condition holds."""
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        page.wait_for_timeout(20)
    raise AssertionError("nothing happened")


def check_record(page: Any, run: Path, score: int) -> None:
    """The record of the last game gives the score that the page shows."""
    page.get_by_role("link", name="Watch the replay").wait_for()  # the game is saved
    newest = max((run / "games").glob("g*.jsonl"), key=lambda path: path.stat().st_mtime)
    header, *rows = [json.loads(line) for line in newest.read_text(encoding="utf-8").splitlines()]
    env = Overcooked("cramped_room", 1)
    names = {json.dumps(way): code for code, way in enumerate(([0, -1], [0, 1], [1, 0], [-1, 0], [0, 0], "INTERACT"))}
    total = 0.0
    for row in rows:
        pair = [names[json.dumps(action)] for action in json.loads(row["joint_action"].replace("'", '"'))]
        total += float(env.step(np.array([pair]))[0][0])
    assert score == header["score"] == total
    page.get_by_role("link", name="Watch the replay").click()
    reach(page, "view", "replay")
    page.locator("input[type=range]").press("End")
    reach(page, "score", str(score))


def test_the_script_cooks() -> None:
    env, scores = Overcooked("cramped_room", 1), []
    for letter in SOUPS[:400]:
        scores.append(float(env.step(np.array([[CODES.index(letter), 4]]))[0][0]))
    assert sum(scores[:60]) == 20
    assert sum(scores) >= 160


def test_a_soup_is_cooked_by_keyboard(server: str, run: Path, new_page: Callable[..., Any]) -> None:
    page = new_page()
    states = watch(page)
    begin(page, server, seconds="")
    assert "blue" in page.locator(".who").inner_text()
    cook(page, states, SOUPS, lambda state: state["score"] == 20)
    reach(page, "score", "20")
    page.get_by_role("button", name="End game").click()
    reach(page, "phase", "over")
    assert page.locator(".score output").inner_text() == "20"
    assert "Score 20" in page.locator("#live").inner_text()
    assert page.evaluate("document.activeElement.textContent") == "The game is over"
    check_record(page, run, 20)


@pytest.mark.slow
def test_a_full_game_by_keyboard(server: str, run: Path, new_page: Callable[..., Any]) -> None:
    page = new_page()
    states = watch(page)
    begin(page, server, seconds="")
    cook(page, states, SOUPS * 3, lambda state: state["phase"] == "over")
    reach(page, "phase", "over")
    score = int(read(page, "score"))
    assert score >= 40
    check_record(page, run, score)


@pytest.mark.slow
def test_a_full_game_with_an_agent(server: str, run: Path, new_page: Callable[..., Any]) -> None:
    page = new_page()
    begin(page, server, partner="Aurelia", seat="1", seconds="")
    page.keyboard.press("Space")
    reach(page, "phase", "playing")
    for letter in "WINES" * 200:
        page.keyboard.press(KEYS[letter])
        page.wait_for_timeout(100)
        if read(page, "phase") == "over":
            break
    reach(page, "phase", "over")
    check_record(page, run, int(read(page, "score")))


def test_a_reload_goes_on_with_the_game(server: str, new_page: Callable[..., Any]) -> None:
    page = new_page()
    begin(page, server, seconds="30")
    page.keyboard.press("Space")
    before = passed(page, 3)
    page.reload()
    reach(page, "phase", "playing")
    assert before <= int(read(page, "step")) <= before + 40
    passed(page, before + 7)
    page.get_by_role("button", name="End game").click()
    reach(page, "phase", "over")
    assert page.evaluate("sessionStorage.length") == 0


def test_a_broken_line_mends_itself(server: str, new_page: Callable[..., Any]) -> None:
    page, lines = new_page(), []

    def connect(line: Any) -> None:
        lines.append(line)
        line.connect_to_server()

    page.route_web_socket("**/api/games/*", connect)
    begin(page, server, seconds="30")
    page.keyboard.press("Space")
    before = passed(page, 3)
    lines[0].close(code=1012, reason="gone")
    page.get_by_role("heading", name="One moment").wait_for()
    reach(page, "phase", "playing")
    assert before <= int(read(page, "step")) <= before + 40
    assert len(lines) == 2
    lines[1].close(code=4409, reason="opened elsewhere")
    page.get_by_text("This game goes on in another tab or window.").wait_for()
    page.get_by_role("button", name="Try again").click()
    reach(page, "phase", "playing")


@pytest.mark.slow
def test_a_silent_line_is_opened_again(server: str, new_page: Callable[..., Any]) -> None:
    page, lines = new_page(), []

    def connect(line: Any) -> None:
        lines.append(line)
        far, first = line.connect_to_server(), len(lines) == 1
        seen: list[str] = []

        def forward(text: str) -> None:
            seen.append(text)
            if not first or len(seen) < 8:
                line.send(text)

        far.on_message(forward)

    page.route_web_socket("**/api/games/*", connect)
    begin(page, server, seconds="30")
    page.keyboard.press("Space")
    passed(page, 3)
    page.get_by_role("heading", name="One moment").wait_for()
    passed(page, 15)
    assert len(lines) == 2
    page.get_by_role("button", name="End game").click()


@pytest.mark.slow
def test_a_held_key_repeats_and_a_short_press_acts_once(server: str, new_page: Callable[..., Any]) -> None:
    page = new_page()
    sent: list[int] = []
    page.on(
        "websocket", lambda line: line.on("framesent", lambda text: sent.append(json.loads(text).get("action", -1)))
    )
    begin(page, server)
    page.keyboard.press("Space")
    step = passed(page, 1)
    page.keyboard.down("ArrowUp")
    passed(page, step + 4)
    page.keyboard.up("ArrowUp")
    assert 3 <= sent.count(0) <= 7
    before = len(sent)
    page.keyboard.press("ArrowLeft", delay=100)
    passed(page, int(read(page, "step")) + 2)
    assert sent[before:] == [3]


def test_two_people_play_together(server: str, new_page: Callable[..., Any]) -> None:
    host, guest = new_page(), new_page()
    begin(host, server, partner="Another person", seat="1")
    guest.goto(host.get_by_label("Link for the other player").input_value())
    reach(guest, "phase", "waiting")
    assert guest.locator(".who").inner_text() == "You are blue (1, tall hat) with another person"
    host.keyboard.press("Space")
    guest.get_by_role("heading", name="Press space or tap to start").click()
    for page in (host, guest):
        reach(page, "phase", "playing")
    step = passed(host, 3)
    assert abs(passed(guest, 3) - step) <= 3
    address = guest.url
    guest.goto("about:blank")
    reach(host, "phase", "paused")
    guest.goto(address)
    reach(guest, "phase", "playing")
    reach(host, "phase", "playing")
    host.get_by_role("button", name="End game").click()
    for page in (host, guest):
        reach(page, "phase", "over")


def test_an_invitation_works_once(server: str, new_page: Callable[..., Any]) -> None:
    page = new_page(expect="404 (Not Found)")
    page.goto(f"{server}#join=nothing")
    page.get_by_role("heading", name="This invitation does not work").wait_for()


def test_touch_on_a_narrow_screen(server: str, new_page: Callable[..., Any]) -> None:
    page = new_page(viewport={"width": 380, "height": 700}, has_touch=True, is_mobile=True, reduced_motion="reduce")
    sent: list[Any] = []
    page.on("websocket", lambda line: line.on("framesent", lambda text: sent.append(json.loads(text))))

    def fits() -> bool:
        return bool(page.evaluate("document.documentElement.scrollWidth <= 380"))

    begin(page, server)
    page.locator(".stage").tap(position={"x": 5, "y": 5})
    reach(page, "phase", "playing")
    assert fits()
    page.get_by_role("button", name="Up").tap()
    page.get_by_role("button", name="Take / put").tap()
    passed(page, int(read(page, "step")))
    assert {"type": "action", "action": 0} in sent
    assert {"type": "action", "action": 5} in sent
    assert page.evaluate("document.documentElement.scrollHeight <= 700"), "all of the game is on the screen"
    small = page.evaluate(
        "[...document.querySelectorAll('button')].filter(b => b.offsetParent && b.offsetHeight < 44).length"
    )
    assert small == 0
    page.set_viewport_size({"width": 740, "height": 360})
    page.get_by_role("button", name="Down").tap(trial=True)
    assert page.evaluate("document.documentElement.scrollWidth <= 740 && document.documentElement.scrollHeight <= 360")
    page.set_viewport_size({"width": 380, "height": 700})
    page.get_by_role("button", name="End game").tap()
    page.get_by_role("link", name="Watch the replay").tap()
    reach(page, "view", "replay")
    assert fits()
    for view in ("", "replays"):
        page.goto(f"{server}#{view}")
        page.reload()
        reach(page, "view", view or "home")
        assert fits()


def test_a_replay_scrubs(server: str, new_page: Callable[..., Any]) -> None:
    page = new_page()
    begin(page, server)
    page.keyboard.press("Space")
    passed(page, 4)
    page.get_by_role("button", name="End game").click()
    page.get_by_role("link", name="Watch the replay").click()
    reach(page, "view", "replay")
    slider = page.locator("input[type=range]")
    last = int(slider.get_attribute("max"))
    assert last >= 5
    for key, step in (("End", last), ("ArrowLeft", last - 1), ("Home", 0), ("ArrowRight", 1)):
        slider.press(key)
        reach(page, "step", str(step))
    page.get_by_label("Speed").select_option("4")
    page.get_by_role("button", name="Play").click()
    reach(page, "step", str(last))
    page.get_by_role("button", name="Play").wait_for()  # it stopped by itself
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.suggested_filename.endswith(".jsonl")
    page.get_by_role("link", name="Replays").click()
    reach(page, "view", "replays")
    assert page.locator("tbody tr").count() >= 1


@pytest.mark.slow
def test_the_study_from_instructions_to_thanks(study_server: str, new_page: Callable[..., Any]) -> None:
    page = new_page()
    seen: list[str] = []

    def look() -> None:
        seen.append(page.locator("body").inner_text())

    page.on("websocket", lambda line: line.on("framereceived", lambda text: seen.append(text)))
    page.goto(study_server)
    reach(page, "phase", "welcome")
    page.get_by_role("button", name="Take part").click()
    reach(page, "phase", "instructions")
    page.reload()
    reach(page, "phase", "instructions")
    page.get_by_role("button", name="I have read this").click()
    for number, stage in enumerate(("warmup", "play", "play")):
        reach(page, "phase", stage)
        look()
        page.get_by_role("button", name=re.compile("Start")).click()
        reach(page, "phase", "waiting")
        page.keyboard.press("Space")
        passed(page, 3)
        look()
        if number == 1:
            page.reload()
            reach(page, "phase", "playing")
        reach(page, "phase", "over")
        look()
        assert page.get_by_role("link", name="replay").count() == 0
        if number == 2:
            page.reload()  # in place of the button
        else:
            page.get_by_role("button", name="Go on").click()
    reach(page, "phase", "ranking")
    page.get_by_role("button", name="Partner B up").click()
    assert page.locator(".ranking li span").all_inner_texts() == ["Partner B", "Partner A"]
    page.get_by_role("button", name="This is my order").click()
    reach(page, "phase", "done")
    look()
    assert not re.search("Aurelia|Berta|Carla|AGENT", " ".join(seen)), "a partner's real name"


@pytest.fixture
def hostile(server: str, new_page: Callable[..., Any]) -> Iterator[Any]:
    page = new_page()

    def change(route: Any) -> None:
        setup = route.fetch().json()
        for partner in setup["partners"]:
            partner["label"] += HOSTILE
        setup["kitchens"][0]["name"] += HOSTILE
        route.fulfill(json=setup | {"title": HOSTILE})

    page.route("**/api/setup", change)
    yield page
    page.unroute_all()


def test_texts_of_the_server_stay_texts(server: str, hostile: Any) -> None:
    hostile.goto(server)
    reach(hostile, "view", "home")
    assert HOSTILE in hostile.locator("#partner").inner_text()
    assert hostile.title().endswith(HOSTILE)
    hostile.check("input[value=coordination_ring]", force=True)
    hostile.select_option("#partner", label="Carla" + HOSTILE)
    hostile.fill("#name", HOSTILE)
    hostile.get_by_role("button", name="Start").click()
    reach(hostile, "phase", "waiting")
    hostile.keyboard.press("Space")
    passed(hostile, 1)
    hostile.get_by_role("button", name="End game").click()
    hostile.get_by_role("link", name="Watch the replay").click()
    reach(hostile, "view", "replay")
    assert HOSTILE in hostile.locator("main").inner_text()
    assert hostile.locator("img, main script").count() == 0


def test_errors_are_shown_in_words(server: str, new_page: Callable[..., Any]) -> None:
    page = new_page()
    page.route("**/api/games", lambda route: route.fulfill(status=200, json={"games": []}))
    page.goto(f"{server}#replays")
    page.get_by_text("No game is recorded yet").wait_for()
    page.route("**/api/setup", lambda route: route.fulfill(status=200, body="not JSON"))
    page.reload()
    page.get_by_role("alert").wait_for()
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()
    reach(page, "view", "replays")
