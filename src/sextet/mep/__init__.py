"""MEP: agents trained in a diverse population, to cooperate with partners they never met.

The library surface, imported when first used::

    from sextet.mep import Overcooked, Policy, play
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Config": "config",
    "HumanProxy": "human",
    "Layout": "overcooked",
    "LAYOUTS": "overcooked",
    "Overcooked": "overcooked",
    "Policy": "policy",
    "PolicyAgent": "policy",
    "PRESETS": "config",
    "cross_play": "evaluate",
    "evaluate_pairs": "evaluate",
    "play": "evaluate",
    "train_population": "train",
    "train_response": "train",
    "train_responses": "train",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
