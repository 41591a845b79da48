"""Several ranks: what rank 0 makes reaches all, gradients are summed, and weights may be sharded (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sextet.core.device import World
from sextet.core.errors import SextetError

T = TypeVar("T")


def from_main(world: World, make: Callable[[], T]) -> T:
    """Returns on every rank what ``make`` returns on rank 0, the only one that calls it.

    Raises:
        SextetError: ``make`` failed; rank 0 raises its own error.
    """
    if world.size == 1:
        return make()
    from torch import distributed

    box: list[Any] = [None, ""]
    failure: Exception | None = None
    if world.is_main:
        try:
            box = [make(), ""]
        except Exception as error:  # the others would wait for ever
            failure, box = error, [None, str(error) or type(error).__name__]
    distributed.broadcast_object_list(box, src=0)
    if failure is not None:
        raise failure
    if box[1]:
        raise SextetError(box[1])
    return box[0]  # type: ignore[no-any-return]


def shard(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Shards the weights of a model over all ranks, layer by layer; gradients are summed over ranks, not averaged."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in (*layers, model):
        fully_shard(module)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def whole(value: Any) -> Any:
    """Returns nested values with sharded tensors put together; all ranks call it at the same time."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, Mapping):
        return {name: whole(item) for name, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns a whole tensor sharded as a parameter is, or as it is."""
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value


def sum_gradients(parameters: Sequence[Tensor], world: World) -> None:
    """Adds up the gradients of all ranks, unless the sharding did."""
    if world.size == 1 or any(isinstance(parameter, DTensor) for parameter in parameters):
        return
    from torch import distributed

    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])  # type: ignore[union-attr]
    distributed.all_reduce(flat)
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def gather(found: dict[int, Tensor], world: World) -> dict[int, Tensor]:
    """Returns the entries of all ranks."""
    if world.size == 1:
        return found
    from torch import distributed

    parts: list[Any] = [None] * world.size
    distributed.all_gather_object(parts, {index: value.cpu() for index, value in found.items()})
    return {index: value for part in parts for index, value in part.items()}


def sum_scalars(values: dict[str, float], world: World) -> dict[str, float]:
    """Adds up scalars over ranks; every rank passes the same names."""
    return {name: value * world.size for name, value in world.mean(values).items()}


class Trained:
    """The weights that training changes and the optimiser's state, as parts of checkpoints, whole also when sharded."""

    def __init__(self, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        self.model, self.optimiser = model, optimiser

    def state_dict(self) -> dict[str, Any]:
        """Returns weights by name, and the optimiser's state."""
        weights = {name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad}
        state: dict[str, Any] = whole({"weights": weights, "optimiser": self.optimiser.state_dict()})
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores both."""
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                if value.requires_grad:
                    value.copy_(like(state["weights"][name], value))
        parameters = [parameter for group in self.optimiser.param_groups for parameter in group["params"]]
        saved = state["optimiser"]
        parts = {
            index: {name: like(value, parameters[int(index)]) for name, value in part.items()}
            for index, part in saved["state"].items()
        }
        self.optimiser.load_state_dict({**saved, "state": parts})
