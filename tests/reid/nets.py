"""Thin networks on small images, shared by the tests of networks."""

import torch

from sextet.core.seeding import torch_rng
from sextet.reid.heads import Outputs
from sextet.reid.losses import Shares, total_loss
from sextet.reid.model import build_model
from sextet.reid.settings import LossConfig, ModelConfig

SIZE = (96, 32)
PEOPLE = 5


def config(**fields):
    return ModelConfig(**{"width": 0.34, "feature_size": 6, **fields})  # widths 8, 16, 32, 64


def network(method, *, seed=0, **fields):
    return build_model(method, config(**fields), PEOPLE, rng=torch_rng(seed, "init"))


def images(count=6, size=SIZE, seed=0):
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))


def step(net, *, loss=None, size=SIZE, cosine=False):
    """One step of SGD on six images of three people; returns the outputs."""
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    outputs = net(images(size=size))
    assert isinstance(outputs, Outputs)
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    value, _ = total_loss(outputs, labels, loss or LossConfig(), metric_weight=1.0, cosine=cosine, shares=Shares())
    value.backward()
    assert value.isfinite()
    optimiser.step()
    return outputs


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def randomise(net, seed=0):
    """Gives the normalisations statistics and weights of a trained network's kind."""
    draw = torch.Generator().manual_seed(seed)
    for module in net.modules():
        if isinstance(module, (torch.nn.BatchNorm2d, torch.nn.BatchNorm1d)):
            module.running_mean.normal_(0, 0.1, generator=draw)
            module.running_var.uniform_(0.5, 1.5, generator=draw)
    return net.eval()
