"""Where and how to compute: device, number format, threads, ranks; one loop for a laptop and torchrun."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sextet.core.errors import SextetError, UsageError, unknown
from sextet.core.metrics import check_finite

if TYPE_CHECKING:
    import torch
    from torch import nn


class World:
    """The processes of one data-parallel run, as torchrun describes them; one process when it does not.

    gloo is used on CPUs and nccl on CUDA. A rank that dies makes the others' next reduction fail within the time-out.
    """

    def __init__(self, *, cuda: bool = False, timeout_seconds: float = 600.0) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if self.size > 1:
            import datetime

            from torch import distributed

            if not distributed.is_initialized():
                distributed.init_process_group(
                    "nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=timeout_seconds)
                )
        self._cuda = cuda

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def _reduce(self, values: list[float], op: str) -> list[float]:
        import torch
        from torch import distributed

        tensor = torch.tensor(values, dtype=torch.float64, device="cuda" if self._cuda else "cpu")
        try:
            distributed.all_reduce(tensor, getattr(distributed.ReduceOp, op))
        except RuntimeError as error:
            raise SextetError(f"rank {self.rank} of {self.size}: another rank is gone ({error})") from error
        return [float(value) for value in tensor]

    def any(self, flag: bool) -> bool:
        """Returns whether any rank raised the flag; all ranks must call it together."""
        return flag if self.size == 1 else self._reduce([float(flag)], "MAX")[0] > 0

    def mean(self, scalars: dict[str, float]) -> dict[str, float]:
        """Returns the means over ranks; every rank passes the same names."""
        if self.size == 1 or not scalars:
            return scalars
        names = sorted(scalars)
        sums = self._reduce([scalars[name] for name in names], "SUM")
        return {name: value / self.size for name, value in zip(names, sums, strict=True)}

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.size > 1:
            self._reduce([0.0], "MAX")


class Device:
    """A device with its number format: moves batches, wraps models, takes optimiser steps.

    Args:
        name: auto, cpu, cuda, cuda:N or mps.
        precision: auto, fp32, bf16 or fp16; auto is bf16 on GPUs that compute it natively and fp32 elsewhere.
        threads: CPU threads of this process.
        world: The ranks of the run.

    Raises:
        UsageError: Unknown or absent device.
    """

    def __init__(self, name: str = "auto", precision: str = "auto", *, threads: int = 1, world: World | None = None):
        import torch

        torch.set_num_threads(threads)
        self.device = pick_device(name)
        cuda = self.device.type == "cuda"
        self.world = world or World(cuda=cuda)
        if cuda and self.world.size > 1:
            self.device = torch.device("cuda", self.world.local_rank)
            torch.cuda.set_device(self.device)
        native_bf16 = cuda and torch.cuda.get_device_capability(self.device) >= (8, 0)
        choices = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        self.dtype = choices["bf16" if native_bf16 else "fp32"] if precision == "auto" else choices[precision]
        self._scaler = torch.amp.GradScaler(self.device.type) if self.dtype is torch.float16 else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which forward passes compute in the chosen number format."""
        import torch

        if self.dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def prepare(self, model: nn.Module, *, compile_model: bool = False) -> nn.Module:
        """Moves a model here; compiles it if asked; wraps it for data parallelism when there are several ranks."""
        import torch

        model = model.to(self.device)
        if compile_model:
            model = torch.compile(model)  # type: ignore[assignment]
        if self.world.size > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
        return model

    def move(self, batch: Any) -> Any:
        """Moves tensors inside (nested) dicts, lists and tuples here, without waiting for the copy."""
        if hasattr(batch, "to"):
            return batch.to(self.device, non_blocking=True)
        if isinstance(batch, dict):
            return {name: self.move(value) for name, value in batch.items()}
        if isinstance(batch, (list, tuple)):
            return type(batch)(self.move(value) for value in batch)
        return batch

    def step(
        self,
        loss: torch.Tensor,
        parameters: Iterable[torch.Tensor],
        optimiser: torch.optim.Optimizer,
        *,
        clip: float = float("inf"),
        context: str = "training",
    ) -> float:
        """Back-propagates ``loss`` (scalar), checks it, clips the gradient norm and applies one optimiser step.

        Returns:
            The gradient norm before clipping.

        Raises:
            DivergenceError: The loss or a gradient is not finite; the parameters are unchanged.
        """
        import torch

        parameters = list(parameters)
        check_finite(context, loss=loss)
        optimiser.zero_grad(set_to_none=True)
        if self._scaler is None:
            loss.backward()
        else:
            self._scaler.scale(loss).backward()
            self._scaler.unscale_(optimiser)
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
        if self._scaler is None:
            check_finite(context, gradient=norm)
            optimiser.step()
        else:
            # The scaler itself skips a step whose scaled gradients overflow, and lowers its scale.
            self._scaler.step(optimiser)
            self._scaler.update()
        return float(norm)


def pick_device(name: str = "auto") -> torch.device:
    """Returns the torch device of that name; ``auto`` prefers cuda, then mps, then cpu.

    Raises:
        UsageError: Unknown name, or a device this machine or this torch build does not have.
    """
    import torch

    available: dict[str, Callable[[], bool]] = {
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "cpu": lambda: True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, has in available.items() if has()))
    kind, _, index = name.partition(":")
    if kind not in available or (index and not index.isdigit()):
        raise UsageError(unknown("device", name, ["auto", "cuda:0", *available]))
    if not available[kind]() or (kind == "cuda" and index and int(index) >= torch.cuda.device_count()):
        raise UsageError(f'device "{name}" is not available here; see `sextet doctor`, or use --device auto')
    return torch.device(name)
