"""Losses as functions of tensors: softmax with smoothing, circle softmax, batch-hard triplets, circle loss.

Shapes: B images, F features, K people.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sextet.core.errors import UsageError
from sextet.reid.heads import Outputs
from sextet.reid.settings import LossConfig


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Distances between rows, (N, F) and (M, F) -> (N, M); the gradient is finite where rows coincide."""
    squared = a.square().sum(1, keepdim=True) + b.square().sum(1) - 2 * a @ b.T
    return squared.clamp_min(1e-12).sqrt()


def hardest(features: Tensor, labels: Tensor, anchors: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Distances of each anchor to its farthest positive and nearest negative (Hermans et al. 2017).

    Args:
        features: (B, F).
        labels: (B,).
        anchors: Which of them are anchors; the others only serve as positives and negatives.

    Returns:
        Two tensors, one value an anchor. The anchor itself counts as a positive at distance 0.

    Raises:
        UsageError: An anchor has no negative, or no anchor has another positive: triplets need several people with
            several images each.
    """
    same = labels[anchors, None] == labels
    if bool(same.all(1).any()):
        raise UsageError(f"triplets need two people or more in a batch; this one has {len(labels.unique())}")
    if int(same.sum()) == len(same):
        raise UsageError("triplets need two images of a person or more in a batch; here everybody has one")
    distances = euclidean(features[anchors], features)
    return distances.where(same, 0.0).amax(1), distances.where(~same, torch.inf).amin(1)


def batch_hard(features: Tensor, labels: Tensor, margin: float | None, anchors: slice = slice(None)) -> Tensor:
    """Mean batch-hard triplet loss with Euclidean distances (Hermans et al. 2017, eq. 5).

    Args:
        features: (B, F), as they are: normalise before, if wanted.
        labels: (B,).
        margin: The margin; None for the soft one, log(1 + exp(x)).
        anchors: Which of them are anchors.

    Raises:
        UsageError: As :func:`hardest`.
    """
    positive, negative = hardest(features, labels, anchors)
    if margin is None:
        return functional.softplus(positive - negative).mean()
    return functional.relu(margin + positive - negative).mean()


def circle_loss(features: Tensor, labels: Tensor, *, margin: float = 0.6, scale: float = 80.0) -> Tensor:
    """Pair-wise circle loss on cosines (Sun et al. 2020, eq. 6), as the public implementation of RMGL uses it."""
    unit = functional.normalize(features)
    cosines = unit @ unit.T
    same = labels[:, None] == labels
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    weight_p = functional.relu(-cosines.detach() + 1 + margin)
    weight_n = functional.relu(cosines.detach() + margin)
    positive = (-scale * weight_p * (cosines - (1 - margin))).where(same & ~itself, -torch.inf)
    negative = (scale * weight_n * (cosines - margin)).where(~same, -torch.inf)
    return functional.softplus(positive.logsumexp(1) + negative.logsumexp(1)).mean()


def circle_softmax(cosines: Tensor, labels: Tensor, *, scale: float, margin: float, smoothing: float) -> Tensor:
    """Softmax loss whose cosines are scaled by how far they are from their optimum (Sun et al. 2020, eq. 7).

    Args:
        cosines: (B, K).
        labels: (B,).
        scale: Factor on all logits.
        margin: Relaxation; the optimum of the own class is 1 + margin, of the others -margin.
        smoothing: Label smoothing.
    """
    own = functional.one_hot(labels, cosines.shape[1]).bool()
    positive = functional.relu(-cosines.detach() + 1 + margin) * (cosines - (1 - margin))
    negative = functional.relu(cosines.detach() + margin) * (cosines - margin)
    return functional.cross_entropy(scale * torch.where(own, positive, negative), labels, label_smoothing=smoothing)


def total_loss(
    outputs: Outputs, labels: Tensor, config: LossConfig, *, metric_weight: float, cosine: bool, shares: Shares
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted mean of the softmax losses plus weighted mean of the metric losses.

    Args:
        outputs: Of a network in training.
        labels: (B,) places in the sorted training people.
        config: Kinds and weights.
        metric_weight: Factor on the metric loss at this step.
        cosine: Whether logits are cosines.
        shares: Gathers features and labels from all ranks, so that triplets see the whole batch.

    Returns:
        The loss and its parts, for the log.
    """
    scale, margin, smoothing = config.circle_scale, config.circle_margin, config.smoothing
    losses = [
        circle_softmax(logits, labels, scale=scale, margin=margin, smoothing=smoothing)
        if cosine
        else functional.cross_entropy(logits, labels, label_smoothing=smoothing)
        for logits in map(exact, outputs.logits)
    ]
    softmax = torch.stack(losses).mean()
    loss, parts = config.softmax * softmax, {"softmax_loss": softmax.detach()}
    features = chosen_features(outputs, config.features)
    if features and metric_weight > 0 and config.metric > 0:
        everyone, anchors = shares.labels(labels)
        terms = []
        for feature in features:
            feature = exact(feature)
            feature = shares.gather(functional.normalize(feature) if config.normalise else feature)
            if config.kind == "circle":
                terms.append(circle_loss(feature, everyone))
            else:
                terms.append(
                    batch_hard(feature, everyone, config.margin if config.kind == "triplet" else None, anchors)
                )
        metric = torch.stack(terms).mean()
        loss = loss + metric_weight * config.metric * metric
        parts["metric_loss"] = metric.detach()
    return loss, parts


def exact(x: Tensor) -> Tensor:
    """In float32 at least: differences of distances and of logits are lost in 16 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def chosen_features(outputs: Outputs, which: str) -> list[Tensor]:
    """Features under the metric loss: whole-image ones, also all stripes, or also each branch's joined stripes."""
    branches = [parts for parts in outputs.locals if parts]
    if which == "all":
        return outputs.globals + [part for parts in branches for part in parts]
    if which == "concat":
        return outputs.globals + [torch.cat(parts, 1) for parts in branches]
    return outputs.globals


class Shares:
    """The ranks' shares of a batch. With one rank nothing is gathered."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def gather(self, features: Tensor) -> Tensor:
        """Own (b, F) of every rank -> all (B, F), with gradients to every rank."""
        if self.size == 1:
            return features
        from torch.distributed.nn.functional import all_gather

        return torch.cat(tuple(all_gather(features)))

    def labels(self, own: Tensor) -> tuple[Tensor, slice]:
        """Own labels (b,) -> all (B,), and which of them are this rank's."""
        if self.size == 1:
            return own, slice(None)
        from torch import distributed

        everyone = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(everyone, own)
        return torch.cat(everyone), slice(self.rank * len(own), (self.rank + 1) * len(own))
