"""Rows for training: the answers to a prompt share it, so it is computed once, and short texts share a row.

A row is a sequence of trees. A tree is a prompt followed by some of its answers; an answer attends to the prompt and to
itself, and its positions go on where the prompt ends, so each is computed as if it stood alone. What all prompts of a
row begin with, such as worked examples, is its trunk: it comes first, once, and all attend to it. The last token of an
answer is no input, because nothing is predicted from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TRUNK = -2  # in place of a tree's number; -1 is padding
WORTH_SHARING = 16  # tokens: a shorter trunk is computed with each prompt


@dataclass(frozen=True, kw_only=True)
class Piece:
    """An answer to pack: ``index`` is its number in the batch, ``group`` that of its prompt."""

    index: int
    group: int
    prompt: Sequence[int]
    answer: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A micro-batch: B rows of at most L tokens, holding n tokens of answers."""

    tokens: Tensor
    """(B, L) int64."""
    positions: Tensor
    """(B, L) places in their texts."""
    mask: Tensor
    """(B, 1, L, L) float32: 0 where a token attends, -inf where not."""
    source: Tensor
    """(n,) place in the flattened rows of the token from which each answer's token is predicted."""
    target: Tensor
    """(n,) the answers' tokens; each answer's are in order and together."""
    answer: Tensor
    """(n,) the number in the batch of each token's answer."""

    @property
    def answers(self) -> list[int]:
        """The numbers of the answers, in the order of their tokens."""
        return [int(index) for index in torch.unique_consecutive(self.answer)]


def pack(pieces: Sequence[Piece], capacity: int) -> list[list[Piece]]:
    """Deals answers out to rows of about ``capacity`` tokens besides the trunk; longer ones have a row of their own.

    Answers to a prompt stay together as far as they fit. The result depends on nothing but the arguments.
    """
    rows: list[list[Piece]] = []
    room, group, shared = 0, None, trunk(pieces)
    for piece in sorted(pieces, key=lambda piece: (piece.group, piece.index)):
        own = len(piece.answer) - 1
        cost = own + (len(piece.prompt) - shared if piece.group != group else 0)
        if not rows or cost > room:
            rows.append([])
            room, cost = capacity, own + len(piece.prompt) - shared
        rows[-1].append(piece)
        room, group = room - cost, piece.group
    return rows


def micro_batches(rows: Sequence[list[Piece]], max_tokens: int) -> list[list[list[Piece]]]:
    """Puts rows of similar length together, at most ``max_tokens`` with padding, at least one row each."""
    batches: list[list[list[Piece]]] = []
    longest, lengths = 0, [row_length(row) for row in rows]
    for index in sorted(range(len(rows)), key=lambda index: -lengths[index]):
        if not batches or (len(batches[-1]) + 1) * longest > max_tokens:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(rows[index])
    return batches


def best_rows(pieces: Sequence[Piece], max_tokens: int, width: int) -> list[list[Piece]]:
    """Returns `pack` at the capacity that costs least: in padding, prompts computed again, and attention.

    Args:
        pieces: The answers.
        max_tokens: Of a micro-batch.
        width: The model's hidden size, on which the share of attention depends.
    """

    def cost(rows: list[list[Piece]]) -> float:
        sizes = [(len(batch), row_length(batch[0])) for batch in micro_batches(rows, max_tokens)]
        return sum(number * length * (1 + length / (2 * width)) for number, length in sizes)

    trees: dict[int, list[Piece]] = {}
    for piece in pieces:
        trees.setdefault(piece.group, []).append(piece)
    longest = max(map(row_length, trees.values()), default=1)
    capacities = [longest // part for part in (8, 4, 3, 2)] + [longest * number for number in (1, 2, 3, 4)]
    return min((pack(pieces, min(capacity, max_tokens)) for capacity in capacities), key=cost)


def trunk(row: Sequence[Piece]) -> int:
    """Number of tokens with which all prompts begin, less than any has; 0 for a single prompt or if it is small."""
    prompts = {piece.group: piece.prompt for piece in row}
    if len(prompts) < 2:
        return 0
    shared = len(commonprefix([list(prompt[:-1]) for prompt in prompts.values()]))
    return shared if shared >= WORTH_SHARING else 0


def row_length(row: Sequence[Piece]) -> int:
    """Tokens of a row."""
    shared = trunk(row)
    prompts = {piece.group: len(piece.prompt) - shared for piece in row}
    return shared + sum(prompts.values()) + sum(len(piece.answer) - 1 for piece in row)


def build(rows: Sequence[Sequence[Piece]]) -> Rows:
    """Returns the tensors of a micro-batch."""
    length = max(1, *(row_length(row) for row in rows))
    shape = (len(rows), length)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    trees, branches = np.full(shape, -1), np.zeros(shape, np.int64)
    source: list[NDArray[np.int64]] = []
    for number, row in enumerate(rows):
        at = shared = trunk(row)
        group, prompt_end = None, 0
        tokens[number, :at], positions[number, :at] = row[0].prompt[:at], np.arange(at)
        trees[number, :at] = TRUNK
        for branch, piece in enumerate(row, 1):
            if piece.group != group:
                end = at + len(piece.prompt) - shared
                tokens[number, at:end] = piece.prompt[shared:]
                positions[number, at:end] = np.arange(shared, len(piece.prompt))
                trees[number, at:end], group, prompt_end, at = piece.group, piece.group, end, end
            size = len(piece.answer) - 1
            end, first = at + size, len(piece.prompt)
            tokens[number, at:end], positions[number, at:end] = piece.answer[:-1], np.arange(first, first + size)
            trees[number, at:end], branches[number, at:end] = group, branch
            places = np.concatenate([[prompt_end - 1], np.arange(at, end)]) + number * length
            source.append(places)
            at = end
    same = (trees[:, :, None] == trees[:, None, :]) | (trees[:, None, :] == TRUNK)
    own = (branches[:, None, :] == 0) | (branches[:, :, None] == branches[:, None, :])
    order = np.arange(length)
    allowed = same & own & (order[:, None] >= order[None, :])
    pieces = [piece for row in rows for piece in row]
    mask = torch.zeros(allowed.shape).masked_fill_(~torch.from_numpy(allowed), -torch.inf)
    return Rows(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        mask=mask[:, None],
        source=torch.from_numpy(np.concatenate(source)),
        target=torch.tensor([token for piece in pieces for token in piece.answer]),
        answer=torch.tensor([piece.index for piece in pieces for _ in piece.answer]),
    )
