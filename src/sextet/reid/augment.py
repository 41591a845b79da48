"""Random changes of a batch of training images, on tensors: flip, pad and crop, random shifting, random erasing.

Pixels are moved while they are bytes and normalised image by image, so that an image stays in the processor's cache.
What is drawn depends on the generator only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sextet.reid.settings import AugmentConfig

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
ERASE_AREA, ERASE_ASPECT = (0.02, 0.4), 0.3  # Zhong et al. 2017


def normalise(images: Tensor) -> Tensor:
    """uint8 (B, 3, H, W) -> float32 in channels-last memory, with ImageNet's mean and deviation."""
    count, _, height, width = images.shape
    mean, std = (torch.tensor(values, device=images.device) * 255 for values in (MEAN, STD))
    scale, offset = (1 / std).repeat(width), (-mean / std).repeat(width)
    rows = images.permute(0, 2, 3, 1).reshape(count, height, 3 * width)
    out = torch.empty(rows.shape, device=images.device)
    for source, target in zip(rows, out, strict=True):
        torch.addcmul(offset, target.copy_(source), scale, out=target)
    return out.view(count, height, width, 3).permute(0, 3, 1, 2)


def augment(images: Tensor, config: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Changes and normalises a batch.

    Args:
        images: uint8 (B, 3, H, W); left as they are.
        config: Probabilities and ranges.
        generator: Source of every draw, on the CPU.

    Returns:
        float32 (B, 3, H, W), normalised, in channels-last memory.
    """
    count, _, height, width = images.shape

    def uniform(low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.rand(count, generator=generator) * (high - low) + low

    x = images.clone(memory_format=torch.channels_last)
    for index in (uniform() < config.flip).nonzero().flatten().tolist():
        x[index] = images[index].flip(2)
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
        _erase(x, uniform() < config.erase, generator)
    return x


def shifted(x: Tensor, dy: Tensor, dx: Tensor, fill: str) -> Tensor:
    """Moves the content of each image down by `dy` and right by `dx` pixels.

    Args:
        x: (B, C, H, W), bytes or floats.
        dy: (B,) int64.
        dx: (B,) int64.
        fill: What appears: "zero", "mean" of the image, its "edge", or its "reflect"ion.
    """
    _, _, height, width = x.shape
    if fill in ("edge", "reflect"):
        rows, columns = torch.arange(height) - dy[:, None], torch.arange(width) - dx[:, None]
        if fill == "reflect":
            rows, columns = _reflected(rows, height), _reflected(columns, width)
        rows, columns = (at.clamp(0, size - 1).to(x.device) for at, size in ((rows, height), (columns, width)))
        batch = torch.arange(len(x), device=x.device)[:, None, None]
        return x.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
    out = x.clone()
    for index, (down, right) in enumerate(zip(dy.tolist(), dx.tolist(), strict=True)):
        if not down and not right:
            continue
        down, right = max(-height, min(height, down)), max(-width, min(width, right))
        if fill == "mean":
            total = (
                x[index].permute(1, 2, 0).reshape(height, -1).float().sum(0).view(width, -1).sum(0)
            )  # rows first: fast
            out[index] = (total / (height * width))[:, None, None]
        else:
            out[index] = 0
        kept = x[index, :, max(-down, 0) : height - max(down, 0), max(-right, 0) : width - max(right, 0)]
        out[index, :, max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = kept
    return out


def _reflected(places: Tensor, size: int) -> Tensor:
    """Places mirrored at both ends, without repeating the end."""
    period = max(2 * size - 2, 1)
    places = places.remainder(period)
    return torch.minimum(places, period - places)


def _erase(x: Tensor, chosen: Tensor, generator: torch.Generator) -> None:
    """Random erasing (Zhong et al. 2017): fills one rectangle of each chosen image with ImageNet's mean colour.

    A rectangle that would not fit is cut down to the image, where the original draws again.
    """
    count, _, height, width = x.shape
    draw = torch.rand(4, count, generator=generator)
    area = height * width * (ERASE_AREA[0] + draw[0] * (ERASE_AREA[1] - ERASE_AREA[0]))
    aspect = ERASE_ASPECT + draw[1] * (1 / ERASE_ASPECT - ERASE_ASPECT)
    tall, wide = (area * aspect).sqrt().clamp(1, height), (area / aspect).sqrt().clamp(1, width)
    top, left = draw[2] * (height - tall), draw[3] * (width - wide)
    sides = torch.stack([top, top + tall, left, left + wide])
    first = (sides - 0.5).ceil().long()  # pixels whose middle lies between the sides
    for index in chosen.nonzero().flatten().tolist():
        upper, lower, start, end = first[:, index].tolist()
        x[index, :, upper:lower, start:end] = 0
