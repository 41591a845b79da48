"""Checkpoints: folders that are whole or absent, verified when read, set aside with a reason when damaged.

``checkpoints/<step>/`` holds one safetensors file per tracked part, ``state.json`` with all that is not a tensor, and
``manifest.json`` with size and SHA-256 of each file. A folder is written under another name, synced and renamed.
Truncation is found by size, flipped bits by hash; the readers of both formats would miss the latter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sextet.core.errors import DataError
from sextet.core.files import fsync_directory, read_json, sha256_of

FORMAT = 1
_TENSOR, _ITEMS = "__tensor__", "__items__"


def split_state(value: Any, tensors: dict[str, Any], path: str) -> Any:
    """Returns ``value`` as JSON with tensors moved to ``tensors`` under their path.

    Raises:
        TypeError: A value is neither tensor, str, int, float, bool, None, list, tuple nor dict; its path is named.
    """
    import torch

    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(name, str) for name in value):
            return {name: split_state(item, tensors, f"{path}.{name}") for name, item in value.items()}
        return {_ITEMS: [[name, split_state(item, tensors, f"{path}.{name}")] for name, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [split_state(item, tensors, f"{path}.{index}") for index, item in enumerate(value)]
    raise TypeError(
        f"{path} is a {type(value).__name__}; a checkpoint holds tensors, text, numbers, None, lists and dicts only"
    )


def join_state(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Undoes :func:`split_state` (tuples come back as lists)."""
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        if _ITEMS in value:
            return {name: join_state(item, tensors) for name, item in value[_ITEMS]}
        return {name: join_state(item, tensors) for name, item in value.items()}
    if isinstance(value, list):
        return [join_state(item, tensors) for item in value]
    return value


def pack_tensors(tensors: Mapping[str, Any]) -> bytes:
    """Serialises tensors as safetensors; views and shared storages are stored as separate copies."""
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})


def save(root: Path, step: int, parts: Mapping[str, Any], *, info: Mapping[str, Any] | None = None) -> Path:
    """Writes the checkpoint ``root/<step>`` of the given state dicts; returns its folder.

    Args:
        root: The run's ``checkpoints`` folder.
        step: Number of completed steps.
        parts: Name to state dict.
        info: JSON values stored in the manifest (for example ``score`` for the retention of the best).

    Raises:
        DataError: Disk full or not writable; older checkpoints are intact and the temporary folder is gone.
    """
    target = root / str(step)
    if target.exists():
        return target
    files: dict[str, bytes] = {}
    state = {}
    for name, part in parts.items():
        tensors: dict[str, Any] = {}
        state[name] = split_state(part, tensors, name)
        if tensors:
            files[f"{name}.safetensors"] = pack_tensors(tensors)
    files["state.json"] = json.dumps(state).encode()
    hashes = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    files["manifest.json"] = json.dumps(
        {"format": FORMAT, "step": step, "info": dict(info or {}), "files": hashes}, indent=1
    ).encode()
    temporary = root / f".{step}.{os.getpid()}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, data in files.items():
            with (temporary / name).open("wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
        fsync_directory(temporary)
        temporary.rename(target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise DataError(
            f"{target}: cannot save ({error.strerror or error}); the previous checkpoint is kept"
        ) from error
    fsync_directory(root)
    return target


def steps(root: Path) -> list[int]:
    """Returns the steps of the checkpoints under ``root``, oldest first, unverified."""
    return sorted(int(entry.name) for entry in root.iterdir() if entry.name.isdigit()) if root.exists() else []


def verify(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint after checking every file's size and hash.

    Raises:
        DataError: Something is missing, truncated or altered; the text says which file and how.
    """
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        raise DataError("manifest.json is missing")
    content = read_json(manifest)
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
        raise DataError("manifest.json has no list of files")
    if content.get("format") != FORMAT:
        raise DataError(f"format {content.get('format')} is not supported (this version reads format {FORMAT})")
    for name, expected in content["files"].items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise DataError(f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}")
        if sha256_of(path) != expected["sha256"]:
            raise DataError(f"{name} was altered (its SHA-256 differs)")
    return content


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns ``(parts, manifest)`` of a verified checkpoint; raises :class:`DataError` as :func:`verify`."""
    from safetensors.torch import load as load_tensors

    manifest = verify(folder)
    state = read_json(folder / "state.json")
    parts = {}
    for name, part in state.items():
        path = folder / f"{name}.safetensors"
        parts[name] = join_state(part, load_tensors(path.read_bytes()) if path.exists() else {})
    return parts, manifest


def load_newest(root: Path, report: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns the newest valid checkpoint, or None when there is none at all.

    Damaged ones are moved to ``quarantine/`` and reported by ``report(step, reason)``.

    Raises:
        DataError: Checkpoints were there but none is valid: a fresh start would silently lose the run.
    """
    for leftover in root.glob(".*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    found = steps(root)
    for step in reversed(found):
        try:
            return load(root / str(step))
        except DataError as error:
            quarantine(root, step, str(error))
            report(step, str(error))
    if found:
        raise DataError(
            f"{root}: none of the {len(found)} checkpoints is valid (see {root / 'quarantine'}); "
            "delete the run's folder to start again"
        )
    return None


def quarantine(root: Path, step: int, reason: str) -> None:
    """Moves a damaged checkpoint aside and writes the reason beside it."""
    number = 0
    while (target := root / "quarantine" / f"{step}-{number}").exists():
        number += 1
    target.parent.mkdir(exist_ok=True)
    (root / str(step)).rename(target)
    with contextlib.suppress(OSError):
        target.with_suffix(".txt").write_text(reason + "\n", encoding="utf-8")


def retain(root: Path, keep: int) -> None:
    """Deletes all but the ``keep`` newest checkpoints and the one of the highest score; never raises."""
    found = steps(root)
    scores = {}
    for step in found:
        with contextlib.suppress(DataError, KeyError, TypeError):
            scores[step] = float(read_json(root / str(step) / "manifest.json")["info"]["score"])
    kept = set(found[-keep:]) | ({max(scores, key=scores.__getitem__)} if scores else set())
    for step in found:
        if step not in kept:
            shutil.rmtree(root / str(step), ignore_errors=True)
