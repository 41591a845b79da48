"""Rewards that misbehave as the answer says, for the tests of the pool."""

import contextlib
import os
import signal
import sys
import time


def judge(text, answer, extra):
    what, _, rest = text.partition(" ")
    if what in ACTS:
        return ACTS[what](rest)
    return text == answer


def hang(rest):
    while True:
        pass


def sleep(rest):
    time.sleep(1000)


def stubborn(rest):
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(0.01)


def hold_the_interpreter(rest):
    return 7 ** (7**9) > 0


def hog(rest):
    held = []
    while True:
        held.append(bytearray(16 << 20))


def fail(rest):
    raise RuntimeError("a fault: " + rest)


def prints(rest):
    print("[0, 1.0, true, '', '']")
    os.write(1, b'["died", "not really"]\n')
    return True


def alarm(rest):
    signal.alarm(1)
    time.sleep(float(rest))
    return True


def handler(rest):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.05)
    return True


def fork_and_leave(rest):
    if os.fork() == 0:
        time.sleep(1000)
    return True


def fork_and_return(rest):
    return os.fork() >= 0


def daemon(rest):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    return True


def closes(rest):
    os.closerange(0, 100)
    return True


def babbles(rest):
    for fd in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(fd, rest.encode() + b"\n")
    return True


def kills_the_guard(rest):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


ACTS = {
    "hang": hang,
    "sleep": sleep,
    "stubborn": stubborn,
    "gil": hold_the_interpreter,
    "hog": hog,
    "fail": fail,
    "exit": lambda rest: sys.exit(3),
    "_exit": lambda rest: os._exit(3),
    "kill": lambda rest: os.kill(os.getpid(), signal.SIGSEGV),
    "prints": prints,
    "alarm": alarm,
    "handler": handler,
    "fork": fork_and_leave,
    "fork-return": fork_and_return,
    "daemon": daemon,
    "closes": closes,
    "babbles": babbles,
    "guard": kills_the_guard,
    "nan": lambda rest: float("nan"),
    "text": lambda rest: "1.0",
    "half": lambda rest: 0.5,
    "pid": lambda rest: {"score": 1.0, "note": str(os.getpid())},
    "length": lambda rest: {"score": 1.0, "note": str(len(rest))},
}
