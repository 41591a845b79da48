"""Random changes of images against loops over single images, their statistics, and determinism."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sextet.reid.augment import MEAN, STD, augment, normalise, shifted
from sextet.reid.settings import AugmentConfig

NONE = AugmentConfig(flip=0.0)


def some(count=8, size=(12, 6), seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=draw)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def matches(changed, candidates):
    """Which of the candidate images each changed one is."""
    found = []
    for image, options in zip(changed, candidates, strict=True):
        equal = [place for place, option in enumerate(options) if torch.allclose(image, option, atol=1e-5)]
        assert equal, "an image that no such change gives"
        found.append(equal[0])
    return found


def test_normalisation_is_the_one_of_imagenet():
    images = some()
    expected = (images.double() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(normalise(images).double(), expected, atol=1e-5, rtol=0)
    assert torch.equal(augment(images, NONE, generator()), normalise(images))


def test_flips_are_whole_and_as_frequent_as_asked():
    images = some(400)
    options = list(zip(normalise(images), normalise(images.flip(3)), strict=True))
    for probability in (0.0, 0.3, 1.0):
        flips = matches(augment(images, AugmentConfig(flip=probability), generator()), options)
        assert np.mean(flips) == pytest.approx(probability, abs=0.07)


def naive_shift(image, dy, dx, fill):
    channels, height, width = image.shape
    out = np.empty_like(image)

    def mirrored(place, size):
        while not 0 <= place < size:
            place = -place if place < 0 else 2 * size - 2 - place
        return place

    for row in range(height):
        for column in range(width):
            y, x = row - dy, column - dx
            if 0 <= y < height and 0 <= x < width:
                out[:, row, column] = image[:, y, x]
            elif fill == "edge":
                out[:, row, column] = image[:, min(max(y, 0), height - 1), min(max(x, 0), width - 1)]
            elif fill == "reflect":
                out[:, row, column] = image[:, mirrored(y, height), mirrored(x, width)]
            else:
                out[:, row, column] = image.mean((1, 2)) if fill == "mean" else 0
    return out


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=4),
    st.sampled_from(("zero", "mean", "edge", "reflect")),
)
def test_shifts_equal_a_loop_with_every_fill(moves, fill):
    images = some(len(moves), (7, 4)).double()
    dy, dx = torch.tensor(moves).T
    found = shifted(images, dy, dx, fill)
    for image, (y, x), moved in zip(images.numpy(), moves, found, strict=True):
        np.testing.assert_allclose(moved, naive_shift(image, y, x, fill), rtol=1e-6)


@pytest.mark.parametrize("fill", ["zero", "mean", "edge", "reflect"])
def test_random_shifts_stay_in_range_and_fill_as_asked(fill):
    images = some(120, (20, 10))
    config = AugmentConfig(flip=0.0, shift=0.5, shift_y=0.1, shift_x=0.2, fill=fill)
    moves = [(y, x) for y in range(-2, 3) for x in range(-2, 3)]
    options = [
        [normalise(torch.from_numpy(naive_shift(image.numpy(), y, x, fill))[None])[0] for y, x in moves]
        for image in images
    ]
    found = matches(augment(images, config, generator()), options)
    still = np.mean([moves[place] == (0, 0) for place in found])
    assert 0.4 < still < 0.7  # half are not moved, and a few of the others by nothing
    assert {moves[place][0] for place in found} == {moves[place][1] for place in found} == {-2, -1, 0, 1, 2}


def test_padding_is_black_and_the_crop_reaches_both_ends():
    images = some(150, (10, 8))
    moves = [(y, x) for y in range(-2, 3) for x in range(-2, 3)]
    options = [
        [normalise(torch.from_numpy(naive_shift(image.numpy(), y, x, "zero"))[None])[0] for y, x in moves]
        for image in images
    ]
    found = matches(augment(images, AugmentConfig(flip=0.0, pad_px=2), generator()), options)
    assert len(set(found)) == 25


def test_erasing_fills_one_rectangle_with_the_mean_colour():
    images = torch.full((600, 3, 64, 32), 255, dtype=torch.uint8)
    erased = augment(images, AugmentConfig(flip=0.0, erase=0.5), generator())
    gone = (erased == 0).all(1)
    assert ((erased == 0).any(1) == gone).all()
    assert torch.equal(erased[:, :, 0][~gone[:, 0][:, None].expand(-1, 3, -1)].unique(), normalise(images[:1]).unique())
    areas, shapes = [], []
    for image in gone:
        if not image.any():
            continue
        rows, columns = image.any(1).nonzero().flatten(), image.any(0).nonzero().flatten()
        assert int(image.sum()) == len(rows) * len(columns)  # a rectangle
        assert len(rows) == rows[-1] - rows[0] + 1 and len(columns) == columns[-1] - columns[0] + 1
        areas.append(len(rows) * len(columns) / (64 * 32))
        shapes.append(len(rows) / len(columns))
    assert len(areas) / 600 == pytest.approx(0.5, abs=0.07)
    assert min(areas) > 0.005 and max(areas) < 0.43
    assert 0.15 < np.mean(areas) < 0.22  # 0.21 before rectangles are cut down to the image
    assert min(shapes) < 0.6 and max(shapes) > 2.0
    assert gone.any(0).float().mean() > 0.95  # everywhere but in corners


def test_the_generator_decides():
    images = some(16, (24, 12))
    config = AugmentConfig(flip=0.5, pad_px=2, shift=0.5, erase=0.5)
    one, two, other = (augment(images, config, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)
    before = images.clone()
    augment(images, config, generator())
    assert torch.equal(images, before)


def test_images_of_a_batch_are_drawn_apart():
    images = some(1, (24, 12)).expand(32, -1, -1, -1)
    changed = augment(images, AugmentConfig(shift=1.0, erase=1.0), generator())
    assert len({tuple(image.flatten().tolist()) for image in changed}) > 25
    assert changed.shape == images.shape and changed.dtype is torch.float32
