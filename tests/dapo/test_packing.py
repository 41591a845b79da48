import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.lm import answered, direct_scores, pieces_of, small_decoder
from sextet.dapo.logprob import token_scores
from sextet.dapo.packing import Piece, build, micro_batches, pack, row_length


@pytest.fixture(scope="module")
def model():
    return small_decoder()


@pytest.fixture(scope="module")
def pieces(model):
    return pieces_of(*answered(model))


def scores(model, batch):
    rows = build(batch)
    hidden = model(rows.tokens, rows.positions, rows.mask).flatten(0, 1)[rows.source]
    logp, _ = token_scores(hidden, model.head, rows.target)
    sizes = {piece.index: len(piece.answer) for row in batch for piece in row}
    return dict(zip(rows.answers, logp.split([sizes[index] for index in rows.answers]), strict=True))


@pytest.mark.parametrize("capacity, micro", [(8, 1), (40, 100), (64, 4096), (10_000, 10_000)])
def test_answers_in_rows_score_as_alone(model, pieces, capacity, micro):
    found = {}
    for batch in micro_batches(pack(pieces, capacity), micro):
        found |= scores(model, batch)
    assert sorted(found) == [piece.index for piece in pieces]
    for piece in pieces:
        expected = direct_scores(model, piece.prompt, piece.answer)
        torch.testing.assert_close(found[piece.index].detach(), expected, atol=1e-5, rtol=0)


def test_neighbours_in_a_row_do_not_touch_each_other(model, pieces):
    row = pack(pieces, 10_000)[0]
    changed = [
        piece if piece.group == 0 and piece.index != 1 else
        Piece(index=piece.index, group=piece.group, prompt=piece.prompt, answer=[5] * len(piece.answer))
        for piece in row
    ]  # fmt: skip
    before, after = scores(model, [row]), scores(model, [changed])
    for piece in row:
        if piece.group == 0 and piece.index != 1:
            assert torch.equal(before[piece.index], after[piece.index])


def test_the_gradient_is_that_of_answers_alone(model, pieces):
    def gradient(capacity, micro):
        model.zero_grad()
        for batch in micro_batches(pack(pieces, capacity), micro):
            torch.cat(list(scores(model, batch).values())).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    alone, shared = gradient(1, 1), gradient(128, 512)
    assert (alone - shared).norm() <= 1e-6 * alone.norm() * 10


def test_what_prompts_begin_with_is_computed_once_in_a_row_and_changes_nothing(model, pieces):
    start = list(range(4, 15)) * 2
    longer = [
        Piece(index=piece.index, group=piece.group, prompt=start + list(piece.prompt), answer=piece.answer)
        for piece in pieces
    ]
    (row,), (bare,) = pack(longer, 10_000), pack(pieces, 10_000)
    assert row_length(row) == row_length(bare) + len(start)
    for capacity, micro in ((40, 100), (64, 4096), (10_000, 10_000)):
        found = {}
        for batch in micro_batches(pack(longer, capacity), micro):
            found |= scores(model, batch)
        for piece in longer:
            expected = direct_scores(model, piece.prompt, piece.answer)
            torch.testing.assert_close(found[piece.index].detach(), expected, atol=1e-5, rtol=0)


def test_a_prompt_is_computed_once_for_its_answers():
    pieces = [Piece(index=index, group=0, prompt=[1] * 30, answer=[2] * 4) for index in range(8)]
    (row,) = pack(pieces, 256)
    assert row_length(row) == 30 + 8 * 3


SIZES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=30)


@settings(deadline=None)
@given(SIZES, st.integers(1, 64), st.integers(1, 256))
def test_every_answer_is_in_one_row_and_rows_keep_their_limits(sizes, capacity, limit):
    prompts = {group: [1] * length for group, length, _ in sizes}
    pieces = [
        Piece(index=index, group=group, prompt=prompts[group], answer=[2] * answer)
        for index, (group, _, answer) in enumerate(sizes)
    ]
    rows = pack(pieces, capacity)
    assert sorted(piece.index for row in rows for piece in row) == list(range(len(pieces)))
    assert all(row_length(row) <= capacity or len(row) == 1 for row in rows)
    batches = micro_batches(rows, limit)
    assert sum(map(len, batches)) == len(rows)
    for batch in batches:
        longest = max(map(row_length, batch))
        assert len(batch) == 1 or longest * len(batch) <= limit
        built = build(batch)
        assert len(built.target) == sum(len(piece.answer) for row in batch for piece in row)
        assert (built.mask == 0).diagonal(dim1=-2, dim2=-1).sum() >= sum(map(row_length, batch))
