import asyncio
import contextlib
import csv
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from serve.harness import live, play, play_on
from sextet.core.errors import DataError, UsageError
from sextet.mep import games, rooms
from sextet.mep.games import COLUMNS, export_games, human_data, read_game, replay
from sextet.mep.human import train_proxy
from sextet.mep.overcooked import Overcooked

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def client(served, tmp_path):
    with live(served, games=tmp_path / "games", max_games=4) as client:
        client.folder = tmp_path / "games"
        yield client


def partner(client, kind):
    return next(item["id"] for item in client.get("/api/setup").json()["partners"] if item["kind"] == kind)


def closed_with(socket):
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            socket.recv(timeout=10)
    return closed.value.rcvd.code


def test_setup_lists_kitchens_and_partners(client):
    setup = client.get("/api/setup").json()
    assert len(setup["kitchens"]) == 5 and setup["tick_seconds"] == 0.1515 and not setup["study"]
    room = setup["kitchens"][0]
    assert room["grid"] == ["XXPXX", "O   O", "X   X", "XDXSX"]
    assert (room["starts"], room["pots"]) == ([[1, 2], [3, 1]], [[2, 0]])
    found = [(item["label"], item["kitchen"], item["kind"]) for item in setup["partners"]]
    assert ("MEP seed 2", "coordination_ring", "agent") in found
    assert ("proxy-0", "cramped_room", "human_proxy") in found
    assert ("Another person", None, "person") in found and ("Nobody (stands still)", None, "nobody") in found


def test_a_whole_game_is_recorded_and_replays_to_the_same_score(client):
    ticket = client.open_game(partner=partner(client, "nobody"), seconds=40, name="Ada\n")
    messages = play(client, ticket)
    kinds = [message["type"] for message in messages]
    assert kinds[0] == "start" and kinds[-1] == "over" and set(kinds[1:-1]) == {"state"}
    assert messages[0]["seat"] == 0 and messages[0]["steps"] == 264 and messages[1]["phase"] == "waiting"
    steps = [message["step"] for message in messages[1:-1] if message["phase"] == "playing"]
    assert steps == list(range(1, 265))
    over = messages[-1]
    assert over["saved"] and over["score"] >= 40
    assert sum(message.get("event") == "delivered" for message in messages[:-2]) * 20 == over["score"]

    listed = client.get("/api/games").json()["games"]
    assert [game["game"] for game in listed] == [ticket["game"]] and listed[0]["score"] == over["score"]
    shown = client.get(f"/api/games/{ticket['game']}/replay").json()
    assert shown["score"] == over["score"] and shown["names"] == ["Ada", "Nobody (stands still)"]
    assert shown["frames"][-1] == messages[-2] and len(shown["frames"]) == 265
    file = client.get(f"/api/games/{ticket['game']}/file")
    assert file.headers["content-type"].startswith("application/x-ndjson")
    path = client.folder / f"{ticket['game']}.jsonl"
    assert file.text == path.read_text()

    game = read_game(path)
    assert tuple(game.rows[0]) == COLUMNS and game.header.finished and len(replay(game)) == 265
    assert game.rows[-1]["score"] * 4 == over["score"] == sum(row["reward_norm"] for row in game.rows)


def test_a_game_goes_on_where_it_was_after_a_reload(client):
    ticket = client.open_game(seconds=10)
    with client.socket(ticket) as socket:
        socket.send('{"type": "ready"}')
        before = play_on(socket, until=20)[-1]
    time.sleep(0.3)
    with client.socket(ticket) as socket:
        assert json.loads(socket.recv())["type"] == "start"
        paused = json.loads(socket.recv())
        assert paused["phase"] == "paused" and before["step"] <= paused["step"] <= before["step"] + 5
        messages = play_on(socket)
    assert messages[-1]["type"] == "over" and messages[-1]["saved"]
    with client.socket(ticket) as socket:  # a late reader still sees the end
        assert [json.loads(text)["type"] for text in socket] == ["start", "state", "over"]


def test_a_newer_connection_takes_over(client):
    ticket = client.open_game(seconds=10)
    with client.socket(ticket) as first, client.socket(ticket) as second:
        assert closed_with(first) == 4409
        second.send('{"type": "ready"}')
        assert play_on(second)[-1]["type"] == "over"


def test_two_persons_play_together(client):
    ticket = client.open_game(partner=partner(client, "person"), seat=1, seconds=10, name="Ada")
    assert client.post("/api/games/join", json={"invite": "wrong"}).status_code == 404
    guest = client.post("/api/games/join", json={"invite": ticket["invite"], "name": "Bob"}).json()
    assert client.post("/api/games/join", json={"invite": ticket["invite"]}).status_code == 404
    assert (ticket["seat"], guest["seat"], guest["game"]) == (1, 0, ticket["game"])
    with client.socket(ticket) as ada, client.socket(guest) as bob:
        ada.send('{"type": "ready"}')
        time.sleep(0.2)
        bob.send('{"type": "ready"}')
        bob.send(json.dumps({"type": "action", "action": 0}))
        with ThreadPoolExecutor() as pool:
            seen = list(pool.map(lambda socket: play_on(socket, act=lambda *_: 4), (ada, bob)))
    assert [messages[0]["partner"] for messages in seen] == ["Bob", "Ada"]
    assert all(messages[-1]["saved"] for messages in seen)
    game = read_game(client.folder / f"{ticket['game']}.jsonl")
    assert game.header.persons == (0, 1) and game.header.names == ("Bob", "Ada")


def test_one_of_two_persons_gone_pauses_the_game(client):
    ticket = client.open_game(partner=partner(client, "person"), seconds=10)
    guest = client.post("/api/games/join", json={"invite": ticket["invite"]}).json()
    with client.socket(ticket) as ada:
        ada.send('{"type": "ready"}')
        with client.socket(guest) as bob:
            bob.send('{"type": "ready"}')
            play_on(bob, until=5)
        phases = []
        while "paused" not in phases:
            phases.append(json.loads(ada.recv(timeout=10)).get("phase"))
        ada.send('{"type": "leave"}')
        over = [json.loads(text) for text in ada][-1]
    assert over["type"] == "over" and over["saved"]
    assert not read_game(client.folder / f"{ticket['game']}.jsonl").header.finished


def test_abandoned_games_end_and_are_saved_as_unfinished(client, monkeypatch):
    monkeypatch.setattr(rooms, "ALONE_SECONDS", 0.2)
    ticket = client.open_game(seconds=10)
    with client.socket(ticket) as socket:
        socket.send('{"type": "ready"}')
        play_on(socket, until=10)
    path = client.folder / f"{ticket['game']}.jsonl"
    for _ in range(600):
        time.sleep(0.05)
        if path.exists():
            break
    assert not read_game(path).header.finished
    never = client.open_game(partner=partner(client, "person"))
    time.sleep(0.5)
    assert client.post("/api/games/join", json={"invite": never["invite"]}).status_code == 404


def test_finished_games_are_forgotten(client, monkeypatch):
    monkeypatch.setattr(rooms, "LATE_READERS_SECONDS", 0.1)
    ticket = client.open_game(seconds=10)
    play(client, ticket)
    time.sleep(0.4)
    with client.socket(ticket) as socket:
        assert closed_with(socket) == 4404


def test_wrong_secrets_and_wrong_messages(client):
    ticket = client.open_game(seconds=10)
    for wrong in ({"player": "x"}, {"player": "é"}, {"game": "g" * 23}):
        with client.socket(ticket | wrong) as socket:
            assert closed_with(socket) == 4404
    with client.socket(ticket) as socket:
        for text in ("{", "[]", '{"type": "action", "action": 6}', '{"type": "action", "action": true}', b"\x00"):
            socket.send(text)
        messages = [json.loads(socket.recv(timeout=10)) for _ in range(7)]
        assert sum(message["type"] == "error" for message in messages) >= 4
        socket.send("x" * 5000)
        assert closed_with(socket) == 1009
    with client.socket(ticket) as socket:
        with contextlib.suppress(ConnectionClosed):  # the server may close before the last one is sent
            for _ in range(500):
                socket.send('{"type": "action", "action": 4}')
        assert closed_with(socket) == 1008


def test_a_full_server_says_so(client):
    tickets = [client.open_game() for _ in range(4)]
    answer = client.post("/api/games", json={"kitchen": "cramped_room", "partner": "p0"})
    assert answer.status_code == 429 and "try again" in answer.json()["error"]
    with client.socket(tickets[0]) as socket:
        socket.send('{"type": "leave"}')
        assert [json.loads(text) for text in socket][-1]["saved"] is False, "a game without a step is not kept"
    client.open_game()


@pytest.mark.parametrize(
    "body, status, text",
    [
        ({"partner": "p9"}, 404, "no partner"),
        ({"kitchen": "counter_circuit"}, 404, "no partner 'p0' for counter_circuit"),
        ({"kitchen": "../x"}, 404, "no kitchen"),
        ({"seat": 2}, 400, "seat"),
        ({"seconds": 5}, 400, "seconds"),
        ({"name": "x" * 41}, 400, "name"),
        ({"more": 1, "seat": None}, 400, "seat"),
    ],
)
def test_wrong_games_are_refused(client, body, status, text):
    answer = client.post("/api/games", json={"kitchen": "cramped_room", "partner": "p0"} | body)
    assert answer.status_code == status and text in answer.json()["error"]


def test_a_disk_that_takes_nothing_ends_the_game_without_a_record(client, monkeypatch):
    def full(*_):
        raise DataError("disk full")

    monkeypatch.setattr(games, "atomic_write_text", full)
    messages = play(client, client.open_game(seconds=10))
    assert messages[-1]["type"] == "over" and messages[-1]["saved"] is False
    assert "could not be saved" in messages[-2]["message"]


def test_a_partner_that_fails_ends_its_game_only(client, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no move")

    ticket = client.open_game(seconds=10)
    with client.socket(ticket) as socket:
        socket.send('{"type": "ready"}')
        play_on(socket, until=5)
        monkeypatch.setattr("sextet.mep.policy.PolicyAgent.act", fail)
        rest = [json.loads(text) for text in socket]
    assert any("partner failed" in message.get("message", "") for message in rest) and rest[-1]["type"] == "over"
    assert "no move" in caplog.text
    assert client.get("/healthz").json()["status"] == "ok"


def test_stopping_the_server_saves_games_in_progress(served, tmp_path):
    with live(served, games=tmp_path) as client:
        ticket = client.open_game()
        with client.socket(ticket) as socket:
            socket.send('{"type": "ready"}')
            play_on(socket, until=20)
            client.server.should_exit = True
            assert closed_with(socket) in (1000, 1012)
    assert not read_game(tmp_path / f"{ticket['game']}.jsonl").header.finished
    with live(served, games=tmp_path) as client:
        assert client.get("/api/games").json()["games"][0]["game"] == ticket["game"]


@pytest.fixture(scope="module")
def recorded(served, tmp_path_factory):
    """Two games with an agent, one from either seat."""
    folder = tmp_path_factory.mktemp("games")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "TICK_SECONDS", 0.015)
        with live(served, games=folder) as client:
            for seat in (0, 1):
                play(client, client.open_game(seconds=10, seat=seat), seat=seat)
    return folder


def test_a_clone_of_recorded_games_learns_from_persons_only_and_plays(recorded):
    paths = sorted(recorded.glob("*.jsonl"))
    data = human_data(paths, "cramped_room")
    assert len(data.rewards) == 132 and data.persons.sum(axis=1).tolist() == [1] * 132
    env = Overcooked("cramped_room", len(data.rewards))
    for array, value in zip(env.state.arrays(), data.state.arrays(), strict=True):
        array[:] = value
    assert (env.step(data.actions)[0] == data.rewards).all()
    for array, value in zip(env.state.arrays(), data.next_state.arrays(), strict=True):
        assert (array == value).all()
    proxy = train_proxy("cramped_room", data, seed=0, epochs=2)
    assert proxy.info["rows"] == 132 and all(np.isfinite(weight).all() for weight in proxy.weights.values())
    proxy.begin(env, 0)
    assert proxy.act(env, 0, np.random.default_rng(0)).shape == (132,)
    with pytest.raises(DataError, match="no step by a person in counter_circuit"):
        human_data(paths, "counter_circuit")
    with pytest.raises(UsageError, match='did you mean "cramped_room"'):
        human_data(paths, "cramped_rom")


def changed(line, change):
    value = json.loads(line)
    change(value)
    return json.dumps(value)


@pytest.mark.parametrize(
    "number, change, text",
    [
        (1, lambda value: value.update(score=1000), "reward_norm_total is not what the environment gives"),
        (1, lambda value: value.update(format="other/1"), r':1: format "other/1"'),
        (1, lambda value: value.pop("grid"), ":1: not the header of a recorded game"),
        (1, lambda value: value.update(steps=3), "66 steps, but the header says 3"),
        (5, lambda value: value.update(reward_norm=20), ":5: reward_norm is not"),
        (5, lambda value: value.update(joint_action="[[0, 2], [0, 0]]"), ":5: not a step"),
        (5, lambda value: value.pop("state"), ":5: not a step of a game .expected the columns"),
        (5, lambda value: value.update(datetime="now"), ":5: not a step"),
        (5, lambda value: value.update(datetime=float("nan")), ":5: not a step"),
        (5, lambda value: value.update(datetime=float("inf")), ":5: not a step"),
    ],
)
def test_damaged_and_changed_records_are_refused_with_their_line(recorded, tmp_path, number, change, text):
    source = sorted(recorded.glob("*.jsonl"))[0]
    lines = source.read_text().splitlines()
    lines[number - 1] = changed(lines[number - 1], change)
    (tmp_path / source.name).write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=text):
        replay(read_game(tmp_path / source.name))


def test_a_changed_record_is_not_replayed_and_a_broken_one_not_listed(recorded, served, tmp_path, caplog):
    first, second = sorted(recorded.glob("*.jsonl"))
    lines = first.read_text().splitlines()
    lines[4] = changed(lines[4], lambda value: value.update(reward_norm=20))
    (tmp_path / first.name).write_text("\n".join(lines) + "\n")
    (tmp_path / second.name).write_text("{}\n")
    with live(served, games=tmp_path) as client:
        assert [game["game"] for game in client.get("/api/games").json()["games"]] == [first.stem]
        assert client.get(f"/api/games/{first.stem}/replay").status_code == 409
    assert "left out of the list" in caplog.text


def test_the_export_is_a_table_of_checked_games(recorded, tmp_path):
    table = export_games(recorded, out=tmp_path / "games.csv")
    assert [row["seat"] for row in table] == [0, 1] and table[0]["partner"] == "MEP seed 0"
    with (tmp_path / "games.csv").open() as file:
        assert [row["game"] for row in csv.DictReader(file)] == [row["game"] for row in table]
    with pytest.raises(UsageError, match='unknown kitchen "cramped_rom"'):
        export_games(recorded, kitchen="cramped_rom")
    with pytest.raises(UsageError, match="holds no recorded games"):
        export_games(tmp_path)
    shutil.copytree(recorded, tmp_path / "games")
    (tmp_path / "games" / "study").mkdir()
    (tmp_path / "games" / "study" / "x.json").write_text("[]")
    with pytest.raises(DataError, match="x.json: not the progress of a participant"):
        export_games(tmp_path)


def test_a_reader_that_is_too_far_behind_is_dropped():
    async def fill():
        dropped = []
        outbox = rooms.Outbox(lambda: dropped.append(True))
        for _ in range(rooms.QUEUED_MESSAGES + 1):
            outbox.put("state")
        return dropped

    assert asyncio.run(fill()) == [True]
