"""What a comparison found, as tables, figures and words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sextet.core.run import Run
from sextet.core.stats import Interval, bootstrap_interval, difference_interval, interquartile_mean, welch_test
from sextet.mep.config import METHODS, Config
from sextet.mep.evaluate import heat_map
from sextet.mep.judge import HUMAN, PUBLISHED, Role, mean_over
from sextet.mep.overcooked import Layout
from sextet.mep.picture import moving_picture, record
from sextet.mep.policy import Policy, PolicyAgent
from sextet.report.build import save_figure, save_table, save_text

WITH_HUMAN, WITH_PUBLISHED = "with human, both seats", "with 2019 agents, both seats"
PLURAL = {HUMAN: "human proxies", PUBLISHED: "published 2019 agents"}
BASES = ("SP", "FCP")  # what every other method is compared with in words


@dataclass(frozen=True, kw_only=True)
class Kitchen:
    """Results on one kitchen: the cast, whom the matrix shows, mean returns by (seat 0, seat 1), and entropies."""

    layout: Layout
    cast: list[Role]
    close: list[int]
    scores: Mapping[tuple[int, int], float]
    entropy: Mapping[str, Sequence[float]]

    def of(self, group: str) -> list[int]:
        """Places in the cast of one group."""
        return [index for index, role in enumerate(self.cast) if role.group == group]

    @property
    def methods(self) -> list[str]:
        """Labels of the methods, in order."""
        return [label for label in METHODS.values() if self.of(label)]

    def columns(self) -> dict[str, dict[str, list[float]]]:
        """Every measure as {column: {method: value of each seed}}."""
        humans, published = self.of(HUMAN), self.of(PUBLISHED)
        measures: dict[str, tuple[list[int] | None, int | None]] = {"self-play": (None, 0)}
        if humans:
            measures["with human, agent in seat 0"] = humans, 0
            measures["with human, agent in seat 1"] = humans, 1
            measures[WITH_HUMAN] = humans, None
        if published:
            measures["with 2019 agents, seat 0"] = published, 0
            measures["with 2019 agents, seat 1"] = published, 1
            measures[WITH_PUBLISHED] = published, None
        columns = {
            name: {
                method: [mean_over(self.scores, index, others or [index], seat) for index in self.of(method)]
                for method in self.methods
            }
            for name, (others, seat) in measures.items()
        }
        if self.entropy:
            columns["population entropy, nats"] = {method: list(row) for method, row in self.entropy.items()}
        return columns


def kitchen_tables(config: Config, run: Run, kitchen: Kitchen, number: int) -> dict[str, Any]:
    """Writes the table, words, game and cross-play matrix of one kitchen; returns its headline numbers."""
    layout, columns, start = kitchen.layout, kitchen.columns(), 10 * (number + 1)
    rows: list[list[Any]] = []
    for method in kitchen.methods:
        values = [columns[name].get(method) for name in columns]
        rows.append([method, *(row and bootstrap_interval(row, statistic="iqm") for row in values)])
    for group in (HUMAN, PUBLISHED):
        if members := kitchen.of(group):
            own = bootstrap_interval([kitchen.scores[index, index] for index in members])
            rows.append([PLURAL[group], own, *[None] * (len(columns) - 1)])
    population, response = config.population, config.response
    save_table(
        run.artifact(f"{start}-{layout.name}"),
        title=f"{layout.name}: points in {config.ppo.horizon} steps",
        columns=["method", *columns],
        rows=rows,
        note=f"Interquartile mean and 95 % bootstrap interval over {config.num_seeds} training seeds; {config.games} "
        f"games a partner and seat, sampled actions. SP, PBT members and best responses: {response.steps:,.0f} "
        f"environment steps each. TrajeDi, FCP and MEP: {population.size} members of {population.steps:,.0f} steps "
        f"before that. Agents meet {len(kitchen.of(HUMAN))} human proxies, clones of the 2019 test games, and "
        f"{len(kitchen.of(PUBLISHED))} published agents, one of which trained beside a clone of the test "
        f"games, and are judged by the mean over them; the last rows are these with themselves. The population "
        f"entropies of one seed are on the same states.",
    )
    words = in_words(columns, kitchen.methods)
    save_text(run.artifact(f"{start + 1}-{layout.name}-words"), title=f"{layout.name} in words", text=words)
    partner = next(iter([*kitchen.of(HUMAN), *kitchen.of("SP")]), 0)
    mine = (kitchen.of(METHODS["mep"]) or [0])[0]
    pair = (kitchen.cast[mine], kitchen.cast[partner])
    players = [PolicyAgent(role.player) if isinstance(role.player, Policy) else role.player for role in pair]
    frames = record(layout, (players[0], players[1]), steps=config.ppo.horizon, seed=run.key("evaluate"))
    picture = moving_picture(layout, frames, (pair[0].name, pair[1].name))
    title = f"{layout.name}, one game: {pair[0].name} with {pair[1].name}"
    save_figure(run.artifact(f"{start + 2}-{layout.name}-game"), picture, title=title, note="At the speed of 2019.")
    matrix = [[kitchen.scores[one, two] for two in kitchen.close] for one in kitchen.close]
    figure = heat_map([kitchen.cast[index].name for index in kitchen.close], matrix, f"cross-play on {layout.name}")
    note = f"Mean return of {config.ppo.horizon} steps; 20 points a soup; the diagonal is self-play."
    title = f"{layout.name}: everyone with everyone"
    save_figure(run.artifact(f"{start + 3}-{layout.name}-cross-play"), figure, title=title, note=note)
    heads = [name for name in ("self-play", WITH_HUMAN, WITH_PUBLISHED) if name in columns]
    return {
        f"{layout.name}, {method}, {name}": bootstrap_interval(columns[name][method], statistic="iqm").as_dict()
        for method in kitchen.methods
        for name in heads
    }


def in_words(columns: Mapping[str, Mapping[str, Sequence[float]]], methods: Sequence[str]) -> str:
    """Says what the table shows, and what it does not."""
    scores = columns.get(WITH_HUMAN)
    if scores is None:
        return "The human games are not here, so no agent met a stand-in for a human: sextet data human --download"
    lines = [line for base in BASES if base in methods for line in _against(base, scores, methods)]
    entropy = columns.get("population entropy, nats", {})
    if {"MEP", "FCP"} <= entropy.keys():
        values = [interquartile_mean(entropy[name]) for name in ("MEP", "FCP")]
        lines.append("Population entropy on the same states: MEP {:.3f}, FCP {:.3f} nats.".format(*values))
    return "\n".join(lines) or "Neither SP nor FCP is in this comparison, so no differences are stated."


def _gains(base: str, scores: Mapping[str, Sequence[float]], methods: Sequence[str]) -> Iterator[tuple[str, Interval]]:
    """What is said of a base: every other method's gain over SP, and that of MEP over FCP."""
    for method in methods:
        if method != base and (base != "FCP" or method.startswith("MEP")):
            yield method, difference(scores[base], scores[method])


def _against(base: str, scores: Mapping[str, Sequence[float]], methods: Sequence[str]) -> list[str]:
    lines, share = [], float(np.mean(scores[base]))
    for method, gain in _gains(base, scores, methods):
        percent = f" ({100 * gain.mean / share:+.0f} %)" if share else ""
        text = f"{method} with the human proxies, against {base}: {gain} points{percent}"
        if gain.low is None or gain.high is None:
            lines.append(f"{text}; one seed each, so chance is not judged.")
            continue
        verdict = "more" if gain.low > 0 else "fewer" if gain.high < 0 else "not told apart"
        p = welch_test(scores[base], scores[method])
        lines.append(f"{text}, Welch p = {p:.2g}: {verdict}.")
        if method == "MEP" and base == "FCP" and not gain.low > 0:
            lines.append("MEP does not beat FCP here.")
    return lines


def difference(base: Sequence[float], other: Sequence[float]) -> Interval:
    """Mean difference other - base with its 95 % interval, or no bounds where a side has one value."""
    if min(len(base), len(other)) < 2:
        return Interval(mean=float(np.mean(other) - np.mean(base)), low=None, high=None, n=1)
    return difference_interval(base, other)


def overall_tables(config: Config, run: Run, kitchens: Sequence[Kitchen]) -> dict[str, Any]:
    """Writes the table over all kitchens, scores relative to SP there; returns the headline numbers.

    A row pools all pairs of kitchen and seed.
    """
    measured = [(kitchen, kitchen.columns()) for kitchen in kitchens]
    if len(kitchens) < 2 or "SP" not in kitchens[0].methods or any(WITH_HUMAN not in c for _, c in measured):
        return {}
    names = [name for name in (WITH_HUMAN, WITH_PUBLISHED) if all(name in columns for _, columns in measured)]
    pooled: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for name in names:
        for _, columns in measured:
            base = float(np.mean(columns[name]["SP"]))
            if not base:
                return {}
            for method, values in columns[name].items():
                pooled[name].setdefault(method, []).extend(value / base for value in values)
    methods = kitchens[0].methods
    cells = {m: {name: bootstrap_interval(pooled[name][m], statistic="iqm") for name in names} for m in methods}
    save_table(
        run.artifact("00-overall"),
        title="All kitchens together: return relative to the mean of SP there",
        columns=["method", *names],
        rows=[[method, *row.values()] for method, row in cells.items()],
        note=f"Interquartile mean and 95 % bootstrap interval over {len(kitchens)} kitchens of {config.num_seeds} "
        f"seeds each ({', '.join(kitchen.layout.name for kitchen in kitchens)}); 1 is SP.",
    )
    words = "\n".join(
        line for base in BASES if base in methods for line in _relative(base, pooled[WITH_HUMAN], methods)
    )
    save_text(run.artifact("01-words"), title="In words", text=words)
    return {
        f"{method}, {name}, relative to SP": cell.as_dict()
        for method, row in cells.items()
        for name, cell in row.items()
    }


def _relative(base: str, scores: Mapping[str, Sequence[float]], methods: Sequence[str]) -> list[str]:
    lines = []
    for method, gain in _gains(base, scores, methods):
        percent = Interval(
            mean=100 * gain.mean, low=gain.low and 100 * gain.low, high=gain.high and 100 * gain.high, n=gain.n
        )
        told = gain.low is not None and gain.high is not None and (gain.low > 0 or gain.high < 0)
        text = f"{method} against {base}: {percent} % of SP's return" + ("." if told else "; not told apart.")
        if method == "MEP" and base == "FCP" and not (gain.low is not None and gain.low > 0):
            text += " MEP does not beat FCP over these kitchens."
        lines.append(text)
    return lines
