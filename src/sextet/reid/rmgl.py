"""Receptive multi-granularity network (Wang et al. 2020), as far as it is known.

The paper's abstract gives the outline: stripes are cut on an intermediate feature map, so that what a stripe sees is
limited to its region; local features are pooled from bands that adapt to where activations lie; images are shifted at
random; two branches of different scale. Everything else here is our decision; the folder's README lists them.

The shared stem and res2 feed one branch for each number n of bands. Both paths of a branch use the same weights:

- the global path runs the whole map and pools it to one vector;
- the local path cuts the map of `cut` into n equal bands, runs each by itself (zero padding at the cuts: nothing
  crosses them), joins them again and pools n vectors from bands balanced by activation.

Shapes: B images, C channels, H and W rows and columns, n bands, F features.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sextet.core.config import require
from sextet.core.errors import UsageError
from sextet.reid.heads import Classifier, Outputs, Pool, Reduction, even_cuts, feature_part, names_of
from sextet.reid.resnet import Stages, without_stride
from sextet.reid.settings import ModelConfig

CUTS = ("input", "res2", "res3", "res4", "output")


def balanced_bands(x: Tensor, bands: int) -> Tensor:
    """Assigns the rows of each map to bands that hold equal shares of activation.

    Every channel votes for the row of its maximum (the first of equal ones). With v(h) votes for row h, of C, and N(h)
    for the rows up to it, row h belongs to band floor(n (N(h) - v(h) / 2) / C). Bands are contiguous, because N never
    falls. No gradient passes.

    Args:
        x: (B, C, H, W).
        bands: n.

    Returns:
        (B, H) int64, from 0 to n - 1, never falling; a band can be empty.
    """
    return (_position(x, bands) // (2 * x.shape[1])).clamp(0, bands - 1)


def _position(x: Tensor, bands: int) -> Tensor:
    """n (2 N(h) - v(h)), (B, H): the position of each row in whole numbers, of which 2 C make a band."""
    rows = x.detach().amax(3).argmax(2)
    votes = torch.zeros(x.shape[0], x.shape[2], dtype=torch.int64, device=x.device)
    votes = votes.scatter_add_(1, rows, torch.ones_like(rows))
    position: Tensor = bands * (2 * votes.cumsum(1) - votes)
    return position


def pool_bands(x: Tensor, bands: int, kind: str) -> Tensor:
    """Activation-balanced pooling: pools each band of :func:`balanced_bands`; an empty band takes the nearest row.

    Args:
        x: (B, C, H, W).
        bands: n.
        kind: "max", or any other for the mean.

    Returns:
        (B, C, n), finite for any votes.
    """
    place = torch.arange(bands, device=x.device)
    position = _position(x, bands)
    inside = (position // (2 * x.shape[1])).clamp(0, bands - 1)[:, None] == place[:, None]  # (B, n, H)
    distance = (position[:, None] - (2 * place[:, None] + 1) * x.shape[1]).abs()
    nearest = distance == distance.amin(2, keepdim=True)
    nearest &= nearest.cumsum(2) == 1
    inside = inside | (nearest & ~inside.any(2, keepdim=True))
    if kind == "max":
        rows = x.amax(3)
        return torch.stack([rows.masked_fill(~band[:, None], -torch.inf).amax(2) for band in inside.unbind(1)], 2)
    share = inside.to(x.dtype)
    return torch.einsum("bch,bnh->bcn", x.mean(3), share / share.sum(2, keepdim=True))


class BalancedPool(Pool):
    """Pools into bands that hold equal shares of activation."""

    def pooled(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, n)."""
        return pool_bands(x, self.stripes, self.kind)


def cut_rows(bands: Tensor, count: int) -> Tensor:
    """Bands of rows (B, H) -> the rows between them as shares of the height, (B, n + 1), from 0 to 1."""
    below = bands[:, None] < torch.arange(count + 1, device=bands.device)[:, None]
    return below.sum(2) / bands.shape[1]


class BandNorm(nn.Module):
    """Batch normalisation with statistics of their own for whole maps and for bands; the weights are shared."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.whole, self.bands = norm, copy.deepcopy(norm)
        self.bands.weight, self.bands.bias = norm.weight, norm.bias
        self.of_bands = False

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> the same shape."""
        norm: nn.BatchNorm2d = self.bands if self.of_bands else self.whole
        y: Tensor = norm(x)
        return y


def _separate_norms(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, BandNorm(child))
        elif not isinstance(child, BandNorm):  # branches that share their weights come here again
            _separate_norms(child)


class Branch(nn.Module):
    """One branch: global and local path through the same stages, with heads for 1 + n features."""

    def __init__(self, stages: nn.ModuleList, bands: int, channels: int, people: int, config: ModelConfig) -> None:
        super().__init__()
        self.stages = stages
        self.bands, self.balanced, self.cut = bands, config.bands == "abp", CUTS.index(config.cut)
        self.pool = Pool(config.pool, 1)
        self.stripes = (BalancedPool if self.balanced else Pool)(config.pool, bands, strict=config.strict_stripes)
        self.joint, size = config.head == "joint", config.feature_size
        count = 1 + bands
        widths = [(channels * count, size * count)] if self.joint else [(channels, size)] * count
        self.reductions = nn.ModuleList(Reduction(inner, outer, config.neck) for inner, outer in widths)
        self.classifiers = nn.ModuleList(Classifier(outer, people, config.classifier) for _, outer in widths)
        if config.band_bn == "separate":
            _separate_norms(self.stages)

    def _run(self, x: Tensor, part: slice, *, of_bands: bool) -> Tensor:
        for module in self.stages.modules():
            if isinstance(module, BandNorm):
                module.of_bands = of_bands
        for stage in self.stages[part]:
            x = stage(x)
        return x

    def maps(self, x: Tensor, banded: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the last maps of the global and of the local path, (B, C, H', W') each.

        Args:
            x: The map after res2.
            banded: The same for images cut at the input, whose bands went through the trunk apart.
        """
        first = max(self.cut - 1, 0)  # stage after the cut; both paths share those before
        before = self._run(x, slice(first), of_bands=False)
        whole = self._run(before, slice(first, None), of_bands=False)
        if self.cut == len(CUTS) - 1:
            return whole, whole
        if banded is None:
            banded = split_bands(before, self.bands)
        local = join_bands(self._run(banded, slice(first, None), of_bands=True), self.bands)
        if local.shape != whole.shape and self.stripes.strict:
            raise UsageError(
                f"{self.bands} bands have {local.shape[2]} rows together on the last map, the whole image "
                f"{whole.shape[2]}: choose a height_px that is a multiple of {16 * self.bands}, or "
                "--model.no-strict-stripes"
            )
        return whole, local

    def vectors(self, x: Tensor, banded: Tensor | None) -> list[Tensor]:
        """Returns the pooled vectors of the whole and of each band, (B, C) each."""
        whole, local = self.maps(x, banded)
        vectors = [self.pool(whole).squeeze(2), *self.stripes(local).unbind(2)]
        return [torch.cat(vectors, 1)] if self.joint else vectors

    def forward(self, x: Tensor, banded: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Returns each reduced vector twice: for the metric loss, and to classify and test with."""
        vectors = self.vectors(x, banded)
        return [reduction(vector) for reduction, vector in zip(self.reductions, vectors, strict=True)]


def split_bands(x: Tensor, bands: int) -> Tensor:
    """Cuts maps into equal bands stacked as images, (B, C, H, W) -> (B n, C, H / n, W).

    Raises:
        UsageError: n does not divide H.
    """
    height = x.shape[2]
    if height % bands:
        raise UsageError(f"{bands} bands do not divide a map of {height} rows: choose another height_px or --model.cut")
    banded: Tensor = x.unflatten(2, (bands, height // bands))
    return banded.transpose(1, 2).flatten(0, 1)


def join_bands(x: Tensor, bands: int) -> Tensor:
    """Undoes :func:`split_bands`: (B n, C, h, W) -> (B, C, n h, W)."""
    banded: Tensor = x.unflatten(0, (-1, bands))
    return banded.transpose(1, 2).flatten(2, 3)


class RMGL(nn.Module):
    """The network.

    In training it returns :class:`Outputs`; else the test feature (B, feature_size), 1792 long by default, not
    normalised.

    Args:
        stages: A trunk in pieces; branches begin as copies of its last ones, or share them.
        people: Classes.
        config: Settings: branches, cut, bands, head.

    Raises:
        UsageError: No branch has bands, or the tested one has none. In use: the bands do not divide the map that is
            cut, or lose their places on the last map.
    """

    def __init__(self, stages: Stages, people: int, config: ModelConfig) -> None:
        super().__init__()
        counts = [stripes for stripes in config.stripes if stripes > 1]
        require(bool(counts), "branches", config.branches, "with 2 or more bands somewhere: RMGL leaves out 1")
        require(config.test_branch != "1", "test_branch", "1", "a branch with bands: RMGL leaves out 1")
        self.shared = stages.res2
        res4 = nn.Sequential(stages.res4_first, stages.res4_rest)
        rest = nn.ModuleList([stages.res3, res4, without_stride(stages.res5)])
        self.at_input = config.cut == "input"
        self.branches: Sequence[Branch] = nn.ModuleList(  # type: ignore[assignment]
            Branch(rest if config.share_branches else copy.deepcopy(rest), bands, stages.channels[3], people, config)
            for bands in counts
        )
        self.names = names_of(tuple(counts))
        sizes = tuple(1 + bands for bands in counts)
        self.tested = feature_part(config, tuple(1 + count if count > 1 else 0 for count in config.stripes))
        self.feature_size = len(range(sum(sizes) * config.feature_size)[self.tested])

    def _branches(self, x: Tensor) -> list[tuple[Branch, Tensor, Tensor | None]]:
        shared = self.shared(x)
        return [
            (branch, shared, self.shared(split_bands(x, branch.bands)) if self.at_input else None)
            for branch in self.branches
        ]

    def forward(self, x: Tensor) -> Outputs | Tensor:
        """(B, 3, H, W) -> outputs in training, features (B, feature_size) else."""
        runs = [(branch, branch(shared, banded)) for branch, shared, banded in self._branches(x)]
        if not self.training:
            return torch.cat([feature for _, pairs in runs for _, feature in pairs], 1)[:, self.tested]
        logits = [
            layer(feature)
            for branch, pairs in runs
            for layer, (_, feature) in zip(branch.classifiers, pairs, strict=True)
        ]
        wholes = [pairs[0][0] for _, pairs in runs]
        return Outputs(logits, wholes, [[first for first, _ in pairs[1:]] for _, pairs in runs])

    def cuts(self, x: Tensor) -> dict[str, Tensor]:
        """Images -> where each branch cuts them, (B, n + 1) shares of the height."""
        cuts = {}
        for name, (branch, shared, banded) in zip(self.names, self._branches(x), strict=True):
            if branch.balanced:
                local = branch.maps(shared, banded)[1]
                cuts[name] = cut_rows(balanced_bands(local, branch.bands), branch.bands)
            else:
                cuts[name] = even_cuts(len(x), branch.bands)
        return cuts
