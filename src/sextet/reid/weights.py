"""Reading other people's weights: names compared before anything is copied, heads for other people dropped aloud."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sextet.core.errors import DataError, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

PREFIXES = ("module.", "backbone.", "model.", "base.", "trunk.")
"""What wrappers (data parallelism, other libraries) put before the names of a network."""
WRAPPERS = ("state_dict", "model_state_dict", "model", "network")
"""Keys under which training scripts keep the weights inside a larger checkpoint."""
HEAD = re.compile(r"(^|\.)(fc|classifier)[^.]*\.")
"""Names of the layers that belong to the people of one training set."""
_SHOWN = 5


def read_weights(path: Path | str) -> dict[str, torch.Tensor]:
    """Reads a file of tensors: ``.safetensors``, or ``.pth`` / ``.pt`` / ``.tar`` as PyTorch saves a state dict.

    Nothing in the file is executed: only tensors, numbers and containers are read. A folder stands for the
    ``model.safetensors`` in it.

    Raises:
        DataError: The file is missing, of another kind, damaged, or holds anything but tensors.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"{path}: no such file; give the path of a .safetensors, .pth or .pt file with weights")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content: Any = torch.load(path, weights_only=True, map_location="cpu")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: damaged or not a file of weights ({error})") from error
    except Exception as error:  # PyTorch lets the errors of several decoders through
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{path}: not a plain state dict ({reason}); files that hold code are refused: save the weights again "
            "with safetensors.torch.save_file(network.state_dict(), ...)"
        ) from error
    for name in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping):
        raise DataError(f"{path}: holds a {type(content).__name__}, not a state dict")
    wrong = [name for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if wrong or not content:
        raise DataError(f"{path}: not a state dict: {_listed(wrong) if wrong else 'it is empty'}")
    return dict(content)


def load_weights(module: nn.Module, path: Path | str) -> list[str]:
    """Copies the weights of a file into ``module``, in place.

    Prefixes such as ``module.`` are stripped. Classifiers that the module lacks, or has for another number of people,
    are dropped, and those of the module stay as they were initialised. A method ``rename_keys`` of the module, from
    state dict to state dict, brings other layouts to its own first.

    Returns:
        What was dropped and what stayed as initialised, a sentence each; empty if every tensor found its place.

    Raises:
        DataError: Unreadable file; tensors missing, unexpected, of another shape or not finite; nothing was changed.
    """
    return fit_weights(module, read_weights(path), source=str(path))


def fit_weights(module: nn.Module, state: Mapping[str, torch.Tensor], *, source: str) -> list[str]:
    """The same as :func:`load_weights` for a state dict; ``source`` is what errors call it."""
    own, rename = module.state_dict(), getattr(module, "rename_keys", dict)
    found: dict[str, torch.Tensor] = {}
    for name, value in rename(state).items():
        stripped = _stripped(name, own)
        if stripped in found:
            raise DataError(f"{source}: holds {stripped} twice, the second time as {name}")
        found[stripped] = value
    fits = {name for name, value in found.items() if name in own and value.shape == own[name].shape}
    dropped = [name for name in found if name not in fits and HEAD.search(name)]
    kept = [name for name in own if name not in fits and HEAD.search(name)]
    missing = [name for name in own if name not in {*found, *kept} and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in found if name not in {*own, *dropped}]
    if missing or unexpected:
        raise DataError(
            f"{source}: does not fit this network: "
            + "; ".join(
                f"{kind} {_listed(names, others)}"
                for kind, names, others in (("missing", missing, unexpected), ("unexpected", unexpected, missing))
                if names
            )
        )
    for name in found.keys() - fits - set(dropped):
        raise DataError(f"{source}: {name} is {tuple(found[name].shape)}; this network needs {tuple(own[name].shape)}")
    for name in fits:
        if not found[name].isfinite().all():
            raise DataError(f"{source}: {name} holds values that are not finite")
    module.load_state_dict({name: found[name] for name in fits}, strict=False)
    return [
        f"{source}: {what}: {_listed(names)}"
        for what, names in (("dropped", dropped), ("not in the file for this number of people, initialised anew", kept))
        if names
    ]


def _stripped(name: str, own: Mapping[str, Any]) -> str:
    while name not in own and (prefix := next((one for one in PREFIXES if name.startswith(one)), "")):
        name = name.removeprefix(prefix)
    return name


def _listed(names: list[str], others: list[str] | None = None) -> str:
    """Returns the first names, each with the nearest of ``others``, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name + nearest(name, others or []) for name in names[:_SHOWN]) + more
