"""Features as a test takes them: of one image or several of a query, and after query expansion."""

from dataclasses import replace

import numpy as np
import pytest
from nets import SIZE, network, randomise
from pictures import MARKET, write

from sextet.core.errors import UsageError
from sextet.reid.config import Config, DataConfig, EvaluationConfig
from sextet.reid.data import load_data
from sextet.reid.distances import expand_queries
from sextet.reid.evaluate import extract, features
from sextet.reid.tables import score
from sextet.reid.train import train


@pytest.fixture
def market(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return DataConfig(format="market1501", root=str(write(tmp_path / "market", MARKET)))


def settings(data, **fields):
    return Config(height_px=SIZE[0], width_px=SIZE[1], data=data, evaluation=EvaluationConfig(rerank=False, **fields))


def test_further_images_of_a_query_are_pooled_and_unit_vectors(market):
    net, data = randomise(network("global")), load_data(market, SIZE)
    alone, gallery = features(settings(market), net, data)
    further = extract(net, data.multi_query.images)
    for how in ("mean", "max"):
        query, same = features(settings(market, multi_query=how), net, data)
        pooled = getattr(further, how)(axis=0)  # both are of the first query's person and camera
        np.testing.assert_allclose(query[0], pooled / np.linalg.norm(pooled), atol=1e-6)
        np.testing.assert_array_equal(query[1], alone[1])
        np.testing.assert_array_equal(same, gallery)


def test_expansion_changes_queries_and_gallery(market):
    net, data = randomise(network("global")), load_data(market, SIZE)
    plain = features(settings(market), net, data)
    for found, right in zip(features(settings(market, expand=2), net, data), expand_queries(*plain, k=2), strict=True):
        np.testing.assert_array_equal(found, right)
    assert score(settings(market, expand=2), None, data, *expand_queries(*plain, k=2))["queries"] == 2
    with pytest.raises(UsageError, match="expand"):
        EvaluationConfig(expand=-1)


def test_several_images_are_refused_before_training_where_there_are_none(market):
    config = settings(DataConfig(people=12), multi_query="mean")
    with pytest.raises(UsageError, match=r"no further images of its queries .*gt_bbox.*multi-query"):
        features(config, network("global"), load_data(config.data, SIZE))

    class Untouched:
        console, directory = None, None

    with pytest.raises(UsageError, match="gt_bbox"):
        train(replace(config, method="global"), Untouched())
