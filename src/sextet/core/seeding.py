"""Seeds from counters: every random draw has a key made of the run's seed and its place, never of its history.

A generator is made from ``(seed, *path)``, where the path names a stream and counters ("rollout", member, step).
So a resumed run, a resubmitted ticket and another number of workers draw the same numbers, and no generator state
is ever saved.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

STREAMS = ("init", "step", "rollout", "update", "evaluate", "partner", "data", "bootstrap", "split")
"""Names of the random streams used in sextet; a test asserts that their keys never meet."""


class Rng(NamedTuple):
    """A numpy and a torch generator of one key."""

    numpy: np.random.Generator
    torch: torch.Generator


def key(seed: int, *path: int | str) -> int:
    """Returns the 63-bit key of a place in the run: ``key(7, "rollout", member, step)``.

    Each part is hashed with its type and length, so ``("a", 1)``, ``("a1",)`` and ``("a", "1")`` differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *path):
        text = f"{type(part).__name__}:{part}"
        digest.update(f"{len(text)}:{text};".encode())
    return int.from_bytes(digest.digest(), "little") >> 1


def numpy_rng(seed: int, *path: int | str) -> np.random.Generator:
    """Returns a numpy generator for the given place; Philox takes a key without a warm-up phase."""
    return np.random.Generator(np.random.Philox(key=key(seed, *path)))


def torch_rng(seed: int, *path: int | str) -> torch.Generator:
    """Returns a CPU torch generator for the given place."""
    import torch

    return torch.Generator().manual_seed(key(seed, *path))


def reseed_default(seed: int, *path: int | str) -> None:
    """Reseeds torch's default CPU generator and, when CUDA is in use, the current CUDA one.

    ``torch.manual_seed`` touches every backend and costs about 0.25 ms a call; this costs a few microseconds.
    """
    import torch

    value = key(seed, *path)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
