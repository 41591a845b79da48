"""Rewards for whole trainings: one that is easy to earn, and one that misbehaves for some answers."""

import os
import time


def starts_with_a_digit(text, answer, extra):
    return text[:1].isdigit()


def raises(text, answer, extra):
    if text[-1:] in ("0", "1", "2"):
        raise RuntimeError("a fault")
    return text == answer


def nan(text, answer, extra):
    return float("nan") if text[-1:] in ("0", "1", "2") else text == answer


def sleeps(text, answer, extra):
    if text[-1:] == "0":
        time.sleep(1000)
    return text == answer


def hogs(text, answer, extra):
    held = []
    while text[-1:] == "0":
        held.append(bytearray(16 << 20))
    return text == answer


def exits(text, answer, extra):
    if text[-1:] == "0":
        os._exit(3)
    return text == answer


def forks(text, answer, extra):
    if text[-1:] == "0" and os.fork() == 0:
        time.sleep(1000)
    return text == answer


def always_raises(text, answer, extra):
    raise RuntimeError("a fault")
