"""The command line: ``sextet train|resume|eval|compare|report|serve|play|export|list|data|doctor`` and recipes' own.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 unusable data or disk, 4 interrupted and saved.
Verbs are argparse; the fields of a recipe's configuration are tyro's. torch is imported only when work starts.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sextet import __version__
from sextet.core.config import override, preset, read_overrides
from sextet.core.errors import DataError, Interrupted, SextetError, UsageError, missing_extra, unknown
from sextet.registry import Recipe, find, recipes

EXTRAS = {
    "coop": ("numba", "gymnasium", "pettingzoo"),
    "llm": ("transformers", "accelerate", "gguf", "math_verify", "pyarrow"),
    "gym": ("reasoning_gym",),
    "lora": ("peft",),
    "vllm": ("vllm",),
    "ray": ("ray",),
    "reid": ("lancedb", "pyarrow", "h5py"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "serve": ("fastapi", "uvicorn", "websockets", "prometheus_client"),
    "track": ("tensorboard",),
    "dev": ("pytest", "ruff", "mypy", "hypothesis", "overcooked"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not options.takes_fields:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        try:
            value = options.verb(options, rest)
        except DataError as error:
            _print(error.report, options.json)
            raise
        _print(value, options.json)
    except Interrupted as error:
        print(f"sextet: {error}", file=sys.stderr)
        return error.exit_code
    except SextetError as error:
        if options.debug:
            raise
        print(f"sextet: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("sextet: ended at once; the last checkpoint is intact", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails again, and loudly
        return 1
    return 0


def _print(value: Any, as_json: bool) -> None:
    if value is not None:
        print(json.dumps(value, indent=1, sort_keys=True, default=str) if as_json else _plain(value), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sextet", description="Trains, evaluates and compares.")
    parser.add_argument("--version", action="version", version=f"sextet {__version__}")
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, verb: Callable[..., Any], text: str, *, fields: bool = False) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text, add_help=not fields, allow_abbrev=False)
        sub.set_defaults(verb=verb, takes_fields=fields)
        sub.add_argument("--json", action="store_true", help="print the result as JSON")
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return sub

    train = add("train", _train, "train a recipe; `sextet train RECIPE --help` lists its fields", fields=True)
    train.add_argument("recipe", nargs="?")
    train.add_argument("--preset", default="fast")
    train.add_argument("--config", type=Path)
    train.add_argument("--out", type=Path)
    train.add_argument("--resume", action="store_true")
    train.add_argument("--dry-run", action="store_true")
    train.add_argument("--quiet", action="store_true")

    resume = add("resume", _resume, "continue an interrupted run", fields=True)
    resume.add_argument("run", type=Path, nargs="?")
    resume.add_argument("--force", action="store_true", help="allow changed settings; recorded in events.jsonl")
    resume.add_argument("--quiet", action="store_true")

    evaluate = add("eval", _eval, "evaluate a finished run again, with other fields if wanted", fields=True)
    evaluate.add_argument("run", type=Path, nargs="?")

    compare = add("compare", _compare, "compare runs of one recipe, with intervals over seeds")
    compare.add_argument("runs", type=Path, nargs="+")
    compare.add_argument("--out", type=Path, help="write the comparison as a self-contained HTML file")

    report = add("report", _report, "write the HTML report of a run and print its path")
    report.add_argument("run", type=Path)

    serve = add("serve", _serve, "serve the page of finished runs, on this machine by default")
    serve.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    serve.set_defaults(no_browser=True)
    play = add("play", _serve, "serve finished runs (by default all of runs/mep, or else the newest) and open the page")
    play.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    play.add_argument("--no-browser", action="store_true", help="only print the address")
    for page in (serve, play):
        page.add_argument(
            "--host", default="127.0.0.1", help="interface to listen on; others than loopback need a token"
        )
        page.add_argument("--port", type=int, default=8000, help="0: any free port")
        page.add_argument("--token", help="secret that visitors need; made for you where one is needed")
        page.add_argument("--study", type=Path, metavar="FILE.toml", help="mep: lead participants through a study")
        page.add_argument(
            "--games", type=Path, metavar="DIR", help="mep: where games are kept (default: games in the first run)"
        )
        page.add_argument("--max-games", type=int, default=256, help="games at the same time")

    export = add("export", _export, "write the model of a finished run for other programs, and check what was written")
    export.add_argument("run", type=Path)
    export.add_argument(
        "--format", help="mgn, rmgl: onnx, torch or safetensors; dapo: safetensors or bf16 (default: the first)"
    )
    export.add_argument("--out", type=Path, help="folder to write to (default: export in the run)")

    add("list", _list, "list recipes and presets")
    data = add("data", _data, "prepare or check data; `sextet data` lists what there is", fields=True)
    data.add_argument("command", nargs="?")
    for verb, tools in _tools().items():
        tool = add(verb, _tool, f"commands of {verb}: {', '.join(tools)}", fields=True)
        tool.set_defaults(tool=verb)
        tool.add_argument("command", nargs="?")
    add("doctor", _doctor, "show versions, devices, extras and space, and what to install")
    return parser


def _plain(value: Any, indent: str = "") -> str:
    if isinstance(value, dict) and value.keys() == {"mean", "low", "high", "n"}:
        from sextet.core.stats import Interval

        return f"{indent}{Interval(**value)}"
    if isinstance(value, dict):
        lines = []
        for name, item in value.items():
            nested = isinstance(item, (dict, list, tuple)) and item and "mean" not in item
            item = item if nested else _plain(item)
            lines.append(f"{indent}{name}:\n{_plain(item, indent + '  ')}" if nested else f"{indent}{name}: {item}")
        return "\n".join(lines)
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(item, dict) and item.keys() == value[0].keys() for item in value):
            return _table(value)
        return "\n".join(_plain(item, indent) for item in value)
    return f"{indent}{'–' if value is None else value}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of equal keys as an aligned table."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(_plain(cell) for cell in row.values()))
    console = Console()
    with console.capture() as capture:
        console.print(table)
    return capture.get().strip("\n")


def _fields(recipe: Recipe, default: Any, rest: list[str], usage: str, description: str) -> Any:
    import tyro

    return tyro.cli(type(default), default=default, args=rest, prog=usage, description=description)


def _presets(recipe: Recipe, *, each: bool = False) -> dict[str, str]:
    """What every preset is; for people, variants of one that say the same share a line: "fast[-ring|-room]"."""
    texts = {name: (f.__doc__ or "").strip().splitlines()[0] for name, f in recipe.presets.items()}
    lines: dict[str, str] = {}
    if each:
        return texts
    for name, text in texts.items():
        base, _, variant = name.partition("-")
        if not (variant and texts.get(base) == text):
            variants = [other for other in texts if other.startswith(f"{name}-") and texts[other] == text]
            suffix = "|".join(other.removeprefix(name) for other in variants)
            lines[f"{name}[{suffix}]" if suffix else name] = text
    return lines


def _presets_text(recipe: Recipe) -> str:
    lines = [f"{recipe.summary}.", "", "Presets (--preset NAME):"]
    lines += [f"  {name}: {text}" for name, text in _presets(recipe).items()]
    lines += [
        "",
        "Also: --config FILE (JSON or TOML over the preset), --out DIR (folder of runs), --resume (go on with an "
        "unfinished run of that name), --dry-run, --json, --quiet, --debug.",
    ]
    return "\n".join(lines)


def _train(options: argparse.Namespace, rest: list[str]) -> Any:
    if options.recipe is None or options.recipe in ("-h", "--help"):
        raise UsageError(f"usage: sextet train RECIPE [--preset NAME] [fields]; recipes: {', '.join(recipes())}")
    recipe = find(options.recipe)
    base = preset(recipe.presets, options.preset)
    if options.config is not None:
        base = override(base, read_overrides(options.config), source=str(options.config))
    config = _fields(recipe, base, rest, f"sextet train {recipe.name}", _presets_text(recipe))
    from sextet.core.config import to_dict
    from sextet.launch import launch

    if options.dry_run:
        value = {"recipe": recipe.name, "preset": options.preset, "config": to_dict(config)}
        if importlib.util.find_spec(f"{recipe.package}.plan") is not None:
            value["plan"] = recipe.module("plan").plan(config)
        return value
    parent = options.out / recipe.name if options.out else None
    run = launch(recipe.name, options.preset, config, parent=parent, resume=options.resume, quiet=options.quiet)
    return _outcome(run)


def _resume(options: argparse.Namespace, rest: list[str]) -> Any:
    if options.run is None:
        raise UsageError("usage: sextet resume RUN [--force] [fields], for example: sextet resume runs/mep/fast")
    from sextet.core.config import difference, to_dict
    from sextet.launch import recorded, resume_run

    recipe, before = recorded(options.run)
    config = _fields(recipe, before, rest, f"sextet resume {options.run}", "Fields that do not change the result.")
    nested: dict[str, Any] = {}
    for name, (_, value) in difference(to_dict(before), to_dict(config)).items():
        *groups, field = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[field] = value
    return _outcome(resume_run(options.run, nested, force=options.force, quiet=options.quiet))


def _outcome(run: Any) -> dict[str, Any]:
    return {"summary": run.summary, "run": str(run.directory), "report": str(run.directory / "report.html")}


def _eval(options: argparse.Namespace, rest: list[str]) -> Any:
    if options.run is None:
        raise UsageError("usage: sextet eval RUN [fields], for example: sextet eval runs/mep/fast")
    from sextet.launch import evaluation

    recipe, config, evaluate = evaluation(options.run)
    if rest:
        text = "Fields of the run; those of the test matter."
        config = _fields(recipe, config, rest, f"sextet eval {options.run}", text)
    return evaluate(config)


def _compare(options: argparse.Namespace, _: list[str]) -> Any:
    from sextet.report.compare import compare_runs, write_comparison

    comparison = compare_runs(options.runs)
    if options.out is not None:
        write_comparison(comparison, options.out)
    value = comparison.as_dict()
    if options.json:
        return value
    labels = [group["label"] for group in value["groups"]]
    letters = [label.split(":")[0] for label in labels]
    rows = [
        {
            "": row["name"],
            **dict(zip(letters, row["values"], strict=True)),
            "difference": row["difference"],
            "p": row["p"],
        }
        for row in value["rows"]
    ]
    runs = {group["label"]: ", ".join(group["runs"]) for group in value["groups"]}
    return {"runs": runs, "results": rows, **({"notes": value["notes"]} if value["notes"] else {})}


def _report(options: argparse.Namespace, _: list[str]) -> Any:
    from sextet.report.build import build_report

    if not (options.run / "config.json").exists():
        raise UsageError(f"{options.run} holds no run (no config.json)")
    return {"report": str(build_report(options.run))}


def _serve(options: argparse.Namespace, _: list[str]) -> Any:
    from sextet.launch import RUNS
    from sextet.serve import Options

    runs = options.runs or sorted(path.parent for path in (RUNS / "mep").glob("*/summary.json"))
    runs = (
        runs
        or sorted((path.parent for path in RUNS.glob("*/*/summary.json")), key=lambda run: run.stat().st_mtime)[-1:]
    )
    if not runs:
        raise UsageError(f"no finished run in {RUNS}; make one: sextet train mep --preset quick")
    if options.max_games < 1:
        raise UsageError(f"--max-games {options.max_games} is not allowed; it must be 1 or more")
    try:
        from sextet.serve.app import serve
    except ModuleNotFoundError as error:
        raise missing_extra(str(error.name), "serve", "sextet serve") from error
    names = ("host", "port", "token", "study", "games", "max_games")
    fields = {name: getattr(options, name) for name in names}
    serve(runs, Options(**fields, browser=not options.no_browser))


def _list(options: argparse.Namespace, _: list[str]) -> Any:
    table: dict[str, Any] = {}
    for name, recipe in recipes().items():
        if recipe.broken:
            table[name] = {"broken": recipe.broken}
            continue
        table[name] = {"what": recipe.summary, "presets": _presets(recipe, each=options.json)}
    return table


def _data(options: argparse.Namespace, rest: list[str]) -> Any:
    commands = {name: target for recipe in recipes().values() for name, target in recipe.data.items()}
    return _call("data", commands, options.command, rest)


def _tools() -> dict[str, Mapping[str, str]]:
    return {verb: tools for recipe in recipes().values() for verb, tools in recipe.tools.items()}


def _tool(options: argparse.Namespace, rest: list[str]) -> Any:
    return _call(options.tool, _tools()[options.tool], options.command, rest)


def _call(verb: str, commands: Mapping[str, str], name: str | None, rest: list[str]) -> Any:
    """Calls the function behind a command with arguments that its signature names."""
    if name is None or name in ("-h", "--help"):
        return {name: f"sextet {verb} {name} --help" for name in commands}
    if name not in commands:
        raise UsageError(unknown(f"{verb} command", name, commands))
    import tyro

    module, _, function = commands[name].partition(":")
    target = getattr(importlib.import_module(module), function)
    return tyro.cli(target, args=rest, prog=f"sextet {verb} {name}")


def _export(options: argparse.Namespace, _: list[str]) -> Any:
    from sextet.launch import recorded

    recipe, _config = recorded(options.run)
    try:
        module = recipe.module("export")
    except UsageError as error:
        raise UsageError(
            f'recipe "{recipe.name}" has no export; its final folder is what `sextet.load` reads'
        ) from error
    return module.export(options.run, options.format or module.DEFAULT, options.out or options.run / "export")


def _doctor(options: argparse.Namespace, _: list[str]) -> Any:
    import importlib.util
    import shutil

    from sextet.core.records import environment

    report: dict[str, Any] = {"sextet": __version__, **environment()}
    try:
        import torch

        report["devices"] = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        report["devices"] += ["mps"] if torch.backends.mps.is_available() else []
    except ImportError as error:
        report["devices"] = f"torch does not import: {error}"
    report["extras"] = {}
    for extra, packages in EXTRAS.items():
        absent = [package for package in packages if importlib.util.find_spec(package) is None]
        report["extras"][extra] = (
            f'missing {", ".join(absent)}: pip install "sextet[{extra}]"' if absent else "installed"
        )
    space = {"here": Path.cwd(), "shared memory": Path("/dev/shm")}
    report["free space (GiB)"] = {
        name: round(shutil.disk_usage(path).free / 2**30, 1) for name, path in space.items() if path.exists()
    }
    report["data"] = {name: f"sextet data {name}" for recipe in recipes().values() for name in recipe.data}
    return report
