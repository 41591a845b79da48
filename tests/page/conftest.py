"""A server with a small policy on a free port, and Chromium pages that must stay quiet and local."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose agents are untrained policies, for two kitchens."""
    for needed in ("fastapi", "uvicorn", "websockets", "prometheus_client", "sextet.serve"):
        pytest.importorskip(needed, reason=f"{needed} is missing: pip install sextet[serve]")
    from sextet.core.files import write_json
    from sextet.mep.overcooked import Layout
    from sextet.mep.policy import Policy

    folder = tmp_path_factory.mktemp("runs") / "run"
    for kitchen, name in (("cramped_room", "Aurelia"), ("cramped_room", "Berta"), ("coordination_ring", "Carla")):
        Policy(Layout.load(kitchen), "planes20", "mlp").save(folder / "agents" / name)
        about = folder / "agents" / name / "config.json"
        write_json(about, json.loads(about.read_text(encoding="utf-8")) | {"label": name})
    write_json(folder / "config.json", {"recipe": "mep"})
    return folder


def _serving(*arguments: str | Path) -> Iterator[str]:
    """Runs the server until the test is over; yields its address."""
    command = [sys.executable, "-m", "sextet", "serve", *map(str, arguments), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert "http://" in line, f"the server did not start: {line}"
        yield next(word for word in line.split() if word.startswith("http://"))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)
        server.stdout.close()


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[str]:
    yield from _serving(run)


@pytest.fixture
def study_server(run: Path, tmp_path: Path) -> Iterator[str]:
    """A short study: one kitchen, two partners met once each."""
    (tmp_path / "study.toml").write_text(
        'kitchens = ["cramped_room"]\nseats = "one"\nseconds = 10\nwarmup_seconds = 10\n', encoding="utf-8"
    )
    yield from _serving(run, "--study", tmp_path / "study.toml", "--games", tmp_path / "games")


@pytest.fixture(scope="module")  # not longer: its event loop would be in the way of other tests' loops
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install sextet[dev]")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the path")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def new_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages in contexts of their own; at the end, none may have complained or asked another host."""
    pages, complaints, requests = [], [], set[str]()

    def open_page(*, expect: str = "nothing", **options: Any) -> Any:
        def listen(message: Any) -> None:
            if message.type != "log" and expect not in message.text:
                complaints.append(message.text)

        page = browser.new_context(
            viewport=options.pop("viewport", {"width": 1280, "height": 800}), **options
        ).new_page()
        page.set_default_timeout(40_000)
        page.on("console", listen)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.add(request.url))
        page.on("websocket", lambda socket: requests.add(socket.url))
        pages.append(page)
        return page

    yield open_page
    hosts = {url.split("/")[2] for url in requests if not url.startswith("data:")}
    for page in pages:
        page.context.close()
    assert complaints == []
    assert all(host.startswith("127.0.0.1:") for host in hosts), hosts
