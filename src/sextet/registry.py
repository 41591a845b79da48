"""The table of recipes, and those that other packages add under the entry-point group ``sextet.recipes``."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from sextet.core.errors import UsageError, unknown

GROUP = "sextet.recipes"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe by name: a package with ``config.py`` (``Config``, presets), ``train.py`` and ``evaluate.py``."""

    name: str
    package: str
    summary: str
    data: Mapping[str, str] = field(default_factory=dict)
    """Data commands: name to ``module:function``, run by ``sextet data NAME``."""
    tools: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Further verbs of the command line: verb to name to ``module:function``, run by ``sextet VERB NAME``."""
    table: str = "PRESETS"
    """Name of the presets' table in ``config.py``; recipes that share a package have one each."""
    broken: str = ""

    @property
    def presets(self) -> Mapping[str, Callable[[], Any]]:
        """The presets: name to function that returns a configuration."""
        presets: Mapping[str, Callable[[], Any]] = getattr(self.module("config"), self.table)
        return presets

    def module(self, name: str) -> ModuleType:
        """Imports ``<package>.<name>``.

        Raises:
            UsageError: The recipe cannot be imported; the cause is named.
        """
        if self.broken:
            raise UsageError(f'recipe "{self.name}" is broken: {self.broken}')
        try:
            return importlib.import_module(f"{self.package}.{name}")
        except ModuleNotFoundError as error:
            if error.name and not error.name.startswith(self.package):
                raise UsageError(
                    f'recipe "{self.name}" needs the package {error.name}; see `sextet doctor` for the command that '
                    "installs it"
                ) from error
            raise UsageError(f'recipe "{self.name}" has no module {error.name}') from error


BUILT_IN = (
    Recipe(
        name="mep",
        package="sextet.mep",
        summary="maximum-entropy population training: agents that cooperate with partners they never met (Overcooked)",
        data={
            "human": "sextet.mep.human_data:prepare_human_data",
            "games": "sextet.mep.games:export_games",
        },
    ),
    Recipe(
        name="dapo",
        package="sextet.dapo",
        summary="decoupled clip and dynamic sampling policy optimisation: language models learn to reason (RL)",
        data={"prompts": "sextet.dapo.check:check"},
    ),
    Recipe(
        name="mgn",
        package="sextet.reid",
        table="MGN_PRESETS",
        summary="multiple granularity network: people found again by whole-body and part features (person re-ID)",
        data={"check": "sextet.reid.check:check"},
        tools={
            "reid": {
                "index": "sextet.reid.commands:index",
                "search": "sextet.reid.commands:search",
                "convert": "sextet.reid.convert:convert",
            }
        },
    ),
    Recipe(
        name="rmgl",
        package="sextet.reid",
        table="RMGL_PRESETS",
        summary="receptive multi-granularity network: part features that follow the body (person re-ID)",
    ),
)


def recipes() -> dict[str, Recipe]:
    """Returns all recipes by name; a plug-in that fails to import is listed as broken and harms no other."""
    table = {recipe.name: recipe for recipe in BUILT_IN}
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name in table:
            continue
        summary, broken = "", ""
        try:
            summary = (point.load().__doc__ or "").strip().split("\n")[0]
        except Exception as error:  # a plug-in may fail in any way
            broken = f"{type(error).__name__}: {error}"
        table[point.name] = Recipe(name=point.name, package=point.value, summary=summary, broken=broken)
    return table


def find(name: str) -> Recipe:
    """Returns the recipe of that name, or raises :class:`UsageError` with the nearest names."""
    table = recipes()
    if name not in table:
        raise UsageError(unknown("recipe", name, table) + "; see `sextet list`")
    return table[name]
