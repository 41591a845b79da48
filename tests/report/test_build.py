import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure

from sextet.core.errors import DataError, UsageError
from sextet.core.files import read_json, write_json
from sextet.core.stats import Interval
from sextet.report.build import build_report, save_figure, save_table, save_text
from sextet.report.compare import compare_runs, write_comparison
from sextet.report.page import MAX_POINTS, Curve, _band

HOSTILE = "<script>alert(1)</script>"
VOID = {"meta", "img", "line", "circle", "br"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps tags, attributes and text."""

    def __init__(self, path):
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.stack, self.tags, self.urls, self.text = [], [], [], ""
        self.feed(self.html)
        assert self.stack == []
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.urls += [value for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag
        self.text += " " if tag in ("td", "th", "li", "dt", "dd", "div", "p") else ""

    def handle_data(self, data):
        if self.stack and self.stack[-1] != "style":
            self.text += data


def write_run(folder, *, seed=0, alpha=0.1, recipe="mep", summary=None, rows=20, name=""):
    config = {"name": name, "seed": seed, "alpha": alpha, "ppo": {"lr": 0.001}}
    write_json(
        folder / "config.json",
        {"recipe": recipe, "preset": "small", "config": config, "changed": {"alpha": [0.01, alpha]}},
    )
    lines = [json.dumps({"step": step, "train/loss": 1 / (step + 1) + seed, "train/lr": alpha}) for step in range(rows)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    if summary is not None:
        finish = {"state": "finished", "steps": rows, "seconds": 75.0, "summary": summary}
        write_json(folder / "summary.json", finish)
    return folder


def test_report_of_a_finished_run_is_one_file_without_network(tmp_path):
    run = write_run(tmp_path / "run", summary={"return": Interval(mean=12.34, low=10.1, high=14.6, n=5).as_dict()})
    save_table(
        run / "artifacts/b", title="Scores", columns=["who", "return"], rows=[["MEP", np.float32(3.5)]], note="n"
    )
    figure = Figure()
    figure.add_subplot().plot([0, 1])
    save_figure(run / "artifacts/a", figure, title="A picture", note="what it shows")
    save_text(run / "artifacts/c", title="A text", text="one\ntwo")
    write_json(run / "env.json", {"python": "3.11", "versions": {"torch": "2.13.0"}})
    (run / "command.txt").write_text("sextet train mep\n")
    report = build_report(run)
    assert report == run / "report.html"
    page = Page(report)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert all(url.startswith(("data:image/svg+xml;base64,", "#s")) for url in page.urls)
    assert "http" not in re.sub(r"data:[^\"]*", "", page.html).replace("http-equiv", "")
    assert "@import" not in page.html
    assert page.tags.count("h1") == 1
    for text in ("finished", "recipe mep", "preset small", "20 steps", "1 min 15 s", "12.3 [10.1, 14.6]", "torch"):
        assert text in page.text
    assert page.text.index("A picture") < page.text.index("Scores") < page.text.index("A text")  # by file name
    assert "alpha 0.01 0.1" in page.text.replace('"', "")
    assert page.text.count("what it shows") == 1
    assert page.tags.count("img") == 3  # the artifact and two metrics


def test_every_text_is_escaped(tmp_path):
    run = write_run(tmp_path / "run", name=HOSTILE, recipe=HOSTILE, summary={HOSTILE: 1, "best": HOSTILE})
    save_table(run / "artifacts/a", title=HOSTILE, columns=[HOSTILE], rows=[[HOSTILE]], note=HOSTILE)
    save_text(run / "artifacts/b", title=HOSTILE, text=HOSTILE)
    figure = Figure()
    figure.add_subplot().set_title(HOSTILE)
    save_figure(run / "artifacts/c", figure, title=f'"{HOSTILE}', note=f"'{HOSTILE}")
    (run / "artifacts/d.svg").write_text(f'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)">{HOSTILE}</svg>')
    write_json(run / "artifacts/d.json", {"kind": "figure", "title": "hostile"})
    (run / "command.txt").write_text(HOSTILE)
    write_json(run / "env.json", {HOSTILE: HOSTILE})
    part = write_run(run / "parts" / "<script>", summary={HOSTILE: 2})
    with (part / "metrics.jsonl").open("a") as handle:
        handle.write(json.dumps({"step": 99, HOSTILE: 1.0}) + "\n")
    (run / "events.jsonl").write_text(json.dumps({"event": HOSTILE, "time": 1, HOSTILE: HOSTILE}) + "\n")
    for path in (build_report(run), write_comparison(compare_runs([run]), tmp_path / "compare.html")):
        page = Page(path)
        assert "script" not in page.tags
        assert HOSTILE in page.text


@pytest.mark.parametrize("state", ["empty", "started", "torn", "damaged"])
def test_report_of_a_run_in_any_state(tmp_path, state):
    run = tmp_path / "run"
    run.mkdir()
    if state != "empty":
        write_run(run)
    if state == "torn":
        (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes()[:-9])
        (run / "events.jsonl").write_text('{"event": "restored", "time": 5, "step": 3}\n{"event": "ended", "ti')
    if state == "damaged":
        (run / "config.json").write_text("[1, 2")
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\nnot json\n{"step": 3, "loss": 2}\n')
        (run / "artifacts").mkdir()
        (run / "artifacts" / "x.json").write_text('{"kind": "table", "title": "no rows"}')
        (run / "artifacts" / "y.json").write_text('{"kind": "figure", "title": "no svg"}')
        (run / "artifacts" / "z.json").write_text('["data of a recipe"]')
    page = Page(build_report(run))
    assert "not finished" in page.text
    problems = page.text.count("Could not be read")
    assert problems == {"damaged": 4}.get(state, 0)
    if state == "torn":
        assert "restored step 3" in page.text
        assert "img" in page.tags


def test_report_names_how_a_session_ended(tmp_path):
    run = write_run(tmp_path / "run")
    event = {"event": "ended", "time": 3.0, "error": "DivergenceError: step 7: loss = nan"}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    page = Page(build_report(run))
    assert "stopped" in page.text
    assert "The last session ended with DivergenceError: step 7: loss = nan" in page.text
    with (run / "events.jsonl").open("a") as handle:
        handle.write(json.dumps({"event": "resumed", "time": 4.0}) + "\n")
    assert "stopped" not in Page(build_report(run)).text


def test_parts_that_differ_by_seed_are_one_group(tmp_path):
    run = write_run(tmp_path / "run", rows=0)
    for seed in range(3):
        write_run(run / "parts" / f"sp-seed{seed}", seed=seed, summary={"return": 10.0 + seed})
    write_run(run / "parts" / "best" / "parts" / "proxy", rows=5)
    page = Page(build_report(run))
    assert "sp 3 of 3 1 min 15 s 11.0 [10.0, 12.0]" in page.text
    assert "best/proxy 0 of 1" in page.text
    assert "sp 3 runs" in page.text


def test_many_events_are_counted_and_cut(tmp_path):
    run = write_run(tmp_path / "run")
    rows = [{"event": "warning", "time": 9.0, "text": "same"}] * 7
    rows += [{"event": "restored", "time": float(step), "step": step} for step in range(150)]
    rows += [{"event": "timing", "time": 1.0, "seconds": 12345}]
    (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = Page(build_report(run)).text
    assert "Only the last 100 of 151 are shown." in text
    assert "12345" not in text


def test_report_needs_a_folder(tmp_path):
    with pytest.raises(UsageError, match="not a directory"):
        build_report(tmp_path / "missing")


def test_save_table_checks_and_converts(tmp_path):
    with pytest.raises(UsageError, match="row 1 has 1 cells for 2 columns"):
        save_table(tmp_path / "t", title="t", columns=["a", "b"], rows=[[1, 2], [3]])
    cells = [Interval(mean=1.0, low=None, high=None, n=1), np.int64(4), None, (1, 2), True]
    save_table(tmp_path / "t", title="t", columns=list("abcde"), rows=[cells])
    assert read_json(tmp_path / "t.json")["rows"] == [
        [{"mean": 1.0, "low": None, "high": None, "n": 1}, 4, None, "(1, 2)", True]
    ]


def test_figures_are_reproducible(tmp_path):
    for name in ("a", "b"):
        figure = Figure()
        figure.add_subplot().plot([0, 1], [1, 0], label="x")
        save_figure(tmp_path / name, figure, title="t")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_band_joins_curves_of_other_steps_and_lengths():
    first = Curve(np.array([0.0, 2, 4]), np.array([0.0, 2, 4]))
    second = Curve(np.array([0.0, 2]), np.array([2.0, 4]))
    steps, middle, low, high = _band([first, second])
    assert steps.tolist() == [0, 2, 4]
    assert middle.tolist() == [1, 3, 4]  # only the first run got to step 4
    assert low.tolist() == [0, 2, 4]
    assert high.tolist() == [2, 4, 4]
    long = Curve(np.arange(10_000.0), np.arange(10_000.0))
    steps, middle, *_ = _band([long])
    assert len(steps) == MAX_POINTS
    assert np.allclose(steps, middle)


def test_compare_groups_by_settings(tmp_path):
    runs = []
    for alpha in (0.1, 0.2):
        for seed in range(4):
            summary = {"return": 100 * alpha + seed, "nested": {"score": 1}, "best": "x"}
            runs.append(
                write_run(tmp_path / f"{alpha}-{seed}", seed=seed, alpha=alpha, summary=summary, name=f"{seed}")
            )
    comparison = compare_runs(runs)
    found = json.loads(json.dumps(comparison.as_dict(), allow_nan=False))
    assert [group["label"] for group in found["groups"]] == ["A: alpha 0.1", "B: alpha 0.2"]
    assert found["groups"][0]["seeds"] == [0, 1, 2, 3]
    assert found["settings"] == {"alpha": [0.1, 0.2]}
    assert found["notes"] == []
    rows = {row["name"]: row for row in found["rows"]}
    assert set(rows) == {"return", "nested score", "train/loss (last)", "train/lr (last)"}
    assert [group["mean"] for group in rows["return"]["values"]] == [11.5, 21.5]
    assert rows["return"]["difference"]["mean"] == pytest.approx(10)
    assert rows["return"]["difference"]["low"] == pytest.approx(10)
    assert rows["return"]["p"] < 0.001
    page = Page(write_comparison(comparison, tmp_path / "out.html"))
    assert "mep: 8 runs in 2 groups" in page.text
    assert "11.5 [10.2, 12.8]" in page.text or "11.5 [10.0, 13.0]" in page.text
    assert page.tags.count("img") == 2


def test_compare_of_one_group_and_unfinished_runs(tmp_path):
    runs = [write_run(tmp_path / "a", seed=1, summary={"return": 1.0}), write_run(tmp_path / "b", seed=1)]
    found = compare_runs(runs)
    assert len(found.groups) == 1
    assert found.settings == {}
    assert found.rows[0].values[0] == Interval(mean=1.0, low=None, high=None, n=1)
    assert found.rows[0].p is None
    assert any("b is not finished" in note for note in found.notes)
    assert any("a seed occurs twice" in note for note in found.notes)


def test_compare_refuses(tmp_path):
    first = write_run(tmp_path / "a", summary={})
    with pytest.raises(UsageError, match=r"different recipes .* mep \(.*a\), dapo \(.*b\)"):
        compare_runs([first, write_run(tmp_path / "b", recipe="dapo")])
    with pytest.raises(UsageError, match="given twice"):
        compare_runs([first, tmp_path / "." / "a"])
    with pytest.raises(UsageError, match="at least one run"):
        compare_runs([])
    with pytest.raises(DataError, match="holds no run"):
        compare_runs([tmp_path])
