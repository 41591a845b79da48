"""Small decoders and answers for tests."""

import numpy as np
import torch

from sextet.core.seeding import torch_rng
from sextet.dapo.decoder import Decoder, Shape
from sextet.dapo.packing import Piece
from sextet.dapo.rollout import Engine, Limits, Request

STOP = 3


def small_decoder(seed=0, **fields):
    sizes = {
        "vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    model = Decoder(Shape(**sizes | fields))
    rng = torch_rng(seed, "init")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3, generator=rng)
    return model


def requests(number=6, answers=4, vocabulary=16, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Request(
            key=("test", index),
            prompt=rng.integers(0, vocabulary, int(rng.integers(2, 12))).tolist(),
            numbers=tuple(range(answers)),
        )
        for index in range(number)
    ]


def limits(max_tokens=20, **fields):
    return Limits(**{"max_tokens": max_tokens, "stop": (STOP,), "seed": 1} | fields)


def answered(model, *, number=6, answers=4, slots=64, **fields):
    asked = requests(number, answers, model.head.shape[0])
    return asked, Engine(model, slots=slots).generate(asked, limits(**fields))


def pieces_of(asked, groups):
    flat = [(group, request.prompt, answer) for group, request in enumerate(asked) for answer in groups[group]]
    return [
        Piece(index=index, group=group, prompt=prompt, answer=answer.tokens)
        for index, (group, prompt, answer) in enumerate(flat)
    ]


def direct_scores(model, prompt, answer, temperature=1.0):
    """Log-probabilities of an answer's tokens by one plain causal pass."""
    text = torch.tensor([[*prompt, *answer]])
    length = text.shape[1]
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        hidden = model(text, torch.arange(length)[None], mask)
        logp = (hidden @ model.head.T / temperature).log_softmax(-1)[0, len(prompt) - 1 : -1]
    return logp.gather(1, torch.tensor(answer)[:, None])[:, 0]
