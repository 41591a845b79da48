"""A synthetic person benchmark that needs no files: people, cameras, views, misalignment and occlusion, drawn.

A person is a set of clothes and things from small palettes; about a third are twins of another person in all but one
small thing (a bag, shoes, a hat, a logo). A camera has a background, a colour response and a preferred view. Every
image has its own stride, scale, shift and, often, something in front. All of it is a function of the seed and VERSION.

| variant | shift | scale | hidden |
|---|---|---|---|
| easy | 4 % of the height, 3 % of the width | 95 to 103 % | 5 % of the images |
| standard | 8 %, 6 % | 91 to 106 % | 25 % |
| misaligned | 24 %, 18 % | 73 to 118 % | 25 % |
| occluded | 8 %, 6 % | 91 to 106 % | 75 % |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter

from sextet.core.seeding import numpy_rng
from sextet.reid.data import ReIDData, Split

VERSION = 1
CAMERAS, TRAIN_IMAGES, TEST_IMAGES = 6, 3, 2  # images of a person from each camera
SUPERSAMPLE = 3
TWINS = 0.35

# variant: (shift as shares of height and width, scale, share of images with something in front)
STRENGTH = {
    "easy": ((0.04, 0.03), (0.95, 1.03), 0.05),
    "standard": ((0.08, 0.06), (0.91, 1.06), 0.25),
    "misaligned": ((0.24, 0.18), (0.73, 1.18), 0.25),
    "occluded": ((0.08, 0.06), (0.91, 1.06), 0.75),
}
CLOTHES = (
    (35, 35, 40), (225, 225, 225), (150, 30, 35), (40, 70, 150), (50, 115, 60), (215, 180, 60), (120, 75, 45),
    (110, 110, 120), (150, 90, 150), (220, 120, 60),
)  # fmt: skip
SKIN = ((235, 200, 175), (205, 160, 125), (150, 105, 75), (95, 65, 50))
HAIR = ((30, 25, 20), (95, 60, 35), (190, 150, 85), (120, 120, 120))
TEXTURES = ("plain", "rows", "columns", "two-tone", "logo", "dots")
Color = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Person:
    """What a person looks like in every image."""

    upper: Color
    lower: Color
    shoes: Color
    second: Color
    texture: str
    legs: str
    bag: str
    bag_color: Color
    hat: bool
    hair: Color
    skin: Color
    long_sleeves: bool
    wide: float
    tall: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Person:
        """Draws a person."""

        def pick(options: Sequence[Any]) -> Any:
            return options[int(rng.integers(len(options)))]

        return cls(
            upper=pick(CLOTHES), lower=pick(CLOTHES), shoes=pick(CLOTHES), second=pick(CLOTHES),
            texture=pick(TEXTURES), legs=pick(("trousers", "trousers", "shorts", "skirt")),
            bag=pick(("none", "none", "backpack", "handbag")), bag_color=pick(CLOTHES), hat=bool(rng.random() < 0.25),
            hair=pick(HAIR), skin=pick(SKIN), long_sleeves=bool(rng.random() < 0.6), wide=rng.uniform(0.88, 1.14),
            tall=rng.uniform(0.94, 1.06),
        )  # fmt: skip

    def twin(self, rng: np.random.Generator) -> Person:
        """Another person in the same clothes, told apart by one small thing only."""

        def other(options: Sequence[Any], own: Any) -> Any:
            rest = [option for option in options if option != own]
            return rest[rng.integers(len(rest))]

        which = rng.integers(5)
        if which == 0:
            return replace(self, shoes=other(CLOTHES, self.shoes))
        if which == 1:
            return replace(self, bag=other(("none", "backpack", "handbag"), self.bag))
        if which == 2:
            return replace(self, hat=not self.hat, hair=other(HAIR, self.hair))
        if which == 3:
            second = self.second if self.second != self.upper else other(CLOTHES, self.upper)  # or nobody sees it
            return replace(self, texture=other(TEXTURES, self.texture), second=second)
        return replace(self, legs=other(("trousers", "shorts", "skirt"), self.legs))


@dataclass(frozen=True, kw_only=True)
class Camera:
    """What all images of a camera share."""

    wall: Color
    floor: Color
    horizon: float
    boxes: tuple[tuple[float, float, float, float, Color], ...]
    gain: float
    cast: tuple[float, float, float]
    gamma: float
    blur: float
    noise: float
    views: tuple[float, float, float]
    """Probabilities of seeing the front, the back and a side."""

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Camera:
        """Draws a camera."""

        boxes = []
        for _ in range(rng.integers(2, 6)):
            x, y = rng.uniform(-0.1, 0.9, 2)
            boxes.append((x, y, x + rng.uniform(0.1, 0.5), y + rng.uniform(0.05, 0.4), _color(rng, 50, 205)))
        return cls(
            wall=_color(rng, 50, 205), floor=_color(rng, 50, 205), horizon=rng.uniform(0.35, 0.75), boxes=tuple(boxes),
            gain=rng.uniform(0.75, 1.2), cast=tuple(rng.uniform(0.9, 1.1, 3)), gamma=rng.uniform(0.8, 1.3),
            blur=rng.uniform(0.0, 0.8), noise=rng.uniform(2.0, 9.0), views=tuple(rng.dirichlet((1.0, 1.0, 0.7))),
        )  # fmt: skip


class ArrayImages:
    """Images held in memory: uint8, (N, 3, H, W)."""

    def __init__(self, array: torch.Tensor) -> None:
        self.array = array
        self.size = (int(array.shape[2]), int(array.shape[3]))

    def __len__(self) -> int:
        return len(self.array)

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Returns the images at `indices`, (B, 3, H, W) uint8."""
        return self.array[torch.as_tensor(indices, dtype=torch.int64)]


def draw_data(variant: str, size: tuple[int, int], *, people: int = 120, seed: int = 0) -> ReIDData:
    """Draws the benchmark.

    Args:
        variant: Key of STRENGTH; empty is standard.
        size: Height and width of the images in pixels.
        people: Training people; the test has 5/6 as many others. All are seen by 6 cameras, 3 times each for training
            and twice for testing, once as query and once in the gallery.
        seed: Seed of people, cameras and images.
    """
    return _drawn(variant or "standard", size, people, seed)


@lru_cache(maxsize=4)
def _drawn(variant: str, size: tuple[int, int], people: int, seed: int) -> ReIDData:
    cameras = [Camera.draw(numpy_rng(seed, "data", VERSION, "camera", number)) for number in range(CAMERAS)]

    def split(part: str, ids: range, images: range) -> Split:
        rows: list[tuple[int, int, int]] = [
            (person, camera, image) for person in ids for camera in range(CAMERAS) for image in images
        ]
        looks = people_of(ids, seed)
        array = np.stack(
            [
                draw_image(looks[person], cameras[camera], variant, size, numpy_rng(seed, "data", VERSION, *row))
                for row in rows
                for person, camera, _ in [row]
            ]
        )
        return Split(
            images=ArrayImages(torch.from_numpy(array).permute(0, 3, 1, 2).contiguous()),
            ids=np.array([person for person, _, _ in rows]),
            cameras=np.array([camera for _, camera, _ in rows]),
            names=tuple(f"{part}/{person:04}_c{camera + 1}_{image}" for person, camera, image in rows),
        )

    test = range(people + 1, people + 1 + people * 5 // 6)
    return ReIDData(
        name=f"synthetic {variant} v{VERSION}",
        train=split("train", range(1, people + 1), range(TRAIN_IMAGES)),
        query=split("query", test, range(1)),
        gallery=split("gallery", test, range(1, TEST_IMAGES)),
    )


def people_of(ids: range, seed: int) -> dict[int, Person]:
    """Draws people; some are twins of the one before."""
    looks: dict[int, Person] = {}
    for number in ids:
        rng = numpy_rng(seed, "data", VERSION, "person", number)
        twin = number > ids.start and rng.random() < TWINS
        looks[number] = looks[number - 1].twin(rng) if twin else Person.draw(rng)
    return looks


def draw_image(
    person: Person, camera: Camera, variant: str, size: tuple[int, int], rng: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Draws one image, (H, W, 3) uint8."""
    (shift_y, shift_x), scales, hidden = STRENGTH[variant]
    height, width = size[0] * SUPERSAMPLE, size[1] * SUPERSAMPLE
    image = Image.new("RGB", (width, height), camera.wall)
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, camera.horizon * height, width, height), fill=camera.floor)
    for left, top, right, bottom, color in camera.boxes:
        pen.rectangle((left * width, top * height, right * width, bottom * height), fill=color)
    scale = rng.uniform(*scales) * person.tall
    tall = 0.9 * height * scale
    middle = width * (0.5 + rng.uniform(-shift_x, shift_x))
    top = height * (0.5 + rng.uniform(-shift_y, shift_y)) - tall / 2
    view = ("front", "back", "side")[rng.choice(3, p=camera.views)]
    _Figure(pen, person, view, middle, top, tall, mirrored=bool(rng.random() < 0.5), stride=rng.uniform(0, 1)).draw()
    if rng.random() < hidden:
        color = _color(rng, 40, 200)
        if rng.random() < 0.6:
            pen.rectangle((0, height * rng.uniform(0.55, 0.85), width, height), fill=color)
        else:
            left = width * rng.uniform(0.1, 0.7)
            pen.rectangle((left, 0, left + width * rng.uniform(0.15, 0.3), height), fill=color)
    image = image.resize((size[1], size[0]), Image.Resampling.BOX)
    if camera.blur > 0.2:
        image = image.filter(ImageFilter.GaussianBlur(camera.blur))
    light = camera.gain * rng.uniform(0.85, 1.15) * np.array(camera.cast)
    pixels = 255 * np.clip(np.asarray(image) / 255 * light, 0, 1) ** camera.gamma
    pixels += rng.normal(0, camera.noise, pixels.shape)
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def _color(rng: np.random.Generator, low: int, high: int) -> Color:
    red, green, blue = rng.integers(low, high, 3)
    return int(red), int(green), int(blue)


class _Figure:
    """Draws a person; lengths are shares of the person's height, x from the middle, y from the top."""

    def __init__(
        self, pen: Any, person: Person, view: str, middle: float, top: float, tall: float, *, mirrored: bool,
        stride: float,
    ) -> None:  # fmt: skip
        self.pen, self.person, self.view = pen, person, view
        self.middle, self.top, self.tall = middle, top, tall
        self.side = -1.0 if mirrored else 1.0
        self.stride = 0.02 + 0.09 * stride if view == "side" else 0.03 + 0.03 * stride
        self.half = 0.125 * person.wide * (0.72 if view == "side" else 1.0)  # of the shoulders

    def box(self, left: float, top: float, right: float, bottom: float, color: Color, *, round_: bool = False) -> None:
        x = sorted((self.middle + self.tall * left * self.side, self.middle + self.tall * right * self.side))
        y = self.top + self.tall * top, self.top + self.tall * bottom
        (self.pen.ellipse if round_ else self.pen.rectangle)((x[0], y[0], x[1], max(y)), fill=color)

    def shape(self, points: Sequence[tuple[float, float]], color: Color) -> None:
        self.pen.polygon(
            [(self.middle + self.tall * x * self.side, self.top + self.tall * y) for x, y in points], fill=color
        )

    def draw(self) -> None:
        person, half = self.person, self.half
        if person.bag == "backpack" and self.view == "side":
            self.box(-half - 0.07, 0.21, -half + 0.04, 0.42, person.bag_color)
        self.draw_legs()
        self.draw_arms()
        self.box(-half, 0.175, half, 0.53, person.upper)
        self.draw_texture()
        if person.bag == "backpack" and self.view == "back":
            self.box(-half * 0.75, 0.2, half * 0.75, 0.42, person.bag_color)
        if person.bag == "backpack" and self.view == "front":
            for x in (-half * 0.65, half * 0.65):
                self.box(x - 0.014, 0.175, x + 0.014, 0.38, person.bag_color)
        if person.bag == "handbag":
            self.box(half + 0.005, 0.48, half + 0.115, 0.6, person.bag_color)
        self.draw_head()

    def draw_legs(self) -> None:
        person, half, step = self.person, self.half, self.stride
        cloth = {"trousers": 0.94, "shorts": 0.7, "skirt": 0.72}[person.legs]
        for sign in (-1.0, 1.0):
            hip, foot = sign * half * 0.5, sign * (half * 0.35 + step)
            thick = half * 0.42

            def at(y: float, hip: float = hip, foot: float = foot) -> float:
                return hip + (foot - hip) * (y - 0.5) / 0.44

            for start, end, color in ((0.5, 0.94, person.skin), (0.5, cloth, person.lower)):
                if color is person.skin and person.legs == "trousers":
                    continue
                corners = ((at(start) - thick, start), (at(start) + thick, start))
                self.shape((*corners, (at(end) + thick * 0.85, end), (at(end) - thick * 0.85, end)), color)
            self.box(foot - 0.045, 0.93, foot + 0.055, 0.985, person.shoes, round_=True)
        if person.legs == "skirt":
            self.shape(((-half * 0.9, 0.5), (half * 0.9, 0.5), (half * 1.35, 0.74), (-half * 1.35, 0.74)), person.lower)

    def draw_arms(self) -> None:
        person, half, swing = self.person, self.half, self.stride * 0.8
        for sign in (-1.0, 1.0):
            x, end = sign * (half + 0.012), sign * (half + 0.012 + swing)
            elbow = (x + end) / 2
            sleeve = person.upper if person.long_sleeves else person.skin
            self.shape(
                ((x - 0.028, 0.18), (x + 0.028, 0.18), (elbow + 0.026, 0.36), (elbow - 0.026, 0.36)), person.upper
            )
            self.shape(((elbow - 0.026, 0.36), (elbow + 0.026, 0.36), (end + 0.022, 0.53), (end - 0.022, 0.53)), sleeve)
            self.box(end - 0.022, 0.52, end + 0.022, 0.56, person.skin, round_=True)

    def draw_texture(self) -> None:
        person, half = self.person, self.half
        if person.texture == "rows":
            for y in (0.215, 0.305, 0.395, 0.485):
                self.box(-half, y, half, y + 0.03, person.second)
        elif person.texture == "columns":
            for x in (-0.75, -0.25, 0.25, 0.75):
                self.box(half * (x - 0.1), 0.175, half * (x + 0.1), 0.53, person.second)
        elif person.texture == "two-tone":
            self.box(-half, 0.36, half, 0.53, person.second)
        elif person.texture == "logo" and self.view == "front":
            self.box(-half * 0.5, 0.25, half * 0.5, 0.34, person.second)
        elif person.texture == "dots":
            for y in (0.23, 0.33, 0.43):
                for x in (-0.55, 0.05, 0.65):
                    self.box(half * x - 0.018, y, half * x + 0.018, y + 0.036, person.second, round_=True)

    def draw_head(self) -> None:
        person, width = self.person, 0.058 * (1.1 if self.view == "side" else 1.0)
        self.box(-0.025, 0.14, 0.025, 0.19, person.skin)
        self.box(-width, 0.03, width, 0.16, person.skin, round_=True)
        if self.view == "back":
            self.box(-width, 0.025, width, 0.15, person.hair, round_=True)
        elif self.view == "side":
            self.box(-width, 0.025, width * 0.3, 0.14, person.hair, round_=True)
        self.box(-width, 0.02, width, 0.075, person.hair, round_=True)
        if person.hat:
            self.box(-width * 1.05, 0.015, width * 1.05, 0.06, person.second)
            self.box(-width * 1.05, 0.055, width * 1.7, 0.075, person.second)
