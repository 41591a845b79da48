"""The look of every HTML page sextet writes: one self-contained file made of sections, and its SVG figures.

A section is ``{"title": str, "blocks": [...]}``. A block is what an artifact's JSON holds, a table, figure or
text, or one of ``facts`` (pairs) and ``curves`` (small panels under one legend). The template escapes every
string, and figures are images in ``data:`` URLs, so that nothing inside an SVG can run.
"""

from __future__ import annotations

import base64
import io
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from sextet.core.stats import Interval, format_number

if TYPE_CHECKING:
    import numpy as np
    from jinja2 import Template
    from markupsafe import Markup
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

PALETTE = ("#0b7285", "#d9480f", "#5f3dc4", "#2b8a3e", "#c2255c", "#a87900", "#1c7ed6", "#5c6370")
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sextet",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a919c",
    "axes.grid": True,
    "grid.color": "#dfe2e7",
    "xtick.color": "#555c66",
    "ytick.color": "#555c66",
    "axes.labelcolor": "#555c66",
}
MAX_POINTS = 300


class Curve(NamedTuple):
    """One metric of one run: `steps` and `values` are (N,), rising in steps."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]


def svg_bytes(figure: Figure) -> bytes:
    """Returns a matplotlib figure as SVG with a transparent background; equal figures give equal bytes."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return buffer.getvalue().replace(b"'DejaVu Sans'", b"system-ui, 'DejaVu Sans'")


def data_url(svg: bytes) -> str:
    """Returns the ``data:`` URL of an SVG image."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def is_interval(value: object) -> bool:
    """Whether a cell is the dict form of an Interval."""
    return isinstance(value, Mapping) and {"mean", "low", "high", "n"} <= value.keys()


def is_number(value: object) -> bool:
    """Whether a cell is set in figures: a number or an interval."""
    return (isinstance(value, (int, float)) and not isinstance(value, bool)) or is_interval(value)


def cell(value: Any) -> Markup | str:
    """HTML of a table cell: numbers short, intervals as "m [l, h]", anything else as escaped text."""
    from markupsafe import Markup

    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_interval(value):
        interval = Interval(**{name: value[name] for name in ("mean", "low", "high", "n")})
        mean, _, bounds = str(interval).partition(" ")
        return Markup('{} <span class="bounds">{}</span>').format(mean, bounds if interval.n > 1 else "")
    if isinstance(value, (int, float)):
        return format_number(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _numeric_columns(block: Mapping[str, Any]) -> set[int]:
    """Columns set in figures: those with a number in some row."""
    return {index for row in block["rows"] for index, value in enumerate(row) if is_number(value)}


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = cell
    environment.filters["numeric"] = _numeric_columns
    return environment.from_string((files("sextet.report") / "page.html.j2").read_text("utf-8"))


def render_page(
    *,
    title: str,
    kicker: str,
    lead: Sequence[str] = (),
    state: tuple[str, str] | None = None,
    tiles: Sequence[tuple[str, Any]] = (),
    alerts: Sequence[str] = (),
    sections: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Returns a page as one HTML text that needs no network.

    Args:
        title: Heading and browser title.
        kicker: What kind of page this is, above the heading.
        lead: Short facts under the heading.
        state: Text and tone ("good", "warn" or "bad") of the badge.
        tiles: Names and values of the headline numbers.
        alerts: Sentences a reader must see first.
        sections: Sections; those without blocks are left out.
    """
    style = (files("sextet.report") / "page.css").read_text("utf-8")
    shown = [section for section in sections if section["blocks"]]
    head = {"title": title, "kicker": kicker, "lead": lead, "state": state, "tiles": tiles, "alerts": alerts}
    return _template().render(**head, sections=shown, style=style, palette=PALETTE[:6])


def curves_section(curves: Mapping[str, Mapping[str, Sequence[Curve]]]) -> dict[str, Any]:
    """Returns the section of metric curves: a block per metric family, a panel per metric, a line per group.

    Args:
        curves: Metric name -> group name -> the curves of the group's runs. Several runs are drawn as their
            median with a band from the lowest to the highest.
    """
    groups = list(dict.fromkeys(group for by_group in curves.values() for group in by_group))
    style = {g: (PALETTE[i % len(PALETTE)], i // len(PALETTE) % 3) for i, g in enumerate(groups)}
    families: dict[str, list[str]] = {}
    for metric in sorted(curves):
        families.setdefault(metric.rpartition("/")[0] or "other", []).append(metric)
    order = sorted(families, key=lambda name: ("eval" not in name, name.startswith("time"), name))
    blocks: list[dict[str, Any]] = []
    for family in order:
        used = [group for group in groups if any(group in curves[metric] for metric in families[family])]
        size = {group: max(len(curves[metric].get(group, ())) for metric in families[family]) for group in used}
        legend = [
            {"name": group, "runs": size[group], "color": style[group][0], "dash": style[group][1]} for group in used
        ]
        panels = [
            {
                "title": metric.rpartition("/")[2].replace("_", " "),
                "src": data_url(_panel(curves[metric], style)),
            }
            for metric in families[family]
        ]
        blocks.append({"kind": "curves", "title": family, "legend": legend, "panels": panels, "open": len(blocks) < 4})
    return {"title": "Curves", "blocks": blocks}


def _panel(by_group: Mapping[str, Sequence[Curve]], style: Mapping[str, tuple[str, int]]) -> bytes:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.3, 2.5), layout="constrained")
        axes = figure.add_subplot()
        for group, curves in by_group.items():
            color, dash = style[group]
            steps, middle, low, high = _band(curves)
            if len(curves) > 1:
                axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
            marker = "o" if len(steps) < 3 else None
            axes.plot(steps, middle, color=color, linestyle=("-", "--", ":")[dash], linewidth=1.6, marker=marker)
        axes.set_xlabel("step")
        axes.locator_params(axis="x", nbins=5, integer=True)
        axes.locator_params(axis="y", nbins=5)
        return svg_bytes(figure)


def _band(curves: Sequence[Curve]) -> tuple[NDArray[np.float64], ...]:
    """Steps, median, lowest and highest of several curves, each (M,) with M <= MAX_POINTS."""
    import numpy as np

    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    values = np.stack([np.interp(steps, *curve, left=np.nan, right=np.nan) for curve in curves])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step where every run has NaN stays NaN: a gap
        rows = [steps, np.nanmedian(values, 0), np.nanmin(values, 0), np.nanmax(values, 0)]
    if len(steps) > MAX_POINTS:
        starts = np.linspace(0, len(steps), MAX_POINTS + 1).astype(int)[:-1]
        counts = np.diff(np.append(starts, len(steps)))
        rows = [np.add.reduceat(row, starts) / counts for row in rows]
    return tuple(rows)
