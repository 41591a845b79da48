"""Errors a user can act on: one line, the exit code of the command line, and the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class SextetError(Exception):
    """Base of every error sextet raises on purpose; the command line prints its text without a traceback."""

    exit_code = 1


class UsageError(SextetError):
    """A wrong option, field, argument or combination of them (exit code 2)."""

    exit_code = 2


class DataError(SextetError):
    """A file, data set, checkpoint or disk that cannot be used (exit code 3).

    ``report`` is what was found before that, if anything: the command line prints it as it prints results.
    """

    exit_code = 3

    def __init__(self, text: str = "", report: Any = None) -> None:
        super().__init__(text)
        self.report = report


class DivergenceError(SextetError):
    """A loss, gradient or parameter stopped being finite; nothing of that step was applied (exit code 1)."""


class Interrupted(SextetError):  # noqa: N818 - not a failure: the run was saved and can go on
    """A stop signal was honoured after the run was saved (exit code 4)."""

    exit_code = 4


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Returns ``' (did you mean "x"?)'`` for the closest allowed name, or an empty string."""
    match = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f' (did you mean "{match[0]}"?)' if match else ""


def unknown(kind: str, name: str, allowed: Iterable[str]) -> str:
    """Returns the standard text for an unknown name: what was given, the nearest match, all that is allowed."""
    names = sorted(allowed)
    return f'unknown {kind} "{name}"{nearest(name, names)}; allowed: {", ".join(names) or "none"}'


def missing_extra(package: str, extra: str, purpose: str) -> UsageError:
    """Returns the error for an optional package that is not installed, with the command that installs it."""
    return UsageError(f'{purpose} needs the package {package}: pip install "sextet[{extra}]"')
