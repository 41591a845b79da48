import numpy as np
import pytest

from sextet.core.errors import UsageError
from sextet.core.stats import Interval
from sextet.mep.evaluate import cross_play, evaluate_pairs, heat_map, play, sample_actions
from sextet.mep.overcooked import Overcooked


class Scripted:
    """Repeats its actions; remembers who asked it what."""

    def __init__(self, actions: list[int]) -> None:
        self.actions, self.begun, self.seats = actions, [], set()

    def begin(self, env: Overcooked, seat: int) -> None:
        assert (env.state.time == 0).all()
        self.begun.append(seat)

    def act(self, env: Overcooked, seat: int, rng: np.random.Generator) -> np.ndarray:
        self.seats.add(seat)
        return np.full(env.num_envs, self.actions[int(env.state.time[0]) % len(self.actions)])


class Wanderer:
    """Acts at random."""

    def begin(self, env: Overcooked, seat: int) -> None:
        pass

    def act(self, env: Overcooked, seat: int, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(0, 6, env.num_envs)


N, S, E, W, STAY, INTERACT = range(6)
# On forced_coordination the left player (seat 1) hands three onions and a dish over the counter to the right one.
LEFT_ONION, LEFT_DISH = [W, INTERACT, E, INTERACT], [S, W, INTERACT, N, E, INTERACT]


def soup_makers() -> tuple[Scripted, Scripted]:
    """A pair for forced_coordination that serves exactly one soup: (right player, left player)."""
    left: list[int] = []
    right: list[int] = []
    for _ in range(3):
        left += LEFT_ONION
        right += [STAY] * 4
        left += [STAY] * 6
        right += [S, W, INTERACT, N, E, INTERACT]
    left += LEFT_DISH + [STAY] * 40
    right += [STAY] * 6 + [S, W, INTERACT, N, E] + [STAY] * 20 + [INTERACT, S, S, S, INTERACT] + [STAY] * 10
    pad = 400 - min(len(left), len(right))
    return Scripted(right + [STAY] * pad), Scripted(left + [STAY] * pad)


def test_scripted_pair_scores_the_soup_it_serves() -> None:
    env = Overcooked("forced_coordination", 3, backend="numpy")
    right, left = soup_makers()
    returns = play(env, (right, left), episodes=5, rng=np.random.default_rng(0))
    assert returns.tolist() == [20.0] * 5 and returns.dtype == np.float64
    assert right.begun == [0, 0] and left.begun == [1, 1]  # two batches of three make five games
    assert right.seats == {0} and left.seats == {1}
    with pytest.raises(UsageError, match="episodes is 0"):
        play(env, (right, left), episodes=0, rng=np.random.default_rng(0))


def test_rows_report_each_seat_on_its_own() -> None:
    right, left = soup_makers()
    (row,) = evaluate_pairs("forced_coordination", {"right": right}, left, episodes=4)
    assert row.name == "right"
    assert row.seat0 == Interval(mean=20.0, low=20.0, high=20.0, n=4)
    assert row.seat1.mean == 0.0 and row.mean.mean == 10.0


def test_a_row_does_not_depend_on_the_other_agents() -> None:
    partner, agents = Wanderer(), {"a": Wanderer(), "b": Wanderer()}
    both = evaluate_pairs("cramped_room", agents, partner, episodes=20, seed=5)
    alone = evaluate_pairs("cramped_room", {"b": agents["b"]}, partner, episodes=20, seed=5)
    other_seed = evaluate_pairs("cramped_room", {"b": agents["b"]}, partner, episodes=20, seed=6)
    assert both[1] == alone[0] != other_seed[0]
    assert both[0].seat1 != both[1].seat1  # the same policy under another name draws other games


def test_cross_play_rows_are_seat_0_and_columns_seat_1() -> None:
    right, left = soup_makers()
    matrix = cross_play("forced_coordination", {"right": right, "left": left}, episodes=2)
    assert [[cell.mean for cell in row] for row in matrix] == [[0.0, 20.0], [0.0, 0.0]]


def test_heat_map_writes_every_mean_legibly() -> None:
    figure = heat_map(["SP", "MEP"], [[200.0, 7.4], [0.0, 95.0]], "cramped_room")
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["200", "7", "0", "95"]
    assert [text.get_color() for text in axes.texts] == ["black", "white", "white", "white"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["SP", "MEP"]
    assert (axes.get_ylabel(), axes.get_xlabel(), axes.get_title()) == ("seat 0", "seat 1", "cramped_room")
    figure.canvas.draw()


def test_sampled_actions_follow_the_probabilities_and_never_a_forbidden_one() -> None:
    probabilities = np.array([0.5, 0.0, 0.25, 0.125, 0.125, 0.0])
    with np.errstate(divide="ignore"):
        logits = np.tile(np.log(probabilities), (40_000, 1)).astype(np.float32)
    counts = np.bincount(sample_actions(logits, np.random.default_rng(1)), minlength=6)
    assert counts[1] == counts[5] == 0
    np.testing.assert_allclose(counts / 40_000, probabilities, atol=0.01)
