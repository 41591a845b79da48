"""PPO on batches of whole games: collect, estimate advantages, improve.

Everything random comes from a generator that the caller makes from a key, and every update starts from a state
dict and returns one, so that a result does not depend on where or in which order updates run.

Legend: T steps of an episode, N games, L learner's rows (2N when both seats learn, else N), A actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
    horizon, rows, device = env.horizon, 2 * env.num_envs, policy.scale.device
    inputs = torch.empty((horizon + 1, rows, *policy.input_shape), device=device)
    outputs = torch.empty((horizon + 1, rows, NUM_ACTIONS + 1), device=device)
    actions = torch.empty((horizon, rows), dtype=torch.int64, device=device)
    sparse, shaped = torch.empty((horizon, env.num_envs)), torch.empty((horizon, env.num_envs, 2))
    # argmax(logits - log E) with E ~ Exp(1) samples from softmax(logits)
    noise = torch.empty((horizon, rows, NUM_ACTIONS)).exponential_(generator=generator).log_().to(device)
    seats = None if partners is None else torch.as_tensor(seats, device=device)
    own = torch.arange(rows, device=device) if seats is None else torch.arange(0, rows, 2, device=device) + seats
    env.reset()
    if begin is not None:
        begin(env)
    for t in range(horizon + 1):
        policy.encode(env.observe(policy.encoding), inputs[t])
        if partners is None:
            outputs[t] = policy(inputs[t])
        else:
            outputs[t, own] = policy(inputs[t, own])
            outputs[t, own ^ 1] = policy(inputs[t, own ^ 1], partners)
        if t < horizon:
            torch.argmax(outputs[t, :, :NUM_ACTIONS] - noise[t], dim=1, out=actions[t])
            reward, per_player, _ = env.step(actions[t].view(-1, 2).cpu().numpy())
            sparse[t], shaped[t] = torch.from_numpy(reward), torch.from_numpy(per_player)
    if seats is not None:
        inputs, outputs, actions = inputs[:, own], outputs[:, own], actions[:, own]
    return Rollout(
        inputs=inputs[:-1],
        actions=actions,
        log_probs=outputs[:-1, :, :NUM_ACTIONS].log_softmax(-1),
        values=outputs[..., NUM_ACTIONS],
        sparse=sparse.to(device),
        shaped=shaped.to(device),
        seats=seats,
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
    for t in range(len(deltas) - 2, -1, -1):
        deltas[t].add_(deltas[t + 1], alpha=gamma * decay)
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
    log_probs, value = outputs[:, :NUM_ACTIONS].log_softmax(-1), outputs[:, NUM_ACTIONS]
    normal = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    ratio = (log_probs.gather(1, actions.unsqueeze(1)).squeeze(1) - old_log_prob).exp()
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    policy_loss = -torch.minimum(normal * ratio, normal * clipped).mean()
    target = advantage + old_value
    near = old_value + (value - old_value).clamp(-config.clip, config.clip)
    value_loss = 0.5 * torch.maximum((value - target).square(), (near - target).square()).mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    loss = policy_loss - entropy_coef * entropy + config.value_coef * value_loss
    moved = (ratio.detach() != clipped.detach()).float().mean()
    parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "clip_frac": moved}
    return loss, {name: part.detach() for name, part in parts.items()}


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
        self.optimiser.load_state_dict(state["optimiser"])
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
        sums: dict[str, Tensor] = {}
        for _ in range(config.epochs):
            order = torch.randperm(len(flat), generator=generator).to(flat.device)
            for batch in order.chunk(config.minibatches):
                outputs = self.policy(inputs.index_select(0, batch))
                old = (actions[batch], old_log_prob[batch], old_value[batch], flat[batch])
                loss, parts = losses(outputs, *old, config=config, entropy_coef=entropy_coef)
                if extra is not None:
                    loss = loss - unit * extra(self.policy)
                self.optimiser.zero_grad()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(self.policy.parameters(), config.max_grad_norm)
                if not bool((loss.detach() + norm).isfinite()):
                    named = {name: weight.grad for name, weight in self.policy.named_parameters()}
                    check_finite(context, loss=loss, **named)  # type: ignore[arg-type]
                    check_finite(context, gradient_norm=norm)
                self.optimiser.step()
                for name, part in {**parts, "loss": loss.detach(), "grad_norm": norm}.items():
                    sums[name] = sums.get(name, 0) + part
        self.env_steps += rollout.sparse.numel()
        means = {name: float(value) / (config.epochs * config.minibatches) for name, value in sums.items()}
        shaped = rollout.shaped.sum((0, 2)).mean()
        return {"return": float(rollout.sparse.sum(0).mean()), "shaped": float(shaped), **means}
