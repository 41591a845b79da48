"""Both stages: what a member's update depends on, SP as alpha 0, middle checkpoints, partners, resume, settings."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sextet.core.config import from_dict, to_dict
from sextet.core.errors import UsageError
from sextet.core.run import Run
from sextet.core.seeding import torch_rng
from sextet.mep import members, responses
from sextet.mep.config import PRESETS, Config, paper, smoke
from sextet.mep.members import Members, population_bonus, train_population, train_populations, update_member
from sextet.mep.overcooked import Layout, Overcooked
from sextet.mep.policy import Policy
from sextet.mep.ppo import Learner, collect
from sextet.mep.responses import train_response
from sextet.mep.train import train

ROOM = Layout.load("cramped_room")


def settings(config: Config = smoke(), **changes) -> Config:  # noqa: B008 - frozen
    """Changes fields given with their group: settings(population__alpha=0.5)."""
    for path, value in changes.items():
        group, _, name = path.rpartition("__")
        change = {name: value} if not group else {group: replace(getattr(config, group), **{name: value})}
        config = replace(config, **change)
    return config


def opened(config: Config, folder: Path, **options) -> Run:
    return Run.open(config, recipe="mep", directory=folder, quiet=True, **options)


def learners(config: Config, count: int) -> list[dict]:
    return [Learner(config, ROOM, torch_rng(0, "init", index)).state_dict() for index in range(count)]


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def env_for(config: Config) -> Overcooked:
    return Overcooked(config.layout, config.ppo.num_envs, horizon=config.ppo.horizon)


def test_update_depends_on_states_and_key_alone() -> None:
    config = settings(population__alpha=1.0)
    states = learners(config, 2)
    before = [Learner(config, ROOM, torch_rng(0, "init", index)).state_dict() for index in range(2)]
    first, _ = update_member(config, env_for(config), states, 1, key=11)
    assert equal(states, before), "the states given are left alone"
    used = env_for(config)
    update_member(config, used, states, 0, key=12)
    again, _ = update_member(config, used, states, 1, key=11)
    assert equal(first, again)
    other, _ = update_member(config, used, states, 1, key=13)
    assert not equal(first["policy"], other["policy"])


def test_repeating_an_update_repeats_its_result() -> None:
    """Adam's moments in the given state are left alone too, so a job done twice, or two copies of a state, are safe."""
    config = smoke()
    states, env = learners(config, 2), env_for(config)
    states[0], _ = update_member(config, env, states, 0, key=1)
    states[1] = states[0]
    first, _ = update_member(config, env, states, 0, key=2)
    again, _ = update_member(config, env, states, 1, key=2)
    assert equal(first["policy"], again["policy"]) and equal(first["optimiser"], again["optimiser"])


def test_alpha_zero_is_self_play_bit_for_bit() -> None:
    mep, sp = settings(population__alpha=0.0), settings(method="sp")
    states = learners(mep, 4)
    with_bonus, parts = update_member(mep, env_for(mep), states, 0, key=5)
    alone, _ = update_member(sp, env_for(sp), states[:1], 0, key=5)
    assert equal(with_bonus, alone) and parts["population_entropy"] > 1.7
    moved, _ = update_member(settings(population__alpha=5.0), env_for(mep), states, 0, key=5)
    assert not equal(moved["policy"], alone["policy"])


def test_members_see_their_own_population_only() -> None:
    config = settings(population__alpha=5.0)
    states = learners(config, 4)
    last, _ = update_member(config, env_for(config), states, 3, key=5)
    states[2], states[0] = states[0], states[2]
    changed, _ = update_member(config, env_for(config), states, 3, key=5)
    assert not equal(last["policy"], changed["policy"])
    states[2], states[0], states[1] = states[0], states[2], states[2]
    same, _ = update_member(config, env_for(config), states, 3, key=5)
    assert equal(last, same)


def test_bonus_counts_the_learner_once() -> None:
    config = smoke()
    policies = [Policy(ROOM, "planes20", "mlp", torch_rng(seed, "init")) for seed in range(3)]
    for seed, policy in enumerate(policies):
        with torch.no_grad():
            policy.biases[-1][seed] = 2.0
    rollout = collect(env_for(config), policies[0], torch_rng(0, "rollout"))
    others = [policy.state_dict() for policy in policies[1:]]
    bonus, parts = population_bonus(config, policies[0], rollout, others)
    with torch.inference_mode():
        probs = torch.stack([policy(rollout.inputs.flatten(0, 1))[:, :6].softmax(-1) for policy in policies]).mean(0)
    expected = -probs.gather(1, rollout.actions.flatten().unsqueeze(1)).squeeze(1).log()
    torch.testing.assert_close(bonus.flatten(), expected)
    assert parts["population_entropy"] == pytest.approx(float(-(probs * probs.log()).sum(-1).mean()), rel=1e-4)
    alone, _ = population_bonus(config, policies[0], rollout, [])
    torch.testing.assert_close(alone, -rollout.log_probs.gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1))
    without, _ = population_bonus(settings(population__include_learner=False), policies[0], rollout, others)
    assert (without - bonus).abs().max() > 0.1


def test_paper_settings_update_one_seat_beside_a_frozen_copy() -> None:
    config = settings(paper(), ppo__num_envs=2, ppo__horizon=20, ppo__minibatches=2, ppo__epochs=1)
    state, parts = update_member(config, env_for(config), learners(config, 5), 0, key=3)
    assert state["env_steps"] == 3 * 40 and 0 < parts["population_entropy"] <= np.log(6)


def test_middle_checkpoint_by_return_and_by_iteration(tmp_path: Path) -> None:
    for rule, expected in (("by_return", [2, 6]), ("by_iteration", [4, 4])):
        config = settings(population__mid_checkpoint=rule, population__candidates=8)
        with opened(config, tmp_path / rule) as run:
            brood = Members(config, run, 1, 8)
        for step, returns in enumerate([(0, 0), (0, 0), (50, 0), (90, 5), (90, 5), (95, 8), (99, 22), (100, 40)]):
            states = [{"policy": {"at": torch.tensor(step + 1)}} for _ in returns]
            brood.advance(states, list(map(float, returns)))
        chosen = brood.populations()[0].weights
        assert [int(weights["at"]) for weights in chosen["mid"]] == expected
        assert [int(weights["at"]) for weights in chosen["final"]] == [8, 8]
        assert ("at" in chosen["init"][0]) == (rule == "by_iteration"), "by return, init is the untrained network"


def test_run_leaves_everything_and_is_read_back(tmp_path: Path) -> None:
    config = smoke()
    with opened(config, tmp_path / "run") as run:
        train(config, run)
        population = train_population(config, run.child("population"))
        policy = train_response(config, run.child("response"), population.pool())
    assert run.summary.keys() >= {"self_play", "members"}
    assert len(population.pool()) == 6 and len(population.returns) == 2
    assert equal(Policy.load(tmp_path / "run" / "final").state_dict(), policy.state_dict())
    assert len(run.child("response").summary["partners"][0]) == 7
    rows = (tmp_path / "run" / "parts" / "population" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 3 and "returns/member1" in rows[0]


def test_self_play_population_has_no_best_response(tmp_path: Path) -> None:
    config = settings(method="sp")
    with opened(config, tmp_path) as run:
        train(config, run)
        population = train_population(config, run.child("population"))
    assert equal(Policy.load(tmp_path / "final").state_dict(), population.weights["final"][0])
    assert not (tmp_path / "parts" / "response").exists()


@pytest.mark.parametrize(("part", "at"), [("population", 1), ("response", 2)])
def test_stopped_run_continues_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, at: int) -> None:
    config = settings(save_every=1)
    with opened(config, tmp_path / "whole") as run:
        train(config, run)

    class PowerCut(Exception):
        pass

    module = members if part == "population" else responses
    original, calls = module.collect, []

    def cut(*args, **kwargs):
        calls.append(1)
        if len(calls) > at * (2 if part == "population" else 1):
            raise PowerCut("power cut")
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "collect", cut)
    with pytest.raises(Exception, match="power cut"), opened(config, tmp_path / "cut") as run:
        train(config, run)
    monkeypatch.setattr(module, "collect", original)
    with opened(config, tmp_path / "cut", resume=True) as run:
        train(config, run)
    for file in ("final/model.safetensors", "parts/population/metrics.jsonl", "parts/response/metrics.jsonl"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "cut" / file).read_bytes(), file


def test_several_populations_at_once_are_several_alone_with_other_streams(tmp_path: Path) -> None:
    config = settings(population__alpha=1.0)
    with opened(config, tmp_path) as run:
        both = train_populations(config, run.child("two"), 2)
        again = train_populations(config, run.child("two"), 2)
    assert equal([p.weights for p in both], [p.weights for p in again]), "a finished part is read back"
    assert len(both) == 2 and not equal(both[0].weights["final"], both[1].weights["final"])


@pytest.mark.slow
def test_workers_do_not_change_the_result(tmp_path: Path) -> None:
    config = settings(population__alpha=1.0)
    for workers in ("inline", "process:2"):
        case = settings(config, workers=workers)
        with opened(case, tmp_path / workers) as run:
            train_population(case, run)
    files = [(tmp_path / workers / "final/model.safetensors").read_bytes() for workers in ("inline", "process:2")]
    assert files[0] == files[1]


def test_response_prefers_the_partner_it_does_worst_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(response__self_in_pool=False, response__beta=50.0, response__steps=160)
    pool = [state["policy"] for state in learners(config, 3)]
    values = torch.tensor([5.0, 9.0, 7.0, 8.0, 3.0, 6.0], dtype=torch.float64)
    monkeypatch.setattr(responses, "partner_returns", lambda *_: values.clone())
    seen = {}

    def spy(*args, partners, seats):
        seen.update(partners=partners, seats=seats)
        return collect(*args, partners=partners, seats=seats)

    monkeypatch.setattr(responses, "collect", spy)
    with opened(config, tmp_path) as run:
        train_response(config, run, pool)
    assert seen["seats"].tolist() == [1] * 4, "entry 4 is partner 1 with the learner in seat 1"
    for name, weight in seen["partners"].items():
        assert torch.equal(weight, pool[1][name].expand_as(weight))


def test_partner_returns_tell_partner_and_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are seat 0 with each partner, then seat 1; each is the mean over that partner's games."""
    config = settings(response__evaluation_games=2, ppo__horizon=60)
    calls = []

    def play(env, agents, *, episodes, rng):
        own = [type(agent.weights) is dict for agent in agents].index(False)
        calls.append(own)
        others = agents[1 - own].weights["biases.2"][:, 0]
        return (others + 10 * own).numpy().astype(float)

    monkeypatch.setattr(responses, "play", play)
    policy = Policy(ROOM, "planes20", "mlp", torch_rng(0, "init"))
    partners = responses.stack([policy.state_dict()] * 3)
    partners["biases.2"][:, 0] = torch.tensor([1.0, 2.0, 3.0])
    found = responses.partner_returns(config, policy, partners, np.random.default_rng(0))
    assert calls == [0, 1] and found.tolist() == [1, 2, 3, 11, 12, 13]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("population__alpha", -0.1), ("response__beta", -1.0), ("population__size", 0), ("ppo__horizon", 0),
        ("ppo__minibatches", 3), ("ppo__gamma", 1.5), ("ppo__learning_rate", 0.0), ("response__running_decay", 1.0),
        ("response__evaluation_games", 0), ("population__steps", 0), ("ppo__clip", -0.2),
    ],
)  # fmt: skip
def test_wrong_settings_name_their_field(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=field.replace("__", ".")):
        settings(**{field: value})


def test_presets_are_complete_and_strict() -> None:
    for name, preset in PRESETS.items():
        assert from_dict(Config, to_dict(preset())) == preset(), name
        assert preset.__doc__
    with pytest.raises(UsageError, match="reference_quirk"):
        from_dict(Config, {"population": {"reference_quirk": True}})
    with pytest.raises(UsageError, match="did you mean"):
        Layout.load(settings(layout="cramped_rom").layout)


def test_settings_import_nothing_heavy() -> None:
    code = (
        "import sys, sextet.mep.config; print([m for m in ('torch', 'numpy', 'numba', 'pydantic') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
