"""PPO on batches of whole games: collect, estimate advantages, improve.

Everything random comes from a generator that the caller makes from a key, and every update starts from a state
dict and returns one, so that a result does not depend on where or in which order updates run.

Legend: T steps of an episode, N games, L learner's rows (2N when both seats learn, else N), A actions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sextet.core.device import pick_device
from sextet.core.metrics import check_finite
from sextet.mep.config import Config, PPOConfig
from sextet.mep.overcooked import Layout, Overcooked
from sextet.mep.policy import NUM_ACTIONS, Policy, Weights


@dataclass(kw_only=True)
class Rollout:
    """One episode of N games as the learner's rows saw it; game g's rows are 2g and 2g + 1 when both seats learn."""

    inputs: Tensor
    """(T, L, ...) float32."""
    actions: Tensor
    """(T, L) int64."""
    log_probs: Tensor
    """(T, L, A) of the policy that played."""
    values: Tensor
    """(T + 1, L); the last are those of the states at the horizon."""
    sparse: Tensor
    """(T, N) team reward."""
    shaped: Tensor
    """(T, N, 2) of each player."""
    seats: Tensor | None
    """(N,) the learner's seat, None for both."""


@torch.inference_mode()
def collect(
    env: Overcooked,
    policy: Policy,
    generator: torch.Generator,
    *,
    partners: Weights | None = None,
    seats: Any = None,
    begin: Callable[[Overcooked], None] | None = None,
) -> Rollout:
    """Plays one episode in every game: the policy in both seats, or in `seats` beside frozen partners.

    Args:
        env: Games; they are reset.
        policy: The learner.
        generator: Of the action noise.
        partners: Weights of the partner of all games, or of one per game, (N, ...) each.
        seats: (N,) seat of the learner in each game; given with `partners`.
        begin: Changes the state in which the games start.
    """
    horizon, num_envs, device = env.horizon, env.num_envs, policy.scale.device
    # argmax(logits - log E) with E ~ Exp(1) samples from softmax(logits)
    noise = torch.empty((horizon, 2 * num_envs, NUM_ACTIONS)).exponential_(generator=generator).log_()
    players = np.arange(2 * num_envs)  # 2 * game + seat
    if partners is not None:
        seats = np.asarray(seats)
        players = np.concatenate([players[::2] + seats, players[1::2] - seats])  # the learner's, then the partners'
    learners = 2 * num_envs if partners is None else num_envs
    own, others = policy.player(), policy.player(partners)
    noise = noise[:, torch.from_numpy(players)].to(device)
    inputs = torch.empty((horizon + 1, learners, *policy.input_shape), device=device)
    outputs = torch.empty((horizon + 1, learners, NUM_ACTIONS + 1), device=device)
    seen = torch.empty((2 * num_envs, *policy.input_shape), device=device)
    joint = np.empty((horizon, 2 * num_envs), np.int64)
    sparse, shaped = np.empty((horizon, num_envs), np.float32), np.empty((horizon, num_envs, 2), np.float32)
    env.reset()
    if begin is not None:
        begin(env)
    for t in range(horizon + 1):
        inputs[t] = policy.see(env, seen, players)[:learners]
        outputs[t] = output = own(seen[:learners])
        if t == horizon:
            break
        if partners is not None:
            output = torch.cat([output, others(seen[learners:])])
        joint[t, players] = (output[:, :NUM_ACTIONS] - noise[t]).argmax(1).cpu().numpy()
        sparse[t], shaped[t], _ = env.step(joint[t].reshape(-1, 2))
    logits = outputs[:-1, :, :NUM_ACTIONS]
    return Rollout(
        inputs=inputs[:-1],
        actions=torch.from_numpy(joint[:, players[:learners]]).to(device),
        log_probs=logits - logits.logsumexp(-1, keepdim=True),  # log_softmax is slow along few actions
        values=outputs[..., NUM_ACTIONS],
        sparse=torch.from_numpy(sparse).to(device),
        shaped=torch.from_numpy(shaped).to(device),
        seats=None if partners is None else torch.as_tensor(seats, device=device),
    )


def shape_rewards(rollout: Rollout, shaping: float, *, team: bool) -> Tensor:
    """Sparse plus `shaping` times shaped reward of every learner's row, (T, L); `team` adds both players' shaping."""
    shaped = rollout.shaped.sum(-1, keepdim=True).expand_as(rollout.shaped) if team else rollout.shaped
    rewards = rollout.sparse.unsqueeze(-1) + shaping * shaped
    if rollout.seats is None:
        return rewards.flatten(1)
    return rewards.gather(2, rollout.seats.view(1, -1, 1).expand(len(rewards), -1, 1)).squeeze(2)


def advantages(rewards: Tensor, values: Tensor, *, gamma: float, decay: float) -> Tensor:
    """Generalised advantage estimates: rewards (T, L), values (T + 1, L) with the bootstrap last -> (T, L)."""
    deltas = rewards + gamma * values[1:] - values[:-1]
    span = 1
    while span < len(deltas):  # sums over `span` steps become sums over twice as many
        deltas[:-span] += (gamma * decay) ** span * deltas[span:]
        span *= 2
    return deltas


def losses(
    outputs: Tensor,
    actions: Tensor,
    old_log_prob: Tensor,
    old_value: Tensor,
    advantage: Tensor,
    *,
    config: PPOConfig,
    entropy_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy and value losses with an entropy term, on B samples.

    mean max(-A r, -A clip(r, 1 +- c)) - e H + v/2 mean max((V - R)^2, (clip(V, V_old +- c) - R)^2), with A normalised
    over the batch and R = A + V_old. Source: 2019 code, and the paper's released code.

    Args:
        outputs: (B, A + 1) logits and value.
        actions: (B,) int64.
        old_log_prob: (B,) of the actions when played.
        old_value: (B,).
        advantage: (B,), not normalised.
        config: Clip range and weight of the value loss.
        entropy_coef: Weight of the entropy.

    Returns:
        The loss and the parts to log.
    """
    count, clip, found = len(outputs), config.clip, outputs.detach().t().contiguous()
    log_probs, value = found[:NUM_ACTIONS].log_softmax(0), found[NUM_ACTIONS]  # fast along samples, slow along actions
    probs = log_probs.exp()
    std, mean = torch.std_mean(advantage, correction=0)
    normal = (advantage - mean) / (std + 1e-8)
    row = actions.unsqueeze(0)
    ratio = (log_probs.gather(0, row)[0] - old_log_prob).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    free, held = normal * ratio, normal * clipped
    target = advantage + old_value
    error = value - target
    near = value.clamp(old_value - clip, old_value + clip) - target
    square, square_near = error.square(), near.square()
    entropies = -(probs * log_probs).sum(0)
    policy_loss, value_loss = -torch.minimum(free, held).mean(), 0.5 * torch.maximum(square, square_near).mean()
    entropy = entropies.mean()
    loss = policy_loss - entropy_coef * entropy + config.value_coef * value_loss
    # what is held by a clip has no gradient; d log p_j / d logit_k = 1[j = k] - p_k
    push = free.masked_fill_(held < free, 0)
    found[:NUM_ACTIONS] = (entropy_coef * (log_probs + entropies) + push) * probs
    found[:NUM_ACTIONS].scatter_add_(0, row, -push.unsqueeze(0))
    found[NUM_ACTIONS] = config.value_coef * error.masked_fill_(square < square_near, 0)
    parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    parts["clip_frac"] = (ratio != clipped).float().mean()
    return _WithGradient.apply(outputs, loss, found.div_(count).t()), parts  # type: ignore[no-untyped-call]


class _WithGradient(torch.autograd.Function):
    """A number of which the gradient with respect to `outputs` is known: one operation of autograd instead of 50."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, number: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, None, None]:
        return above[0] * ctx.saved_tensors[0], None, None


class Learner:
    """A policy, its optimiser and the environment steps it has learned from."""

    def __init__(self, config: Config, layout: Layout, generator: torch.Generator | None = None) -> None:
        self.config = config.ppo
        self.policy = Policy(layout, config.encoding, config.net, generator).to(pick_device(config.device))
        rate, eps = self.config.learning_rate, self.config.adam_eps
        self.optimiser = torch.optim.Adam(self.policy.parameters(), lr=rate, eps=eps, fused=True)
        self.env_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns weights, optimiser and step count."""
        optimiser = self.optimiser.state_dict()
        return {"policy": self.policy.state_dict(), "optimiser": optimiser, "env_steps": self.env_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts a state back."""
        self.policy.load_state_dict(state["policy"])
        self.optimiser.load_state_dict(copy.deepcopy(state["optimiser"]))  # it would update the given moments in place
        self.env_steps = state["env_steps"]

    def update(
        self,
        rollout: Rollout,
        bonus: Tensor,
        generator: torch.Generator,
        *,
        total_steps: float,
        context: str,
        credit: Tensor | None = None,
        extra: Callable[[Policy], Tensor] | None = None,
    ) -> dict[str, float]:
        """Improves the policy on one rollout.

        Step size and entropy coefficient reach their final values after `total_steps` environment steps.

        Args:
            rollout: What was played.
            bonus: (T, L) or a scalar, added to the rewards in their raw unit.
            generator: Of the order of the minibatches.
            total_steps: Environment steps of the whole training.
            context: Who learns, for an error.
            credit: (T, L), added to the advantages in the raw unit of rewards.
            extra: A further objective in the raw unit of rewards, climbed at every optimiser step.

        Returns:
            Means of what is logged.

        Raises:
            DivergenceError: A loss or gradient is not finite, found before the optimiser applied it.
        """
        config = self.config
        shaping, left = (max(0.0, 1 - self.env_steps / steps) for steps in (config.shaping_steps, total_steps))
        entropy_coef = left * config.entropy_coef + (1 - left) * config.entropy_coef_final
        rate = left * config.learning_rate + (1 - left) * config.learning_rate_final
        self.optimiser.param_groups[0]["lr"] = rate
        rewards = config.reward_scale * (shape_rewards(rollout, shaping, team=config.team_shaping) + bonus)
        values = rollout.values.clone()
        values[-1] *= config.proper_time_limits
        advantage = advantages(rewards, values, gamma=config.gamma, decay=config.gae_lambda)
        if credit is not None:
            advantage += config.reward_scale * credit
        unit = config.reward_scale / (float(advantage.std()) + 1e-8)  # a raw unit once advantages are normalised
        played = rollout.log_probs.gather(-1, rollout.actions.unsqueeze(-1))
        columns = (rollout.actions, played, values[:-1], advantage)
        actions, old_log_prob, old_value, flat = (column.flatten() for column in columns)
        inputs = rollout.inputs.flatten(0, 1)
        names, weights = zip(*self.policy.named_parameters(), strict=True)
        sums: dict[str, Tensor] = {}
        for _ in range(config.epochs):
            order = torch.randperm(len(flat), generator=generator).to(flat.device)
            for batch in order.chunk(config.minibatches):
                outputs = self.policy(inputs.index_select(0, batch))
                old = [column.index_select(0, batch) for column in (actions, old_log_prob, old_value, flat)]
                loss, parts = losses(outputs, *old, config=config, entropy_coef=entropy_coef)
                if extra is not None:
                    loss = loss - unit * extra(self.policy)
                for weight in weights:  # zero_grad and clip_grad_norm_ look up more than they compute
                    weight.grad = None
                loss.backward()
                gradients: list[Any] = [weight.grad for weight in weights]
                norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
                if not bool((loss.detach() + norm).isfinite()):
                    check_finite(context, loss=loss, **dict(zip(names, gradients, strict=True)))
                    check_finite(context, gradient_norm=norm)
                scale = (config.max_grad_norm / (norm + 1e-6)).clamp(max=1)
                for gradient in gradients:
                    gradient.mul_(scale)
                self.optimiser.step()
                for name, part in {**parts, "loss": loss.detach(), "grad_norm": norm}.items():
                    sums[name] = sums.get(name, 0) + part
        self.env_steps += rollout.sparse.numel()
        means = {name: float(value) / (config.epochs * config.minibatches) for name, value in sums.items()}
        shaped = rollout.shaped.sum((0, 2)).mean()
        return {"return": float(rollout.sparse.sum(0).mean()), "shaped": float(shaped), **means}
