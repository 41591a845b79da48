"""Random changes of a batch of training images, on tensors: flip, pad and crop, random shifting, random erasing.

All images of a batch are changed at once; what is drawn depends on the generator only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sextet.reid.settings import AugmentConfig

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
ERASE_AREA, ERASE_ASPECT = (0.02, 0.4), 0.3  # Zhong et al. 2017


def normalise(images: Tensor) -> Tensor:
    """uint8 (B, 3, H, W) -> float32, with ImageNet's mean and deviation."""
    mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1) * 255 for values in (MEAN, STD))
    return (images.float() - mean) / std


def augment(images: Tensor, config: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Changes and normalises a batch.

    Args:
        images: uint8 (B, 3, H, W).
        config: Probabilities and ranges.
        generator: Source of every draw, on the CPU.

    Returns:
        float32 (B, 3, H, W), normalised.
    """
    x = images
    count, _, height, width = x.shape

    def uniform(low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.rand(count, generator=generator) * (high - low) + low

    x = torch.where((uniform() < config.flip).to(x.device)[:, None, None, None], x.flip(3), x)
    if config.pad_px:
        pad = config.pad_px
        dy, dx = (torch.randint(-pad, pad + 1, (count,), generator=generator) for _ in range(2))
        x = shifted(x, dy, dx, "zero")
    if config.shift > 0:
        chosen = uniform() < config.shift
        limit_y, limit_x = config.shift_y * height, config.shift_x * width
        dy = (uniform(-limit_y, limit_y) * chosen).round().long()
        dx = (uniform(-limit_x, limit_x) * chosen).round().long()
        x = shifted(x, dy, dx, config.fill)
    x = normalise(x)
    if config.erase > 0:
        x = _erased(x, uniform() < config.erase, generator)
    return x


def shifted(x: Tensor, dy: Tensor, dx: Tensor, fill: str) -> Tensor:
    """Moves the content of each image down by `dy` and right by `dx` pixels.

    Args:
        x: (B, C, H, W).
        dy: (B,) int64.
        dx: (B,) int64.
        fill: What appears: "zero", "mean" of the image, its "edge", or its "reflect"ion.
    """
    _, _, height, width = x.shape
    rows = torch.arange(height) - dy[:, None]
    columns = torch.arange(width) - dx[:, None]
    inside = ((rows >= 0) & (rows < height))[:, None, :, None] & ((columns >= 0) & (columns < width))[:, None, None]
    if fill == "reflect":
        rows, columns = _reflected(rows, height), _reflected(columns, width)
    rows, columns = ((places.clamp(0, size - 1)).to(x.device) for places, size in ((rows, height), (columns, width)))
    batch = torch.arange(len(x), device=x.device)[:, None, None]
    moved = x.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
    if fill in ("edge", "reflect"):
        return moved
    outside = x.float().mean((2, 3), keepdim=True).to(x.dtype) if fill == "mean" else x.new_zeros(1, 1, 1, 1)
    return torch.where(inside.to(x.device), moved, outside)


def _reflected(places: Tensor, size: int) -> Tensor:
    """Places mirrored at both ends, without repeating the end."""
    period = max(2 * size - 2, 1)
    places = places.remainder(period)
    return torch.minimum(places, period - places)


def _erased(x: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Random erasing (Zhong et al. 2017): fills one rectangle of each chosen image with ImageNet's mean colour.

    A rectangle that would not fit is cut down to the image, where the original draws again.
    """
    count, _, height, width = x.shape
    draw = torch.rand(4, count, generator=generator)
    area = height * width * (ERASE_AREA[0] + draw[0] * (ERASE_AREA[1] - ERASE_AREA[0]))
    aspect = ERASE_ASPECT + draw[1] * (1 / ERASE_ASPECT - ERASE_ASPECT)
    tall, wide = (area * aspect).sqrt().clamp(1, height), (area / aspect).sqrt().clamp(1, width)
    top, left = draw[2] * (height - tall), draw[3] * (width - wide)
    rows, columns = torch.arange(height) + 0.5, torch.arange(width) + 0.5
    in_rows = (rows >= top[:, None]) & (rows < (top + tall)[:, None])
    in_columns = (columns >= left[:, None]) & (columns < (left + wide)[:, None])
    inside = in_rows[:, None, :, None] & in_columns[:, None, None] & chosen[:, None, None, None]
    return x.masked_fill(inside.to(x.device), 0.0)
