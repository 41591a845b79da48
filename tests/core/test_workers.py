"""One suite for all backends of Workers, and the virtual clock of the inline one."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import worker_factories as factories
from hypothesis import given, settings
from hypothesis import strategies as st
from ray_fixture import local_ray  # noqa: F401 - a fixture

from sextet.core.errors import UsageError
from sextet.core.workers import WorkerError, WorkerLost, Workers
from sextet.core.workers_host import dumps, loads

BACKENDS = ["inline:2", "process:2", pytest.param("ray:2", marks=pytest.mark.ray)]
CONFIG = {"scale": 2.0}


@pytest.fixture(params=BACKENDS)
def spec(request):
    if request.param.startswith("ray"):
        request.getfixturevalue("local_ray")
    return request.param


def values(results):
    return {result.key: result.value for result in results}


def test_results_come_sorted_by_key_and_once(spec):
    with Workers.open(spec, factories.toy, CONFIG) as workers:
        tickets = [workers.submit("echo", key * 10, key=f"k{key}", extra=key) for key in (3, 1, 4, 0, 2)]
        assert [(ticket.key, ticket.version) for ticket in tickets] == [(f"k{n}", 0) for n in (3, 1, 4, 0, 2)]
        results = workers.gather()
        assert [result.key for result in results] == ["k0", "k1", "k2", "k3", "k4"]
        assert [result.value for result in results] == [(key * 10, key) if key else (0, 0) for key in range(5)]
        assert {result.worker for result in results} <= {0, 1} and all(r.seconds >= 0 for r in results)
        assert workers.gather() == [] and workers.gather(at_least=3) == []
        workers.submit("echo", "again", key="k1")
        assert values(workers.gather(at_least=1, timeout=60)) == {"k1": "again"}


def test_keyed_work_with_torch_weights_is_the_same_as_without_workers(spec):
    import torch

    generator = torch.Generator().manual_seed(5)
    matrix, x = torch.randn(4, 3, generator=generator), torch.randn(2, 3, generator=generator)
    weights = {
        "layers": [{"matrix": torch.nn.Parameter(matrix), "bias": torch.ones(4, dtype=torch.bfloat16)}],
        "scalar": torch.tensor(7, dtype=torch.int64),
        "none": torch.zeros(0, 2),
        "name": "toy",
    }
    with Workers.open(spec, factories.toy, CONFIG) as workers:
        assert workers.publish(weights) == 1
        with torch.no_grad():
            weights["layers"][0]["matrix"].zero_()  # a published version does not change
        for row in range(2):
            workers.submit("forward", x[row : row + 1], key=f"row{row}")
        got = workers.gather()
        assert [result.version for result in got] == [1, 1]
    direct = factories.toy(CONFIG)
    restored = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))
    direct.load_weights({"layers": [{"matrix": restored, "bias": torch.ones(4)}]})
    for row, result in enumerate(got):
        assert torch.equal(result.value, direct.forward(x[row : row + 1]))


def test_tensors_and_arrays_travel_by_value(spec):
    import torch

    with Workers.open(f"{spec.split(':')[0]}:1", factories.toy, CONFIG, threads=2) as workers:
        if not spec.startswith("inline"):
            workers.submit("threads", key="threads")
            assert workers.gather()[0].value == (2, "2")
        sent = torch.arange(6).reshape(2, 3).T
        workers.submit("echo", [sent, np.arange(3), torch.tensor(2.5), torch.zeros(0, 4)], key="echo")
        sent.zero_()  # arguments are taken at submit
        (back,) = workers.gather()
        assert torch.equal(back.value[0], torch.arange(6).reshape(2, 3).T) and back.value[2] == 2.5
        assert back.value[3].shape == (0, 4)
        back.value[1][0] = 9  # results are ours to change
        taken = []
        for n in range(3):
            workers.submit("state", 1.0, key=f"state{n}")
            taken += [result.value for result in workers.gather()]
        assert [array.tolist() for array, _ in taken] == [[n] * 3 for n in (1, 2, 3)]
        assert [tensor.tolist() for _, tensor in taken] == [[n] * 3 for n in (1, 2, 3)]


def test_a_slice_is_sent_without_the_rest_and_without_gradient():
    import torch

    weight = torch.zeros(1000, 100, requires_grad=True)
    data = dumps(weight[3:5] * 2)
    assert len(dumps(weight[3:5])) < 1500 and len(data) < 1500
    assert not loads(data).requires_grad and type(loads(dumps(torch.nn.Parameter(weight)))) is torch.Tensor


def test_workers_adopt_the_newest_version_between_tickets(spec):
    with Workers.open(f"{spec.split(':')[0]}:1", factories.toy, CONFIG) as workers:
        seen = []
        for version in range(1, 4):
            assert workers.publish({"version": version, "bias": 0.5}) == version == workers.version
            for repeat in range(2):
                assert workers.submit("count", key=f"{version}{repeat}").version == version
            seen += [(result.version, *result.value) for result in workers.gather()]
        assert seen == [(version, 2 * version - 1 + r, version, version) for version in (1, 2, 3) for r in (0, 1)]


def test_an_exception_is_reported_once_and_the_others_stay(spec):
    with Workers.open(spec, factories.toy, CONFIG) as workers:
        workers.submit("fail", "deliberate", key="bad")
        workers.submit("echo", 1, key="good")
        with pytest.raises(WorkerError, match=r'"bad" failed in worker \d: ValueError: deliberate') as caught:
            workers.gather()
            workers.gather()
        assert caught.value.key == "bad" and "worker_factories.py" in caught.value.detail
        assert values(workers.gather()) == {"good": 1}
        for method, text in (("nothing", "has no attribute 'nothing'"), ("unsendable", "the result cannot be sent")):
            workers.submit(method, key="bad")
            with pytest.raises(WorkerError, match=text):
                workers.gather()
        assert workers.stats == {"restarts": 0, "resubmitted": 0, "stale": 0}
        assert workers.free_slots == 1000


def test_bounds_and_misuse_are_refused_with_a_clear_text(spec):
    with Workers.open(spec, factories.toy, CONFIG, max_in_flight=2) as workers:
        workers.submit("echo", 1, key="a")
        with pytest.raises(UsageError, match='"a" is in flight already'):
            workers.submit("echo", 1, key="a")
        assert workers.free_slots == 1
        with pytest.raises(UsageError, match='arguments of ticket "b" cannot be sent'):
            workers.submit("echo", lambda: 1, key="b")
        with pytest.raises(UsageError, match="the weights cannot be sent"):
            workers.publish({"function": lambda: 1})
        workers.submit("echo", 2, key="b")
        with pytest.raises(UsageError, match='no free slot for ticket "c": gather some of 2 in flight'):
            workers.submit("echo", 3, key="c")
        assert values(workers.gather()) == {"a": 1, "b": 2} and workers.free_slots == 2
        health = workers.health()
        assert [(state.worker, state.restarts, state.busy_key) for state in health] == [(0, 0, None), (1, 0, None)]
        assert all(state.alive and 0 <= state.last_seen_seconds < 60 for state in health)
    workers.close()
    assert not any(state.alive for state in workers.health())
    for call in (workers.gather, lambda: workers.submit("echo", key="d"), lambda: workers.publish({})):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_a_factory_that_raises_is_an_error_not_a_wait(spec):
    with (
        pytest.raises(WorkerError, match="RuntimeError: no luck"),
        Workers.open(  # noqa: SIM117
            spec, factories.broken, "luck"
        ) as workers,
    ):
        workers.submit("echo", 1, key="a")
        workers.gather()


def test_stale_results_are_computed_again(spec):
    durations = (lambda key, method: 1.0) if spec.startswith("inline") else None
    with Workers.open(
        f"{spec.split(':')[0]}:1", factories.toy, CONFIG, max_staleness=1, durations=durations
    ) as workers:
        workers.publish({"version": 1})
        workers.submit("count", key="first")
        workers.gather()
        workers.submit("count", key="slow")
        for version in (2, 3):
            workers.publish({"version": version})
        (result,) = workers.gather()
        assert (result.version, result.value[2]) == (3, 3)
        assert workers.stats == {"restarts": 0, "resubmitted": 1, "stale": 1}


@pytest.mark.parametrize("spec", BACKENDS[1:], indirect=True)
def test_gather_takes_what_is_ready_and_obeys_its_timeout(spec):
    with Workers.open(spec, factories.toy, CONFIG) as workers:
        workers.submit("echo", 0, key="warm")
        workers.gather()
        workers.submit("nap", 1.5, key="slow")
        workers.submit("nap", 0.0, key="quick")
        assert list(values(workers.gather(at_least=1))) == ["quick"]
        start = time.monotonic()
        assert workers.gather(timeout=0.2) == [] and workers.gather(at_least=0) == []
        assert time.monotonic() - start < 1
        assert [state.busy_key for state in workers.health()].count("slow") == 1
        assert list(values(workers.gather())) == ["slow"]


@pytest.mark.ray
def test_a_joined_ray_stays_and_a_worker_can_join_by_address(local_ray):  # noqa: F811
    address = local_ray.get_runtime_context().gcs_address
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import worker_factories as factories\n"
        "from sextet.core.workers import Workers\n"
        f"with Workers.open('ray:1@{address}', factories.toy, dict(scale=1)) as workers:\n"
        "    workers.submit('echo', 'from the cluster', key='a')\n"
        "    print(workers.gather()[0].value)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "from the cluster", done.stderr
    assert local_ray.is_initialized() and local_ray.cluster_resources()["CPU"] == 4


def test_ray_missing_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "sextet.core.workers_ray", raising=False)
    with pytest.raises(UsageError, match=r'pip install "sextet\[ray\]"'):
        Workers.open("ray:2", factories.toy, CONFIG)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("proces:2", r'is not inline\[:N\], process\[:N\] or .*did you mean "process"'),
        ("process:0", "is not inline"),
        ("process:2@host", "is not inline"),
        ("ray:two", 'did you mean "ray"'),
        ("", "is not inline"),
    ],
)
def test_a_wrong_spec_names_the_allowed_forms(spec, text):
    with pytest.raises(UsageError, match=text):
        Workers.open(spec, factories.toy, CONFIG)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_in_flight": 0}, "max_in_flight=0"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
        ({"threads": 0}, "threads=0"),
        ({"durations": lambda key, method: 1.0}, 'durations are for workers "inline"'),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        Workers.open("process:1", factories.toy, CONFIG, **options)


def test_a_factory_that_workers_cannot_import_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="top-level function"):
        Workers.open("inline", lambda config: None, CONFIG)
    monkeypatch.setattr(sys.modules["__main__"], "toy", factories.toy, raising=False)
    monkeypatch.setattr(factories.toy, "__module__", "__main__")
    with pytest.raises(UsageError, match="move it into a module"):
        Workers.open("process:1", factories.toy, CONFIG)


# Virtual clock


def table(seconds):
    return lambda key, method: seconds[key]


def test_inline_runs_in_the_order_of_keys_at_gather():
    with Workers.open("inline", factories.toy, CONFIG) as workers:
        for key in "bca":
            workers.submit("count", key=key)
        assert [(r.key, r.value[0]) for r in workers.gather(at_least=2)] == [("a", 1), ("b", 2)]
        workers.submit("count", key="a")
        assert [(r.key, r.value[0]) for r in workers.gather()] == [("a", 3), ("c", 4)]


def test_virtual_workers_finish_in_the_order_of_their_durations():
    seconds = {"a": 5.0, "b": 1.0, "c": 2.0, "d": 1.0}
    with Workers.open("inline:2", factories.toy, CONFIG, durations=table(seconds)) as workers:
        for key in seconds:
            workers.submit("echo", key, key=key)
        assert [state.busy_key for state in workers.health()] == ["a", "b"]
        first = workers.gather(at_least=1)
        assert [(r.key, r.seconds, r.worker) for r in first] == [("b", 1.0, 1)] and workers.now == 1.0
        assert workers.gather(at_least=0) == [] and workers.gather(timeout=1.5) == [] and workers.now == 2.5
        assert [r.key for r in workers.gather(at_least=2)] == ["c", "d"] and workers.now == 4.0
        assert [r.key for r in workers.gather()] == ["a"] and workers.now == 5.0


def test_a_virtual_worker_keeps_the_weights_it_started_with():
    with Workers.open("inline:1", factories.toy, CONFIG, durations=table({"a": 1.0, "b": 1.0})) as workers:
        workers.publish({"version": 1})
        workers.submit("count", key="a")
        workers.submit("count", key="b")
        workers.publish({"version": 2})
        assert [(r.key, r.version, r.value[2]) for r in workers.gather()] == [("a", 1, 1), ("b", 2, 2)]


def test_a_virtual_timeout_replaces_the_worker_until_the_retries_are_used():
    with Workers.open(
        "inline:1", factories.toy, CONFIG, durations=table({"a": 5.0, "b": 1.0}), timeout_seconds=2.0, max_retries=2
    ) as workers:
        workers.submit("echo", 1, key="a")
        workers.submit("echo", 2, key="b")
        with pytest.raises(WorkerLost, match='"a" lost its worker 3 times.*no answer within 2 s'):
            workers.gather()
        assert workers.now == 6.0 and workers.stats == {"restarts": 3, "resubmitted": 2, "stale": 0}
        assert values(workers.gather()) == {"b": 2}


STEP = st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 3))  # publications, submissions, at_least


@settings(max_examples=100, deadline=None)
@given(
    seconds=st.lists(st.floats(0.1, 10), min_size=1, max_size=12),
    steps=st.lists(STEP, max_size=12),
    num=st.integers(1, 4),
    bound=st.integers(0, 2),
)
def test_staleness_stays_within_the_bound_and_nothing_is_lost(seconds, steps, num, bound):
    """Random durations, publications and partial gathers: results out of order, never too old, each exactly once."""
    durations = table({f"k{n:02d}": value for n, value in enumerate(seconds)})
    waiting, returned = list(range(len(seconds))), []
    with Workers.open(f"inline:{num}", factories.toy, CONFIG, max_staleness=bound, durations=durations) as workers:
        for publications, submissions, at_least in [*steps, (0, len(seconds), None)]:
            for _ in range(publications):
                workers.publish({"version": workers.version + 1, "bias": 0.0})
            for number in waiting[:submissions]:
                workers.submit("draw", number, key=f"k{number:02d}")
            waiting = waiting[submissions:]
            before, flying = workers.now, 1000 - workers.free_slots
            results = workers.gather(at_least)
            assert workers.now >= before
            assert len(results) == (flying if at_least is None else min(at_least, flying))
            assert [r.key for r in results] == sorted(r.key for r in results)
            assert all(workers.version - r.version <= bound for r in results)
            returned += results
    assert sorted(r.key for r in returned) == [f"k{n:02d}" for n in range(len(seconds))]
    for result in returned:
        expected = np.random.default_rng(int(result.key[1:])).normal(size=3) * 2.0
        assert result.value.tolist() == expected.tolist()
