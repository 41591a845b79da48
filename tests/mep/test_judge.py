"""Games of a whole cast: who meets whom, in which seats, resumed games, common states for entropies, words."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sextet.core.errors import UsageError
from sextet.core.run import Run
from sextet.core.seeding import torch_rng
from sextet.mep import judge
from sextet.mep.config import smoke
from sextet.mep.evaluate import cross_play
from sextet.mep.jobs import open_workers
from sextet.mep.judge import Role, mean_over, measure_entropies, play_pairs, schedule
from sextet.mep.members import Population
from sextet.mep.overcooked import Layout
from sextet.mep.policy import Policy, PolicyAgent
from sextet.mep.tables import Kitchen, difference, overall_tables

ROOM = Layout.load("cramped_room")


def someone(name, group="SP", seed=0):
    return Role(name=name, group=group, seed=seed, player=Policy(ROOM, "planes20", "mlp", torch_rng(seed, "init")))


def test_schedule_has_every_wanted_pair_once_with_enough_games() -> None:
    cast = [someone(str(index)) for index in range(5)]
    pairs = schedule(cast, strangers=[4], close=[0, 1, 4], games=100, few=20)
    assert len({(first, second) for first, second, _ in pairs}) == len(pairs)
    assert all(first <= second for first, second, _ in pairs)
    games = {(first, second): number for first, second, number in pairs}
    assert all(games[index, index] == 100 and games[index, 4] == 100 for index in range(5))
    assert games[0, 1] == 20 and (2, 3) not in games


def test_pairs_are_played_in_both_orders_and_read_back(tmp_path, monkeypatch) -> None:
    config = replace(smoke(), save_every=1)
    cast = [someone("a", seed=1), someone("b", seed=2)]
    pairs = [(0, 0, 2), (0, 1, 3), (1, 1, 2)]
    monkeypatch.setattr(judge, "PAIRS_A_STEP", 1)
    with Run.open(config, recipe="mep", directory=tmp_path, quiet=True) as run, open_workers(config) as workers:
        scores = play_pairs(config, run.child("games"), cast, pairs, workers)
        monkeypatch.setattr(judge, "run_jobs", None)
        assert play_pairs(config, run.child("games"), cast, pairs, workers) == scores
        with pytest.raises(UsageError, match="another cast, which differs in b, c"):
            play_pairs(config, run.child("games"), [cast[0], someone("c")], pairs, workers)
    assert scores.keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_order_of_a_pair_is_that_of_its_seats(monkeypatch) -> None:
    """The score under (one, two) is that of games with one in seat 0."""
    config, seen = replace(smoke(), ppo=replace(smoke().ppo, horizon=4)), []

    def play(env, agents, *, episodes, rng):
        seen.append([agent.name for agent in agents])
        return np.full(episodes, float(len(seen)))

    monkeypatch.setattr(judge, "play", play)
    env = judge.Overcooked(ROOM, 1, horizon=4)
    shared = {"cast": [someone("a").spec(), someone("b").spec()], "pairs": [(0, 1, 5)]}
    row, _ = judge.play_pair(config, env, shared, 0, 7)
    assert row == [1.0, 2.0] and seen == [["a", "b"], ["b", "a"]]


def test_mean_over_takes_the_seat_of_the_one_judged() -> None:
    scores = {(0, 5): 10.0, (5, 0): 20.0, (0, 6): 30.0, (6, 0): 60.0}
    assert mean_over(scores, 0, [5, 6], seat=0) == 20.0
    assert mean_over(scores, 0, [5, 6], seat=1) == 40.0
    assert mean_over(scores, 0, [5, 6]) == 30.0


def test_a_rebuilt_player_plays_the_same_games() -> None:
    role = someone("a", seed=3)
    env = judge.Overcooked(ROOM, 2, horizon=400)
    again = judge.rebuild(role.spec(), env)
    one = cross_play(ROOM, {"a": PolicyAgent(role.player)}, episodes=2, seed=1)
    two = cross_play(ROOM, {"a": again}, episodes=2, seed=1)
    assert one == two


def test_entropy_is_measured_on_the_states_of_all_populations(tmp_path) -> None:
    """Equal members have the entropy of one; unlike members have more, on the same states."""
    config = smoke()

    def member(action):
        policy = Policy(ROOM, "planes20", "mlp", torch_rng(0, "init"))
        with torch.no_grad():
            policy.biases[-1][action] = 9.0
        return policy.state_dict()

    same, unlike = [member(4), member(4)], [member(4), member(5)]
    groups = {
        name: [Population(weights={"final": weights}, returns=[0.0, 0.0])]
        for name, weights in {"FCP": same, "MEP": unlike}.items()
    }
    with Run.open(config, recipe="mep", directory=tmp_path, quiet=True) as run, open_workers(config) as workers:
        found = measure_entropies(config, run.child("entropy"), groups, workers)
        assert measure_entropies(config, run.child("entropy"), {}, workers) == {}
    assert found["MEP"][0] == pytest.approx(np.log(2), abs=0.05) and found["FCP"][0] < 0.05


def kitchen(name, **scores):
    """A kitchen of one human proxy with itself at 50, and methods with the given scores of two seeds."""
    cast, table = [], {}
    for group, values in scores.items():
        for seed, value in enumerate(values):
            cast.append(someone(f"{group} {seed}", group, seed))
            table[len(cast) - 1] = value
    human = len(cast)
    cast.append(someone("human proxy 0", "human proxy"))
    pairs = {(human, human): 50.0}
    for index, value in table.items():
        pairs |= {(index, index): 100.0, (index, human): value, (human, index): value}
    return Kitchen(layout=Layout.load(name), cast=cast, close=[0, human], scores=pairs, entropy={})


def test_overall_scores_are_relative_to_sp_and_say_what_is_not_told_apart(tmp_path) -> None:
    config = replace(smoke(), num_seeds=2)
    kitchens = [
        kitchen("cramped_room", SP=[90.0, 110.0], FCP=[150.0, 151.0], MEP=[149.0, 151.0]),
        kitchen("coordination_ring", SP=[20.0, 20.0], FCP=[30.0, 30.2], MEP=[29.0, 31.0]),
    ]
    with Run.open(config, recipe="mep", directory=tmp_path, quiet=True) as run:
        summary = overall_tables(config, run, kitchens)
        assert overall_tables(config, run, kitchens[:1]) == {}
    assert summary["SP, with human, both seats, relative to SP"]["mean"] == pytest.approx(1)
    assert summary["FCP, with human, both seats, relative to SP"]["mean"] == pytest.approx(1.505, abs=0.01)
    words = (tmp_path / "artifacts" / "01-words.json").read_text()
    assert "MEP does not beat FCP over these kitchens." in words and "MEP against SP" in words
    assert difference([1.0], [3.0]).low is None and difference([1.0], [3.0]).mean == 2.0
