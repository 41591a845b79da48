import os
import subprocess
import sys

import pytest
import torch

from sextet.core.device import Device, pick_device
from sextet.core.errors import DivergenceError, UsageError


def test_auto_picks_something_and_absent_devices_are_refused():
    assert pick_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(UsageError, match='did you mean "cuda"'):
        pick_device("cudaa")
    with pytest.raises(UsageError):
        pick_device("cuda:x")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="not available here"):
            pick_device("cuda:0")


def test_batches_move_inside_containers_and_threads_are_set():
    device = Device("cpu", threads=1)
    batch = device.move({"a": [torch.ones(2), 3], "b": (torch.zeros(1), "text")})
    assert torch.equal(batch["a"][0], torch.ones(2)) and batch["b"][1] == "text"
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("precision, dtype", [("auto", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_computes_in_the_chosen_format(precision, dtype):
    device = Device("cpu", precision)
    with device.autocast():
        assert torch.nn.Linear(4, 4)(torch.ones(1, 4)).dtype is dtype


def test_a_step_clips_and_nothing_is_applied_when_a_gradient_is_not_finite():
    device, model = Device("cpu"), torch.nn.Linear(2, 1, bias=False)
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    norm = device.step(10 * model(torch.ones(1, 2)).sum(), model.parameters(), optimiser, clip=0.5)
    assert norm == pytest.approx(10 * 2**0.5)
    torch.testing.assert_close((model.weight - before).norm(), torch.tensor(0.5))
    before = model.weight.detach().clone()
    with pytest.raises(DivergenceError, match="loss is not finite"):
        device.step(model(torch.full((1, 2), float("nan"))).sum(), model.parameters(), optimiser)
    bad = (model(torch.zeros(1, 2)).sum() ** 2).sqrt()  # finite value, gradient 0 * inf
    with pytest.raises(DivergenceError, match="gradient is not finite"):
        device.step(bad, model.parameters(), optimiser)
    assert torch.equal(before, model.weight)


RANK = """
import sys, torch
from sextet.core.config import RunConfig
from sextet.core.device import Device
from sextet.core.run import Run

run = Run.open(RunConfig(device="cpu", save_every=3), recipe="toy", directory=sys.argv[1], quiet=True)
device = Device("cpu", world=run.world)
torch.manual_seed(0)
model = device.prepare(torch.nn.Linear(3, 1))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimiser=optimiser)
for step in run.steps(6):
    rows = torch.arange(12.0).reshape(4, 3)[run.world.rank :: run.world.size] / 12
    loss = model(rows).square().mean()
    device.step(loss, model.parameters(), optimiser)
    run.log({"train/loss": loss.detach()}, rank=run.world.rank)
assert run.world.any(run.world.rank == 1) == (run.world.size > 1)
plain = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
run.finish({}, weights=plain)
run.close()
"""


def launch(tmp_path, size, port):
    processes = []
    for rank in range(size):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        processes.append(subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path / f"{size}")], env=env))
    assert [process.wait(timeout=120) for process in processes] == [0] * size


def test_two_ranks_train_as_one_and_rank_zero_writes(tmp_path):
    import socket

    from safetensors.torch import load_file

    from sextet.core.metrics import read_metrics

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch(tmp_path, 1, port)
    launch(tmp_path, 2, port)
    one, two = (load_file(tmp_path / size / "final" / "model.safetensors") for size in ("1", "2"))
    for name in one:
        torch.testing.assert_close(one[name], two[name])
    rows = read_metrics(tmp_path / "2" / "metrics.jsonl")
    assert [row["rank"] for row in rows] == [0.5] * 6
    alone = read_metrics(tmp_path / "1" / "metrics.jsonl")
    assert rows[3]["train/loss"] == pytest.approx(alone[3]["train/loss"])
