"""Policies and PPO: sizes, files, batched weights, returns and losses by hand, replayed rollouts, the finite check."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from sextet.core.errors import DataError, DivergenceError
from sextet.core.seeding import numpy_rng, torch_rng
from sextet.mep.config import Config, PPOConfig, smoke
from sextet.mep.kernels import NUMPY_KERNELS, numba_kernels
from sextet.mep.overcooked import LAYOUTS, Layout, Overcooked
from sextet.mep.policy import Policy, PolicyAgent
from sextet.mep.ppo import Learner, advantages, collect, losses, shape_rewards

ROOM = Layout.load("cramped_room")


def make(layout: Layout = ROOM, encoding: str = "planes20", net: str = "mlp", seed: int = 0) -> Policy:
    return Policy(layout, encoding, net, torch_rng(seed, "init"))


def wander(layout: Layout, num_envs: int = 16, steps: int = 60) -> Overcooked:
    env, rng = Overcooked(layout, num_envs), np.random.default_rng(0)
    for _ in range(steps):
        env.step(rng.integers(0, 6, (num_envs, 2)))
    return env


@pytest.mark.parametrize(("layout", "count"), [("cramped_room", 42_264), ("counter_circuit", 61_464)])
def test_published_network_size(layout: str, count: int) -> None:
    policy = make(Layout.load(layout), net="conv")
    assert sum(weight.numel() for weight in policy.parameters()) == count


@pytest.mark.parametrize("encoding", ["planes20", "planes20_legacy", "planes26"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_left_out_never_vary(layout: str, encoding: str) -> None:
    """Random states, not only reached ones: what the perceptron does not see is constant in the whole kitchen."""
    kitchen, rng = Layout.load(layout), np.random.default_rng(0)
    env = Overcooked(kitchen, 512)
    state, counters = env.state, kitchen.terrain == 1
    state.pos[:] = rng.choice(np.flatnonzero(kitchen.terrain == 0), state.pos.shape)
    state.orient[:], state.held[:] = rng.integers(0, 4, (2, *state.held.shape))
    state.counter[:] = rng.integers(0, 4, state.counter.shape) * counters
    state.pot_onions[:] = rng.integers(0, 4, state.pot_onions.shape)
    state.pot_cook[:] = rng.integers(0, 21, state.pot_cook.shape) * (state.pot_onions == 3)
    state.time[:] = rng.integers(0, 400, state.time.shape)
    seen = env.observe(encoding).reshape(1024, -1)
    policy = make(kitchen, encoding)
    varies = np.flatnonzero((seen != seen[0]).any(0))
    extra = set(policy.columns.tolist()) - set(varies.tolist())
    if encoding == "planes26":  # urgency fills its plane with one value; one cell of it is enough
        varies = varies[varies <= 25 * len(kitchen.terrain)]
    assert set(varies.tolist()) <= set(policy.columns.tolist())
    assert len(extra) <= 0.05 * len(policy.columns)
    inputs = policy.encode(
        seen.reshape(512, 2, *env.observe(encoding).shape[2:]), torch.empty(1024, *policy.input_shape)
    )
    assert inputs.min() == 0 and inputs.max() == 1


@pytest.mark.parametrize("net", ["mlp", "conv"])
def test_one_policy_per_row_equals_each_policy_alone(net: str) -> None:
    policies = [make(net=net, seed=seed) for seed in range(3)]
    inputs = torch.rand(3, *policies[0].input_shape)
    stacked = {name: torch.stack([p.state_dict()[name] for p in policies]) for name in policies[0].state_dict()}
    with torch.inference_mode():
        alone = torch.cat([policy(inputs[row : row + 1]) for row, policy in enumerate(policies)])
        torch.testing.assert_close(policies[0](inputs, stacked), alone)
        torch.testing.assert_close(policies[0](inputs, policies[2].state_dict()), policies[2](inputs))
        torch.testing.assert_close(policies[0].player(stacked)(inputs), alone)
        torch.testing.assert_close(policies[0].player(policies[2].state_dict())(inputs), policies[2](inputs))


def test_kernels_run_the_same_perceptrons_and_hide_no_nan() -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    shapes = ((5, 9, 64), (5, 64, 64), (5, 64, 7))
    layers = tuple((rng.normal(size=s).astype(np.float32), rng.normal(size=s[::2]).astype(np.float32)) for s in shapes)
    inputs, found = rng.integers(0, 2, (5, 9)).astype(np.float32), np.empty((2, 5, 7), np.float32)
    for poison in (False, True):
        if poison:
            layers[1][1][3, 5] = np.nan
        for backend, out in zip((numba_kernels(), NUMPY_KERNELS), found, strict=True):
            backend.perceptrons(inputs, layers, out)
        np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-3)
    assert np.isnan(found[:, 3]).all() and np.isfinite(found[:, :3]).all()


@pytest.mark.parametrize("encoding", ["planes20", "features62"])
def test_save_and_load(tmp_path, encoding: str) -> None:
    policy = make(encoding=encoding, seed=4)
    policy.save(tmp_path)
    again = Policy.load(tmp_path, layout="cramped_room", encoding=encoding)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))


def test_load_refuses_what_does_not_fit(tmp_path) -> None:
    make().save(tmp_path)
    with pytest.raises(DataError, match='layout "cramped_room", but "counter_circuit"'):
        Policy.load(tmp_path, layout="counter_circuit")
    with pytest.raises(DataError, match='encoding "planes20", but "planes20_legacy"'):
        Policy.load(tmp_path, encoding="planes20_legacy")
    about = json.loads((tmp_path / "config.json").read_text())
    about["config"]["layout"] = "counter_circuit"
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match="do not fit"):
        Policy.load(tmp_path)
    broken = make()
    with torch.no_grad():
        broken.biases[1][3] = torch.nan
    broken.save(tmp_path)
    with pytest.raises(DataError, match=r"biases\.1 is not finite"):
        Policy.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="not a saved policy"):
        Policy.load(tmp_path)


def test_agent_samples_its_policy() -> None:
    policy, env = make(), Overcooked(ROOM, 4000)
    with torch.no_grad():
        policy.biases[-1][:6] = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.0, 0.5])
    agent = PolicyAgent(policy)
    actions = agent.act(env, 0, np.random.default_rng(1))
    assert np.array_equal(actions, agent.act(env, 0, np.random.default_rng(1)))
    inputs = policy.encode(env.observe("planes20", seat=0), torch.empty(4000, *policy.input_shape))
    expected = policy(inputs)[0, :6].softmax(-1).detach().numpy()
    np.testing.assert_allclose(np.bincount(actions, minlength=6) / 4000, expected, atol=0.03)
    with torch.no_grad():
        policy.biases[-1][2] = torch.nan
    with pytest.raises(DivergenceError, match="member 3: action logits are not finite"):
        PolicyAgent(policy, name="member 3").act(env, 0, np.random.default_rng(1))


def test_advantages_by_hand() -> None:
    rewards, values = torch.tensor([[1.0], [0.0], [2.0]]), torch.tensor([[0.5], [1.0], [-1.0], [4.0]])
    found = advantages(rewards, values, gamma=0.5, decay=0.8)
    last = 2 + 0.5 * 4 + 1
    middle = (0 + 0.5 * -1 - 1) + 0.4 * last
    np.testing.assert_allclose(found[:, 0], [(1 + 0.5 * 1 - 0.5) + 0.4 * middle, middle, last], rtol=1e-6)


def test_losses_by_hand() -> None:
    """Two samples of a uniform policy: one ratio is clipped from above, one value change is clipped."""
    outputs = torch.zeros(2, 7)
    outputs[:, 6] = torch.tensor([1.0, 0.1])
    old = torch.tensor([np.log(1 / 6 / 1.5), np.log(1 / 6)], dtype=torch.float32)
    actions, old_value, advantage = torch.tensor([0, 3]), torch.tensor([0.0, 0.0]), torch.tensor([3.0, 1.0])
    config = PPOConfig(clip=0.2, value_coef=0.5)
    loss, parts = losses(outputs, actions, old, old_value, advantage, config=config, entropy_coef=0.1)
    policy_loss = -(1 * 1.2 + -1 * 1.0) / 2  # normalised advantages are +1 and -1
    value_loss = 0.5 * (max((1 - 3) ** 2, (0.2 - 3) ** 2) + (0.1 - 1) ** 2) / 2
    assert parts["policy_loss"].item() == pytest.approx(policy_loss, rel=1e-5)
    assert parts["value_loss"].item() == pytest.approx(value_loss, rel=1e-5)
    assert parts["entropy"].item() == pytest.approx(np.log(6), rel=1e-5)
    assert parts["clip_frac"].item() == 0.5
    assert loss.item() == pytest.approx(policy_loss - 0.1 * np.log(6) + 0.5 * value_loss, rel=1e-5)


def replay(actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    env = Overcooked(ROOM, actions.shape[1])
    rows = [env.step(row)[:2] for row in actions]
    return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])


def test_rollout_is_what_the_games_gave() -> None:
    env, policy = wander(ROOM, 8), make(seed=1)  # used games: collect starts them anew
    env.horizon = 150
    rollout = collect(env, policy, torch_rng(0, "rollout"))
    sparse, shaped = replay(rollout.actions.view(150, 8, 2).numpy())
    assert np.array_equal(rollout.sparse, sparse) and np.array_equal(rollout.shaped, shaped) and shaped.sum() > 0
    own = shape_rewards(rollout, 0.5, team=False).view(150, 8, 2)
    np.testing.assert_allclose(own, sparse[..., None] + 0.5 * shaped)
    team = shape_rewards(rollout, 0.5, team=True).view(150, 8, 2)
    np.testing.assert_allclose(team[..., 0], sparse + 0.5 * shaped.sum(-1))
    with torch.inference_mode():
        outputs = policy(rollout.inputs.flatten(0, 1))
    torch.testing.assert_close(rollout.log_probs.flatten(0, 1), outputs[:, :6].log_softmax(-1))
    torch.testing.assert_close(rollout.values[:-1].flatten(), outputs[:, 6])


def test_rollout_beside_partners_keeps_the_learners_rows() -> None:
    """Partners with a pinned action sit where the learner does not; the learner's rows and rewards are its own."""
    policy, partner = make(seed=1), make(seed=2)
    with torch.no_grad():
        partner.biases[-1][4] = 100.0
    env, seats = Overcooked(ROOM, 6, horizon=40), np.array([0, 1, 0, 1, 1, 0])
    rollout = collect(env, policy, torch_rng(0, "rollout"), partners=partner.state_dict(), seats=seats)
    assert rollout.inputs.shape == (40, 6, *policy.input_shape) and rollout.values.shape == (41, 6)
    joint = np.full((40, 6, 2), 4)
    joint[:, np.arange(6), seats] = rollout.actions.numpy()
    sparse, shaped = replay(joint)
    assert np.array_equal(rollout.shaped, shaped)
    own = np.take_along_axis(shaped, np.broadcast_to(seats[None, :, None], (40, 6, 1)), 2)[..., 0]
    np.testing.assert_allclose(shape_rewards(rollout, 1.0, team=False), sparse + own)
    with torch.inference_mode():
        torch.testing.assert_close(policy(rollout.inputs[3])[:, 6], rollout.values[3])


def trained(config: Config, updates: int, bonus: float = 0.0) -> tuple[Learner, dict[str, float]]:
    learner = Learner(config, ROOM, torch_rng(0, "init"))
    env, parts = Overcooked(ROOM, config.ppo.num_envs, horizon=config.ppo.horizon), {}
    for step in range(updates):
        rollout = collect(env, learner.policy, torch_rng(0, "rollout", step))
        parts = learner.update(
            rollout, torch.tensor(bonus), torch_rng(0, "update", step), total_steps=1e6, context="test"
        )
    return learner, parts


def test_update_is_repeatable_and_continues_from_its_state() -> None:
    whole, _ = trained(smoke(), 3)
    first, _ = trained(smoke(), 2)
    again = Learner(smoke(), ROOM)
    again.load_state_dict(first.state_dict())
    rollout = collect(Overcooked(ROOM, 4, horizon=40), again.policy, torch_rng(0, "rollout", 2))
    again.update(rollout, torch.zeros(()), torch_rng(0, "update", 2), total_steps=1e6, context="test")
    assert again.env_steps == whole.env_steps == 480
    for a, b in zip(again.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_nothing_is_applied_when_a_loss_is_not_finite() -> None:
    learner, _ = trained(smoke(), 1)
    before = [weight.clone() for weight in learner.policy.parameters()]
    rollout = collect(Overcooked(ROOM, 4, horizon=40), learner.policy, torch_rng(0, "rollout", 1))
    with pytest.raises(DivergenceError, match=r"member 2, 160 steps: loss is not finite"):
        nan, rng = torch.tensor(torch.nan), torch_rng(0, "update")
        learner.update(rollout, nan, rng, total_steps=1e6, context="member 2, 160 steps")
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))


def test_time_limit_changes_only_the_last_target() -> None:
    values, rewards = torch.rand(5, 2), torch.rand(4, 2)
    ended = values.clone()
    ended[-1] = 0
    change = advantages(rewards, values, gamma=0.9, decay=0.0) - advantages(rewards, ended, gamma=0.9, decay=0.0)
    torch.testing.assert_close(change[-1], 0.9 * values[-1])
    assert not change[:-1].any()
    config = smoke()
    limits = replace(config, ppo=replace(config.ppo, proper_time_limits=True))
    a, b = (next(trained(case, 1)[0].policy.parameters()) for case in (config, limits))
    assert not torch.equal(a, b)


def test_fast_settings_learn_to_cook() -> None:
    """Fifteen updates, about 3 s: from no soup to more than one per game."""
    _, parts = trained(Config(), 15)
    assert parts["return"] > 25
    assert parts["entropy"] < 1.7


def test_play_is_deterministic_given_the_generator() -> None:
    from sextet.mep.evaluate import play

    agent = PolicyAgent(make(seed=3))
    scores = [
        play(Overcooked(ROOM, 4, horizon=30), (agent, agent), episodes=4, rng=numpy_rng(5, "evaluate")) for _ in "ab"
    ]
    assert np.array_equal(*scores)


def test_step_size_and_entropy_weight_fall_to_their_final_values(monkeypatch: pytest.MonkeyPatch) -> None:
    from sextet.mep import ppo

    seen = []

    def spy(*args, entropy_coef, **kwargs):
        seen.append(entropy_coef)
        return losses(*args, entropy_coef=entropy_coef, **kwargs)

    monkeypatch.setattr(ppo, "losses", spy)
    config = smoke()
    config = replace(config, ppo=replace(config.ppo, entropy_coef=0.3, entropy_coef_final=0.1, minibatches=1))
    learner, rates = Learner(config, ROOM), []
    for step in range(3):
        rollout = collect(Overcooked(ROOM, 4, horizon=40), learner.policy, torch_rng(0, "rollout", step))
        learner.update(rollout, torch.zeros(()), torch_rng(0, "update", step), total_steps=320, context="test")
        rates.append(learner.optimiser.param_groups[0]["lr"])
    np.testing.assert_allclose(seen, [0.3, 0.2, 0.1])
    np.testing.assert_allclose(rates, [2e-3, 1.1e-3, 2e-4])


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize(("encoding", "net"), [("planes20_legacy", "mlp"), ("planes26", "conv"), ("features62", "mlp")])
def test_a_policy_sees_the_encoded_observations(backend: str, encoding: str, net: str) -> None:
    if backend == "numba":
        pytest.importorskip("numba")
    policy, env, rng = make(encoding=encoding, net=net), Overcooked(ROOM, 8, backend=backend), np.random.default_rng(0)
    rows = rng.permutation(16)[:9]
    seen, chosen = torch.empty(16, *policy.input_shape), torch.empty(9, *policy.input_shape)
    for _ in range(60):
        env.step(rng.integers(0, 6, (8, 2)))
        expected = torch.empty_like(seen)
        policy.encode(env.observe(encoding), expected)
        assert torch.equal(policy.see(env, seen), expected)
        assert torch.equal(policy.see(env, chosen, rows), expected[torch.from_numpy(rows)])


def test_gradient_of_the_losses_is_that_of_automatic_differentiation() -> None:
    def plain(outputs: torch.Tensor) -> torch.Tensor:
        log_probs, value = outputs[:, :6].log_softmax(1), outputs[:, 6]
        normal = (advantage - advantage.mean()) / advantage.std(correction=0)
        ratio = (log_probs[torch.arange(400), actions] - old_log_prob).exp()
        gain = torch.minimum(normal * ratio, normal * ratio.clamp(0.8, 1.2)).mean()
        near = old_value + (value - old_value).clamp(-0.2, 0.2) - target
        critic = torch.maximum((value - target).square(), near.square()).mean() / 2
        return -gain + 0.3 * (log_probs.exp() * log_probs).sum(1).mean() + 0.5 * critic

    rng = torch_rng(0, "losses")
    outputs, noise = (torch.randn(400, 7, generator=rng, dtype=torch.float64) for _ in range(2))
    actions = torch.randint(6, (400,), generator=rng)
    old_log_prob, old_value, advantage = noise[:, 0] / 3 - 1.8, outputs[:, 6] + noise[:, 1] / 3, noise[:, 2]
    target, found = advantage + old_value, []
    config = PPOConfig(clip=0.2, value_coef=0.5)
    for loss in (
        plain,
        lambda x: losses(x, actions, old_log_prob, old_value, advantage, config=config, entropy_coef=0.3)[0],
    ):
        varied = outputs.clone().requires_grad_()
        loss(varied).backward()
        found.append(varied.grad)
    torch.testing.assert_close(*found)
