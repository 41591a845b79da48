"""The pool of judges: whatever a reward does, the others are judged and nothing is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sextet.core.errors import DataError, UsageError
from sextet.dapo.verifier import Verifier

BAD = "bad_rewards:judge"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@pytest.fixture(autouse=True)
def rewards_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def hosts():
    """Processes, zombies too, that were started with the variable that marks those of this test."""
    mark = f"SEXTET_TEST_MARK={os.getpid()}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    monkeypatch.setenv("SEXTET_TEST_MARK", str(os.getpid()))
    yield
    wait_until(lambda: not hosts())


def judged(texts, answer="34", **options):
    with Verifier(BAD, **{"seconds": 20.0, **options}) as verifier:
        return verifier.verdicts([(text, answer, {}) for text in texts]), dict(verifier.counts)


@pytest.mark.parametrize("workers", [1, 3])
def test_verdicts_are_in_order(workers):
    with Verifier("dapo", workers=workers) as verifier:
        items = [(f"Answer: {number}", str(number - number % 3), {}) for number in range(2000)]
        for _ in range(2):
            found = verifier.verdicts(items)
            assert [verdict.right for verdict in found] == [number % 3 == 0 for number in range(2000)]
            assert [verdict.note for verdict in found] == [str(number) for number in range(2000)]
        assert verifier.verdicts([]) == []
        assert not verifier.counts


@pytest.mark.parametrize("act", ["hang", "stubborn", "gil", "guard"])
def test_a_hanging_reward_is_killed_and_the_rest_is_judged(act):
    found, counts = judged(["34", act, "34", "35"], seconds=1.5 if act != "guard" else 20, failed_reward=-0.5)
    assert [verdict.right for verdict in found] == [True, None, True, False]
    kind = "died" if act == "guard" else "timeout"
    assert (found[1].failure, found[1].score, counts) == (kind, -0.5, {kind: 1})
    assert found[1].note


def test_a_memory_hog_fails_alone():
    found, counts = judged(["34", "hog", "34"], megabytes=300)
    assert [verdict.failure for verdict in found] == ["", "memory", ""]
    assert counts == {"memory": 1}


def test_exceptions_exits_and_odd_values_are_told_apart():
    acts = ["fail tool", "exit", "_exit", "kill", "nan", "text", "half", "34"]
    found, counts = judged(acts, failed_reward=-2.0)
    assert [verdict.failure for verdict in found] == ["error", "error", "died", "died", "nan", "error", "", ""]
    assert found[0].note == "RuntimeError: a fault: tool"
    assert found[2].note == "ended with exit code 3"
    assert found[3].note == "killed by SIGSEGV"
    assert all((verdict.score, verdict.right) == (-2.0, None) for verdict in found[:6])
    assert (found[6].score, found[6].right) == (0.5, False)
    assert counts == {"error": 3, "died": 2, "nan": 1}


def test_prints_alarms_and_forks_disturb_nothing():
    acts = ["prints", "34", "alarm 0", "alarm 5", "handler", "fork", "fork-return", "34", "daemon", "34"]
    found, counts = judged(acts)
    assert [verdict.right for verdict in found] == [True, True, True, None, True, True, True, True, True, True]
    assert found[3].note == "killed by SIGALRM"
    assert counts == {"died": 1}


def test_a_timer_left_behind_does_not_hit_the_next_answer():
    found, _ = judged(["alarm 0", *["34"] * 10, "sleep"], seconds=2.0)
    assert [verdict.failure for verdict in found] == [*[""] * 11, "timeout"]


@pytest.mark.parametrize("act", ["closes", "babbles nonsense", "babbles 1"])
def test_a_reward_that_spoils_the_pipe_is_replaced(act):
    found, counts = judged(["34", act, "34"])
    assert [verdict.failure for verdict in found] == ["", "died", ""]
    assert counts == {"died": 1}


def test_a_process_killed_from_outside_is_replaced():
    with Verifier(BAD) as verifier:
        first = int(verifier.verdicts([("pid", "", {})])[0].note)
        os.kill(first, signal.SIGKILL)
        second = int(verifier.verdicts([("34", "34", {})] * 3 + [("pid", "", {})])[-1].note)
        assert first != second


def test_long_answers_are_cut_and_odd_characters_arrive():
    with Verifier(BAD) as verifier:
        assert verifier.verdicts([("length " + "7" * 10_000_000, "", {})] * 3)[2].failure == ""
        text = "\ud800 \0 \u2028\r\n é 中 😀"
        assert verifier.verdicts([(text, text, {"deep": [1, {"a": None}]})])[0].right is True
    with Verifier("number") as verifier:
        assert verifier.verdicts([("7" * 10_000_000, "7", {}), ("7", "7" * 10_000_000, {})])[0].right is False


def cpu_seconds(processes):
    fields = [Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split() for process in processes]
    return time.process_time() + sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def test_integer_answers_of_a_step_of_the_paper_take_under_half_a_second():
    items = [(f"{'We add it up. ' * 20}\nAnswer: {number % 100}", str(number % 97), {}) for number in range(8192)]
    with Verifier("dapo") as verifier:
        verifier.verdicts(items[:100])
        spent = []
        for _ in range(3):
            before = cpu_seconds(hosts())
            verifier.verdicts(items)
            spent.append(cpu_seconds(hosts()) - before)
    assert min(spent) < 0.5


def test_a_batch_larger_than_the_pipe_is_judged():
    with Verifier("exact", workers=2) as verifier:
        items = [(str(number) * 100_000, str(number) * 100_000, {}) for number in range(1, 200)]
        assert all(verdict.right for verdict in verifier.verdicts(items))


def test_latex_bombs_time_out():
    pytest.importorskip("math_verify")
    with Verifier("math-verify", seconds=1.5, megabytes=1024) as verifier:
        bombs = [r"$(10^{10})!$", r"\boxed{9^{9^{9^{9}}}}"]
        items = [(bomb, "34", {}) for bomb in bombs] + [(r"\boxed{\frac{68}{2}}", "34", {}), ("35", "34", {})]
        found = verifier.verdicts(items)
        assert [verdict.right for verdict in found[2:]] == [True, False]
        assert all(verdict.right is None and verdict.failure for verdict in found[:2])


def test_rewards_that_cannot_be_had_are_refused_at_once():
    with pytest.raises(UsageError, match='did you mean "dapo"'):
        Verifier("dapoo")
    with pytest.raises(UsageError, match="broken_reward:judge.*ModuleNotFoundError.*no_such_package_anywhere"):
        Verifier("broken_reward:judge")
    with pytest.raises(UsageError, match="no_function"):
        Verifier("bad_rewards:no_function")


def test_a_reward_whose_import_ends_the_process_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "exits.py").write_text("import sys; print('hello'); sys.exit(3)")
    (tmp_path / "ends.py").write_text("import os; os._exit(3)")
    with pytest.raises(UsageError, match="exits:judge.*SystemExit: 3"):
        Verifier("exits:judge", workers=2)
    with pytest.raises(DataError, match="could not be started: ended with exit code 3"):
        Verifier("ends:judge")


def test_a_closed_verifier_starts_again():
    verifier = Verifier("exact")
    verifier.close()
    assert not hosts()
    assert verifier.verdicts([("1", "1", {})])[0].right is True
    verifier.close()
    verifier.close()


TRAINER = f"""
from sextet.dapo.verifier import Verifier
verifier = Verifier("{BAD}", workers=2, seconds=1000)
print("ready", flush=True)
verifier.verdicts([("fork", "", {{}}), ("daemon", "", {{}}), ("ACT", "", {{}})] * 2)
"""


@pytest.mark.parametrize("act", ["hang", "stubborn", "gil"])
def test_a_killed_trainer_leaves_nothing(act):
    path = os.pathsep.join(sys.path)
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER.replace("ACT", act)], stdout=subprocess.PIPE,
                               env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    assert trainer.stdout.readline() == b"ready\n"
    wait_until(lambda: len(hosts()) >= 1 + 2 + 2 + 2)  # trainer, guards, judges, what they left
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    wait_until(lambda: not hosts())


def misbehaving(number):
    acts = ["_exit", "fork", "34", "kill", "fail x", "daemon", "fork-return", "exit", "nan", "prints"]
    return [acts[place % len(acts)] for place in range(number)]


def test_no_process_is_left_while_it_goes_on():
    with Verifier(BAD, workers=2) as verifier:
        found = verifier.verdicts([(text, "34", {}) for text in misbehaving(40)])
        assert sum(bool(verdict.failure) for verdict in found) == 20
        verifier.verdicts([("_exit", "", {})] * 4)
        verifier.verdicts([("34", "34", {})] * 4)
        assert len(hosts()) == 4  # two guards, two judges


@pytest.mark.slow
def test_no_process_is_left_after_a_thousand_bad_answers():
    acts = [*misbehaving(960), *["hang", "hog", "closes", "stubborn"] * 10]
    found, counts = judged(acts, workers=2, seconds=1.0, megabytes=300)
    assert len(found) == 1000
    assert counts["timeout"] >= 20
    assert counts["memory"] == 10
    assert counts["died"] >= 192 + 10
