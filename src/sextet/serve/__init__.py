"""Serving a recipe's page: what the server and a recipe's `demo.py` agree on. Nothing heavy is imported here.

A recipe that has a page defines `<recipe>.demo.demo(runs, options) -> Demo`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import APIRouter


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line's options. A token is made where one is needed and none given."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    study: Path | None = None
    games: Path | None = None
    """Folder of recorded games; by default `games` in the first run."""
    max_games: int = 256
    browser: bool = False
    """Open the page in a browser once the server listens."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """A recipe's page and its routes. An error with a `status`, raised in a route, is the answer."""

    router: APIRouter
    page: Path
    """Folder of static files with index.html."""
    close: Callable[[], Awaitable[None]]
    """Called once at the end, with 2 seconds to save things."""
    gauges: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    """Name to function of a number, shown in /metrics."""
    collectors: Sequence[Any] = ()
    """Further metrics: collectors of prometheus_client that are not yet registered."""
    uploads: Mapping[str, int] = field(default_factory=dict)
    """Path to the bytes that the body of a POST there may have, in place of the 64 kB of all other routes."""
