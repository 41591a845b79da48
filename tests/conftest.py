"""Shared test settings: one thread a process, real data where there is some."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real data files that are not part of the project; the test skips where it is absent."""
    for candidate in (os.environ.get("SEXTET_DATA"), Path(__file__).parents[2] / "shared" / "data"):
        if candidate and Path(candidate).is_dir():
            return Path(candidate)
    pytest.skip("no real data: set SEXTET_DATA to the folder that holds overcooked/, math/ and temporal/")
