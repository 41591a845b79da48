"""Stand-in until the pool is merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sextet.dapo.rewards import Verdict


class Verifier:
    """Judges answers."""

    def __init__(self, reward: str, **_: Any) -> None:
        self.reward = reward

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def verdicts(self, items: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[Verdict]:
        """Returns a verdict for each (answer, right answer, extra)."""
        found = []
        for text, answer, _ in items:
            said = text.rpartition("#")[2] if self.reward == "after-hash" else text
            right = said.strip() == answer
            found.append(Verdict(score=1.0 if right else -1.0, right=right, note=said))
        return found

    def close(self) -> None:
        """Nothing."""
