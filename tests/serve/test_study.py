import json

import pytest

from serve.harness import live, play, play_on
from sextet.core.errors import DataError, UsageError
from sextet.mep import study as module
from sextet.mep.games import export_games, read_game
from sextet.mep.overcooked import LAYOUTS, Layout
from sextet.mep.rooms import Partner
from sextet.mep.study import Plan, Study

pytestmark = pytest.mark.usefixtures("quick")
FILE = """
title = "Partners"
seed = 5
seats = "one"
seconds = 10
warmup_seconds = 10
"""


def partners(*labels, kitchen="cramped_room", kind="agent"):
    return [Partner(id=label, label=label, kitchen=kitchen, kind=kind, make=lambda: None) for label in labels]


KITCHENS = {name: Layout.load(name) for name in LAYOUTS}
EVERYBODY = [
    *partners("MEP 0", "MEP 1", "SP 0"),
    *partners("FCP 0", "FCP 1", kitchen="counter_circuit"),
    *partners("clone", kind="human_proxy"),
]


def test_order_depends_on_seed_and_number_and_hides_who_is_who(tmp_path):
    study = Study(Plan(seed=1), tmp_path, KITCHENS, EVERYBODY)
    orders = [study.stages(number) for number in range(20)]
    assert orders == [Study(Plan(seed=1), tmp_path, KITCHENS, EVERYBODY).stages(number) for number in range(20)]
    assert orders[0] != Study(Plan(seed=2), tmp_path, KITCHENS, EVERYBODY).stages(0)
    assert len({str(order) for order in orders}) == 20
    assert {order[1].kitchen for order in orders} == {"cramped_room", "counter_circuit"}
    for order in orders:
        assert [stage.stage for stage in order if stage.stage != "play"] == [
            *("instructions", "warmup", "ranking", "warmup", "ranking", "done")
        ]
        plays = [stage for stage in order if stage.stage == "play"]
        assert len({(stage.kitchen, stage.partner, stage.seat) for stage in plays}) == len(plays) == 10
        assert len({(stage.kitchen, stage.partner, stage.letter) for stage in plays}) == 5
    first = [next(s.partner for s in order if s.letter == "A" and s.kitchen == "cramped_room") for order in orders]
    assert set(first) == {"MEP 0", "MEP 1", "SP 0"}


def test_one_seat_and_patterns(tmp_path):
    plan = Plan(seats="one", partners=("MEP*", "clone"), ranking=False)
    stages = Study(plan, tmp_path, KITCHENS, EVERYBODY).stages(1)
    assert sorted(stage.partner for stage in stages if stage.stage == "play") == ["MEP 0", "MEP 1", "clone"]
    assert not any(stage.stage == "ranking" for stage in stages)


@pytest.mark.parametrize(
    "text, message",
    [
        ('tilte = "x"', 'unknown field "tilte" (did you mean "title"?)'),
        ("seconds = 5", "seconds = 5.0 is not allowed; it must be from 10 to 300"),
        ('seats = "all"', "seats"),
        ('kitchens = ["cramped_rom"]', 'unknown kitchen "cramped_rom" (did you mean "cramped_room"?)'),
        ('kitchens = ["forced_coordination"]', "no partner of this study plays forced_coordination"),
        ('partners = ["MPE 0"]', 'unknown partner "MPE 0" (did you mean "MEP 0"?)'),
        ("= 3", "not TOML"),
    ],
)
def test_wrong_study_files(tmp_path, text, message):
    file = tmp_path / "study.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        Study.load(file, tmp_path, KITCHENS, EVERYBODY)
    assert message in str(error.value) and str(file) in str(error.value)


def test_a_whole_study_with_a_restart_and_its_export(served, tmp_path):
    file, games = tmp_path / "study.toml", tmp_path / "games"
    file.write_text(FILE)
    options = {"study": file, "games": games}
    seen = []
    with live(served, **options) as client:
        assert client.get("/api/setup").json()["partners"] == []
        assert client.post("/api/games", json={"kitchen": "cramped_room", "partner": "p0"}).status_code == 403
        me = client.post("/api/study").json()["participant"]
        place = f"/api/study/{me}"
        assert client.get(place).json()["stage"] == "instructions"
        assert client.post(f"{place}/game").status_code == 409
        assert client.post(f"{place}/next").json()["stage"] == "warmup"
        refused = client.post(f"{place}/next")
        assert refused.status_code == 409 and "play the game" in refused.json()["error"]
        messages = play(client, client.post(f"{place}/game").json(), act=lambda *_: 4)
        assert messages[0]["hidden"] and messages[-1]["saved"]
        assert client.post(f"{place}/game").status_code == 409
        assert client.post(f"{place}/next").json()["stage"] == "play"
        ticket = client.post(f"{place}/game").json()
        with client.socket(ticket) as socket:
            socket.send('{"type": "ready"}')
            play_on(socket, until=10, act=lambda *_: 4)
            assert client.post(f"{place}/game").json() == ticket, "a reload goes on with the game"
    with live(served, **options) as client:  # the game was cut off: its stage begins again
        view = client.get(place).json()
        assert view["stage"] == "play" and view["done"] == 0 and view["total"] == 3
        while view["stage"] != "done":
            if view["stage"] in ("warmup", "play"):
                messages = play(client, client.post(f"{place}/game").json(), act=lambda *_: 4)
                seen += messages
                assert messages[0]["partner"] == (view["label"] or "Nobody")
            body = {}
            if view["stage"] == "ranking":
                assert client.post(f"{place}/next", json={"ranking": ["A", "A"]}).status_code == 409
                body = {"ranking": view["partners"][::-1]}
            seen.append(view)
            answer = client.post(f"{place}/next", json=body)
            assert answer.status_code == 200, answer.text
            view = answer.json()
        assert view["done"] == view["total"] == 3 and client.post(f"{place}/next").status_code == 409
        assert client.get("/api/games").json() == {"games": []}
        assert client.get(f"/api/games/{ticket['game']}/file").status_code == 404
        assert client.get("/api/study/wrong").status_code == 404
        assert client.get("/api/study/..%2f..%2fconfig").status_code == 404
        other = client.post("/api/study").json()["participant"]
        assert other != me
    assert "MEP" not in json.dumps(seen)
    assert [json.loads(path.read_text())["participant"] for path in (games / "study").glob(f"{other}.json")] == [2]

    table = export_games(games)
    main = [row for row in table if row["round"] == "main" and row["finished"]]
    assert len(main) == 3 and {row["participant"] for row in table} == {1}
    assert sorted((row["kitchen"], row["rank"]) for row in main) == [
        *[("coordination_ring", 1), ("cramped_room", 1), ("cramped_room", 2)]
    ]
    assert sum(not row["finished"] for row in table) == 1
    assert all(row["partner"].startswith("MEP seed") for row in main)
    names = {read_game(path).header.names for path in games.glob("*.jsonl")}
    assert all("Participant 1" in pair for pair in names)


def test_a_study_is_full_at_its_number_of_participants(served, tmp_path):
    file = tmp_path / "study.toml"
    file.write_text("participants = 1")
    with live(served, study=file, games=tmp_path / "games") as client:
        assert client.post("/api/study").status_code == 201
        assert client.post("/api/study").status_code == 429


def test_damaged_progress_is_named(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DataError):
        Study(Plan(), tmp_path, KITCHENS, EVERYBODY)
    (tmp_path / "x.json").rename(tmp_path / f"{'x' * 22}.json")
    with pytest.raises(DataError, match="not the progress of a participant"):
        Study(Plan(), tmp_path, KITCHENS, EVERYBODY)
    assert module.INSTRUCTIONS
