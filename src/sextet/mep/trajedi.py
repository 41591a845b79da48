"""TrajeDi: a population whose trajectories differ, the baseline of MEP's stage 1.

The population climbs sum_i [return of i + w T JSD_i], JSD_i being member i's share of the Jensen-Shannon divergence of
the trajectory distributions. With log delta_i,t = sum_t' gamma^|t-t'| log pi_i(a_t'|s_t') on a trajectory of member i,

    g_t = log delta_i,t - log mean_j delta_j,t        JSD_i = E[mean_t g_t]

gamma 0 is the divergence of single actions, 1 of whole trajectories. Its gradient has three parts: the return that g
brings (a reward, paid late enough to be credited to all actions whose kernel reaches it), the explicit dependence
of g on the member's own actions (credit beside the advantages), and the dependence of the other members' g on this
member's policy (a likelihood term on their games). Source: Lupu and others 2021 ("Trajectory diversity for zero-shot
coordination"); the estimator is ours, and the weight is in units of raw reward per nat and step, as MEP's alpha.

Legend: n members, T steps, L rows of a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sextet.core.seeding import torch_rng
from sextet.mep.config import Config
from sextet.mep.jobs import Parts
from sextet.mep.overcooked import Overcooked
from sextet.mep.policy import NUM_ACTIONS, Policy, log_policy
from sextet.mep.ppo import Learner, collect

NEGLIGIBLE = 0.05  # weight of the kernel beyond which an action's effect on g is left to the return


def smooth(values: Tensor, gamma: float) -> Tensor:
    """sum_t' gamma^|t-t'| values[t'] along the last but one axis: (..., T, L) -> (..., T, L); 0^0 is 1."""
    time = torch.arange(values.shape[-2])
    distance = (time.unsqueeze(0) - time.unsqueeze(1)).abs()
    kernel = torch.full(distance.shape, float(gamma)).pow(distance).to(values)
    return kernel @ values


def divergence(log_probs: Tensor, member: int, gamma: float) -> tuple[Tensor, Tensor]:
    """Terms g of one member's trajectories, and how they move with every member's policy.

    Args:
        log_probs: (n, T, L) of the actions that `member` took, under each member.
        member: Whose trajectories they are.
        gamma: Reach of the kernel, 0 to 1.

    Returns:
        g (T, L), and d(sum_t g_t) / d(log pi_j(a_t|s_t)) of every member j, (n, T, L).
    """
    log_delta = smooth(log_probs, gamma)
    g = log_delta[member] - torch.logsumexp(log_delta, 0) + math.log(len(log_probs))
    share = -torch.softmax(log_delta, 0)
    share[member] += 1
    return g, smooth(share, gamma)


def delay(g: Tensor, gamma: float) -> Tensor:
    """Shifts (T, L) terms until their kernel is negligible; what would come after the end comes at the last step."""
    steps = len(g)
    late = 0 if gamma == 0 else steps - 1 if gamma == 1 else math.ceil(math.log(NEGLIGIBLE) / math.log(gamma))
    late = min(late, steps - 1)
    paid = torch.zeros_like(g)
    paid[late:] = g[: steps - late]
    paid[-1] += g[steps - late :].sum(0)
    return paid


def update_trajedi(
    config: Config, env: Overcooked, states: Sequence[dict[str, Any]], index: int, key: int
) -> tuple[dict[str, Any], Parts]:
    """One iteration of a whole population, a `Job`: its members need each other's games.

    Args:
        config: Settings.
        env: Games.
        states: States of the members of all populations.
        index: Which population.
        key: Of its random streams.

    Returns:
        "states" and "parts" (what to log) of the members of this population; and nothing more to log.
    """
    options, gamma = config.population, config.trajedi.gamma
    learners = [Learner(config, env.layout) for _ in range(options.size)]
    for learner, state in zip(learners, states[index * options.size :], strict=False):
        learner.load_state_dict(state)
    rows: list[Parts] = []
    for turn in range(options.updates_per_iteration):
        rollouts = [
            collect(env, learner.policy, torch_rng(key, "rollout", turn, member))
            for member, learner in enumerate(learners)
        ]
        inputs = torch.cat([rollout.inputs.flatten(0, 1) for rollout in rollouts])
        actions = torch.cat([rollout.actions.flatten() for rollout in rollouts])
        every = torch.stack([log_policy(learner.policy, inputs) for learner in learners])
        chosen = every.gather(-1, actions.expand(len(learners), -1).unsqueeze(-1)).squeeze(-1)
        shape, own = rollouts[0].actions.shape, len(actions) // len(learners)
        terms = [divergence(part.view(-1, *shape), member, gamma) for member, part in enumerate(chosen.split(own, 1))]
        slopes = torch.cat([slope.flatten(1) for _, slope in terms], 1)  # (n, samples of all)
        parts = []
        for member, learner in enumerate(learners):
            g = terms[member][0]
            extra = None
            if len(learners) > 1 and config.trajedi.weight:
                samples = inputs, actions, slopes[member]
                extra = _likelihood(config, samples, member, own, torch_rng(key, "partner", turn, member))
            logged = learner.update(
                rollouts[member],
                config.trajedi.weight * delay(g, gamma),
                torch_rng(key, "update", turn, member),
                total_steps=options.steps,
                context=f"population {index}, member {member}, {learner.env_steps} environment steps",
                credit=config.trajedi.weight * terms[member][1][member],
                extra=extra,
            )
            parts.append({"divergence": float(g.mean()), **logged})
        rows = parts
    return {"states": [learner.state_dict() for learner in learners], "parts": rows}, {}


def _likelihood(
    config: Config, samples: tuple[Tensor, Tensor, Tensor], member: int, own: int, generator: torch.Generator
) -> Callable[[Policy], Tensor]:
    """The third part of the gradient, on as many of the others' samples as a minibatch has.

    Args:
        config: Settings.
        samples: Inputs, actions and slopes of all members, `own` rows of each.
        member: Whose policy climbs it.
        own: Rows of one member.
        generator: Of the choice of samples.
    """
    inputs, actions, slopes = samples
    others = len(actions) // own - 1
    size = config.ppo.num_envs * config.ppo.horizon * 2 // config.ppo.minibatches

    def extra(policy: Policy) -> Tensor:
        rows = torch.randint(others * own, (size,), generator=generator)
        rows += own * (rows >= member * own)  # the member's own samples are left out
        logits = policy(inputs.index_select(0, rows))[:, :NUM_ACTIONS]
        chosen = logits.gather(1, actions[rows].unsqueeze(1)).squeeze(1) - logits.logsumexp(1)
        gain: Tensor = config.trajedi.weight * others * (slopes[rows] * chosen).mean()
        return gain

    return extra
