"""One local Ray for all tests of a session: it takes about 7 s and seven processes to start."""

import importlib.util
import os

import pytest


@pytest.fixture(scope="session")
def local_ray():
    if importlib.util.find_spec("ray") is None:
        pytest.skip('needs Ray: pip install "sextet[ray]"')
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            logging_level="ERROR",
        )
    yield ray
    ray.shutdown()
