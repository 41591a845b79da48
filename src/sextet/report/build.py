"""Artifacts and the HTML report of a run.

A report is written from what the run directory holds, so it also works for a run that is unfinished, empty or
damaged: what cannot be read is named in the report.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sextet.core.config import flatten
from sextet.core.console import duration
from sextet.core.errors import DataError, UsageError
from sextet.core.files import atomic_write_bytes, atomic_write_text, read_json, read_text, write_json
from sextet.core.metrics import read_metrics
from sextet.core.records import parts_of
from sextet.core.stats import Interval, bootstrap_interval
from sextet.report.page import Curve, curves_section, data_url, is_interval, is_number, render_page, svg_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEED_SUFFIX = re.compile(r"[-_.]?seed[-_.]?\d+(?=/|$)")
ROUTINE_EVENTS = {"finished", "timing", "started", "ended"}
MAX_TILES, MAX_EVENTS = 8, 100
Curves = dict[str, dict[str, list[Curve]]]


def _plain(value: Any) -> Any:
    """JSON form of a cell: intervals as dicts, numpy scalars as numbers, anything else as text."""
    if isinstance(value, Interval):
        return value.as_dict()
    if hasattr(value, "item"):
        value = value.item()
    return value if value is None or is_number(value) or isinstance(value, (bool, str)) else str(value)


def save_table(
    stem: Path | str, *, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = ""
) -> None:
    """Writes ``<stem>.json``, a table of the report; cells are text, numbers, None or intervals.

    Raises:
        UsageError: A row's length differs from the number of columns.
    """
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise UsageError(f'table "{title}": row {number} has {len(row)} cells for {len(columns)} columns')
    cells = [[_plain(value) for value in row] for row in rows]
    write_json(
        f"{stem}.json",
        {"kind": "table", "title": title, "columns": list(columns), "rows": cells, "note": note},
    )


def save_figure(stem: Path | str, figure: Figure | str, *, title: str, note: str = "") -> None:
    """Writes a matplotlib figure, or the text of an SVG, as ``<stem>.svg`` and its title as ``<stem>.json``."""
    atomic_write_bytes(f"{stem}.svg", figure.encode() if isinstance(figure, str) else svg_bytes(figure))
    write_json(f"{stem}.json", {"kind": "figure", "title": title, "note": note})


def save_text(stem: Path | str, *, title: str, text: str) -> None:
    """Writes ``<stem>.json``, a text of the report, shown with its line breaks in a fixed-width font."""
    write_json(f"{stem}.json", {"kind": "text", "title": title, "text": text})


# --- what is in a run directory ---


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """Returns the object in a JSON file, empty if it holds none; an unreadable file is added to the problems."""
    try:
        value = read_json(path) if path.exists() else {}
    except DataError as error:
        problems.append(str(error))
        return {}
    return value if isinstance(value, dict) else {}


def group_of(part: str) -> str:
    """Returns the name shared by the parts that differ only in their seed."""
    return SEED_SUFFIX.sub("", part).strip("/") or ("seeds" if part else "")


def read_curves(run_dir: Path, own: str, problems: list[str]) -> Curves:
    """Returns metric -> group of parts -> curves; `own` names the run itself."""
    import numpy as np

    curves: Curves = {}
    for part, folder in parts_of(run_dir):
        try:
            rows = read_metrics(folder / "metrics.jsonl")
        except DataError as error:
            problems.append(str(error))
            continue
        columns: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            for name, value in row.items():
                if name != "step" and is_number(value) and not is_interval(value):
                    columns.setdefault(name, []).append((row["step"], value))
        for name, points in columns.items():
            steps, values = np.asarray(points, dtype=float).T
            curves.setdefault(name, {}).setdefault(group_of(part) or own, []).append(Curve(steps, values))
    return curves


def scalars_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the numbers, intervals, flags and texts of a nested summary, with their names."""
    for name, value in values.items():
        label = f"{prefix}{name}"
        if isinstance(value, Mapping) and not is_interval(value):
            yield from scalars_of(value, f"{label} ")
        elif is_number(value) or isinstance(value, (str, bool)):
            yield label.replace("_", " "), value


def _events(run_dir: Path) -> list[dict[str, Any]]:
    """Events of a run and its parts in order of time; lines that are no events are skipped."""
    events = []
    for part, folder in parts_of(run_dir):
        path = folder / "events.jsonl"
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("time", 0), (int, float)):
                events.append({"part": part, "time": 0, **row})
    return sorted(events, key=lambda row: row["time"])


# --- the report ---


def build_report(run_dir: Path | str) -> Path:
    """Writes ``report.html`` of a run directory in any state and returns its path.

    Raises:
        UsageError: There is no such directory. DataError: The report cannot be written.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UsageError(f"{run_dir} is not a directory; give the folder of a run")
    problems: list[str] = []
    record, finish = (
        read_object(run_dir / "config.json", problems),
        read_object(run_dir / "summary.json", problems),
    )
    environment, events = read_object(run_dir / "env.json", problems), _events(run_dir)
    curves = read_curves(run_dir, "run", problems)
    results = list(scalars_of(finish.get("summary") or {}))
    artifacts = _artifacts(run_dir, problems)
    if len(results) > MAX_TILES:
        table = {"kind": "table", "title": "All results", "columns": ["result", "value"], "rows": results}
        artifacts.append({**table, "folded": True})
    newest: dict[str, Any] = next((row for row in reversed(events) if not row["part"]), {})
    badge = (finish.get("state", "finished"), "good") if finish else ("not finished", "warn")
    alerts = [f"Could not be read: {text}" for text in problems]
    if newest.get("event") == "ended" and not finish:
        badge = ("stopped", "bad")
        alerts.insert(0, f"The last session ended with {newest.get('error', 'an error')}")
    sections = [
        {"title": "Results", "blocks": artifacts},
        {"title": "Parts", "blocks": _parts_table(run_dir, problems)},
        curves_section(curves),
        {"title": "Settings", "blocks": _settings(record)},
        {"title": "Events", "blocks": _events_table(events)},
        {"title": "Environment", "blocks": _environment(run_dir, environment)},
    ]
    lead = [f"recipe {record.get('recipe', 'unknown')}"]
    lead += [f"preset {record['preset']}"] if record.get("preset") else []
    lead += [f"seed {record['config']['seed']}"] if "seed" in record.get("config", {}) else []
    lead += [f"{finish['steps']:,} steps"] if finish.get("steps") else []
    lead += [duration(finish["seconds"])] if "seconds" in finish else []
    page = render_page(
        title=record.get("config", {}).get("name") or run_dir.resolve().name,
        kicker="sextet run report",
        lead=lead,
        state=badge,
        tiles=results[:MAX_TILES],
        alerts=alerts,
        sections=sections,
    )
    atomic_write_text(run_dir / "report.html", page)
    return run_dir / "report.html"


def _artifacts(run_dir: Path, problems: list[str]) -> list[dict[str, Any]]:
    blocks = []
    needed = {"table": ("columns", "rows"), "figure": (), "text": ("text",)}
    for path in sorted((run_dir / "artifacts").glob("*.json")):
        block = read_object(path, problems)
        if block.get("kind") not in needed:
            continue  # data that a recipe keeps beside the artifacts
        missing = [name for name in ("title", *needed[block["kind"]]) if name not in block]
        picture = path.with_suffix(".svg")
        if missing or (block["kind"] == "figure" and not picture.exists()):
            problems.append(f"{path}: no {', '.join(missing) or picture.name}")
            continue
        if block["kind"] == "figure":
            block["src"] = data_url(picture.read_bytes())
        blocks.append(block)
    return blocks


def _parts_table(run_dir: Path, problems: list[str]) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for part, folder in parts_of(run_dir):
        if part:
            groups.setdefault(group_of(part), []).append(read_object(folder / "summary.json", problems))
    results = {
        name: _collect([dict(scalars_of(run.get("summary") or {})) for run in runs]) for name, runs in groups.items()
    }
    names = list(dict.fromkeys(name for found in results.values() for name in found))[:MAX_TILES]
    rows = []
    for group, runs in groups.items():
        done = [run for run in runs if run]
        times = [run["seconds"] for run in done if "seconds" in run]
        took = duration(sum(times) / len(times)) if times else None
        row: list[Any] = [group, f"{len(done)} of {len(runs)}", took]
        rows.append(row + [results[group].get(name) for name in names])
    note = "Parts that differ only in their seed share a row; time is the mean of one part."
    table = {"kind": "table", "title": "Parts", "note": note, "rows": rows}
    return [{**table, "columns": ["part", "finished", "time", *names]}] if rows else []


def _collect(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One interval per numeric scalar of several runs, from the runs that have it."""
    names = dict.fromkeys(name for run in runs for name, value in run.items() if is_number(value))
    found = {name: [mean_of(run[name]) for run in runs if is_number(run.get(name))] for name in names}
    return {name: bootstrap_interval(values).as_dict() for name, values in found.items()}


def mean_of(value: Any) -> float:
    """Returns the number of a scalar: of an interval its mean."""
    return float(value["mean"] if is_interval(value) else value)


def _settings(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    settings, changed = flatten(record.get("config", {})), record.get("changed", {})
    if not settings:
        return []
    preset = f'preset "{record["preset"]}"' if record.get("preset") else "the preset"
    rows = [[name, json.dumps(before), json.dumps(value)] for name, (before, value) in changed.items()]
    first = {
        "kind": "table",
        "title": f"Changed from {preset}",
        "columns": ["setting", "preset", "this run"],
        "rows": rows,
    }
    lines = [[name, json.dumps(value)] for name, value in settings.items()]
    marked = [index for index, name in enumerate(settings) if name in changed]
    title = f"All {len(lines)} settings" + (", changed ones marked" if marked else f", all as in {preset}")
    table = {
        "kind": "table",
        "title": title,
        "columns": ["setting", "value"],
        "rows": lines,
        "marked": marked,
    }
    return [first, {**table, "folded": True}] if rows else [{**table, "folded": True}]


def _events_table(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    seen: Counter[tuple[str, str, str]] = Counter()
    first: dict[tuple[str, str, str], float] = {}
    for row in events:
        if row.get("event") not in ROUTINE_EVENTS or (row["event"] == "ended" and "error" in row):
            rest = {name: value for name, value in row.items() if name not in ("event", "time", "part", "traceback")}
            texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in rest.items()}
            text = ", ".join(value if name == "text" else f"{name} {value}" for name, value in texts.items())
            key = (row["part"], str(row.get("event")), text)
            seen[key] += 1
            first.setdefault(key, row["time"])
    rows = [
        [
            datetime.fromtimestamp(first[key], UTC).strftime("%Y-%m-%d %H:%M:%S"),
            *key[1:],
            key[0] or "run",
            count,
        ]
        for key, count in seen.items()
    ]
    note = f"Only the last {MAX_EVENTS} of {len(rows)} are shown." if len(rows) > MAX_EVENTS else ""
    table = {
        "kind": "table",
        "title": "Restores, warnings and losses",
        "note": note,
        "rows": rows[-MAX_EVENTS:],
    }
    return [{**table, "columns": ["first at (UTC)", "event", "details", "part", "times"]}] if rows else []


def _environment(run_dir: Path, environment: Mapping[str, Any]) -> list[dict[str, Any]]:
    items = [(name.removeprefix("versions."), str(value)) for name, value in flatten(environment).items()]
    blocks: list[dict[str, Any]] = [{"kind": "facts", "title": "Machine and versions", "items": items}] if items else []
    command = run_dir / "command.txt"
    if command.exists():
        blocks.append({"kind": "text", "title": "Command", "text": read_text(command).strip()})
    return blocks
