"""The built-in generator: one prefill for all answers to a prompt, slots that are refilled as answers end.

An answer's randomness comes from its own stream of uniform numbers, keyed by prompt, answer and token; so it does not
depend on the slot, the order, or the other answers of the batch (but for rounding, which follows the batch's shape).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sextet.core.errors import DivergenceError
from sextet.core.seeding import numpy_rng

PREFILL_TOKENS = 8192
WORTH_SHARING = 16  # tokens with which all prompts of a batch begin: the system's message, worked examples
Poll = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A sampled answer: its tokens, the stop token included, and how they came about."""

    tokens: list[int]
    logp: list[float]
    """Log-probability of each token under the distribution at the temperature, before top-p."""
    versions: list[int]
    """Version of the weights that sampled each token."""
    stopped: bool
    """Whether it ended by a stop token; else it was cut off, or goes on in another call."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Answers wanted to a prompt; ``begun`` are unfinished answers that go on, by their numbers."""

    key: tuple[int | str, ...]
    """Names the random streams together with the number of the answer."""
    prompt: Sequence[int]
    numbers: Sequence[int]
    begun: dict[int, Answer] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How to sample."""

    max_tokens: int
    stop: Collection[int]
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    slice_tokens: int = 0
    """Most new tokens of a call; 0: no bound but ``max_tokens``."""


NOTHING = Answer(tokens=[], logp=[], versions=[], stopped=False)


class _Slots:
    """The answers being generated: row by row what each has; the first ``active`` rows are in use."""

    def __init__(self, capacity: int, max_tokens: int) -> None:
        self.active = 0
        self.request = np.zeros(capacity, np.int64)
        self.number = np.zeros(capacity, np.int64)
        self.room = np.zeros(capacity, np.int64)  # most new tokens
        self.count = np.zeros(capacity, np.int64)  # new tokens so far
        self.length = np.zeros(capacity, np.int64)  # tokens whose keys and values are kept
        self.uniform = np.zeros((capacity, max_tokens))
        self.tokens = np.zeros((capacity, max_tokens), np.int64)
        self.logp = np.zeros((capacity, max_tokens), np.float32)

    def add(self, request: int, number: int, room: int, length: int, uniform: NDArray[np.float64]) -> None:
        """Takes the next row."""
        row = self.active
        self.request[row], self.number[row], self.room[row], self.length[row] = request, number, room, length
        self.count[row], self.uniform[row, : len(uniform)] = 0, uniform
        self.active += 1

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copies rows over others."""
        for table in (
            self.request, self.number, self.room, self.count, self.length, self.uniform, self.tokens, self.logp,
        ):  # fmt: skip
            table[targets] = table[sources]


class _Keys:
    """Keys and values of what is in the slots; no text gets longer than ``longest``."""

    def __init__(self, capacity: int, longest: int) -> None:
        self.capacity, self.longest = capacity, longest
        self.store: list[Tensor] = []  # per layer (capacity, room, 2, kv heads, D)
        self.active = self.length = 0
        self.places = self.rows = torch.empty(0, dtype=torch.long)

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the newest token of each active slot at its place; returns all up to ``length``."""
        store = self.store[layer]
        store[self.rows, self.places] = torch.stack((keys[:, :, 0], values[:, :, 0]), 1)
        kept = store[: self.active, : self.length].transpose(1, 3)
        return kept[:, :, 0], kept[:, :, 1]

    def put(self, places: list[int], prefix: Prefix, rows: list[int]) -> None:
        """Copies prefilled texts into slots."""
        length = prefix.layers[0].shape[3]
        self.reserve(length + 1, prefix.layers)
        for store, part in zip(self.store, prefix.layers, strict=True):
            store[places, :length] = part.permute(1, 3, 0, 2, 4)[rows]

    def reserve(self, length: int, like: list[Tensor]) -> None:
        """Makes room for ``length`` tokens, and half as many more where there was none."""
        if self.store and self.store[0].shape[1] >= length:
            return
        old, room = self.store, max(length, min(max(length * 3 // 2, 128), self.longest))
        shape = old[0].shape[2:] if old else (2, *like[0].shape[2::2])
        self.store = [part.new_zeros(self.capacity, room, *shape) for part in like]
        for store, before in zip(self.store, old, strict=bool(old)):
            store[:, : before.shape[1]] = before

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copies slots over others."""
        for store in self.store:
            store[targets] = store[sources]


class Prefix:
    """Keys and values per layer, (2, B, kv heads, L, D), of prefilled texts, and the last state (B, H) of each.

    ``start`` is of what all texts begin with, and was computed before.
    """

    def __init__(self, start: Prefix | None = None) -> None:
        self.start = [] if start is None else start.layers
        self.layers: list[Tensor] = []
        self.states = torch.empty(0)

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps those of a layer."""
        both = torch.stack((keys, values))
        if self.start:
            both = torch.cat((self.start[layer].expand(-1, len(keys), -1, -1, -1), both), 3)
        self.layers.append(both)
        return both[0], both[1]


Context = tuple[int, int]
"""A prefilled text: (request, -1), or (request, number) for an answer that goes on."""


class Engine:
    """Generates answers with a decoder.

    Args:
        model: Maps (tokens, positions, mask, cache) to hidden states, and has ``head``, as `decoder.Decoder`.
        slots: Answers generated at the same time.
        device: Where the model is.
    """

    def __init__(self, model: nn.Module, *, slots: int, device: torch.device | str = "cpu") -> None:
        self.model, self.capacity, self.device = model, slots, torch.device(device)
        self.version = 0
        self.steps = self.prefilled = 0
        """Decoding steps and prefilled tokens so far, for the logs."""

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], limits: Limits, poll: Poll = lambda: None) -> list[list[Answer]]:
        """Returns the answers of each request, in the order of its numbers.

        Raises:
            DivergenceError: The logits of a token are not finite.
        """
        self.model.eval()
        answers = [
            {n: begun for n, begun in request.begun.items() if begun.stopped or len(begun.tokens) >= limits.max_tokens}
            for request in requests
        ]
        waiting = deque(
            (index, number)
            for index, request in enumerate(requests)
            for number in request.numbers
            if number not in answers[index]
        )
        capacity = min(self.capacity, max(1, len(waiting)))
        longest = max((len(request.prompt) for request in requests), default=0) + limits.max_tokens
        slots, keys = _Slots(capacity, limits.max_tokens), _Keys(capacity, longest)
        ready: dict[Context, tuple[Prefix, int]] = {}
        while waiting or slots.active:
            poll()
            if capacity - slots.active >= min(len(waiting), 1 + capacity // 8) > 0:
                self._fill(requests, waiting, slots, keys, ready, limits)
                self._retire(requests, slots, keys, answers, limits)
            if slots.active:
                self._decode(slots, keys, limits)
                self._retire(requests, slots, keys, answers, limits)
        return [[found[number] for number in request.numbers] for found, request in zip(answers, requests, strict=True)]

    def _fill(
        self, requests: Sequence[Request], waiting: deque[Context], slots: _Slots, keys: _Keys,
        ready: dict[Context, tuple[Prefix, int]], limits: Limits,
    ) -> None:  # fmt: skip
        """Starts waiting answers in free slots: prefills what is new, then samples their first tokens."""
        first, budget = slots.active, PREFILL_TOKENS
        starting: list[Context] = []
        new: dict[Context, list[int]] = {}
        while waiting and slots.active < keys.capacity:
            index, number = waiting[0]
            request = requests[index]
            begun = request.begun.get(number, NOTHING).tokens
            context = (index, number if begun else -1)
            length = len(request.prompt) + len(begun)
            if context not in ready and context not in new:
                if length > budget and new:
                    break
                budget -= length
                new[context] = [*request.prompt, *begun]
            waiting.popleft()
            stream = numpy_rng(limits.seed, *request.key, number).random(limits.max_tokens)[len(begun) :]
            slots.add(index, number, min(len(stream), limits.slice_tokens or len(stream)), length, stream)
            starting.append(context)
        if new:
            prefix = self._prefill(list(new.values()))
            ready.update((context, (prefix, row)) for row, context in enumerate(new))
        states = []
        for prefix in {id(ready[context][0]): ready[context][0] for context in starting}.values():
            places = [first + place for place, context in enumerate(starting) if ready[context][0] is prefix]
            keys.put(places, prefix, [ready[starting[place - first]][1] for place in places])
        for context in starting:
            prefix, row = ready[context]
            states.append(prefix.states[row])
        self._sample(slots, slice(first, slots.active), torch.stack(states), limits)
        needed = {context for context in ready if waiting and context == (waiting[0][0], -1)}
        for context in ready.keys() - needed:
            del ready[context]

    def _prefill(self, texts: Sequence[Sequence[int]]) -> Prefix:
        """Computes texts: first what all of them begin with, once, then the rest, padded on the right."""
        common = len(commonprefix([list(text[:-1]) for text in texts])) if len(texts) > 1 else 0
        start = None
        if common >= WORTH_SHARING:
            start = self._computed([texts[0][:common]], None, 0)
        else:
            common = 0
        return self._computed([text[common:] for text in texts], start, common)

    def _computed(self, texts: Sequence[Sequence[int]], start: Prefix | None, begun: int) -> Prefix:
        """Computes texts that go on after ``begun`` tokens of ``start``."""
        longest = max(map(len, texts))
        tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=self.device)
        positions = torch.arange(begun, begun + longest, device=self.device).expand(len(texts), -1)
        mask = torch.full((longest, begun + longest), -torch.inf, device=self.device).triu(1 + begun)[None, None]
        prefix = Prefix(start)
        hidden = self.model(tokens, positions, mask, prefix)
        ends = torch.tensor([len(text) - 1 for text in texts], device=self.device)
        prefix.states = hidden[torch.arange(len(texts), device=self.device), ends]
        self.prefilled += sum(map(len, texts))
        return prefix

    def _decode(self, slots: _Slots, keys: _Keys, limits: Limits) -> None:
        """Feeds the newest token of every active answer and samples the next."""
        rows = np.arange(slots.active)
        places = slots.length[: slots.active]
        keys.active, keys.length = slots.active, int(places.max()) + 1
        keys.reserve(keys.length, keys.store)
        keys.rows, keys.places = (torch.from_numpy(part.copy()).to(self.device) for part in (rows, places))
        tokens = torch.from_numpy(slots.tokens[rows, slots.count[: slots.active] - 1]).to(self.device)
        closed = torch.arange(keys.length, device=self.device) > keys.places[:, None]
        mask = torch.zeros(closed.shape, device=self.device).masked_fill_(closed, -torch.inf)[:, None, None]
        states = self.model(tokens[:, None], keys.places[:, None], mask, keys)[:, 0]
        slots.length[: slots.active] += 1
        self.steps += 1
        self._sample(slots, slice(0, slots.active), states, limits)

    def _sample(self, slots: _Slots, part: slice, states: Tensor, limits: Limits) -> None:
        """Draws the next token of some slots from their states (B, H)."""
        head: Tensor = self.model.head  # type: ignore[assignment]
        rows, count = np.arange(part.start, part.stop), slots.count[part]
        uniform = torch.from_numpy(slots.uniform[rows, count]).to(self.device)
        logits = (states.to(head.dtype) @ head.T).float()
        tokens, logp = draw(logits if limits.temperature == 1 else logits / limits.temperature, uniform, limits.top_p)
        slots.tokens[rows, count], slots.logp[rows, count] = tokens.cpu().numpy(), logp.cpu().numpy()
        if not np.isfinite(slots.logp[rows, count]).all():
            raise DivergenceError("the logits of a sampled token are not finite: the weights have diverged")
        slots.count[part] += 1

    def _retire(
        self, requests: Sequence[Request], slots: _Slots, keys: _Keys, answers: list[dict[int, Answer]], limits: Limits
    ) -> None:
        """Takes answers that have ended out of their slots, and closes the gaps."""
        rows, count = np.arange(slots.active), slots.count[: slots.active]
        stopped = np.isin(slots.tokens[rows, count - 1], list(limits.stop))
        ended = stopped | (count >= slots.room[: slots.active])
        for row in np.flatnonzero(ended).tolist():
            index, number, new = int(slots.request[row]), int(slots.number[row]), int(count[row])
            begun = requests[index].begun.get(number, NOTHING)
            answers[index][number] = Answer(
                tokens=begun.tokens + slots.tokens[row, :new].tolist(),
                logp=begun.logp + slots.logp[row, :new].tolist(),
                versions=begun.versions + [self.version] * new,
                stopped=bool(stopped[row]),
            )
        slots.active -= int(ended.sum())
        gaps = np.flatnonzero(ended[: slots.active])
        if len(gaps):
            last = slots.active + np.flatnonzero(~ended[slots.active :])
            slots.move(last, gaps)
            keys.move(last, gaps)


def draw(logits: Tensor, uniform: Tensor, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draws tokens by inversion.

    Args:
        logits: (B, V) float32, at the temperature; overwritten.
        uniform: (B,) in [0, 1).
        top_p: Draw only from the most probable tokens that together have at least this probability.

    Returns:
        Tokens (B,) and their log-probabilities (B,) before top-p.
    """
    number = logits.shape[-1]
    p = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    size = next((size for size in (256, 128, 64) if number % size == 0), number)  # blocks: first one, then in it
    sums = p.unflatten(-1, (-1, size)).sum(-1)
    total = sums.sum(-1)
    kept, kept_sums = p, sums
    if top_p < 1:
        kept = p * _nucleus(p / total[:, None], top_p)
        kept_sums = kept.unflatten(-1, (-1, size)).sum(-1)
    block, rest = _invert(kept_sums, uniform.double() * kept_sums.double().sum(-1))
    inside, _ = _invert(kept.unflatten(-1, (-1, size))[torch.arange(len(p), device=p.device), block], rest)
    tokens = block * size + inside
    return tokens, (p.gather(-1, tokens[:, None])[:, 0] / total).log()


def _invert(weights: Tensor, aim: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which of the weights (B, N) covers ``aim`` (B,) when they are laid end to end, and how far into it."""
    edges = weights.double().cumsum(-1)
    # rounding may aim just past the end; an entry without weight is never found
    place = torch.searchsorted(edges, torch.minimum(aim[:, None], edges[:, -1:] * (1 - 1e-12)), right=True)
    place = place.clamp(max=weights.shape[-1] - 1)
    before = edges.gather(-1, place) - weights.double().gather(-1, place)
    return place[:, 0], (aim[:, None] - before)[:, 0]


def _nucleus(p: Tensor, top_p: float) -> Tensor:
    """Mask (B, V) of the fewest most probable tokens whose probabilities sum to ``top_p`` or more."""
    for count in (256, p.shape[-1]):
        values = p.topk(min(count, p.shape[-1])).values
        before = values.cumsum(-1) - values
        if count >= p.shape[-1] or bool((before[:, -1] + values[:, -1] >= top_p).all()):
            break
    number = (before < top_p).sum(-1, keepdim=True)
    return p >= values.gather(-1, number - 1)
