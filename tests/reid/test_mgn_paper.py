"""MGN as published: map sizes, parameters, lengths of features, sizes of images. No numbers are computed ("meta")."""

import pytest
import torch

from sextet.core.errors import UsageError
from sextet.reid.model import build_model
from sextet.reid.settings import ModelConfig


def published(people=751, **changes):
    with torch.device("meta"):
        return build_model("mgn", ModelConfig(backbone="resnet50", **changes), people)


def run(network, height, width):
    with torch.device("meta"):
        return network(torch.zeros(2, 3, height, width))


def test_maps_have_the_published_sizes():
    network, shapes = published().eval(), []

    def record(module, inputs, output):
        shapes.append(tuple(output.shape[1:]))

    branches = [stage for branch in network.branches for stage in branch.stages]
    for module in (*network.shared, *branches):
        module.register_forward_hook(record)
    assert run(network, 384, 128).shape == (2, 2048)
    part = [(1024, 24, 8), (2048, 24, 8)]
    assert shapes == [(256, 96, 32), (512, 48, 16), (1024, 24, 8), (1024, 24, 8), (2048, 12, 4), *part, *part]


@pytest.mark.parametrize("classify, millions", [("full", 74.4), ("reduced", 70.35)])
def test_the_number_of_parameters(classify, millions):
    network = published(classify=classify)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=1e-3)


def test_where_the_parameters_are():
    network = published()
    sizes = [sum(parameter.numel() for parameter in part.parameters()) / 1e6 for part in (
        network.shared, *(branch.stages for branch in network.branches)
    )]  # fmt: skip
    assert sizes == pytest.approx([2.957, 20.551, 20.551, 20.551], abs=1e-3)


@pytest.mark.parametrize(
    "classify, widths", [("full", [2048, 2048, 256, 256, 2048, 256, 256, 256]), ("reduced", [256] * 8)]
)
def test_eight_classifiers_and_three_vectors_for_the_triplets(classify, widths):
    network = published(people=11, classify=classify).train()
    assert [layer.weight.shape[1] for branch in network.branches for layer in branch.classifiers] == widths
    outputs = run(network, 384, 128)
    assert [tuple(logits.shape) for logits in outputs.logits] == [(2, 11)] * 8
    assert [tuple(vector.shape) for vector in outputs.globals] == [(2, 256)] * 3
    assert [len(parts) for parts in outputs.locals] == [0, 2, 3]


@pytest.mark.parametrize("height, width", [(96, 32), (192, 64), (288, 144), (384, 192), (480, 128)])
def test_any_height_whose_map_the_stripes_divide(height, width):
    assert run(published().eval(), height, width).shape == (2, 2048)


@pytest.mark.parametrize("height", [256, 320])
def test_other_heights_are_refused_or_get_uneven_stripes(height):
    with pytest.raises(UsageError, match=rf"{height // 16} rows.*equal stripes.*no-strict-stripes"):
        run(published().eval(), height, 128)
    for pool in ("max", "avg", "gem"):
        assert run(published(strict_stripes=False, pool=pool).eval(), height, 128).shape == (2, 2048)


@pytest.mark.parametrize(
    "changes, features",
    [
        ({"branches": "1"}, 1),
        ({"branches": "3"}, 4),
        ({"branches": "1,2"}, 4),
        ({"branches": "1,3"}, 5),
        ({"branches": "1,2,4"}, 9),
        ({"test_branch": "1"}, 1),
        ({"test_branch": "2"}, 3),
        ({"test_branch": "3"}, 4),
    ],
)
def test_the_variants_of_the_ablation(changes, features):
    network = published(**changes).eval()
    assert network.feature_size == 256 * features
    assert run(network, 384, 128).shape == (2, 256 * features)
