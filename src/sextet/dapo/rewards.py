"""Rules that judge answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found of an answer."""

    score: float
    right: bool | None
    """None where there is no verdict, see ``failure``."""
    note: str = ""
    """What was compared, for people."""
    failure: str = ""
    """Why there is no verdict: timeout, memory, error, died; else empty."""
