"""What is trained on: which groups, in which order, how old, and what happens when there are none."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.scripted import FAILED, LENGTH, RIGHT, WRONG, ScriptedPool, by_problem, collect, collector
from sextet.core.errors import DataError
from sextet.dapo.groups import MOST_CANDIDATES, Group, Prompts
from sextet.dapo.rewards import Verdict
from sextet.dapo.rollout import Answer
from sextet.dapo.train import Stalled, group_logs, watch_empty
from sextet.launch import launch

KINDS = st.lists(st.sampled_from(["mixed", "right", "wrong", "failed"]), min_size=1, max_size=7)
SETTINGS = st.fixed_dictionaries(
    {
        "prompts": st.integers(1, 5),
        "answers": st.integers(2, 4),
        "candidates": st.sampled_from([0.0, 1.0, 3.0]),
        "max_rounds": st.integers(1, 5),
        "surplus": st.sampled_from(["drop", "carry"]),
        "curriculum": st.sampled_from([0.0, 2.0]),
    }
)


def verdict(score, failure=""):
    return Verdict(score=score, right=None if failure else score > 0.5, failure=failure)


def group(*verdicts):
    answers = [Answer(tokens=[1], logp=[-1.0], versions=[0], stopped=True) for _ in verdicts]
    return Group(draw=0, problem=0, prompt=[1], answers=answers, verdicts=list(verdicts))


# --- groups ---


@pytest.mark.parametrize(
    "verdicts, kind",
    [
        ([RIGHT, WRONG], "mixed"),
        ([RIGHT, RIGHT], "right"),
        ([WRONG, WRONG], "wrong"),
        ([FAILED, FAILED], "failed"),
        ([FAILED, WRONG], "wrong"),
        ([verdict(1.0, "error"), RIGHT], "right"),
        ([FAILED, RIGHT], "mixed"),
        ([verdict(0.25), verdict(0.75)], "mixed"),
        ([verdict(0.3), verdict(0.3)], "wrong"),
        ([verdict(0.9), verdict(0.9)], "right"),
        ([verdict(0.1 + 0.2), verdict(0.3)], "wrong"),
        ([verdict(0.9), verdict(0.9 + 1.9e-6)], "right"),
        ([verdict(0.9), verdict(0.9 + 2.1e-6)], "mixed"),
    ],
)
def test_kinds_of_groups(verdicts, kind):
    assert group(*verdicts).kind(1e-6) == kind


def test_a_group_that_differs_in_length_only_is_not_trained_on():
    found = collector(by_problem(["wrong", "mixed"]), cache_tokens=LENGTH)
    trained, seen, _ = collect(found)
    lengths = {tuple(sorted(len(answer.tokens) for answer in group.answers)) for group in seen}
    assert any(short < long for short, long in lengths), "the shaped rewards of all-wrong groups have a spread"
    assert {group.problem % 2 for group in trained} == {1}


def test_without_dynamic_sampling_every_group_is_trained_on():
    found = collector(by_problem(["wrong", "right", "failed", "mixed"]), method="grpo", prompts=8)
    trained, seen, counts = collect(found)
    assert trained == seen and len(trained) == 8 and counts["rounds"] == 1
    assert sum(counts[kind] for kind in ("wrong", "right", "failed", "mixed") if kind in counts) == 8


# --- what holds for every batch ---


@settings(deadline=None, max_examples=25)
@given(KINDS, SETTINGS, st.integers(1, 25), st.integers(0, 3), st.integers(1, 4), st.integers(0, 3), st.integers())
def test_every_batch_of_every_schedule(kinds, fields, number, ahead, tickets, slice_tokens, seed):
    pool = ScriptedPool(abs(seed), tickets)
    found = collector(
        by_problem(kinds), number=number, pool=pool, ahead=ahead, slice_tokens=slice_tokens if ahead else 0, **fields
    )
    bound = max(ahead, int(fields["surplus"] == "carry"))
    used, judged, totals = Counter(), Counter(), Counter()
    for step in range(6):
        before = len(pool.sent)
        trained, seen, counts = collect(found, step)
        totals.update(counts)
        assert len(trained) <= fields["prompts"]
        assert len(trained) == fields["prompts"] or counts["rounds"] == fields["max_rounds"]
        for each in trained:
            assert np.std(each.scores) > 1e-6 and each.kind(1e-6) == "mixed"
            assert len(each.answers) == fields["answers"]
            assert [answer.tokens[:2] for answer in each.answers] == [
                [each.draw, number] for number in range(fields["answers"])
            ]
            for answer in each.answers:
                assert answer.stopped and len(answer.tokens) == len(answer.logp) == len(answer.versions)
                assert answer.versions == sorted(answer.versions)
                assert all(step - bound <= version <= step for version in answer.versions)
                assert answer.logp == [-0.5 - version for version in answer.versions]
        used.update(each.draw for each in trained)
        judged.update(each.draw for each in seen)
        logs = group_logs(seen, counts, step)
        assert logs.get("async/staleness_max", 0) <= bound
        kinds_seen = Counter(each.kind(1e-6) for each in seen)
        assert all(counts.get(kind, 0) == kinds_seen[kind] for kind in ("mixed", "right", "wrong", "failed"))
        if not ahead and fields["candidates"]:
            most = max(1, int(np.ceil(fields["candidates"] * fields["prompts"])))
            assert len(pool.sent) - before <= most * fields["max_rounds"]
    assert not used or max(used.values()) == 1, "no group is trained on twice"
    assert not judged or max(judged.values()) == 1, "no draw is judged twice"
    draws = [request.key[1] for request in pool.sent]
    assert draws == list(range(found.order.drawn)), "every draw is sent once, in order"
    on_its_way = {request.key[1] for request in pool.in_flight("train")}
    left = {each.draw for each in found.left}
    assert not on_its_way & (set(used) | set(judged)) and not left & set(used)
    assert 0 <= len(draws) - len(on_its_way) - len(judged) <= totals["stale"], "what is missing was too old"
    assert ahead or fields["surplus"] == "carry" or not totals["stale"]


@settings(deadline=None, max_examples=12)
@given(KINDS, SETTINGS, st.integers(1, 25), st.integers(0, 3))
def test_a_restored_collection_goes_on_as_if_never_stopped(kinds, fields, number, kill):
    """Synchronous: bit by bit the same, whatever was left over and whatever the curriculum knew."""

    def batches(stop):
        found = collector(by_problem(kinds), number=number, **fields)
        made = []
        for step in range(5):
            if step == stop:
                state = json.loads(json.dumps(found.state_dict()))
                found = collector(by_problem(kinds), number=number, **fields)
                found.load_state_dict(state)
            made.append(collect(found, step))
        return made, found.state_dict()

    assert batches(kill) == batches(None)


@settings(deadline=None, max_examples=12)
@given(KINDS, st.integers(1, 3), st.integers(1, 4), st.integers(0, 2), st.integers(0, 1000))
def test_what_was_on_its_way_is_sent_again_and_nothing_twice(kinds, ahead, tickets, slice_tokens, seed):
    def fresh(number):
        return collector(
            by_problem(kinds), pool=ScriptedPool(seed + number, tickets), ahead=ahead, slice_tokens=slice_tokens,
            max_rounds=3,
        )  # fmt: skip

    def drawn_and_begun(found):
        return {request.key: (request.prompt, request.numbers, request.begun) for request in
                found.pool.in_flight("train")}  # fmt: skip

    found, trained, seen = fresh(0), [], []
    for step in range(6):
        batch, judged, _ = collect(found, step)
        trained += batch
        seen += judged
        state = json.loads(json.dumps(found.state_dict()))
        again = fresh(step + 1)
        again.load_state_dict(state)
        assert drawn_and_begun(again) == drawn_and_begun(found)
        assert again.left == found.left and again.order.drawn == found.order.drawn
        assert again.state_dict() == found.state_dict()
        found = again
    for groups in (trained, seen):
        draws = [each.draw for each in groups]
        assert len(draws) == len(set(draws))


def test_a_state_taken_while_a_batch_is_filled_holds_what_was_kept():
    states = []

    class Watching(ScriptedPool):
        def take(self, tag, *, everything):
            states.append(json.loads(json.dumps(found.state_dict())))
            return super().take(tag, everything=everything)

    found = collector(by_problem(["mixed", "wrong"]), pool=Watching(), prompts=6, candidates=1.0)
    trained, _, counts = collect(found)
    assert counts["rounds"] > 1 and len(states) == counts["rounds"]
    for state in states:
        kept, flying = {left["draw"] for left in state["left"]}, {draw for draw, _, _ in state["flying"]}
        assert kept <= {each.draw for each in trained} and not kept & flying and max(flying) < state["drawn"]
    assert states[-1]["left"]


def test_partial_answers_are_restored_with_their_tokens_versions_and_log_probabilities():
    class Prompt(ScriptedPool):
        """Everything that was sent is there when it is asked for, done under the weights of that moment."""

        def take(self, tag, *, everything):
            self.flying = [(part, limits, None) for part, limits, _ in self.flying]
            return super().take(tag, everything=True)

    found = collector(pool=Prompt(), ahead=2, slice_tokens=2, prompts=2)
    collect(found, 0)
    state = json.loads(json.dumps(found.state_dict()))
    parts = {draw: [Answer(**answer) for answer in begun.values()] for draw, _, begun in state["flying"]}
    assert {len(answer.tokens) for answer in parts[2] + parts[3]} == {4}
    again = collector(pool=Prompt(), ahead=2, slice_tokens=2, prompts=2)
    again.load_state_dict(state)
    trained = [each for step in (1, 2) for each in collect(again, step)[0]]
    (two, three) = (each for each in trained if each.draw in (2, 3))
    assert [answer.versions for answer in two.answers + three.answers] == [
        [0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 1],
    ]  # fmt: skip
    for answer in two.answers + three.answers:
        assert answer.stopped and answer.logp == [-0.5 - version for version in answer.versions]


def test_a_state_of_other_problems_is_refused():
    with pytest.raises(DataError, match="20 problems; there are 7 now"):
        collector(number=7).load_state_dict(collector().state_dict())


# --- surplus ---


def test_surplus_groups_are_dropped_or_carried_for_one_step():
    dropped = collector(prompts=3, candidates=3.0)
    assert [each.draw for step in range(2) for each in collect(dropped, step)[0]] == [0, 1, 2, 9, 10, 11]
    carried = collector(prompts=3, candidates=2.0, surplus="carry")
    first, _, counts = collect(carried, 0)
    assert counts["surplus"] == 3 and counts["carried"] == 0
    second, seen, counts = collect(carried, 1)
    assert counts["carried"] == 3 and not counts["rounds"] and not seen, "nothing needs to be generated"
    assert [each.draw for each in first + second] == list(range(6))
    assert {version for each in second for answer in each.answers for version in answer.versions} == {0}
    third, _, _ = collect(carried, 2)
    assert [each.draw for each in third] == [6, 7, 8]


def test_carried_groups_never_grow_older_than_one_version():
    found = collector(prompts=2, candidates=5.0, surplus="carry")
    collect(found, 0)
    collect(found, 1)
    trained, _, counts = collect(found, 2)
    assert counts["stale"] == 6 and {each.oldest for each in trained} == {2}


# --- when there are not enough groups ---


def test_at_the_cap_it_trains_on_what_there_is():
    found = collector(by_problem(["mixed", *["wrong"] * 9]), number=1000, prompts=8, candidates=1.0, max_rounds=3)
    sizes = []
    for step in range(20):
        trained, seen, counts = collect(found, step)
        assert counts["rounds"] == 3 and counts.get("mixed", 0) == len(trained) < 8
        assert counts["wrong"] == len(seen) - len(trained)
        sizes.append(len(trained))
    assert any(sizes)


@pytest.mark.parametrize("percent, enough", [(0, False), (1, False), (100, True)])
def test_data_of_which_few_or_all_can_be_solved(percent, enough):
    kinds = ["mixed"] * percent + ["wrong"] * (100 - percent)
    found = collector(by_problem(kinds), number=10_000, prompts=8)
    sizes, generated = [], 0
    for step in range(4):
        trained, seen, counts = collect(found, step)
        sizes.append(len(trained))
        generated += len(seen)
        assert counts.get("wrong", 0) == len(seen) - counts.get("mixed", 0) and not counts.get("right")
    if enough:
        assert sizes == [8] * 4 and generated == 32, "no more than are needed"
    else:
        assert all(sizes) if percent else not any(sizes)
        assert generated <= 4 * 10 * MOST_CANDIDATES * 8


def test_rounds_grow_with_the_share_of_prompts_that_fail():
    found = collector(by_problem(["mixed", "wrong", "wrong", "wrong"]), number=4000, prompts=32)
    for step in range(8):
        trained, seen, counts = collect(found, step)
        assert len(trained) == 32
    assert 0.1 < found.share < 0.6 and counts["rounds"] <= 4 and len(seen) < 32 * 8


def test_a_fixed_number_of_candidates():
    found = collector(prompts=4, candidates=3.0)
    _, seen, counts = collect(found)
    assert len(seen) == 12 and counts["surplus"] == 8


def test_groups_without_a_verdict_are_their_own_kind_and_can_be_told_from_wrong_ones():
    found = collector(by_problem(["failed", "mixed"]), prompts=4, candidates=2.0)
    trained, seen, counts = collect(found)
    failed = [each for each in seen if each.problem % 2 == 0]
    assert failed and counts["failed"] == len(failed) and counts["failures"] == 2 * len(failed)
    assert "wrong" not in counts and "right" not in counts and len(trained) == 4
    assert not any(found.order.tried[each.problem] for each in failed), "no failure counts as a try"


def watched(counts, steps=5, trained=False):
    said, events = [], []
    run = SimpleNamespace(step=0, say=said.append, event=lambda name, **fields: events.append((name, fields)))
    found = collector()
    for _ in range(steps):
        watch_empty(found, trained, counts, 5, run)
    return said, events


@pytest.mark.parametrize(
    "counts, advice",
    [
        ({"wrong": 160}, "easier problems"),
        ({"right": 150, "wrong": 10}, "harder problems"),
        ({"failed": 100, "wrong": 60}, "the verifier fails"),
        ({"failed": 1, "wrong": 159}, "easier problems"),
    ],
)
def test_steps_without_a_group_warn_with_counts_and_stop_the_run(counts, advice):
    said, events = watched(counts, steps=4)
    assert len(said) == 4 and all(f"{counts.get('wrong', 0)} wrong" in text for text in said)
    assert [name for name, _ in events] == ["warning"] * 4
    with pytest.raises(Stalled, match=advice) as stop:
        watched(counts)
    assert stop.value.exit_code == 3 and "5 steps in a row" in str(stop.value)


def test_a_step_with_a_group_starts_the_count_again():
    run = SimpleNamespace(step=0, say=lambda text: None, event=lambda name, **fields: None)
    found = collector()
    for _ in range(5):
        for trained in (False, False, True):
            watch_empty(found, trained, {}, 3, run)
    assert found.empty == 0


def test_10000_prompts_that_cannot_be_solved_stop_the_run(tmp_path):
    fields = {
        "task": {"name": "chain", "size": 10_000, "reward": "dapo.never_right:judge"},
        "model": {"warm_steps": 1, "width": 16},
        "sampling": {"prompts": 4, "answers": 2, "max_rounds": 3, "max_empty": 2},
        "optim": {"steps": 50},
        "evaluation": {"problems": 2, "samples": 1},
    }
    with pytest.raises(Stalled, match="2 steps in a row .* 0 right, [0-9]+ wrong, 0 failed.*easier") as stop:
        launch("dapo", "smoke", fields, directory=tmp_path / "run", quiet=True)
    assert stop.value.exit_code == 3
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    warned = [event for event in events if "no group with a spread" in event.get("text", "")]
    assert len(warned) == 2 and events[-1]["event"] == "ended"


# --- the order of prompts ---


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(0, 1000), st.lists(st.integers(0, 20), max_size=12))
def test_every_epoch_has_every_prompt_once_however_it_is_taken(number, seed, counts):
    order = Prompts(number, seed, 0.0)
    taken = [pair for count in counts for pair in order.take(count)]
    assert [draw for draw, _ in taken] == list(range(sum(counts)))
    problems = [problem for _, problem in taken]
    for start in range(0, len(problems) - number + 1, number):
        assert sorted(problems[start : start + number]) == list(range(number))
    assert [problem for _, problem in Prompts(number, seed, 0.0).take(sum(counts))] == problems
    assert len(set(problems[-(len(problems) % number) :] if len(problems) % number else [])) == len(problems) % number


def test_epochs_have_different_orders_and_seeds_too():
    def order(seed):
        return [problem for _, problem in Prompts(50, seed, 0.0).take(100)]

    assert order(1)[:50] != order(1)[50:] and order(1) != order(2)


def test_more_prompts_than_there_are():
    found = collector(by_problem(["mixed", "wrong", "wrong"]), number=3, prompts=8, max_rounds=10)
    trained, _, _ = collect(found)
    assert len(trained) == 8 and {each.problem for each in trained} == {0}
    assert len({each.draw for each in trained}) == 8, "the same prompt, answered anew each time"


@settings(deadline=None)
@given(
    st.integers(1, 12), st.floats(0.1, 50), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 8)), max_size=30),
    st.integers(0, 40),
)  # fmt: skip
def test_the_curriculum_draws_any_number_of_prompts_whatever_it_saw(number, sharpness, results, count):
    order = Prompts(number, 5, sharpness)
    for problem, right in results:
        order.saw(problem % number, [RIGHT] * right + [WRONG] * (8 - right))
    chosen = [problem for _, problem in order.take(count)]
    assert len(chosen) == count and all(0 <= problem < number for problem in chosen)


def test_the_curriculum_prefers_problems_that_are_sometimes_right():
    order = Prompts(100, 1, 2.0)
    for problem in range(100):
        right = (0, 8, 4, 4)[problem % 4]
        for _ in range(2):
            order.saw(problem, [RIGHT] * right + [WRONG] * (8 - right))
    chosen = Counter(problem % 4 for _ in range(50) for _, problem in order.take(10))
    assert chosen[2] + chosen[3] > 1.5 * (chosen[0] + chosen[1])
    assert len({problem for _, problem in order.take(40)}) == 40, "no prompt twice in a round if that can be"


def test_what_the_curriculum_knows_fades_and_ignores_failed_verdicts():
    order = Prompts(3, 1, 1.0)
    order.saw(0, [RIGHT, RIGHT, WRONG, FAILED])
    assert (order.tried[0], order.solved[0]) == (3, 2)
    order.saw(0, [WRONG, WRONG])
    assert (order.tried[0], order.solved[0]) == (3.5, 1)
    assert order.tried[1:].tolist() == [0, 0]


def test_the_curriculum_needs_fewer_groups():
    """Problems of 2/3 that are always wrong: they are met, and then mostly left alone."""

    def generated(curriculum):
        found = collector(
            by_problem(["mixed", "wrong", "wrong"]), number=60, prompts=8, candidates=1.0, curriculum=curriculum
        )
        return sum(len(collect(found, step)[1]) for step in range(20))

    assert generated(3.0) < 0.8 * generated(0.0)
