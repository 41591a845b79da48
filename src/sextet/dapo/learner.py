"""The update: groups to advantages, mini-batches, packed rows, loss, one optimiser step each."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sextet.core.device import Device
from sextet.core.errors import DataError, DivergenceError
from sextet.core.files import write_json
from sextet.core.run import Run
from sextet.dapo.groups import Group
from sextet.dapo.logprob import token_scores
from sextet.dapo.loss import MONITORED, Tokens, advantages, overlong_penalty, policy_loss, token_weights
from sextet.dapo.packing import Piece, best_rows, build, micro_batches
from sextet.dapo.ranks import gather, shard, sum_gradients, sum_scalars, whole
from sextet.dapo.rollout import Answer
from sextet.dapo.settings import Config


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An answer with all that its loss needs."""

    group: int
    prompt: list[int]
    answer: Answer
    advantage: float
    penalty: float
    """The soft overlong punishment in its reward."""
    kept: bool
    """Whether it has a loss; overlong filtering takes it from answers that were cut off."""


def samples_of(groups: Sequence[Group], config: Config) -> tuple[list[Sample], dict[str, float]]:
    """Returns the answers of groups with their advantages, and means for the logs."""
    loss, sampling = config.loss, config.sampling
    rewards, index, punished = [], [], []
    for number, group in enumerate(groups):
        for answer, score in zip(group.answers, group.scores, strict=True):
            penalty = overlong_penalty(len(answer.tokens), sampling.max_tokens, sampling.cache_tokens)
            punished.append((loss.overlong_punishment or 0.0) * penalty)
            rewards.append(score + punished[-1])
            index.append(number)
    found = advantages(torch.tensor(rewards), torch.tensor(index, dtype=torch.long), str(loss.advantage))
    answers = [answer for group in groups for answer in group.answers]
    samples = [
        Sample(
            group=number,
            prompt=groups[number].prompt,
            answer=answer,
            advantage=advantage,
            penalty=penalty,
            kept=answer.stopped or not loss.overlong_filter,
        )
        for number, answer, advantage, penalty in zip(index, answers, found.tolist(), punished, strict=True)
    ]
    return samples, {
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards)),
        "reward/length_penalty": float(np.mean(punished)),
    }


class Scorer(nn.Module):
    """A model as training sees it: rows to log-probabilities and entropies."""

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, source: Tensor, target: Tensor) -> Any:
        """Returns both, (n,), of the tokens of :class:`sextet.dapo.packing.Rows`."""
        hidden = self.model(tokens, positions, mask).flatten(0, 1)[source]
        return token_scores(hidden, self.model.head, target, self.temperature)  # type: ignore[arg-type]


class Learner:
    """The policy and its optimiser.

    Args:
        model: As `decoder.Decoder`.
        config: With no field left to the method.
        device: Where to compute, and the ranks.
    """

    def __init__(self, model: nn.Module, config: Config, device: Device) -> None:
        self.config, self.device, optim = config, device, config.optim
        self.model = model.to(device.device)
        self.model.checkpointing = optim.checkpointing  # type: ignore[assignment]
        self.width = int(model.head.shape[1])  # type: ignore[index]
        reference = copy.deepcopy(model).eval() if config.loss.kl else None
        self.scorer = Scorer(model, config.sampling.temperature)
        self.reference = None if reference is None else Scorer(reference, config.sampling.temperature)
        self.sharded = optim.shard and device.world.size > 1
        if self.sharded:
            for scorer in filter(None, (self.scorer, self.reference)):
                shard(scorer, layers_of(scorer.model))
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(
            self.parameters, optim.learning_rate, weight_decay=optim.weight_decay, fused=True
        )
        self.bad = 0

    def update(self, samples: Sequence[Sample], run: Run) -> dict[str, float]:
        """Learns from the answers of a step; returns means for the logs.

        Raises:
            DivergenceError: Too many updates in a row were not finite.
        """
        config, optim = self.config, self.config.optim
        rate = optim.learning_rate * min(1.0, (run.step + 1) / optim.warmup if optim.warmup else 1.0)
        for setting in self.optimiser.param_groups:
            setting["lr"] = rate
        old = self._scores(self.scorer, samples) if config.loss.old == "recompute" else None
        reference = self._scores(self.reference, samples) if self.reference is not None else None
        totals: dict[str, float] = {}
        norms, losses, skipped, idle = [], [], 0, 0
        for number in range(optim.passes):
            place = run.rng("update", run.step, number).numpy.permutation(1 + samples[-1].group)
            arranged = sorted(range(len(samples)), key=lambda index: (place[samples[index].group], index))
            for part in np.array_split(np.array(arranged), min(optim.minibatches, len(arranged))):
                chosen = part.tolist()
                try:
                    loss, norm, sums = self._step(samples, chosen, old, reference)
                except DivergenceError as error:
                    skipped += 1
                    self.bad += 1
                    file = f"skipped/{run.step:06}-{skipped}.json"
                    run.event("update skipped", step=run.step, error=str(error), batch=file)
                    if self.device.world.is_main:
                        write_batch(run, file, [samples[index] for index in chosen])
                    if self.bad >= optim.max_bad:
                        raise
                    continue
                self.bad = 0
                idle += not sums["tokens"]
                losses.append(loss)
                norms.append(norm)
                for name, value in sums.items():
                    totals[name] = totals.get(name, 0.0) + value
        return self._logs(totals, losses, norms, rate) | {"train/skipped": float(skipped), "train/idle": float(idle)}

    def _step(
        self, samples: Sequence[Sample], chosen: Sequence[int], old: dict[int, Tensor] | None,
        reference: dict[int, Tensor] | None,
    ) -> tuple[float, float, dict[str, float]]:  # fmt: skip
        """One optimiser step on a mini-batch."""
        config = self.config
        batch = [samples[index] for index in chosen]
        weights = token_weights(
            [len(sample.answer.tokens) for sample in batch], [sample.group for sample in batch],
            str(config.loss.aggregate), horizon=config.sampling.max_tokens, kept=[sample.kept for sample in batch],
        )  # fmt: skip
        weight = dict(zip(chosen, weights.tolist(), strict=True))
        # without an advantage and other terms an answer has no gradient; it counts in the weights of the others
        idle = not config.loss.kl and not config.loss.entropy
        active = [i for i in chosen if weight[i] and not (idle and samples[i].advantage == 0)]
        self.optimiser.zero_grad(set_to_none=True)
        total, sums = 0.0, dict.fromkeys(MONITORED, 0.0)
        for rows, counts in self._rows(samples, active):
            logp, entropy, answers, index = self._forward(self.scorer, rows)
            logs = [samples[i].answer.logp for i in answers]
            rollout = torch.tensor([value for values in logs for value in values], device=logp.device)
            tokens = Tokens(
                old=rollout if old is None else torch.cat([old[i] for i in answers]).to(logp.device),
                rollout=rollout,
                advantage=_spread([samples[i].advantage for i in answers], logs, logp),
                weight=_spread([weight[i] * counts for i in answers], logs, logp),
                answer=index,
                reference=None if reference is None else torch.cat([reference[i] for i in answers]).to(logp.device),
            )
            loss, found = policy_loss(logp, entropy, tokens, config.loss)
            loss.backward()
            total += float(loss.detach())
            for name, value in found.items():
                sums[name] += float(value) * counts
        sum_gradients(self.parameters, self.device.world)
        sums = sum_scalars({"loss": total, **sums}, self.device.world)
        total = sums.pop("loss")
        if not active:
            return 0.0, 0.0, sums
        norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters, config.optim.clip))
        if not bool(norm.isfinite()):
            self.optimiser.zero_grad(set_to_none=True)
            raise DivergenceError(f"the gradient's norm is {float(norm)}; nothing was applied")
        self.optimiser.step()
        return total, float(norm), sums

    def _rows(self, samples: Sequence[Sample], chosen: Sequence[int]) -> Iterator[tuple[list[list[Piece]], bool]]:
        """Yields the micro-batches of this rank, and whether they count: sharded ranks make equally many passes."""
        world, limit = self.device.world, self.config.optim.micro_tokens
        pieces = [
            Piece(index=i, group=samples[i].group, prompt=samples[i].prompt, answer=samples[i].answer.tokens)
            for i in chosen
        ]
        rows = best_rows(pieces, limit, self.width)
        shares = [micro_batches(rows[rank :: world.size], limit) for rank in range(world.size)]
        own = shares[world.rank]
        yield from ((batch, True) for batch in own)
        if self.sharded:
            yield from (([rows[0][:1]], False) for _ in range(max(map(len, shares)) - len(own)))

    def _forward(self, scorer: Scorer, pieces: list[list[Piece]]) -> tuple[Tensor, Tensor, list[int], Tensor]:
        """Returns log-probabilities and entropies (n,), the answers in their order, and each token's answer (n,)."""
        rows = build(pieces)
        *inputs, index = self.device.move(
            (rows.tokens, rows.positions, rows.mask, rows.source, rows.target, rows.answer)
        )
        with self.device.autocast():
            logp, entropy = scorer(*inputs)
        return logp, entropy, rows.answers, index

    @torch.no_grad()
    def _scores(self, scorer: Scorer, samples: Sequence[Sample]) -> dict[int, Tensor]:
        """Returns the log-probabilities under a model of the tokens of every answer that this rank trains on."""
        found: dict[int, Tensor] = {}
        for rows, _ in self._rows(samples, range(len(samples))):
            logp, _, answers, _ = self._forward(scorer, rows)
            found.update(zip(answers, logp.split([len(samples[i].answer.tokens) for i in answers]), strict=True))
        return gather(found, self.device.world)

    def _logs(
        self, totals: dict[str, float], losses: Sequence[float], norms: Sequence[float], rate: float
    ) -> dict[str, float]:
        """Means over tokens and updates."""
        tokens = max(totals.pop("tokens", 0.0), 1.0)
        above = totals.get("clip_high", 0.0)
        probability = totals.pop("clip_high_probability", 0.0)
        means = {f"policy/{name}": value / tokens for name, value in totals.items()}
        if above:
            means["policy/clip_high_probability"] = probability / above
        return means | {
            "train/loss": float(np.mean(losses)) if losses else 0.0,
            "train/grad_norm": float(np.mean(norms)) if norms else 0.0,
            "train/learning_rate": rate,
            "train/tokens": tokens,
        }


def write_batch(run: Run, name: str, batch: Sequence[Sample]) -> None:
    """Writes the answers of an update that was skipped to an artifact; a disk that takes nothing costs a warning."""
    try:
        write_json(run.artifact(name), [asdict(sample) for sample in batch])
    except (DataError, OSError) as error:
        run.event("batch lost", step=run.step, error=str(error))


def layers_of(model: Any) -> list[nn.Module]:
    """Returns the layers of a decoder, ours or one of transformers."""
    body = model.model if hasattr(model, "model") else model.network.base_model
    for name in ("layers", "h"):
        if hasattr(body, name):
            return list(getattr(body, name))
    return []


def _spread(values: Sequence[float], tokens: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """Repeats each answer's value for its tokens."""
    counts = torch.tensor([len(part) for part in tokens])
    return torch.tensor(values, dtype=like.dtype).repeat_interleave(counts).to(like.device)
