import hashlib
import io
import json
import os
import pickle  # only to write hostile files; the package itself never imports it
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sextet.core.errors import DataError, UsageError
from sextet.core.seeding import numpy_rng
from sextet.mep import human, human_data
from sextet.mep.evaluate import play
from sextet.mep.features import features62
from sextet.mep.human import HumanProxy, train_proxy
from sextet.mep.human_data import HumanData, load_human_data, read_inert, replay_check
from sextet.mep.overcooked import LAYOUTS, Layout, Overcooked

RETURNS_2019 = {  # self-play of the proxy of the test games, ranges over five seeds
    "cramped_room": (90, 125),
    "asymmetric_advantages": (100, 145),
    "coordination_ring": (65, 90),
    "forced_coordination": (20, 50),
    "counter_circuit": (35, 55),
}


@pytest.fixture(scope="module")
def games() -> Path:
    """The converted games of the user; the test skips without them."""
    try:
        return human_data.find_human_data()
    except DataError as error:
        pytest.skip(str(error))


def toy_data(layout: str = "cramped_room", n: int = 256) -> HumanData:
    """Games of players whose rule is: turn to where the onions are, else stay."""
    env = Overcooked(layout, n, backend="numpy")
    rng = np.random.default_rng(0)
    floor = np.flatnonzero(env.layout.terrain == 0)
    env.state.pos[:, 0], env.state.pos[:, 1] = rng.choice(floor[:2], n), rng.choice(floor[2:], n)
    env.state.orient[:] = rng.integers(0, 4, (n, 2))
    actions = np.where(env.state.orient == 2, 4, 2).astype(np.uint8)
    zero = np.zeros(n)
    return HumanData(
        layout=layout,
        state=env.state,
        next_state=env.state,
        actions=actions,
        rewards=zero.astype(np.float32),
        worker=zero.astype(np.int16),
    )


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_hostile_pickle_is_refused_by_name_and_not_run(
    protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="refused, it .*posix[. ]mkdir") as caught:
        read_inert(pickle.dumps(Bomb(), protocol), "games.pickle")
    assert "games.pickle" in str(caught.value) and "sextet data human --download" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "exploded").exists()


def test_reader_builds_containers_and_inert_records() -> None:
    shared = ["a", 300, -1, b"raw"]
    value = {"x": (shared, shared), "y": ((), (1,), (1, 2), {"z": None}), "w": False}
    got = read_inert(pickle.dumps(value, 4), "games")
    assert got == value and got["x"][0] is got["x"][1]
    opcodes = b"\x80\x04\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02i8\x85R\x88."
    with pytest.raises(DataError, match="NEWTRUE"):
        read_inert(opcodes, "games")
    dtype = read_inert(opcodes.replace(b"\x88", b""), "games")
    assert (dtype.name, dtype.arguments, dtype.state) == ("numpy.dtype", ("i8",), None)


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"\x80\x04.", b"\x80\x04h\x05.", b"\x80\x04(e.", b"\x80\x04Nb."])
def test_damaged_pickles_give_one_line(data: bytes) -> None:
    with pytest.raises(DataError, match="damaged pickle"):
        read_inert(data, "games")


def test_another_version_is_named_before_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        human_data.convert_human_data(tmp_path / "nowhere", tmp_path / "out.npz")
    with pytest.raises(DataError, match="has no clean_train_trials.pickle"):
        human_data.convert_human_data(tmp_path, tmp_path / "out.npz")
    (tmp_path / "clean_train_trials.pickle").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match="clean_train_trials.pickle: another version: SHA-256"):
        human_data.convert_human_data(tmp_path, tmp_path / "out.npz")
    archive = tmp_path / "overcooked_ai-9.9.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "clean_train_trials.pickle")
    with pytest.raises(DataError, match=r"9\.9\.tar\.gz: another version"):
        human_data.convert_human_data(archive, tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()


def small_pickle(rows: list[dict[str, Any]]) -> bytes:
    """A data frame as the 2019 pickles store it, one block of objects and one of numbers, written by hand."""

    out = io.BytesIO()

    def text(value: str) -> None:
        raw = value.encode()
        out.write(b"X" + len(raw).to_bytes(4, "little") + raw)

    def name(module: str, attribute: str) -> None:
        text(module)
        text(attribute)
        out.write(b"\x93")

    def number(value: int) -> None:
        out.write(b"J" + value.to_bytes(4, "little", signed=True))

    def array(kind: str, shape: tuple[int, ...], content: bytes | list[str]) -> None:
        name("numpy.core.multiarray", "_reconstruct")
        name("numpy", "ndarray")
        out.write(b")N\x87R(")
        number(1)
        out.write(b"(")
        for size in shape:
            number(size)
        out.write(b"t")
        name("numpy", "dtype")
        text(kind)
        out.write(b"\x85R\x89")
        if isinstance(content, bytes):
            out.write(b"B" + len(content).to_bytes(4, "little") + content)
        else:
            out.write(b"](")
            for item in content:
                text(item)
            out.write(b"e")
        out.write(b"tb")

    objects, numbers = (
        ["layout_name", "joint_action", "state", "next_state"],
        ["reward_norm", "workerid_num", "cur_gameloop"],
    )
    out.write(b"\x80\x04")
    name("pandas.core.frame", "DataFrame")
    out.write(b")\x81}")
    text("_data")
    name("pandas.core.internals.managers", "BlockManager")
    out.write(b")\x81(NNN}")
    text("0.14.1")
    out.write(b"}(")
    text("axes")
    out.write(b"](")
    name("pandas.core.indexes.base", "_new_Index")
    name("pandas.core.indexes.base", "Index")
    out.write(b"}")
    text("data")
    array("O8", (7,), objects + numbers)
    out.write(b"s\x86Re")
    text("blocks")
    out.write(b"](")
    for first, names, kind in ((0, objects, "O8"), (4, numbers, "f8")):
        out.write(b"}(")
        text("mgr_locs")
        array("i8", (len(names),), np.arange(first, first + len(names), dtype="<i8").tobytes())
        text("values")
        cells = [row[column] for column in names for row in rows]
        array(kind, (len(names), len(rows)), cells if kind == "O8" else np.array(cells, "<f8").tobytes())
        out.write(b"u")
    out.write(b"eu" + b"s" + b"tb" + b"sb.")
    return out.getvalue()


def test_conversion_of_hand_written_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def player(x: int, y: int, held: str = "") -> dict[str, Any]:
        soup = {"state": ["onion", 3, 27]} if held == "soup" else {}
        return {"position": [x, y], "orientation": [-1, 0]} | (
            {"held_object": {"name": held, "position": [x, y]} | soup} if held else {}
        )

    def text(x: int, held: str, cook: int) -> str:
        objects = {
            "4,1": {"name": "soup", "position": [4, 1], "state": ["onion", 3, cook]},
            "2,2": {"name": "dish", "position": [2, 2]},
        }
        return str({"players": [player(x, 1, held), player(1, 3)], "objects": objects, "pot_explosion": False})

    idle = str({"players": [player(1, 1), player(3, 1)], "objects": {}, "pot_explosion": False})
    rows: list[dict[str, Any]] = [
        {"layout_name": name, "joint_action": "[[0, 0], [1, 0]]", "state": idle, "next_state": idle,
         "reward_norm": 0, "workerid_num": 3, "cur_gameloop": 0}
        for name in ("cramped_room", "asymmetric_advantages", "coordination_ring", "random3", "random0")
    ]  # fmt: skip
    rows[-1] |= {"joint_action": "['INTERACT', [0, -1]]", "reward_norm": 20, "workerid_num": 7, "cur_gameloop": 5}
    rows[-1] |= {"state": text(3, "soup", 31), "next_state": text(3, "", 32)}
    for split in ("train", "test"):
        content = small_pickle(rows)
        (tmp_path / f"clean_{split}_trials.pickle").write_bytes(content)
        monkeypatch.setitem(human_data.PICKLE_SHA256, split, hashlib.sha256(content).hexdigest())
    summary = human_data.convert_human_data(tmp_path, tmp_path / "games.npz")
    assert summary == {name: {"train": 1, "test": 1} for name in LAYOUTS}
    data = load_human_data(tmp_path / "games.npz", "forced_coordination", "train")
    assert data.state.pos.tolist() == [[8, 16]] and data.state.orient.tolist() == [[3, 3]]
    assert data.state.held.tolist() == [[3, 0]] and data.next_state.held.tolist() == [[0, 0]]
    assert data.state.pot_onions.tolist() == [[0, 3]] and data.state.pot_cook.tolist() == [[0, 20]]
    assert np.flatnonzero(data.state.counter[0]).tolist() == [12] and data.state.counter[0, 12] == 2
    assert data.actions.tolist() == [[5, 0]] and data.rewards.tolist() == [20] and data.worker.tolist() == [7]
    assert (data.state.time[0], data.next_state.time[0]) == (5, 6)
    assert data.state.pos.dtype == np.int16 and data.actions.dtype == np.uint8


def test_finding_and_loading_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEXTET_HUMAN_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match="sextet data human --download"):
        human_data.find_human_data()
    (tmp_path / "sextet").mkdir()
    file = tmp_path / "sextet" / "human_2019.npz"
    file.write_bytes(b"PK\x03\x04 not an archive")
    assert human_data.find_human_data() == file
    with pytest.raises(DataError, match="not a file of converted human games"):
        load_human_data(file, "cramped_room", "train")
    np.savez(file, format=np.array("other/9"))
    with pytest.raises(DataError, match="other/9"):
        load_human_data(file, "cramped_room", "train")
    with pytest.raises(UsageError, match='did you mean "cramped_room"'):
        load_human_data(file, "cramped_rom", "train")
    with pytest.raises(UsageError, match="split"):
        load_human_data(file, "cramped_room", "validation")
    monkeypatch.setenv("SEXTET_HUMAN_DATA", str(tmp_path / "mine.npz"))
    assert human_data.human_data_path() == tmp_path / "mine.npz"


def test_training_is_deterministic_and_learns_both_seats(tmp_path: Path) -> None:
    data, seen = toy_data(), []
    proxy = train_proxy("cramped_room", data, seed=3, epochs=60, progress=lambda *row: seen.append(row))
    again = train_proxy("cramped_room", data, seed=3, epochs=60)
    other = train_proxy("cramped_room", data, seed=4, epochs=60)
    assert all(np.array_equal(proxy.weights[name], again.weights[name]) for name in proxy.weights)
    assert not np.array_equal(proxy.weights["w0"], other.weights["w0"])
    assert [row[:2] for row in seen] == [(epoch, 60) for epoch in range(1, 61)] and seen[-1][2] < 0.2
    for seat in (0, 1):
        chosen = proxy.logits(features62(Layout.load("cramped_room"), data.state, seat)).argmax(axis=1)
        assert np.mean(chosen == data.actions[:, seat]) > 0.98
    proxy.save(tmp_path / "proxy")
    loaded = HumanProxy.load(tmp_path / "proxy", unblock=False)
    assert loaded.info == proxy.info and loaded.layout == "cramped_room" and not loaded.unblock
    assert all(np.array_equal(proxy.weights[name], loaded.weights[name]) for name in proxy.weights)
    with pytest.raises(UsageError, match="games of cramped_room"):
        train_proxy("counter_circuit", data, seed=0)


def test_loading_something_else_is_refused(tmp_path: Path) -> None:
    train_proxy("cramped_room", toy_data(), seed=0, epochs=1).save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match="cannot read"):
        HumanProxy.load(tmp_path)
    HumanProxy("cramped_room", {"w0": np.zeros((2, 2), np.float32)}).save(tmp_path)
    with pytest.raises(DataError, match="shapes"):
        HumanProxy.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"kind": "policy"}))
    with pytest.raises(DataError, match="not a human proxy"):
        HumanProxy.load(tmp_path)


def frozen(action: int, *, unblock: bool) -> HumanProxy:
    """A proxy that all but surely repeats one action."""
    weights = {name: np.zeros(shape, np.float32) for name, shape in human._SHAPES.items()}
    weights["b2"][action] = 30
    return HumanProxy("cramped_room", weights, unblock=unblock)


def test_unblock_excludes_the_last_three_actions_of_a_stuck_player() -> None:
    env = Overcooked("cramped_room", 64, backend="numpy")
    for unblock in (True, False):
        env.reset()
        proxy, rng, taken = frozen(4, unblock=unblock), np.random.default_rng(0), []
        for seat in (0, 1):
            proxy.begin(env, seat)
        for _ in range(5):
            joint = np.stack([proxy.act(env, seat, rng) for seat in (0, 1)], axis=1)
            taken.append(joint)
            env.step(joint)
        assert all((joint == 4).all() for joint in taken[:4])  # as in 2019, not before the fifth step
        assert (taken[4] == 4).any() == (not unblock)
    with pytest.raises(UsageError, match="plays cramped_room"):
        proxy.begin(Overcooked("counter_circuit", 1, backend="numpy"), 0)


def test_every_human_step_replays_exactly(games: Path) -> None:
    counts = replay_check(games)
    assert sum(row["transitions"] for row in counts.values()) == 91_102
    for name in LAYOUTS:
        assert counts[name]["both"] == counts[name]["states"] == counts[name]["transitions"], name


def test_features_of_every_human_state_equal_the_2019_code(games: Path) -> None:
    golden = json.loads((Path(__file__).parents[1] / "golden" / "features.json").read_text())
    for name in LAYOUTS:
        for split in ("train", "test"):
            state = load_human_data(games, name, split).state
            both = np.stack([features62(Layout.load(name), state, seat) for seat in (0, 1)], axis=1)
            digest = hashlib.sha256(both.astype("<i2").tobytes()).hexdigest()[:16]
            assert digest == golden[name]["human"][split], (name, split)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_proxies_play_like_the_2019_ones_and_need_the_unblock_rule(name: str, games: Path) -> None:
    env, returns = Overcooked(name, 100), {}
    for seed in (0, 1):
        proxy = train_proxy(name, load_human_data(games, name, "test"), seed=seed)
        for proxy.unblock in (True, False):
            rng = numpy_rng(0, "evaluate", name)
            returns[seed, proxy.unblock] = play(env, (proxy, proxy), episodes=100, rng=rng).mean()
    low, high = RETURNS_2019[name]
    assert low <= (returns[0, True] + returns[1, True]) / 2 <= high, returns
    assert all(returns[seed, False] < returns[seed, True] for seed in (0, 1)), returns


def test_the_data_command_wants_exactly_one_source(tmp_path):
    with pytest.raises(UsageError, match="give either"):
        human_data.prepare_human_data()
    with pytest.raises(UsageError, match="give either"):
        human_data.prepare_human_data(download=True, source=tmp_path)
    with pytest.raises(DataError, match="no such file"):
        human_data.prepare_human_data(source=tmp_path / "absent.tar.gz")
