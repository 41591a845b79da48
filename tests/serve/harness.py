"""A served run of small untrained agents, and a person who can cook."""

import contextlib
import json
import threading
from pathlib import Path

import httpx
import numpy as np
import torch
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from sextet.core.files import read_json, write_json
from sextet.mep import human
from sextet.mep.human import HumanProxy
from sextet.mep.overcooked import Layout
from sextet.mep.policy import Policy
from sextet.serve import Options
from sextet.serve.app import Server, bind, build, demo_of


def make_run(run: Path, kitchens=("cramped_room", "cramped_room", "coordination_ring")) -> Path:
    """A comparison with agents of random weights and a human proxy."""
    write_json(run / "config.json", {"recipe": "mep", "config": {}})
    for number, kitchen in enumerate(kitchens):
        folder = run / "agents" / f"mep-{number}"
        Policy(Layout.load(kitchen), "planes20", "mlp", torch.Generator().manual_seed(number)).save(folder)
        write_json(folder / "config.json", read_json(folder / "config.json") | {"label": f"MEP seed {number}"})
    weights = {name: np.zeros(shape, np.float32) for name, shape in human._SHAPES.items()}
    HumanProxy("cramped_room", weights).save(run / "agents" / "proxy-0")
    return run


class Client(httpx.Client):
    """An HTTP client of a live server that also opens WebSockets."""

    def socket(self, ticket, **options):
        address = f"ws://{self.base_url.netloc.decode()}/api/games/{ticket['game']}?player={ticket['player']}"
        return connect(address, compression=None, **options)

    def open_game(self, **body):
        answer = self.post("/api/games", json={"kitchen": "cramped_room", "partner": "p0", "seat": 0} | body)
        assert answer.status_code == 201, answer.text
        return answer.json()


@contextlib.contextmanager
def live(run: Path, *, token=None, page=None, **options):
    """Serves a run on a free loopback port; yields a client; ends with the server's orderly stop."""
    demo = demo_of([run], Options(**options))
    if page is not None:
        object.__setattr__(demo, "page", page)
    with listening(demo, token=token) as client:
        yield client


@contextlib.contextmanager
def listening(demo, *, token=None):
    """Serves a recipe's page as `live` serves that of a run."""
    listener, listens = bind("127.0.0.1", 0), threading.Event()
    port = listener.getsockname()[1]
    app = build(demo, host="127.0.0.1", port=port, token=token)
    server = Server(app, connections=64, listening=listens.set)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    assert listens.wait(20)
    try:
        with Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            client.server = server
            yield client
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def cook(state, seat=0):
    """The next action of a person who cooks alone in cramped_room from what is seen."""
    me, pot = state["players"][seat], state["pots"][0]

    def use(x, y, facing):
        if (me["x"], me["y"]) == (x, y):
            return 5 if me["facing"] == facing else facing
        vertical = 0 if me["y"] > y else 1
        if me["y"] != y and (x == 3 or me["x"] == x):
            return vertical
        return 2 if me["x"] < x else 3

    if me["held"] == "soup":
        return use(3, 2, 1)
    if me["held"] == "onion":
        return use(2, 1, 0)
    if pot["onions"] < 3:
        return use(1, 1, 3)
    if me["held"] != "dish":
        return use(1, 2, 1)
    action = use(2, 1, 0)
    return 4 if action == 5 and pot["cooking"] < 20 else action


def play_on(socket, *, until=None, seat=0, act=cook):
    """Plays until the end, or until step `until`; returns all messages."""
    messages = []
    for text in socket:
        messages.append(json.loads(text))
        if messages[-1]["type"] == "state" and messages[-1]["phase"] != "over":
            if until is not None and messages[-1]["step"] >= until:
                break
            with contextlib.suppress(ConnectionClosed):  # the end may be on its way
                socket.send(json.dumps({"type": "action", "action": act(messages[-1], seat)}))
    return messages


def play(client, ticket, **options):
    """Plays a game from the ticket to its end."""
    with client.socket(ticket) as socket:
        socket.send('{"type": "ready"}')
        return play_on(socket, **options)
