"""Workers that are killed, hang, or outlive their parent (process and Ray): nothing is lost, nothing is left over."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CORE = Path(__file__).parents[1] / "core"
sys.path.insert(0, str(CORE))

import worker_factories as factories  # noqa: E402
from ray_fixture import local_ray  # noqa: E402, F401 - a fixture

from sextet.core.workers import WorkerLost, Workers  # noqa: E402

BACKENDS = ["process", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "ray":
        request.getfixturevalue("local_ray")
    return request.param


def gone(pids, within=10.0):
    """Waits until no process of ``pids`` runs (a zombie does not run)."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        states = []
        for pid in pids:
            try:
                states.append(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0])
            except (FileNotFoundError, ProcessLookupError):
                states.append("gone")
        if set(states) <= {"Z", "gone"}:
            return True
        time.sleep(0.02)
    return False


def test_one_worker_killed_within_a_ticket_loses_nothing(backend, tmp_path):
    with Workers.open(f"{backend}:2", factories.toy, {}) as workers:
        workers.publish({"version": 1})
        workers.publish({"version": 2})
        workers.submit("once", str(tmp_path / "a"), "a", "SIGKILL", key="a")
        for number in range(6):
            workers.submit("echo", number, key=f"b{number}")
        results = workers.gather(timeout=60)
        assert [(r.key, r.value) for r in results] == [("a", ("a", 2)), *((f"b{n}", n) for n in range(6))]
        assert results[0].version == 2
        assert workers.stats == {"restarts": 1, "resubmitted": 1, "stale": 0}
        assert sorted(state.restarts for state in workers.health()) == [0, 1]


def test_all_workers_killed_at_once_lose_nothing(backend, tmp_path):
    with Workers.open(f"{backend}:2", factories.toy, {}) as workers:
        workers.publish({"version": 1})
        for key in ("a", "b"):
            workers.submit("once", str(tmp_path / key), key, "SIGKILL", key=key)
        workers.submit("echo", 3, key="c")
        results = workers.gather(timeout=60)
        assert [(r.key, r.value) for r in results] == [("a", ("a", 1)), ("b", ("b", 1)), ("c", 3)]
        assert workers.stats["restarts"] == 2


def test_an_idle_worker_killed_from_outside_is_replaced_with_the_newest_weights(backend):
    with Workers.open(f"{backend}:1", factories.toy, {}) as workers:
        workers.publish({"version": 1})
        workers.submit("pid", key="pid")
        pid = workers.gather()[0].value
        os.kill(pid, signal.SIGKILL)
        assert gone([pid])
        workers.submit("count", key="after")
        assert workers.gather(timeout=60)[0].value == (1, 1, 1)
        assert workers.stats["restarts"] == 1


@pytest.mark.ray
def test_an_actor_killed_by_ray_is_replaced(local_ray):  # noqa: F811
    with Workers.open("ray:1", factories.toy, {}) as workers:
        workers.publish({"version": 1})
        workers.submit("count", key="before")
        workers.gather()
        workers.submit("nap", 0.5, key="nap")
        workers.submit("count", key="queued")
        local_ray.kill(workers._actors[0])
        assert [r.value for r in workers.gather(timeout=60)] == [0.5, (1, 1, 1)]
        assert workers.stats == {"restarts": 1, "resubmitted": 1, "stale": 0}


def test_a_ticket_that_always_kills_its_worker_is_given_up_with_the_cause(backend):
    with Workers.open(f"{backend}:1", factories.toy, {}, max_retries=1) as workers:
        workers.submit("end", "SIGSEGV", key="bad")
        workers.submit("echo", 1, key="good")
        with pytest.raises(WorkerLost, match='"bad" lost its worker 2 times') as caught:
            workers.gather()
        assert (caught.value.exit_code, caught.value.key, caught.value.worker) == (3, "bad", 0)
        if backend == "process":
            assert "signal 11" in str(caught.value) and "last words" in caught.value.detail
        else:
            assert "Died" in caught.value.detail
        assert [(r.key, r.value) for r in workers.gather(timeout=60)] == [("good", 1)]


def test_a_hanging_worker_is_replaced_after_the_timeout(backend, tmp_path):
    with Workers.open(f"{backend}:1", factories.toy, {}, timeout_seconds=1.0) as workers:
        workers.submit("once", str(tmp_path / "a"), "a", "hang", key="a")
        assert workers.gather(timeout=60)[0].value == ("a", None)
        workers.submit("once", str(tmp_path / "b"), "b", "SIGSTOP", key="b")
        assert workers.gather(timeout=60)[0].value == ("b", None)
        assert workers.stats == {"restarts": 2, "resubmitted": 2, "stale": 0}


def test_a_worker_that_always_hangs_is_given_up_and_says_where():
    with Workers.open("process:1", factories.toy, {}, timeout_seconds=0.3, max_retries=0) as workers:
        workers.submit("nap", 600, key="a")
        with pytest.raises(WorkerLost, match="no answer within 0.3 s") as caught:
            workers.gather()
        assert "in nap" in caught.value.detail and "last words" not in caught.value.detail


def test_a_dead_worker_is_noticed_while_its_child_lives(tmp_path):
    with Workers.open("process:1", factories.toy, {}) as workers:
        workers.submit("orphan", str(tmp_path / "a"), key="a")
        start = time.monotonic()
        assert workers.gather(timeout=60)[0].value == "again" and time.monotonic() - start < 4


def test_a_worker_that_takes_nothing_does_not_block_the_parent(monkeypatch):
    monkeypatch.setattr("sextet.core.workers_process.STALL_SECONDS", 1)
    with Workers.open("process:1", factories.toy, {}) as workers:
        workers.submit("pid", key="a")
        os.kill(workers.gather()[0].value, signal.SIGSTOP)
        workers.submit("echo", bytes(10_000_000), key="a")
        assert workers.gather(timeout=60)[0].value == bytes(10_000_000)
        assert workers.stats["restarts"] == 1


def test_a_factory_that_kills_its_process_is_given_up_with_the_cause(backend):
    with Workers.open(f"{backend}:1", factories.dying, {}, max_retries=1) as workers:
        workers.submit("echo", 1, key="a")
        with pytest.raises(WorkerLost, match='"a" lost its worker 2 times') as caught:
            workers.gather()
        if backend == "process":
            assert "exit code 7" in caught.value.detail and "cannot start" in caught.value.detail


def test_signals_to_the_group_are_left_to_the_parent():
    with Workers.open("process:1", factories.toy, {}) as workers:
        workers.submit("pid", key="pid")
        pid = workers.gather()[0].value
        workers.submit("nap", 0.3, key="nap")
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        assert workers.gather()[0].value == 0.3 and workers.stats["restarts"] == 0


PARENT = """
import os, signal, sys, time
sys.path.insert(0, {core!r})
import worker_factories as factories
from sextet.core.workers import Workers

workers = Workers.open("process:2", factories.toy, {{}})
workers.publish({{"big": bytes(10_000_000)}})
workers.submit("pid", key="a")
workers.submit("pid", key="b")
pids = [result.value for result in workers.gather()]
workers.submit("nap", 600, key="c")
workers.submit("nap", 600, key="d")
print(*pids, flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("workers.close(); workers.close()", 0),
        ("sys.exit(3)", 3),
        ("del workers", 0),
        ("raise RuntimeError", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.killpg(0, signal.SIGINT); workers.gather()", -signal.SIGINT),
    ],
)
def test_no_worker_outlives_its_parent_and_no_memory_is_left(end, code):
    shared = set(Path("/dev/shm").iterdir())
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(core=str(CORE), end=end)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    pids = parent.stdout.readline().split()
    start = time.monotonic()
    assert len(pids) == 2 and parent.wait(60) == code
    assert time.monotonic() - start < 20 and gone(pids)  # 3 on an idle machine
    parent.stdout.close()
    assert not any("sextet" in name.name for name in set(Path("/dev/shm").iterdir()) - shared)


def test_a_forked_copy_of_the_parent_leaves_the_workers_alone():
    fork = "child = os.fork()\nif child == 0: sys.exit(0)\nos.waitpid(child, 0)\n"
    script = PARENT.format(core=str(CORE), end=fork + "print([state.alive for state in workers.health()])")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[1:] == ["[True, True]"], done.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_a_local_ray_ends_with_its_workers(local_ray):  # noqa: F811 - skips without ray
    script = PARENT.replace("process:2", "ray:2").format(core=str(CORE), end="workers.close()")
    mark = f"SEXTET_TEST={os.getpid()}-{time.time_ns()}"
    environment = os.environ | dict([mark.split("=")])
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and len(done.stdout.split()) == 2, done.stderr

    def marked():
        for process in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark.encode() in process.read_bytes():
                    yield process.parent.name
            except OSError:
                pass

    assert gone(list(marked()))


def test_restarts_leave_no_descriptor_open(tmp_path):
    with Workers.open("process:1", factories.toy, {}) as workers:
        counts = []
        for number in range(4):
            workers.publish({"version": number})
            workers.submit("once", str(tmp_path / str(number)), number, "SIGKILL", key="a")
            workers.gather(timeout=60)
            counts.append(len(list(Path("/proc/self/fd").iterdir())))
        assert counts[1:] == counts[:1] * 3
