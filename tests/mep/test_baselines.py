"""PBT, TrajeDi, FCP and random starts: their formulas, and whole runs of every method."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sextet
from sextet.core.errors import UsageError
from sextet.core.run import Run
from sextet.core.seeding import torch_rng
from sextet.mep.config import METHODS, PAPER_PBT, PRESETS, PPOConfig, smoke
from sextet.mep.members import update_member
from sextet.mep.overcooked import LAYOUTS, Layout, Overcooked
from sextet.mep.pbt import exploit, mutate, pair_scores, train_pbt, with_settings
from sextet.mep.policy import Policy
from sextet.mep.ppo import Learner, collect
from sextet.mep.starts import reachable, scatter
from sextet.mep.train import adapt, check
from sextet.mep.trajedi import delay, divergence, smooth, update_trajedi


def settings(method, **changes):
    base = replace(smoke(), method=method)
    for path, value in changes.items():
        group, _, name = path.partition("__")
        base = replace(base, **{group: replace(getattr(base, group), **{name: value})})
    return base


def env_for(config):
    return Overcooked(config.layout, config.ppo.num_envs, horizon=config.ppo.horizon)


def learners(config, count):
    layout = Layout.load(config.layout)
    return [Learner(config, layout, torch_rng(0, "init", index)).state_dict() for index in range(count)]


# --- TrajeDi ---


def test_smooth_is_the_kernel_sum() -> None:
    values = torch.randn(2, 5, 3, generator=torch_rng(0, "init"), dtype=torch.float64)
    expected = torch.zeros_like(values)
    for t in range(5):
        for other in range(5):
            expected[:, t] += 0.5 ** abs(t - other) * values[:, other]
    torch.testing.assert_close(smooth(values, 0.5), expected)
    torch.testing.assert_close(smooth(values, 0.0), values)
    torch.testing.assert_close(smooth(values, 1.0), values.sum(1, keepdim=True).expand_as(values))


@given(seed=st.integers(0, 1000), gamma=st.sampled_from([0.0, 0.5, 0.9, 1.0]), member=st.integers(0, 2))
def test_divergence_and_its_slopes(seed: int, gamma: float, member: int) -> None:
    """The terms by their definition, and the slopes as autograd has them."""
    log_probs = torch.randn(3, 6, 2, generator=torch_rng(seed, "init"), dtype=torch.float64).requires_grad_()
    g, slopes = divergence(log_probs.detach(), member, gamma)
    log_delta = smooth(log_probs, gamma)
    direct = -torch.log(log_delta.exp().mean(0) / log_delta[member].exp())
    torch.testing.assert_close(g, direct.detach())
    (gradient,) = torch.autograd.grad(direct.sum(), log_probs)
    torch.testing.assert_close(slopes, gradient)


def test_divergence_of_equal_members_is_zero_and_of_unlike_ones_log_n() -> None:
    same = torch.randn(1, 4, 2, generator=torch_rng(1, "init")).expand(3, 4, 2)
    torch.testing.assert_close(divergence(same, 0, 0.5)[0], torch.zeros(4, 2))
    unlike = torch.full((3, 4, 2), -60.0)
    unlike[1] = 0.0
    torch.testing.assert_close(divergence(unlike, 1, 0.5)[0], torch.full((4, 2), math.log(3)))


@pytest.mark.parametrize(("gamma", "late"), [(0.0, 0), (0.5, 5), (1.0, 9)])
def test_delay_moves_terms_and_loses_none(gamma: float, late: int) -> None:
    g = torch.arange(20.0).view(10, 2)
    paid = delay(g, gamma)
    torch.testing.assert_close(paid.sum(0), g.sum(0))
    torch.testing.assert_close(paid[late], g.sum(0) if late == 9 else g[0])
    assert not paid[:late].any()


def test_trajedi_without_weight_is_self_play_bit_for_bit() -> None:
    config = settings("trajedi", trajedi__weight=0.0)
    states = learners(config, 4)
    group, _ = update_trajedi(config, env_for(config), states, 1, key=9)
    assert len(group["states"]) == 2
    alone, env = Learner(config, Layout.load(config.layout)), env_for(config)
    alone.load_state_dict(states[2])
    rollout = collect(env, alone.policy, torch_rng(9, "rollout", 0, 0))
    order = torch_rng(9, "update", 0, 0)
    alone.update(rollout, torch.zeros(()), order, total_steps=config.population.steps, context="alone")
    weighted, _ = update_trajedi(settings("trajedi", trajedi__weight=5.0), env_for(config), states, 1, key=9)
    one, other = (result["states"][0]["policy"] for result in (group, weighted))
    assert all(torch.equal(one[name], tensor) for name, tensor in alone.policy.state_dict().items())
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_trajedi_makes_members_unlike() -> None:
    """With a heavy weight and little else to gain the members' action choices part."""
    found = []
    for weight in (0.0, 3.0):
        config = settings("trajedi", trajedi__weight=weight, ppo__entropy_coef=0.0, ppo__epochs=4)
        states, env = learners(config, 2), env_for(config)
        for step in range(25):
            group, _ = update_trajedi(config, env, states, 0, key=step)
            states = group["states"]
        found.append(np.mean([parts["divergence"] for parts in group["parts"]]))
    assert found[1] > found[0] + 0.1, found


# --- PBT ---


@given(seed=st.integers(0, 10_000))
def test_mutation_moves_settings_by_the_published_factors(seed: int) -> None:
    ppo = PPOConfig(epochs=5)
    before = {
        name: getattr(ppo, name)
        for name in ("clip", "learning_rate", "entropy_coef", "value_coef", "epochs", "gae_lambda")
    }
    after = mutate(before, 0.33, np.random.default_rng(seed))
    for name, value in after.items():
        if name == "epochs":
            assert value in (3, 5, 6) and isinstance(value, int)
        elif name == "gae_lambda":
            assert value in (before[name], pytest.approx(0.975), pytest.approx(0.925))
        else:
            assert value / before[name] == pytest.approx(1) or value / before[name] in (
                pytest.approx(0.75), pytest.approx(1.25),
            )  # fmt: skip
    assert mutate(before, 0.0, np.random.default_rng(seed)) == before
    changed = mutate(before, 1.0, np.random.default_rng(seed))
    assert all(changed[name] != before[name] for name in before)
    assert mutate({**before, "epochs": 1}, 1.0, np.random.default_rng(seed))["epochs"] == 1


def test_settings_change_start_and_end_alike() -> None:
    base = PPOConfig()
    changed = with_settings(base, {"learning_rate": base.learning_rate * 2, "entropy_coef": base.entropy_coef / 2})
    assert changed.learning_rate_final == pytest.approx(2 * base.learning_rate_final)
    assert changed.entropy_coef_final == pytest.approx(base.entropy_coef_final / 2)


def test_pairs_are_scored_by_both_members_games_and_the_worst_is_replaced() -> None:
    scores = pair_scores([[2.0, 4.0], [0.0, 6.0], [1.0, 0.0], [0.0, 1.0]], 2)
    assert scores == [2.0, 4.0, 0.5, 0.5]
    states = [{"learner": name, "settings": {"clip": 0.2, "learning_rate": 1e-3, "entropy_coef": 0.1,
               "value_coef": 0.5, "epochs": 2, "gae_lambda": 0.95}} for name in "abc"]  # fmt: skip
    after = exploit(states, [5.0, 9.0, 1.0], settings("pbt", pbt__mutation=1.0), np.random.default_rng(0))
    assert [state["learner"] for state in after] == ["a", "b", "b"]
    assert after[2]["settings"] != states[1]["settings"] and after[:2] == states[:2]


def test_pbt_trains_resumes_and_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sextet.mep import pbt

    config = replace(settings("pbt"), save_every=1)
    with Run.open(config, recipe="mep", directory=tmp_path / "whole", quiet=True) as run:
        first = train_pbt(config, run.child("population"), 2)
    original, calls = pbt.exploit, []

    def cut(*arguments):
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("power cut")
        return original(*arguments)

    monkeypatch.setattr(pbt, "exploit", cut)
    with (
        pytest.raises(RuntimeError, match="power cut"),
        Run.open(config, recipe="mep", directory=tmp_path / "cut", quiet=True) as run,
    ):
        train_pbt(config, run.child("population"), 2)
    monkeypatch.setattr(pbt, "exploit", original)
    with Run.open(config, recipe="mep", directory=tmp_path / "cut", quiet=True, resume=True) as run:
        second = train_pbt(config, run.child("population"), 2)
    for one, two in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert len(run.child("population").summary["scores"]) == 2


# --- random starts ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_starts_are_states_that_the_game_could_reach(layout: str) -> None:
    env = Overcooked(layout, 400)
    scatter(1.0, np.random.default_rng(0))(env)
    state, kitchen = env.state, env.layout
    places = [set(reachable(kitchen, seat).tolist()) for seat in (0, 1)]
    assert all(set(state.pos[:, seat].tolist()) <= places[seat] for seat in (0, 1))
    assert (state.pos[:, 0] != state.pos[:, 1]).all() and (state.time == 0).all()
    assert not state.counter[:, kitchen.terrain != 1].any() and state.counter.max() <= 3
    assert ((state.pot_cook > 0) <= (state.pot_onions == 3)).all() and state.pot_cook.max() <= 20
    assert len(np.unique(state.held)) == 4 and len(np.unique(state.orient)) == 4
    before = [array.copy() for array in state.arrays()]
    for _ in range(20):
        env.step(np.random.default_rng(1).integers(6, size=(400, 2)))
    assert any((a != b).any() for a, b in zip(before, state.arrays(), strict=True))


def test_a_share_of_none_leaves_the_start_alone() -> None:
    env, usual = Overcooked("cramped_room", 50), Overcooked("cramped_room", 50)
    scatter(0.0, np.random.default_rng(0))(env)
    assert all((a == b).all() for a, b in zip(env.state.arrays(), usual.state.arrays(), strict=True))
    config = settings("sp_random_starts")
    states = learners(config, 1)
    plain, _ = update_member(config, env_for(config), states, 0, key=4)
    moved, _ = update_member(adapt(config), env_for(config), states, 0, key=4)
    assert not all(torch.equal(plain["policy"][name], moved["policy"][name]) for name in plain["policy"])


# --- methods and presets ---


@pytest.mark.parametrize("method", [name for name in METHODS if name != "mep_uniform"])
def test_every_method_trains_an_agent_that_loads(tmp_path: Path, method: str) -> None:
    run = sextet.train("mep", "smoke", method=method, directory=str(tmp_path / "run"))
    assert isinstance(sextet.load(run), Policy)
    single = method in ("sp", "sp_random_starts", "pbt")
    parts = sorted(path.name for path in (tmp_path / "run" / "parts").iterdir())
    assert parts == (["population"] if single else ["population", "response"])


def test_methods_change_what_their_definition_says() -> None:
    fcp = adapt(settings("fcp", population__alpha=0.1))
    assert (fcp.population.alpha, fcp.response.beta, fcp.response.self_in_pool) == (0.0, 0.0, False)
    mep = settings("mep", population__alpha=0.1)
    assert adapt(mep) == mep
    with pytest.raises(UsageError, match="both_seats"):
        adapt(settings("trajedi", population__both_seats=False))


def test_what_a_comparison_could_not_do_is_refused_before_it_starts(tmp_path: Path) -> None:
    check(settings("compare"))
    with pytest.raises(UsageError, match="both_seats"):
        check(settings("compare", population__both_seats=False))
    kitchen = tmp_path / "cramped_room.layout"
    kitchen.write_text("XXPXX\nO1 2O\nX   X\nXDXSX\n")
    with pytest.raises(UsageError, match="two kitchens of one name"):
        check(replace(settings("compare"), layouts=f"cramped_room,{kitchen}"))


def test_presets_cover_every_kitchen() -> None:
    for name in ("fast", "quick", "paper", "paper_sp", "paper_pbt"):
        for layout in LAYOUTS:
            preset = PRESETS[name if layout == "cramped_room" else f"{name}-{layout}"]()
            assert preset.layout == layout
    ring = PRESETS["paper_pbt-coordination_ring"]()
    assert (ring.pbt.steps, ring.ppo.shaping_steps, ring.ppo.learning_rate) == PAPER_PBT["coordination_ring"]
    with pytest.raises(UsageError, match='did you mean "trajedi"'):
        replace(smoke(), methods="sp,trajedy")
