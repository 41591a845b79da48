"""sextet: six published learning systems on one training core.

Importing this package is cheap: torch and the recipes are imported when they are used.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "list_recipes", "load", "train"]


def list_recipes() -> dict[str, str]:
    """Returns the name of every recipe and what it does, in one line each."""
    from sextet.registry import recipes

    return {name: recipe.summary for name, recipe in recipes().items()}


def train(recipe: str, preset: str = "fast", *, directory: str | None = None, **fields: Any) -> str:
    """Trains a recipe and returns the run's directory; the same as ``sextet train RECIPE --preset PRESET``.

    Args:
        recipe: A name from :func:`list_recipes`.
        preset: Name of one of its presets.
        directory: Where the run goes; by default a new folder under ``runs/<recipe>/``.
        **fields: Configuration fields to change, nested ones as dicts: ``seed=3, ppo={"gamma": 0.95}``.

    Raises:
        UsageError: Unknown recipe, preset or field, or a wrong value.
        DataError: A data set or checkpoint that cannot be used.
    """
    from sextet.launch import launch

    return str(launch(recipe, preset, fields, directory=directory).directory)


def load(path: str) -> Any:
    """Returns the trained model of a run directory, or of a published ``final`` folder.

    Raises:
        UsageError: The folder holds no finished run. DataError: Its files are damaged.
    """
    from sextet.launch import load_model

    return load_model(path)
