"""A game as a moving picture: one SVG that plays by itself in a browser, in an image element, without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from sextet.core.seeding import numpy_rng
from sextet.mep.evaluate import Agent
from sextet.mep.overcooked import Layout, Overcooked

CELL = 40  # side of a cell in the picture's units
TICKS_PER_SECOND = 6.6  # speed of the human games of 2019
FLOORS = {0: "#efe6d5", 1: "#b98b5b", 2: "#b98b5b", 3: "#8d8d93", 4: "#b98b5b", 5: "#7aa37a"}
SIGNS = {2: "onions", 3: "", 4: "dishes", 5: "serve"}
ITEMS = {
    1: '<circle r="7" fill="#e3b341" stroke="#8a6410"/>',
    2: '<circle r="8" fill="#fff" stroke="#777" stroke-width="2"/>',
    3: '<circle r="8" fill="#fff" stroke="#777" stroke-width="2"/><circle r="5" fill="#d9822b"/>',
}
CHEFS = ("#2f6db5", "#c0443c")


def record(layout: Layout, agents: tuple[Agent, Agent], *, steps: int, seed: int) -> list[dict[str, Any]]:
    """Plays one game; returns its frames: the state's arrays of that game, and the score so far."""
    env, rng = Overcooked(layout, 1, horizon=steps), numpy_rng(seed, "evaluate", "picture")
    for seat, agent in enumerate(agents):
        agent.begin(env, seat)
    score, frames = 0.0, []
    for _ in range(steps):
        frames.append({**{name: array[0].copy() for name, array in vars(env.state).items()}, "score": score})
        reward = env.step(np.stack([agent.act(env, seat, rng) for seat, agent in enumerate(agents)], axis=1))[0]
        score += float(reward[0])
    return frames


def _animate(attribute: str, values: Sequence[Any], *, transform: bool = False) -> str:
    """One discrete animation over the whole game, with a key only where the value changes."""
    keys = [0] + [index for index in range(1, len(values)) if values[index] != values[index - 1]]
    times = ";".join(f"{index / len(values):.5g}" for index in keys)
    kind = 'animateTransform type="translate"' if transform else "animate"
    return (
        f'<{kind} attributeName="{attribute}" calcMode="discrete" repeatCount="indefinite" '
        f'dur="{len(values) / TICKS_PER_SECOND:.2f}s" keyTimes="{times}" '
        f'values="{";".join(str(values[index]) for index in keys)}"/>'
    )


def _shown(shape: str, when: Sequence[bool]) -> str:
    """A shape that is visible in some frames; nothing when it is never seen."""
    if not any(when):
        return ""
    values = ["visible" if seen else "hidden" for seen in when]
    return f'<g visibility="{values[0]}">{shape}{_animate("visibility", values)}</g>'


def moving_picture(layout: Layout, frames: Sequence[dict[str, Any]], names: tuple[str, str]) -> str:
    """Returns the SVG of a recorded game; ``names`` are those of the players in seats 0 and 1."""
    width, height = layout.width * CELL, layout.height * CELL
    pots = layout.pots.tolist()

    def centre(cell: int) -> str:
        return f"{cell % layout.width * CELL + CELL // 2} {cell // layout.width * CELL + CELL // 2}"

    parts = []
    for cell, code in enumerate(layout.terrain.tolist()):
        x, y = cell % layout.width * CELL, cell // layout.width * CELL
        parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{FLOORS[code]}" stroke="#0002"/>')
        if SIGNS.get(code):
            parts.append(f'<text x="{x + CELL / 2}" y="{y + 37}" font-size="9">{SIGNS[code]}</text>')
        if code in (2, 4):
            parts.append(f'<g transform="translate({centre(cell)})">{ITEMS[code // 2]}</g>')
        items = [_shown(ITEMS[kind], [frame["counter"][cell] == kind for frame in frames]) for kind in ITEMS]
        parts.append(f'<g transform="translate({centre(cell)})">{"".join(items)}</g>')
    for index, cell in enumerate(pots):
        onions = [int(frame["pot_onions"][index]) for frame in frames]
        ready = [int(frame["pot_cook"][index]) >= 20 for frame in frames]
        pot = '<circle r="15" fill="#3c3c42"/>'
        for number, (x, y) in enumerate(((-5, 4), (5, 4), (0, -5)), 1):
            onion = f'<circle cx="{x}" cy="{y}" r="4.5" fill="#e3b341"/>'
            pot += _shown(onion, [n >= number and not done for n, done in zip(onions, ready, strict=True)])
        pot += _shown('<circle r="11" fill="#d9822b"/>', ready)
        parts.append(f'<g transform="translate({centre(cell)})">{pot}</g>')
    for seat, colour in enumerate(CHEFS):
        nose = [("0 -13", "0 13", "13 0", "-13 0")[int(frame["orient"][seat])] for frame in frames]
        held = [_shown(ITEMS[kind], [frame["held"][seat] == kind for frame in frames]) for kind in ITEMS]
        parts.append(
            f"<g>{_animate('transform', [centre(int(f['pos'][seat])) for f in frames], transform=True)}"
            f'<circle r="13" fill="{colour}"/>'
            f'<g>{_animate("transform", nose, transform=True)}<circle r="4" fill="{colour}" stroke="#fff"/>'
            f"{''.join(held)}</g></g>"
        )
    scores = [int(frame["score"]) for frame in frames]
    for score in sorted(set(scores)):
        text = f'<text x="8" y="{height + 20}" text-anchor="start" font-weight="bold">score {score}</text>'
        parts.append(_shown(text, [value == score for value in scores]))
    for seat, name in enumerate(names):
        parts.append(
            f'<circle cx="14" cy="{height + 35 + 20 * seat}" r="6" fill="{CHEFS[seat]}"/>'
            f'<text x="26" y="{height + 39 + 20 * seat}" text-anchor="start">{escape(name)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 66}" width="{1.6 * width:.0f}" '
        f'font-family="system-ui, sans-serif" font-size="13" text-anchor="middle">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>'
    )
