"""Configurations: frozen dataclasses, presets as functions, strict files, and the difference of two configs.

A recipe's ``config.py`` defines one frozen dataclass that inherits :class:`RunConfig`, with help as the string literal
under each field, and ``PRESETS``, a table from name to a function that returns one. Validation of files needs pydantic,
imported only when a file is read.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from sextet.core.errors import UsageError, unknown
from sextet.core.files import read_json, read_text

ConfigT = TypeVar("ConfigT", bound="RunConfig")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every recipe's configuration has: the seed, where to compute, when to save and log."""

    changeable: ClassVar[frozenset[str]] = frozenset(
        {"device", "workers", "threads", "save_minutes", "save_every", "keep", "log_every", "track", "name"}
    )
    """Fields that a resumed run may change because they do not change its result."""

    name: str = ""
    """Name of the run's folder; empty: the preset's name with the first free number."""
    seed: int = 0
    """Seed of every random stream of the run."""
    device: str = "auto"
    """Where to compute: auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps."""
    precision: str = "auto"
    """Number format of heavy computation: auto (bf16 on GPUs that have it, else fp32), fp32, bf16, fp16."""
    workers: str = "inline"
    """Where jobs run: inline, process:N, ray, ray:N, ray:N@ADDRESS. The result does not depend on it."""
    threads: int = 1
    """CPU threads of each process; 1 is fastest for small networks and for shared machines."""
    save_minutes: float = 10.0
    """Minutes between checkpoints."""
    save_every: int = 0
    """Steps between checkpoints, besides the minutes; 0: by minutes only."""
    keep: int = 2
    """Number of newest checkpoints kept, besides the best one."""
    log_every: int = 1
    """Steps averaged into one row of metrics.jsonl."""
    track: str = ""
    """Tracker that follows the metrics in its own process: tensorboard, wandb, mlflow, trackio; empty: none."""

    def __post_init__(self) -> None:
        """Checks the common fields; recipes call ``super().__post_init__()`` and add their own."""
        require(self.seed >= 0, "seed", self.seed, "0 or more")
        require(self.threads >= 1, "threads", self.threads, "1 or more")
        require(self.keep >= 1, "keep", self.keep, "1 or more")
        require(self.log_every >= 1, "log_every", self.log_every, "1 or more")
        require(self.save_every >= 0, "save_every", self.save_every, "0 or more")
        require(self.save_minutes > 0, "save_minutes", self.save_minutes, "above 0")
        allowed = ("auto", "fp32", "bf16", "fp16")
        if self.precision not in allowed:
            raise UsageError(unknown("precision", self.precision, allowed))


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raises :class:`UsageError` naming the field, its value and what is allowed, unless ``condition`` holds."""
    if not condition:
        raise UsageError(f"{field} = {value!r} is not allowed; it must be {allowed}")


def preset(presets: Mapping[str, Callable[[], ConfigT]], name: str) -> ConfigT:
    """Returns the preset of that name, or raises :class:`UsageError` with the nearest names."""
    if name not in presets:
        raise UsageError(unknown("preset", name, presets))
    return presets[name]()


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Returns the configuration as plain JSON values (tuples become lists)."""
    value: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return value


def from_dict(cls: type[ConfigT], values: Mapping[str, Any], *, source: str = "config") -> ConfigT:
    """Builds a configuration from plain values; every unknown field and wrong type is reported at once.

    Raises:
        UsageError: Naming ``source`` and each offending field.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(cls).validate_json(json.dumps(values), strict=True, extra="forbid")
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error
    except ValidationError as error:
        names = flatten(dataclasses.asdict(cls()))
        lines = []
        for item in error.errors(include_url=False):
            field = ".".join(str(part) for part in item["loc"])
            if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
                lines.append(unknown("field", field, names).split("; allowed")[0])
            else:
                lines.append(f"{field} = {json.dumps(item.get('input'), default=str)}: {item['msg']}")
        raise UsageError(f"{source}: " + "; ".join(lines)) from error


def read_overrides(path: Path | str) -> dict[str, Any]:
    """Reads a JSON or TOML file of fields that override a preset.

    Raises:
        DataError: Unreadable. UsageError: Not TOML, or another ending than .json or .toml.
    """
    path = Path(path)
    if path.suffix == ".json":
        values = read_json(path)
    elif path.suffix == ".toml":
        try:
            values = tomllib.loads(read_text(path))
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path}: not TOML ({error})") from error
    else:
        raise UsageError(f"{path}: a configuration file ends in .json or .toml")
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected an object of fields, found {type(values).__name__}")
    return values


def override(config: ConfigT, values: Mapping[str, Any], *, source: str) -> ConfigT:
    """Returns ``config`` with the given (possibly nested) fields replaced; strict as :func:`from_dict`."""
    return from_dict(type(config), _merge(to_dict(config), values), source=source)


def _merge(base: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(merged.get(name), dict):
            merged[name] = _merge(merged[name], value)
        else:
            merged[name] = value
    return merged


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested fields as one table with dotted names: ``{"ppo.gamma": 0.99}``."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns ``{dotted field: [before, after]}`` for every field that differs."""
    old, new = flatten(before), flatten(after)
    names = sorted(old.keys() | new.keys())
    return {name: [old.get(name), new.get(name)] for name in names if old.get(name) != new.get(name)}


def check_resumable(cls: type[RunConfig], before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the changed fields of a resumed run.

    Raises:
        UsageError: A field that changes the result differs; the text shows each as ``field: old -> new``.
    """
    changed = difference(before, after)
    refused = {name: pair for name, pair in changed.items() if name not in cls.changeable}
    if refused:
        text = ", ".join(f"{name}: {old!r} -> {new!r}" for name, (old, new) in refused.items())
        raise UsageError(f"the run was started with other settings ({text}); start a new run, or pass --force")
    return changed
