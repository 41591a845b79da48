"""Batches of P people with K images each, as a function of the step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sextet.core.errors import UsageError
from sextet.core.seeding import numpy_rng


class PeopleSampler:
    """Batches of P x K images; ``sampler[step]`` depends on the seed and the step only.

    An epoch of "images" covers nearly every image once: the images of each person are shuffled and dealt in groups of
    K, and people with most groups left go first, until fewer than P people have any. An epoch of "ids" takes K images
    of every person once; its last batch is filled up with people from its beginning.
    A person's last group is filled up with images of the others; only one with fewer than K images repeats some.

    Args:
        labels: (N,) a label of each image.
        people: P.
        images: K.
        epoch: "images" or "ids".
        seed: Seed of the run.

    Raises:
        UsageError: Fewer than P people.
    """

    def __init__(
        self, labels: NDArray[np.int64], people: int, images: int, *, epoch: str = "images", seed: int = 0
    ) -> None:
        order = np.argsort(labels, kind="stable")
        ids, starts = np.unique(labels[order], return_index=True)
        if len(ids) < people:
            raise UsageError(
                f"batches of {people} people cannot be made of {len(ids)}: lower --optim.people, or add people"
            )
        self.groups = np.split(order, starts[1:])
        self.people, self.images, self.kind, self.seed = people, images, epoch, seed
        self._epoch, self._batches = -1, list[NDArray[np.int64]]()
        self.batches_per_epoch = len(self.epoch(0))

    def __getitem__(self, step: int) -> NDArray[np.int64]:
        """Returns the images of a batch, (P * K,), each person's together."""
        number, place = divmod(step, self.batches_per_epoch)
        if number != self._epoch:
            self._batches, self._epoch = self.epoch(number), number
        return self._batches[place]

    def epoch(self, number: int) -> list[NDArray[np.int64]]:
        """Returns the batches of an epoch."""
        rng = numpy_rng(self.seed, "data", "epoch", number)
        if self.kind == "ids":
            order = rng.permutation(len(self.groups))
            order = np.concatenate((order, order[: -len(order) % self.people]))
            return [
                np.concatenate([self._draw(rng, person)[: self.images] for person in chosen])
                for chosen in order.reshape(-1, self.people)
            ]
        dealt = [self._draw(rng, person).reshape(-1, self.images) for person in range(len(self.groups))]
        left = np.array([len(groups) for groups in dealt])
        batches = []
        while (left > 0).sum() >= self.people:
            # largest first, equals in random order
            chosen = np.lexsort((rng.random(len(left)), -left))[: self.people]
            left[chosen] -= 1
            batches.append(np.concatenate([dealt[person][left[person]] for person in chosen]))
        rng.shuffle(batches)
        return batches

    def _draw(self, rng: np.random.Generator, person: int) -> NDArray[np.int64]:
        """All images of a person in random order, then the first ones again up to a multiple of K."""
        images = rng.permutation(self.groups[person])
        return np.resize(images, len(images) + -len(images) % self.images)
