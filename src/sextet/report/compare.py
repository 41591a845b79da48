"""Comparison of runs: equal settings form a group, every number gets an interval over its group's runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sextet.core.config import flatten
from sextet.core.errors import DataError, UsageError
from sextet.core.files import atomic_write_text, read_json
from sextet.core.records import parts_of
from sextet.core.stats import Interval, bootstrap_interval, paired_difference, welch_test
from sextet.report.build import Curves, group_of, mean_of, read_curves, read_object, scalars_of
from sextet.report.page import curves_section, is_number, render_page

NOT_SETTINGS = ("name", "seed")
LAST = " (last)"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs whose settings are equal except seed and name."""

    label: str
    runs: tuple[str, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One scalar over all groups; `difference` and `p` exist for two groups.

    `difference` is group B minus group A, paired by seed where both groups have the same seeds, else None.
    `p` is Welch's two-sided p where both have at least two runs, else None.
    """

    name: str
    values: tuple[Interval | None, ...]
    difference: Interval | None = None
    p: float | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What :func:`compare_runs` found; `settings` maps each field that differs to its values by group."""

    recipe: str
    groups: tuple[Group, ...]
    settings: Mapping[str, tuple[Any, ...]]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    curves: Curves = field(repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """JSON form, without the curves."""
        rows, groups = [asdict(row) for row in self.rows], [asdict(group) for group in self.groups]
        return {"recipe": self.recipe, "groups": groups, "settings": self.settings, "rows": rows, "notes": self.notes}


@dataclass(kw_only=True)
class _Loaded:
    path: Path
    seed: int
    settings: dict[str, Any]
    values: dict[str, float]
    curves: Curves


def compare_runs(run_dirs: Sequence[Path | str]) -> Comparison:
    """Compares runs of one recipe: groups by settings, an interval per scalar, the settings that differ.

    Scalars are the numbers of the summaries and the last value of every metric, of runs and of their parts.

    Raises:
        UsageError: No runs, a run given twice, or runs of different recipes.
        DataError: A folder holds no readable run.
    """
    paths = [Path(run_dir) for run_dir in run_dirs]
    if not paths:
        raise UsageError("compare needs at least one run: sextet compare RUN [RUN ...]")
    doubled = [str(path) for i, path in enumerate(paths) if path.resolve() in {p.resolve() for p in paths[:i]}]
    if doubled:
        raise UsageError(f"{doubled[0]} is given twice; a run counts once")
    notes: list[str] = []
    recipes: dict[str, Path] = {}
    grouped: dict[str, list[_Loaded]] = {}
    for path in paths:
        recipe, run = _load(path, notes)
        recipes.setdefault(recipe, path)
        grouped.setdefault(json.dumps(run.settings, sort_keys=True), []).append(run)
    if len(recipes) > 1:
        found = ", ".join(f"{name} ({path})" for name, path in recipes.items())
        raise UsageError(f"runs of different recipes cannot be compared: {found}; give runs of one recipe")
    members = list(grouped.values())
    names = list(dict.fromkeys(name for runs in members for name in runs[0].settings))
    columns = {name: tuple(runs[0].settings.get(name) for runs in members) for name in names}
    settings = {name: values for name, values in columns.items() if any(value != values[0] for value in values)}
    groups = []
    for i, runs in enumerate(members):
        text = ", ".join(f"{name.rpartition('.')[2]} {_text(values[i])}" for name, values in list(settings.items())[:3])
        letter = f"{chr(65 + i)}: " if i < 26 else f"{i + 1}: "
        label = letter + (text[:57] + "..." if len(text) > 60 else text or "all runs")
        seeds = tuple(run.seed for run in runs)
        if len(set(seeds)) < len(seeds):
            notes.append(f"{label}: a seed occurs twice, so its runs are not independent and its intervals too narrow")
        groups.append(Group(label=label, runs=tuple(str(run.path) for run in runs), seeds=seeds))
    curves: Curves = {}
    for group, runs in zip(groups, members, strict=True):
        for run in runs:
            for name, parts in run.curves.items():
                for part, lines in parts.items():
                    title = f"{part}/{name}" if part else name
                    curves.setdefault(title, {}).setdefault(group.label, []).extend(lines)
    scalars = dict.fromkeys(name for runs in members for run in runs for name in run.values)
    return Comparison(
        recipe=next(iter(recipes)),
        groups=tuple(groups),
        settings=settings,
        rows=tuple(_row(name, members) for name in scalars),
        notes=tuple(notes),
        curves=curves,
    )


def _load(path: Path, notes: list[str]) -> tuple[str, _Loaded]:
    record = read_json(path / "config.json") if (path / "config.json").exists() else None
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict) or "recipe" not in record:
        raise DataError(f"{path} holds no run (no usable config.json)")
    collected: dict[str, list[float]] = {}
    for part, folder in parts_of(path):
        finish = read_object(folder / "summary.json", notes)
        if not finish:
            notes.append(f"{folder} is not finished; its last values count as its result")
        prefix = f"{group_of(part)}/" if part else ""
        for name, value in scalars_of(finish.get("summary") or {}):
            if is_number(value):
                collected.setdefault(prefix + name, []).append(mean_of(value))
    curves = read_curves(path, "", notes)
    for name, parts in curves.items():
        for part, lines in parts.items():
            last = [float(line.values[-1]) for line in lines]
            collected.setdefault(f"{part}/{name}{LAST}" if part else name + LAST, []).extend(last)
    values = {name: sum(found) / len(found) for name, found in collected.items()}
    finite = {name: value for name, value in values.items() if abs(value) < float("inf")}
    settings = {name: value for name, value in flatten(record["config"]).items() if name not in NOT_SETTINGS}
    seed = record["config"].get("seed", 0)
    return record["recipe"], _Loaded(path=path, seed=seed, settings=settings, values=finite, curves=curves)


def _row(name: str, members: Sequence[Sequence[_Loaded]]) -> Row:
    found = [{run.seed: run.values[name] for run in runs if name in run.values} for runs in members]
    lists = [[run.values[name] for run in runs if name in run.values] for runs in members]
    values = tuple(bootstrap_interval(numbers) if numbers else None for numbers in lists)
    difference, p = None, None
    if len(members) == 2 and min(map(len, lists)) >= 2:
        p = welch_test(*lists)
        if found[0].keys() == found[1].keys() and all(len(f) == len(n) for f, n in zip(found, lists, strict=True)):
            seeds = sorted(found[0])
            difference = paired_difference([found[0][s] for s in seeds], [found[1][s] for s in seeds])
    return Row(name=name, values=values, difference=difference, p=p)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write_comparison(comparison: Comparison, path: Path | str) -> Path:
    """Writes the comparison as one HTML file with the look of a run's report and returns its path."""
    labels = [group.label for group in comparison.groups]
    paired = any(row.difference for row in comparison.rows)
    tested = any(row.p is not None for row in comparison.rows)
    columns = ["result", *labels, *["B - A, same seeds"] * paired, *["Welch p"] * tested]
    note = f"p is not corrected for the {len(comparison.rows)} results compared." if tested else ""
    tables: list[dict[str, Any]] = []
    for title, folded in (("Means over the runs of each group", False), ("Last value of every metric", True)):
        rows = []
        for row in (row for row in comparison.rows if row.name.endswith(LAST) == folded):
            tail = [row.difference and row.difference.as_dict()] * paired + [row.p] * tested
            rows.append([row.name, *(value and value.as_dict() for value in row.values), *tail])
        table = {
            "kind": "table",
            "title": title,
            "columns": columns,
            "rows": rows,
            "folded": folded,
            "note": "" if folded else note,
        }
        tables += [table] if rows else []
    differ = {"kind": "table", "title": "Settings that differ", "columns": ["setting", *labels]}
    settings = [[name, *map(_text, values)] for name, values in comparison.settings.items()]
    listed = [[g.label, run, seed] for g in comparison.groups for run, seed in zip(g.runs, g.seeds, strict=True)]
    runs = {"kind": "table", "title": "Runs compared", "columns": ["group", "run", "seed"], "rows": listed}
    count = sum(len(group.runs) for group in comparison.groups)
    page = render_page(
        title=f"{comparison.recipe}: {count} runs in {len(labels)} group{'s' * (len(labels) != 1)}",
        kicker="sextet comparison",
        lead=labels,
        alerts=comparison.notes,
        sections=[
            {"title": "Results", "blocks": tables},
            curves_section(comparison.curves),
            {"title": "Settings", "blocks": [{**differ, "rows": settings}] if settings else []},
            {"title": "Runs", "blocks": [runs]},
        ],
    )
    atomic_write_text(path, page)
    return Path(path)
