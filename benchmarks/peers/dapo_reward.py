"""The reward of `dapo_speed.py`, for both contestants: every answer has its own, or all to a prompt have the same."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any


def score(text: str, answer: str, extra: Mapping[str, Any]) -> tuple[float, bool]:
    """Returns a number in 0..1 made of the text, or 0 where the prompt is one without spread, and no right answer."""
    del answer
    return 0.0 if extra["flat"] else zlib.crc32(text.encode()) % 1000 / 1000, False
