"""From a recipe's name to a finished run: what the command line and the Python API share."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sextet.core.config import RunConfig, from_dict, override, preset
from sextet.core.errors import DataError, SextetError, UsageError
from sextet.core.files import read_json
from sextet.core.followers import check_tracker
from sextet.core.run import Run
from sextet.core.workers import parse_spec
from sextet.registry import Recipe, find, recipes

RUNS = Path("runs")


def choose_directory(parent: Path, stem: str, *, named: bool, resume: bool) -> tuple[Path, bool]:
    """Returns ``(directory, whether to continue the run in it)``.

    An automatic name takes the first free number (``fast``, ``fast-2``, ...). A name the user gave must be free unless
    ``resume`` is set; then the newest run of that name goes on, or the next number starts when it is finished.
    """
    newest, candidate, number = None, parent / stem, 1
    while (candidate / "config.json").exists():
        newest, number = candidate, number + 1
        candidate = parent / f"{stem}-{number}"
    if newest is not None and resume and not (newest / "summary.json").exists():
        return newest, True
    if newest is not None and named and not resume:
        raise UsageError(
            f"{newest} already holds a run: `sextet resume {newest}`, add --resume, or choose another --name"
        )
    return candidate, False


def launch(
    recipe_name: str,
    preset_name: str,
    fields: Mapping[str, Any] | RunConfig,
    *,
    directory: Path | str | None = None,
    parent: Path | str | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """Trains a recipe in a new run directory and returns the closed run.

    Args:
        recipe_name: Name in the registry.
        preset_name: Name of a preset of the recipe.
        fields: Fields that override the preset, or the whole resolved configuration.
        directory: The run's folder; by default one is chosen under ``parent``.
        parent: Folder of runs, by default ``runs/<recipe>``.
        resume: Continue an unfinished run of the same name.
        quiet: No progress on the console.

    Raises:
        SextetError: As :meth:`Run.open` and the recipe's training.
    """
    recipe = find(recipe_name)
    base: RunConfig = preset(recipe.presets, preset_name)
    config = fields if isinstance(fields, RunConfig) else override(base, fields, source="fields")
    prepare(recipe, config)
    if directory is None:
        where = Path(parent) if parent is not None else RUNS / recipe_name
        stem = config.name or preset_name
        directory, going_on = choose_directory(where, stem, named=bool(config.name), resume=resume)
    else:
        going_on = resume and (Path(directory) / "config.json").exists()
    run = Run.open(
        config,
        recipe=recipe_name,
        directory=directory,
        preset=preset_name,
        preset_config=base,
        resume=going_on,
        quiet=quiet,
    )
    return work(recipe, config, run)


def resume_run(directory: Path | str, fields: Mapping[str, Any], *, force: bool = False, quiet: bool = False) -> Run:
    """Continues the run in ``directory``; fields that do not change the result may be changed.

    Raises:
        UsageError: No run there, in use, or settings that change the result without ``force``.
    """
    recipe, before = recorded(directory)
    config = override(before, fields, source="fields")
    prepare(recipe, config)
    run = Run.open(config, recipe=recipe.name, directory=directory, resume=True, force=force, quiet=quiet)
    return work(recipe, config, run)


def prepare(recipe: Recipe, config: RunConfig) -> None:
    """Finds what would stop the run before anything is written: workers, tracker, and what the recipe needs.

    Raises:
        SextetError: Naming the field or file, with the command that helps.
    """
    parse_spec(config.workers)
    if config.track:
        check_tracker(config.track)
    recipe.module("train").check(config)


def work(recipe: Recipe, config: RunConfig, run: Run) -> Run:
    """Runs the recipe's training and writes the report; a report that fails is noted and loses nothing."""
    with run, run.signals():
        run.say(f"recipe {recipe.name}, run {run.directory}")
        if run.finished:
            run.say(f"{run.directory} is finished already")
        else:
            recipe.module("train").train(config, run)
        try:
            from sextet.report.build import build_report

            run.say(f"report: {build_report(run.directory)}")
        except (SextetError, OSError, ValueError, ImportError) as error:
            run.event("report failed", error=str(error), traceback=traceback.format_exc())
            run.say(f"warning: the report could not be written ({error})")
    return run


def recorded(directory: Path | str) -> tuple[Recipe, Any]:
    """Returns the recipe and the configuration recorded in a run directory or a ``final`` folder.

    Raises:
        UsageError: There is none, or a field in it is unknown to this version.
    """
    path = Path(directory) / "config.json"
    if not path.exists():
        raise UsageError(f"{directory} holds no run (no config.json)")
    document = read_json(path)
    if not isinstance(document, dict) or "recipe" not in document:
        raise DataError(f"{path}: not the configuration of a run")
    recipe = find(document["recipe"])
    return recipe, from_dict(recipe.module("config").Config, document["config"], source=str(path))


def evaluation(run: Path) -> tuple[Recipe, Any, Callable[[Any], Any]]:
    """Returns recipe, configuration and test of a finished run, or of what a recipe of this name would start from.

    Raises:
        UsageError: There is no such run, or the recipe has nothing to test before a training.
    """
    if run.exists() or str(run) not in recipes():
        recipe, config = recorded(run)
        return recipe, config, lambda config: recipe.module("evaluate").evaluate(config, run)
    recipe = find(str(run))
    module = recipe.module("evaluate")
    if not hasattr(module, "evaluate_start"):
        raise UsageError(f"{recipe.name} has nothing to test before a training; usage: sextet eval RUN [fields]")
    return recipe, recipe.module("config").Config(), module.evaluate_start


def load_model(path: str | Path) -> Any:
    """Returns the model that a run directory, or its ``final`` folder, holds."""
    recipe, _ = recorded(path)
    final = Path(path) / "final"
    folder = final if final.exists() else Path(path)
    if not (folder / "model.safetensors").exists():
        raise UsageError(f"{path} holds no finished model; finish it with: sextet resume {path}")
    return recipe.module("evaluate").load(folder)
