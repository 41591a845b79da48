"""Kitchens: the five of 2019, files written by users, and one line for every mistake in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sextet.core.errors import DataError, UsageError
from sextet.mep.overcooked import LAYOUTS, Layout, Overcooked

GOOD = ["XXPXX", "O1 2O", "X   X", "XDXSX"]


@pytest.mark.parametrize(
    ("name", "size", "starts", "pots"),
    [
        ("cramped_room", (5, 4), [(1, 2), (3, 1)], [(2, 0)]),
        ("asymmetric_advantages", (9, 5), [(6, 2), (1, 3)], [(4, 2), (4, 3)]),
        ("coordination_ring", (5, 5), [(2, 1), (1, 2)], [(3, 0), (4, 1)]),
        ("forced_coordination", (5, 5), [(3, 1), (1, 2)], [(3, 0), (4, 1)]),
        ("counter_circuit", (8, 5), [(3, 3), (3, 1)], [(3, 0), (4, 0)]),
    ],
)
def test_the_five_kitchens(
    name: str, size: tuple[int, int], starts: list[tuple[int, int]], pots: list[tuple[int, int]]
) -> None:
    layout = Layout.load(name)
    assert (layout.width, layout.height) == size and name in LAYOUTS
    assert [divmod(int(cell), layout.width)[::-1] for cell in layout.starts] == starts
    assert [divmod(int(cell), layout.width)[::-1] for cell in layout.pots] == pots
    assert not set("".join(layout.grid)) - set(" XOPDS") and len(layout.grid) == layout.height
    assert "".join(" XOPDS"[code] for code in layout.terrain) == "".join(layout.grid)
    with pytest.raises(ValueError, match="read-only"):
        layout.terrain[0] = 0


def test_a_file_from_another_editor(tmp_path: Path) -> None:
    path = tmp_path / "my kitchen é.layout"
    path.write_bytes(b"\xef\xbb\xbf" + "  \r\n".join(GOOD).encode() + b"\r\n\r\n   \r\n")
    layout = Layout.load(path)
    assert layout.name == "my kitchen é" and layout.grid == ("XXPXX", "O   O", "X   X", "XDXSX")
    assert layout.starts.tolist() == [6, 8]
    assert Layout.load(str(path)).grid == layout.grid
    np.testing.assert_array_equal(Layout.parse("\ufeff\n\n" + "\n".join(GOOD), name="x").terrain, layout.terrain)
    assert Overcooked(path, 2).layout.grid == layout.grid


def edited(row: int, text: str) -> str:
    return "\n".join(text if y == row else line for y, line in enumerate(GOOD))


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (edited(2, "X   "), "3:4", "open border"),  # a trailing space is floor only inside the first row's width
        (edited(2, "X  X"), "3:5", "ragged grid: 4 columns, the first row has 5"),
        (edited(2, "X   XX"), "3:7", "ragged grid: 6 columns, the first row has 5"),
        (edited(2, ""), "3:1", "ragged grid: 0 columns"),
        (edited(2, "X T X"), "3:3", 'unknown character "T"; allowed: space X O P D S 1 2'),
        (edited(2, "X 3 X"), "3:3", 'unknown character "3"'),
        (edited(2, "X\t  X"), "3:2", "unknown character"),
        (edited(1, "O11 O"), "2:3", 'second "1"; each player starts once'),
        (edited(1, "O 2 O"), "1:1", 'no "1" .player. in the grid'),
        (edited(1, "O 1 O"), "1:1", 'no "2" .player. in the grid'),
        (edited(1, "X1 2X"), "1:1", 'no "O" .onions. in the grid'),
        (edited(0, "XXXXX"), "1:1", 'no "P" .pot. in the grid'),
        (edited(3, "XXXSX"), "1:1", 'no "D" .dishes. in the grid'),
        (edited(3, "XDXXX"), "1:1", 'no "S" .serving. in the grid'),
        (edited(1, "O1  2"), "2:5", "player 2 on the border; start cells are floor inside"),
        (edited(1, " 1 2O"), "2:1", "open border; the outer cells must be X O P D or S"),
        (edited(0, "XXP X"), "1:4", "open border"),
        (edited(0, "PXXXX"), "1:1", "no pot can be reached by any player"),
        ("XXXPX\nO12XX\nXXX X\nXDXSX", "1:4", "no pot can be reached"),
        ("", "1:1", "the layout is empty"),
        (" \n\n", "1:1", "the layout is empty"),
        ("X" * 5000 + "\n" + "O1 2P" + "D" * 4990 + "XXXXS" + "\n" + "X" * 5000, "1:1", "at most 4096"),
    ],
)
def test_one_line_for_each_mistake(text: str, where: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.layout"
    path.write_text(text)
    if "   \n" in text:
        text = text.replace("X   \n", "X    \n")  # now as wide as the first row
        path.write_text(text)
        where = "3:5"
    with pytest.raises(DataError, match=what) as raised:
        Layout.load(path)
    assert str(raised.value).startswith(f"{path}:{where}: ") and "\n" not in str(raised.value)
    with pytest.raises(DataError, match=what) as raised:
        Layout.parse(text, name="drawn")
    assert str(raised.value).startswith(f"drawn:{where}: ")


def test_players_may_live_apart_if_one_reaches_the_pot() -> None:
    apart = Layout.parse("XPXXX\nO1X2D\nX X X\nXSXSX", name="apart")
    assert apart.pots.tolist() == [1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("random3", 'unknown layout "random3": this kitchen is called "counter_circuit" here'),
        ("counter_circuit_o_1order", 'this kitchen is called "counter_circuit" here'),
        ("simple", 'this kitchen is called "cramped_room" here'),
        ("unident_s", 'this kitchen is called "asymmetric_advantages" here'),
        ("cramped_rom", 'unknown layout "cramped_rom" .did you mean "cramped_room"'),
        ("coord_ring", 'did you mean "coordination_ring"'),
        ("qwerty", 'unknown layout "qwerty"; allowed: asymmetric_advantages, .* a file such as'),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        Layout.load(name)
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.layout"):
        Layout.load(tmp_path / "none.layout")
    path = tmp_path / "latin.layout"
    path.write_bytes("XXPXX\nO1é2O".encode("latin-1"))
    with pytest.raises(DataError, match="UTF-8"):
        Layout.load(path)
    path.write_bytes(b"X" * (1 << 21))
    with pytest.raises(DataError, match="limit"):
        Layout.load(path)
