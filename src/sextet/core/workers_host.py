"""What runs inside a worker, and how values travel to it and back: by value, on a channel of this run only."""

from __future__ import annotations

import io
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from sextet.core.errors import UsageError


class _ByValue(ForkingPickler):
    """Serialises for a worker's private channel: tensors as bytes, never as shared memory as torch would."""

    _extra_reducers: dict[type, Callable[[Any], Any]] = {}

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (flat.numpy(), str(value.dtype).removeprefix("torch."), tuple(value.shape))


def _tensor(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)


def dumps(value: Any, what: str = "the result") -> bytes:
    """Returns ``value`` as bytes for a worker of this run, never for a file; UsageError if that is impossible."""
    stream = io.BytesIO()
    try:
        _ByValue(stream, 5).dump(value)
    except Exception as error:
        raise UsageError(f"{what} cannot be sent between workers: {error}") from error
    return stream.getvalue()


def loads(data: bytes | memoryview) -> Any:
    """Returns a copy of the value that :func:`dumps` was given; only for a worker's own channel."""
    return ForkingPickler.loads(data)


def thread_limits(threads: int) -> dict[str, str]:
    """Returns the environment that limits the numeric libraries a worker loads to ``threads`` CPU threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return dict.fromkeys(names, str(threads))


class Host:
    """What runs inside a worker: the object of the factory, and the calls made to it."""

    instance: Any

    def boot(self, boot: bytes) -> tuple[str, float, str]:
        """Makes the object from the bytes of (factory, config); returns an ``Event`` without its worker."""
        try:
            factory, config = loads(boot)
            self.instance = factory(config)
        except Exception:
            return "failed", 0.0, traceback.format_exc()
        return "ready", 0.0, ""

    def run(self, call: bytes, weights: bytes | memoryview | None) -> tuple[str, float, Any]:
        """Adopts ``weights`` if there are new ones, makes the call; returns an ``Event`` without its worker."""
        start = time.perf_counter()
        try:
            if weights is not None and hasattr(self.instance, "load_weights"):
                self.instance.load_weights(loads(weights))
            method, args, kwargs = loads(call)
            value = dumps(getattr(self.instance, method)(*args, **kwargs))
        except Exception:
            return "error", time.perf_counter() - start, traceback.format_exc()
        return "done", time.perf_counter() - start, value
