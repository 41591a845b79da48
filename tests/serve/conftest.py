import pytest

from serve.harness import make_run
from sextet.mep import rooms


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def quick(monkeypatch):
    """Ten times as many ticks a second."""
    monkeypatch.setattr(rooms, "TICK_SECONDS", 0.015)
