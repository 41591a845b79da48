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
    "find_published": "published",
    "load_published": "published",
    "evaluate_pairs": "evaluate",
    "play": "evaluate",
    "train_agents": "train",
    "train_pbt": "pbt",
    "train_population": "members",
    "train_populations": "members",
    "train_response": "responses",
    "train_responses": "responses",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
