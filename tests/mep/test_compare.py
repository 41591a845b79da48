import json
import os
import signal

import numpy as np
import pytest

import sextet
from sextet.cli import main
from sextet.core.errors import Interrupted, UsageError
from sextet.mep.evaluate import play
from sextet.mep.human_data import human_data_path
from sextet.mep.overcooked import Overcooked
from sextet.mep.policy import Policy, PolicyAgent
from sextet.mep.tables import in_words

TINY = {
    "method": "compare",
    "num_seeds": 2,
    "games": 3,
    "num_proxies": 2,
    "matrix_seeds": 2,
    "matrix_alphas": [0.0, 0.3],
    "methods": "sp,mep,mep_uniform",
    "ppo": {"horizon": 400},
    "population": {"steps": 1600.0},
    "response": {"steps": 1600.0},
}


@pytest.fixture(autouse=True)
def no_published_agents(monkeypatch, tmp_path):
    monkeypatch.setenv("SEXTET_DATA", str(tmp_path / "absent"))


@pytest.fixture
def no_human_data(monkeypatch, tmp_path):
    monkeypatch.setenv("SEXTET_HUMAN_DATA", str(tmp_path / "absent.npz"))


def test_comparison_without_human_games_says_so_and_finishes(tmp_path, no_human_data, capsys):
    run = sextet.train("mep", "smoke", directory=str(tmp_path / "run"), **TINY)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["summary"]
    assert summary["cramped_room, SP, self-play"]["n"] == summary["cramped_room, MEP, self-play"]["n"] == 2
    assert summary["SP conventions of 8 levers"]["mean"] < summary["MEP conventions of 8 levers"]["mean"]
    assert not any("human" in name for name in summary)
    assert "sextet data human --download" in capsys.readouterr().err
    words = json.loads((tmp_path / "run" / "artifacts" / "11-cramped_room-words.json").read_text())["text"]
    assert "no agent met a stand-in" in words
    page = (tmp_path / "run" / "report.html").read_text()
    assert "data:image/svg+xml" in page and "everyone with everyone" in page

    policy = sextet.load(run)
    agent = PolicyAgent(policy)
    returns = play(Overcooked(policy.layout, 2), (agent, agent), episodes=2, rng=np.random.default_rng(0))
    assert returns.shape == (2,)


@pytest.mark.skipif(not human_data_path().is_file(), reason="no human games: sextet data human --download")
def test_comparison_with_human_games_fills_the_table_and_resumes(tmp_path, monkeypatch):
    from sextet.mep import compare

    original = compare.train_proxy
    monkeypatch.setattr(
        compare, "train_proxy", lambda layout, data, *, seed: original(layout, data, seed=seed, epochs=1)
    )
    trained, train_agents = [], compare.train_agents

    def stop_once(config, *arguments, **options):
        trained.append(config.method)
        if len(trained) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_agents(config, *arguments, **options)

    monkeypatch.setattr(compare, "train_agents", stop_once)
    with pytest.raises(Interrupted, match="sextet resume"):
        sextet.train("mep", "smoke", directory=str(tmp_path / "run"), **TINY)
    parts = tmp_path / "run" / "parts"
    before = {path: path.stat().st_mtime_ns for path in parts.rglob("final/*.safetensors")}
    assert parts / "cramped_room-sp-population" / "final" / "model.safetensors" in before
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert all(path.stat().st_mtime_ns == time for path, time in before.items()), "finished parts are not repeated"
    artifacts = tmp_path / "run" / "artifacts"
    table = json.loads((artifacts / "10-cramped_room.json").read_text())
    assert {"with human, both seats", "population entropy, nats"} <= set(table["columns"])
    assert [row[0] for row in table["rows"]][:4] == ["SP", "MEP", "MEP, uniform partners", "human proxies"]
    words = json.loads((artifacts / "11-cramped_room-words.json").read_text())["text"]
    assert words.count("Welch p =") == 2
    agents = sorted(path.name for path in (tmp_path / "run" / "agents").iterdir())
    assert "cramped_room-mep-uniform-partners-seed-1" in agents and "cramped_room-human-proxy-0" in agents
    about = json.loads((tmp_path / "run" / "agents" / "cramped_room-mep-seed-0" / "config.json").read_text())
    assert about["label"] == "MEP seed 0"
    assert isinstance(sextet.load(str(tmp_path / "run" / "agents" / "cramped_room-mep-seed-0")), Policy)


def test_words_say_where_mep_does_not_beat_fcp():
    scores = {"SP": [100.0, 102.0, 98.0], "FCP": [130.0, 131.0, 129.0], "MEP": [129.0, 131.0, 130.5]}
    text = in_words({"with human, both seats": scores}, list(scores))
    assert "MEP does not beat FCP here." in text and "FCP with the human proxies, against SP: 30.0" in text
    better = {**scores, "MEP": [150.0, 151.0, 149.0]}
    assert "does not beat" not in in_words({"with human, both seats": better}, list(better))


def test_train_eval_report_compare_and_load_from_the_command_line(tmp_path, no_human_data, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in ("0", "1"):
        command = ["train", "mep", "--preset", "smoke", "--quiet", "--json", "--seed", seed, "--games", "2"]
        assert main(command) == 0
        outcome = json.loads(capsys.readouterr().out)
    assert outcome["run"] == "runs/mep/smoke-2" and (tmp_path / outcome["report"]).exists()
    assert main(["train", "mep", "--preset", "smoke", "--name", "smoke", "--quiet"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["eval", "runs/mep/smoke", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["self_play"]["n"] == 2 and "sextet data human" in result["with_human_proxy"]
    assert main(["report", "runs/mep/smoke"]) == 0
    assert main(["compare", "runs/mep/smoke", "runs/mep/smoke-2", "--out", "both.html", "--json"]) == 0
    assert (tmp_path / "both.html").stat().st_size > 10_000
    with pytest.raises(UsageError, match="holds no run"):
        sextet.load(str(tmp_path / "nothing"))


def test_an_unfinished_run_cannot_be_loaded(tmp_path, monkeypatch):
    from sextet.core.run import Run

    logged = []

    def stop(run, *_, **__):
        logged.append(run)
        if len(logged) == 1:  # a second signal would end the process at once
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Run, "log", stop)
    with pytest.raises(Interrupted):
        sextet.train("mep", "smoke", directory=str(tmp_path / "run"))
    with pytest.raises(UsageError, match=f"sextet resume {tmp_path / 'run'}"):
        sextet.load(str(tmp_path / "run"))
