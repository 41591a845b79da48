"""Presets say what they cost, resolve, and pass the checks of their recipe."""

import pytest

from sextet.core.config import from_dict, to_dict
from sextet.reid.config import MGN_PRESETS, RMGL_PRESETS, Config
from sextet.reid.train import check

ALL = [(table, name) for table in (MGN_PRESETS, RMGL_PRESETS) for name in table]


@pytest.mark.parametrize("table, name", ALL, ids=[name for _, name in ALL])
def test_presets_survive_their_file(table, name):
    config = table[name]()
    assert from_dict(Config, to_dict(config)) == config


@pytest.mark.parametrize(
    "table, name", [pair for pair in ALL if "paper" not in pair[1]], ids=lambda value: str(value)[:9]
)
def test_small_presets_pass_their_checks(table, name):
    if table[name]().model.backbone == "small":
        check(table[name]())


def test_the_values_of_the_papers():
    paper, strong, rmgl = MGN_PRESETS["paper"](), MGN_PRESETS["strong"](), RMGL_PRESETS["paper"]()
    assert (paper.optim.learning_rate, paper.optim.name, paper.optim.milestones, paper.optim.epochs) == (
        0.01,
        "sgd",
        "40,60",
        80,
    )
    assert (paper.loss.margin, paper.size, paper.optim.people, paper.optim.images) == (1.2, (384, 128), 16, 4)
    assert (strong.loss.circle_scale, strong.loss.circle_margin, strong.optim.images) == (64, 0.35, 16)
    assert (rmgl.model.cut, rmgl.model.bands, rmgl.optim.milestones) == ("res2", "abp", "40,70")
