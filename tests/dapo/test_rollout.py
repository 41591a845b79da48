import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.lm import STOP, answered, direct_scores, limits, requests, small_decoder
from sextet.core.errors import DivergenceError
from sextet.dapo.rollout import Engine, Request, draw


@pytest.fixture(scope="module")
def model():
    return small_decoder()


def plain(groups):
    return [[(answer.tokens, answer.stopped) for answer in group] for group in groups]


def test_log_probabilities_are_those_of_the_whole_text(model):
    asked, groups = answered(model)
    for request, group in zip(asked, groups, strict=True):
        for answer in group:
            expected = direct_scores(model, request.prompt, answer.tokens)
            torch.testing.assert_close(torch.tensor(answer.logp), expected, atol=1e-4, rtol=0)
            assert answer.stopped == (answer.tokens[-1] == STOP) and STOP not in answer.tokens[:-1]
            assert answer.stopped or len(answer.tokens) == 20


def test_what_all_prompts_begin_with_is_computed_once(model):
    start = list(range(4, 15)) * 3
    asked = [Request(key=r.key, prompt=start + list(r.prompt), numbers=r.numbers) for r in requests()]
    engine = Engine(model, slots=64)
    groups = engine.generate([*asked, Request(key=("bare",), prompt=[*start, 5], numbers=(0,))], limits())
    ends = sum(len(request.prompt) - len(start) for request in asked) + 1
    assert engine.prefilled == len(start) + ends, "33 tokens once, then each prompt's own"
    for request, group in zip(asked, groups, strict=False):
        for answer in group:
            expected = direct_scores(model, request.prompt, answer.tokens)
            torch.testing.assert_close(torch.tensor(answer.logp), expected, atol=1e-4, rtol=0)
    alone = Engine(model, slots=64)
    assert plain([alone.generate([request], limits())[0] for request in asked]) == plain(groups[:-1])


@settings(max_examples=15, deadline=None)
@given(slots=st.integers(1, 40))
def test_answers_do_not_depend_on_the_number_of_slots(model, slots):
    assert plain(answered(model, slots=slots)[1]) == plain(answered(model)[1])


def test_answers_do_not_depend_on_what_else_is_asked(model):
    asked, groups = answered(model)
    alone = Engine(model, slots=8).generate(asked[3:4], limits())
    assert plain(alone) == plain(groups[3:4])
    some = Request(key=asked[2].key, prompt=asked[2].prompt, numbers=(1, 3))
    assert plain(Engine(model, slots=8).generate([some], limits())) == [[plain(groups)[2][1], plain(groups)[2][3]]]


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_answers_in_slices_are_the_same_and_carry_their_versions(model, size):
    asked, whole = answered(model)
    engine, current, ended = Engine(model, slots=8), asked, {}
    for version in range(30):
        engine.version = version
        groups = engine.generate(current, limits(slice_tokens=size))
        again = []
        for request, group in zip(current, groups, strict=True):
            begun = dict(zip(request.numbers, group, strict=True))
            if all(answer.stopped or len(answer.tokens) == 20 for answer in group):
                ended[request.key] = group
            else:
                again.append(Request(key=request.key, prompt=request.prompt, numbers=request.numbers, begun=begun))
        current = again
        if not current:
            break
    assert plain([ended[request.key] for request in asked]) == plain(whole)
    for group in ended.values():
        for answer in group:
            assert answer.versions == [place // size for place in range(len(answer.tokens))]


def test_a_prompt_is_prefilled_once_for_all_its_answers(model):
    engine = Engine(model, slots=4)
    asked = requests(number=3, answers=16)
    engine.generate(asked, limits())
    assert engine.prefilled == sum(len(request.prompt) for request in asked)


def test_free_slots_are_filled_while_long_answers_go_on(model):
    engine = Engine(model, slots=8)
    groups = engine.generate(requests(number=8, answers=8), limits())
    longest, tokens = 20, sum(len(answer.tokens) for group in groups for answer in group)
    assert engine.steps < 0.75 * 8 * longest, "as many as eight batches of eight"
    assert engine.steps >= math.ceil(tokens / 8) - 64


def test_weights_that_diverged_are_noticed():
    model = small_decoder()
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(DivergenceError, match="not finite"):
        answered(model)


def test_tokens_are_drawn_by_their_probabilities():
    rng = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4, 64, generator=rng)
    uniform = torch.rand(4 * 20_000, generator=rng, dtype=torch.float64)
    tokens, logp = draw(logits.repeat_interleave(20_000, 0), uniform)
    expected = logits.softmax(-1)
    for row in range(4):
        counts = torch.bincount(tokens[row * 20_000 : (row + 1) * 20_000], minlength=64)
        chi2 = ((counts - 20_000 * expected[row]) ** 2 / (20_000 * expected[row])).sum()
        assert chi2 < 63 + 5 * math.sqrt(2 * 63)
    right = logits.log_softmax(-1).repeat_interleave(20_000, 0).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logp, right, atol=1e-5, rtol=0)


@settings(deadline=None)
@given(st.integers(2, 300), st.floats(0.05, 1), st.integers(0, 2**31))
def test_top_p_draws_from_the_fewest_tokens_that_reach_it(vocabulary, top_p, seed):
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, vocabulary, generator=rng)
    p = logits.softmax(-1)[0].double().numpy()
    order = np.argsort(-p)
    needed = int(np.searchsorted(np.cumsum(p[order]), top_p - 1e-6)) + 1
    tokens, _ = draw(logits.repeat(64, 1), torch.rand(64, generator=rng, dtype=torch.float64), top_p)
    assert set(tokens.tolist()) <= set(order[: needed + 1].tolist())
    assert int(draw(logits.clone(), torch.zeros(1, dtype=torch.float64), 1e-6)[0]) == order[0]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_give_possible_tokens(uniform):
    logits = torch.full((1, 512), -torch.inf)
    logits[0, [7, 300]] = 0.0
    token, logp = draw(logits, torch.tensor([uniform], dtype=torch.float64))
    assert token.item() == (7 if uniform == 0 else 300) and logp.item() == pytest.approx(math.log(0.5))
