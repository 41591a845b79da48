"""What runs inside a worker, and how values travel: by value, on a channel of this run only, never in a file."""

from __future__ import annotations

import dataclasses
import io
import sys
import time
import traceback
from multiprocessing.reduction import ForkingPickler
from typing import Any

from sextet.core.errors import UsageError

Event = tuple[int, str, float, Any]
"""(worker, "ready" | "done" | "error" | "failed" | "dead", seconds, payload: bytes of the value, or text)."""


@dataclasses.dataclass(kw_only=True)
class Job:
    """A ticket as the backends see it; ``call`` is what :meth:`Host.run` takes."""

    key: str
    method: str
    call: bytes
    losses: int = 0


class _ByValue(ForkingPickler):
    """Writes of a tensor the bytes it shows; torch's own ways share memory, or send all that a slice is part of."""

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
    """Returns ``value`` as bytes for :func:`loads`; raises UsageError if it cannot be sent."""
    stream = io.BytesIO()
    try:
        _ByValue(stream, 5).dump(value)
    except Exception as error:
        raise UsageError(f"{what} cannot be sent between workers: {error}") from error
    return stream.getvalue()


def loads(data: bytes | memoryview) -> Any:
    """Returns a copy of the value that :func:`dumps` was given; only for data from this run's own processes."""
    return ForkingPickler.loads(data)


def thread_limits(threads: int) -> dict[str, str]:
    """Returns the environment that limits the numeric libraries a worker loads to ``threads`` CPU threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return dict.fromkeys(names, str(threads))


class Host:
    """The object of the factory and the calls made to it; what is returned is an ``Event`` without its worker."""

    instance: Any

    def boot(self, boot: bytes) -> tuple[str, float, Any]:
        """Makes the object from the bytes of (factory, config)."""
        try:
            factory, config = loads(boot)
            self.instance = factory(config)
        except Exception:
            return "failed", 0.0, traceback.format_exc()
        return "ready", 0.0, ""

    def run(self, call: bytes, weights: bytes | memoryview | None) -> tuple[str, float, Any]:
        """Adopts new weights, if any, and makes the call, the bytes of (method, args, kwargs)."""
        start = time.perf_counter()
        try:
            if weights is not None and hasattr(self.instance, "load_weights"):
                self.instance.load_weights(loads(weights))
            method, args, kwargs = loads(call)
            value = dumps(getattr(self.instance, method)(*args, **kwargs))
        except Exception:
            return "error", time.perf_counter() - start, traceback.format_exc()
        return "done", time.perf_counter() - start, value
