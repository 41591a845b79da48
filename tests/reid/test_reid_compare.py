"""The comparison: every piece is a run that is made once, whatever interrupts; the tables say what was compared."""

from dataclasses import replace

import pytest

import sextet
from sextet.core.files import read_json
from sextet.core.run import Run
from sextet.launch import launch
from sextet.reid import compare as module
from sextet.reid.config import Config, smoke


def small(**changes) -> Config:
    base = smoke()
    optim = replace(base.optim, epochs=0.1)
    return replace(base, method="compare", methods="global,mgn", num_seeds=2, optim=optim, **changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("compare") / "run"
    launch("mgn", "smoke", small(), directory=directory, quiet=True)
    return directory


def test_the_table_has_chance_the_untrained_network_and_every_method(finished):
    table = read_json(finished / "artifacts" / "00-comparison.json")
    assert [row[0] for row in table["rows"]] == ["chance", "untrained network", "global", "MGN"]
    gain = table["rows"][3][-1]
    seeds = [
        read_json(finished / "parts" / f"{name}-{seed}" / "summary.json")["summary"]["mAP"]["mean"]
        for name in ("mgn", "global")
        for seed in (0, 1)
    ]
    assert gain["mean"] == pytest.approx((seeds[0] + seeds[1] - seeds[2] - seeds[3]) / 2)
    assert table["rows"][0][2] < 25, "five right images of 59 are found at random"


def test_other_cameras_and_single_branches_are_scored(finished):
    other = read_json(finished / "artifacts" / "02-other-cameras.json")["rows"]
    assert [row[0] for row in other] == ["untrained", "global", "MGN"]
    branches = read_json(finished / "artifacts" / "03-branches.json")["rows"]
    assert [row[1] for row in branches] == ["all", "branch 1", "branch 2", "branch 3"]


def test_the_run_loads_as_mgn_and_keeps_one_network_of_each_method(finished):
    assert sextet.load(str(finished)).config.shown == "mgn"
    assert sorted(path.name for path in (finished / "models").iterdir()) == ["global", "mgn"]
    assert sextet.load(str(finished / "models" / "global")).network.cuts(None) == {}


@pytest.mark.slow
def test_finished_pieces_are_not_repeated_and_the_result_is_the_same(finished, tmp_path, monkeypatch):
    directory, config, done = tmp_path / "run", small(), []

    def stopped(self, name, seed):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append((name, seed))
        return original(self, name, seed)

    original = module.Trainer.work
    monkeypatch.setattr(module.Trainer, "work", stopped)
    with pytest.raises(KeyboardInterrupt):
        launch("mgn", "smoke", config, directory=directory, quiet=True)
    monkeypatch.setattr(module.Trainer, "work", original)
    launch("mgn", "smoke", config, directory=directory, resume=True, quiet=True)
    first, again = (
        Run.open(config, recipe="mgn", directory=path, resume=True, quiet=True) for path in (finished, directory)
    )
    assert first.summary == again.summary
    weights = [(path / "final" / "model.safetensors").read_bytes() for path in (finished, directory)]
    assert weights[0] == weights[1]
    first.close()
    again.close()
