"""The 2019 human-human games: a converter that executes nothing, their arrays, and a replay check.

The games are two pickles in the source distribution of overcooked-ai 1.1.0. A pickle is a program; `read_inert`
builds plain containers from it and refuses every name that these two files do not use. Cook time is capped at
20 as in the 2019 preprocessing (the web game let it run on).
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from pickletools import genops  # reads opcodes one by one, executes none
from typing import TYPE_CHECKING, Any

import numpy as np

from sextet.core.errors import DataError, UsageError, unknown
from sextet.core.files import archive_members, atomic_write_bytes
from sextet.mep.features import COOK_TIME
from sextet.mep.overcooked import LAYOUTS, Layout, Overcooked, State

if TYPE_CHECKING:
    from numpy.typing import NDArray

SDIST_SHA256 = "478bf319274bdb6c5bede8048ee901d088912353111ab85e9fb2bf389c6ccddf"
PICKLE_SHA256 = {"train": "28659cfd09ee033d82b56bed905b239f078877e1b09d1f1b916e4bc0480ca4fa",
                 "test": "59979552a053f1efe762de976f37dd83e269d70d19b67613c61e856c86705666"}  # fmt: skip
_FORMAT = "sextet-human-2019/1"
_GET = "get the games with: sextet data human --download, or --source overcooked_ai-1.1.0.tar.gz"
_NAMES = {"random0": "forced_coordination", "random3": "counter_circuit"}
ACTIONS: list[Any] = [[0, -1], [0, 1], [1, 0], [-1, 0], [0, 0], "INTERACT"]
OBJECTS = ["", "onion", "dish", "soup"]
_STATE = [field.name for field in fields(State)]
_GLOBALS = {
    "numpy.dtype", "numpy.ndarray", "numpy.core.multiarray._reconstruct", "pandas.core.frame.DataFrame",
    "pandas.core.indexes.base.Index", "pandas.core.indexes.base._new_Index",
    "pandas.core.indexes.numeric.Int64Index", "pandas.core.internals.managers.BlockManager",
}  # fmt: skip
_LITERALS = ["SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "SHORT_BINBYTES", "BINBYTES"]
_EMPTY = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "NEWFALSE": bool, "NONE": type(None)}


@dataclass(slots=True)
class Inert:
    """What a pickle asked for: a name, its arguments, its state. Nothing is imported or called."""

    name: str
    arguments: Any
    state: Any = None


def read_inert(data: bytes, source: str) -> Any:
    """Reads a pickle without executing any of it: plain containers, and an `Inert` for each object.

    Raises DataError for a name or an opcode that the 2019 games do not use, and for damaged bytes.
    """
    stack: list[Any] = []
    memo: list[Any] = []
    marks: list[int] = []

    def cut(at: int) -> list[Any]:
        items = stack[at:]
        del stack[at:]
        return items

    try:
        operations: Iterable[tuple[Any, Any, Any]] = genops(data)
        for opcode, argument, _ in operations:
            name = opcode.name
            if name in _LITERALS or name in _EMPTY:
                stack.append(_EMPTY[name]() if name in _EMPTY else argument)
            elif name == "MEMOIZE":
                memo.append(stack[-1])
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name == "MARK":
                marks.append(len(stack))
            elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
                stack.append((*cut(marks.pop() if name == "TUPLE" else -int(name[-1])),))
            elif name == "APPENDS":
                items = cut(marks.pop())
                stack[-1].extend(items)
            elif name in ("SETITEMS", "SETITEM"):
                items = cut(marks.pop() if name == "SETITEMS" else -2)
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            elif name == "STACK_GLOBAL":
                stack.append(".".join(cut(-2)))
                if stack[-1] not in _GLOBALS:
                    raise DataError(f"{source}: refused, it asks for {stack[-1]}, unknown to the games; {_GET}")
            elif name in ("REDUCE", "NEWOBJ"):
                stack.append(Inert(*cut(-2)))
            elif name == "BUILD":
                stack[-2].state = stack[-1]
                cut(-1)
            elif name == "STOP":
                return stack.pop()
            elif name not in ("PROTO", "FRAME"):
                raise DataError(f"{source}: refused, it has {name} {argument!r:.60}, unknown to the games; {_GET}")
        raise IndexError("no end")
    except DataError:
        raise
    except (IndexError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{source}: damaged pickle ({error}); {_GET}") from error


def _array(record: Inert) -> NDArray[Any]:
    _, shape, dtype, fortran, content = record.state
    kind = dtype.arguments[0]
    values = np.array(content, object) if kind == "O8" else np.frombuffer(content, f"<{kind}")
    return values.reshape(shape, order="F" if fortran else "C")


def _columns(frame: Inert) -> dict[str, NDArray[Any]]:
    manager = frame.state["_data"].state[3]["0.14.1"]
    names = _array(manager["axes"][0].arguments[1]["data"])
    blocks = [(_array(block["mgr_locs"]), _array(block["values"])) for block in manager["blocks"]]
    return {names[place]: row for places, rows in blocks for place, row in zip(places, rows, strict=True)}


def _parse(text: str) -> Any:
    return json.loads(text.replace("'", '"').replace("False", "false"))  # literals of Python, not code


def read_states(layout: Layout, texts: NDArray[Any], time: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Reads the column "state" or "next_state" of N recorded steps.

    Args:
        layout: The kitchen.
        texts: (N,) object, states as the games' tables have them.
        time: (N,) steps since the start.

    Returns:
        The arrays of `State` by name, (N, ...). Raises KeyError, ValueError or TypeError for other texts.
    """
    unique, pots = {text: row for row, text in enumerate(dict.fromkeys(texts))}, layout.pots.tolist()
    state = Overcooked(layout, len(unique), backend="numpy").state
    for text, row in unique.items():
        value = _parse(text)
        for seat, player in enumerate(value["players"]):
            state.pos[row, seat] = player["position"][0] + player["position"][1] * layout.width
            state.orient[row, seat] = ACTIONS.index(player["orientation"])
            state.held[row, seat] = OBJECTS.index(player.get("held_object", {"name": ""})["name"])
        for item in value["objects"].values():
            cell = item["position"][0] + item["position"][1] * layout.width
            if cell in pots:
                state.pot_onions[row, pots.index(cell)] = item["state"][1]
                state.pot_cook[row, pots.index(cell)] = min(item["state"][2], COOK_TIME)
            else:
                state.counter[row, cell] = OBJECTS.index(item["name"])
    index = np.array([unique[text] for text in texts])
    return {name: array[index] for name, array in vars(state).items()} | {"time": time.astype(np.int32)}


def _pickles(source: Path) -> dict[str, bytes]:
    """Returns the checked content of both pickles, from a source distribution or a folder."""

    def check(name: str, content: bytes, wanted: str) -> None:
        if (digest := sha256(content).hexdigest()) != wanted:
            raise DataError(f"{name}: another version: SHA-256 {digest[:12]}, not {wanted[:12]}; {_GET}")

    if source.is_dir():
        members = [(path.name, path.read_bytes()) for path in sorted(source.glob("clean_*_trials.pickle"))]
    elif source.is_file():
        check(str(source), source.read_bytes(), SDIST_SHA256)
        members = [item for item in archive_members(source, max_bytes=64 * 2**20) if item[0].endswith(".pickle")]
    else:
        raise DataError(f"{source}: no such file or folder; {_GET}")
    found = {Path(name).name: content for name, content in members}
    for split, wanted in PICKLE_SHA256.items():
        if (name := f"clean_{split}_trials.pickle") not in found:
            raise DataError(f"{source}: has no {name}; {_GET}")
        check(f"{source}: {name}", found[name], wanted)
    return {split: found[f"clean_{split}_trials.pickle"] for split in PICKLE_SHA256}


def convert_human_data(source: Path | str, out_path: Path | str) -> dict[str, dict[str, int]]:
    """Converts the games (the .tar.gz of overcooked-ai 1.1.0, or a folder with its two pickles) to one .npz.

    Returns the rows per layout and split. Raises DataError for another file or version, and as `read_inert`.
    """
    arrays: dict[str, Any] = {"format": np.array(_FORMAT)}
    summary: dict[str, dict[str, int]] = {name: {} for name in LAYOUTS}
    for split, content in _pickles(Path(source)).items():
        table = _columns(read_inert(content, f"clean_{split}_trials.pickle"))
        names = np.array([_NAMES.get(name, name) for name in table["layout_name"]])
        for name in LAYOUTS:
            part = {column: values[names == name] for column, values in table.items()}
            actions = [[ACTIONS.index(action) for action in _parse(pair)] for pair in part["joint_action"]]
            record = {"actions": np.array(actions, np.uint8), "rewards": part["reward_norm"].astype(np.float32)}
            record["worker"] = part["workerid_num"].astype(np.int16)
            for later, column in enumerate(("state", "next_state")):
                states = read_states(Layout.load(name), part[column], part["cur_gameloop"] + later)
                record |= {f"{column}.{field}": array for field, array in states.items()}
            arrays |= {f"{name}/{split}/{key}": array for key, array in record.items()}
            summary[name][split] = len(actions)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    atomic_write_bytes(out_path, buffer.getvalue())
    return summary


def human_data_path() -> Path:
    """Returns where the converted games are kept: `SEXTET_HUMAN_DATA`, or a file in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("SEXTET_HUMAN_DATA") or cache / "sextet" / "human_2019.npz")


def find_human_data() -> Path:
    """Returns the path of the converted games; raises DataError saying how to get them."""
    if not (path := human_data_path()).is_file():
        raise DataError(f"{path}: no human games there; {_GET}; or set SEXTET_HUMAN_DATA to a converted file")
    return path


def download_human_data() -> dict[str, dict[str, int]]:
    """Fetches the source distribution with pip and converts it into `human_data_path()`.

    pip checks the pinned hash first; it then asks the package's setup.py for its metadata, as it does for every
    source distribution. Nothing else of it is run. Raises DataError when pip fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        pinned = Path(folder) / "pinned.txt"
        pinned.write_text(f"overcooked-ai==1.1.0 --hash=sha256:{SDIST_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", "--dest", folder, "-r"]
        done = subprocess.run([*command, str(pinned)], capture_output=True, text=True, check=False)
        if not (files := sorted(Path(folder).glob("*.tar.gz"))):
            reason = (done.stderr.strip() or "no file came").splitlines()[-1]
            raise DataError(f"pip could not download overcooked-ai 1.1.0 ({reason}); {_GET}")
        return convert_human_data(files[0], human_data_path())


@dataclass(frozen=True, kw_only=True)
class HumanData:
    """The steps of one layout and split in time order; `worker` (n,) tells the games apart (one game each).

    `actions` (n, 2) uint8 are joint actions by seat, `rewards` (n,) float32 sparse team rewards (20 per soup).
    `persons` (n, 2) bool says which seats a person held, where not both were.
    """

    layout: str
    state: State
    next_state: State
    actions: NDArray[np.uint8]
    rewards: NDArray[np.float32]
    worker: NDArray[np.int16]
    persons: NDArray[np.bool_] | None = None


def load_human_data(path: Path | str, layout: str, split: str) -> HumanData:
    """Reads the games of one layout and split ("train" or "test").

    Raises UsageError for an unknown name, DataError for anything but a file written by `convert_human_data`.
    """
    for kind, name, allowed in (("human layout", layout, LAYOUTS), ("split", split, (*PICKLE_SHA256,))):
        if name not in allowed:
            raise UsageError(unknown(kind, name, allowed))
    try:
        with np.load(path, allow_pickle=False) as stored:
            if str(stored["format"]) != _FORMAT:
                raise KeyError(f"its format is {stored['format']}, not {_FORMAT}")
            get = {key.rsplit("/", 1)[1]: stored[key] for key in stored if key.startswith(f"{layout}/{split}/")}
        now, later = (State(**{f: get[f"{s}.{f}"] for f in _STATE}) for s in ("state", "next_state"))
        rest = {key: get[key] for key in ("actions", "rewards", "worker")}
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a file of converted human games ({error}); {_GET}") from error
    return HumanData(layout=layout, state=now, next_state=later, **rest)


def replay_check(path: Path | str) -> dict[str, dict[str, int]]:
    """Replays every human step: per layout "transitions", and the number with equal "states", "rewards", "both"."""
    counts: dict[str, dict[str, int]] = {}
    for name in LAYOUTS:
        total = np.zeros(4, np.int64)
        for split in PICKLE_SHA256:
            data = load_human_data(path, name, split)
            env = Overcooked(name, len(data.rewards))
            for array, recorded in zip(env.state.arrays(), data.state.arrays(), strict=True):
                array[:] = recorded
            rewards = env.step(data.actions)[0] == data.rewards
            pairs = zip(env.state.arrays(), data.next_state.arrays(), strict=True)
            states = np.all([(a == b).reshape(len(a), -1).all(axis=1) for a, b in pairs], axis=0)
            total += (len(states), states.sum(), rewards.sum(), (states & rewards).sum())
        counts[name] = dict(zip(("transitions", "states", "rewards", "both"), total.tolist(), strict=True))
    return counts


def prepare_human_data(*, download: bool = False, source: Path | None = None) -> dict[str, dict[str, int]]:
    """Converts the human games of 2019, needed for the human proxy, into the cache folder.

    Args:
        download: Fetch the source distribution of overcooked-ai 1.1.0 with pip (2.3 MB).
        source: That file, or a folder with its two pickles, if you have it already.

    Returns:
        Steps per layout and split.

    Raises:
        UsageError: Neither or both were given. DataError: As `convert_human_data` and `download_human_data`.
    """
    if download == (source is not None):
        raise UsageError("give either --download, or --source overcooked_ai-1.1.0.tar.gz")
    return download_human_data() if source is None else convert_human_data(source, human_data_path())
