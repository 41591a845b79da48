"""The processes behind `verifier`: one that judges, and a guard over it that outlives whatever the reward does.

The guard starts the judge in a process group of its own and waits: for the judge's end, for SIGTERM, or for the end of
the trainer, which closes the pipe. Then it kills the group and every process that was left behind, and ends. Messages
are JSON lines of less than a page, so that two writers never mix: ``["ready"]``, ``["refused", why]``,
``["died", why]`` or ``[number, score, right, note, failure]``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from sextet.dapo.rewards import Rule, Verdict, load_rule

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> NoReturn:
    """Starts the judge and guards it; the arguments are the reward and MiB of memory."""
    commands, answers = os.dup(0), os.dup(1)  # fds of their own: what a reward prints goes to the standard error
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    stopped: list[int] = []
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    judge = os.fork()
    if judge == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setpgid(0, 0)
        os.close(wake)
        os.close(woken)
        _judge(sys.argv[1], int(sys.argv[2]), commands, answers)
    with contextlib.suppress(OSError):
        os.setpgid(judge, judge)
    poll = select.poll()
    poll.register(commands, 0)  # only the other end's closing
    poll.register(wake, select.POLLIN)
    status = None
    while status is None:
        status = _reap().get(judge)
        if status is None:
            events = dict(poll.poll())
            if stopped or commands in events:
                break
            os.read(wake, 4096)
    _kill_all(judge)
    if status is not None:
        code = os.waitstatus_to_exitcode(status)
        why = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        with contextlib.suppress(OSError):
            os.write(answers, _line(["died", why]))
    os._exit(0)


def _judge(reward: str, megabytes: int, commands: int, answers: int) -> NoReturn:
    """Judges what comes until the pipe is closed."""
    try:
        rule = load_rule(reward)
    except BaseException as error:
        os.write(answers, _line(["refused", str(error)[:2000]]))
        os._exit(1)
    with contextlib.suppress(OSError, ValueError):  # counted on top of what importing the reward took
        pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
        limit = pages * resource.getpagesize() + megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    own = reward.partition(":")[2] != ""
    process = os.getpid()
    os.write(answers, _line(["ready"]))
    for line in open(commands, "rb"):  # noqa: SIM115, PTH123 - for as long as the process lives
        number, *item = json.loads(line)
        verdict = _verdict(rule, *item)
        if os.getpid() != process:
            os._exit(0)  # a fork of the reward that came back from it
        if own:
            signal.setitimer(signal.ITIMER_REAL, 0)  # a timer left behind would hit the next answer
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        os.write(answers, _line([number, verdict.score, verdict.right, verdict.note[:200], verdict.failure]))
    os._exit(0)


def _verdict(rule: Rule, text: str, answer: str, extra: dict[str, Any]) -> Verdict:
    try:
        return rule(text, answer, extra)
    except MemoryError:
        return Verdict(score=0.0, right=None, failure="memory", note="ran out of its memory")
    except BaseException as error:
        try:
            note = f"{type(error).__name__}: {error}"
        except Exception:
            note = type(error).__name__
        return Verdict(score=0.0, right=None, failure="error", note=note)


def _line(message: list[Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _reap() -> dict[int, int]:
    """Returns the status of every child that has ended."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def _kill_all(judge: int) -> None:
    """Kills the judge's group, and what has left it, and waits for their ends."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(ChildProcessError):
        while True:
            with contextlib.suppress(OSError):
                os.killpg(judge, signal.SIGKILL)
            with contextlib.suppress(OSError):
                for child in children.read_text().split():  # orphans come to the guard, whatever their group
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


if __name__ == "__main__":
    main()
