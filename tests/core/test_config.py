import dataclasses
import json

import pytest

from sextet.core import config as config_module
from sextet.core.config import (
    RunConfig,
    check_resumable,
    difference,
    from_dict,
    override,
    preset,
    read_overrides,
)
from sextet.core.errors import DataError, UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    gamma: float = 0.99
    """Discount."""
    sizes: tuple[int, ...] = (64, 64)
    """Widths."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    group: Group = Group()
    """A group."""
    alpha: float = 0.1
    """A weight."""

    def __post_init__(self):
        super().__post_init__()
        config_module.require(self.alpha >= 0, "alpha", self.alpha, "0 or more")


def test_round_trip_through_json():
    config = Config(alpha=0.3, group=Group(gamma=0.5, sizes=(1, 2, 3)), seed=4)
    assert from_dict(Config, json.loads(json.dumps(config_module.to_dict(config)))) == config


def test_every_error_is_reported_at_once_with_the_nearest_name():
    with pytest.raises(UsageError) as caught:
        from_dict(Config, {"alhpa": 1.0, "seed": "three", "group": {"gama": 1}}, source="my.json")
    text = str(caught.value)
    assert text.startswith("my.json: ")
    assert '"alhpa" (did you mean "alpha"?)' in text
    assert "gamma" in text and 'seed = "three"' in text and "\n" not in text


def test_values_that_a_recipe_forbids_name_the_field():
    with pytest.raises(UsageError, match=r"alpha = -1.* must be 0 or more"):
        from_dict(Config, {"alpha": -1.0})
    for field, value in {
        "seed": -1,
        "threads": 0,
        "keep": 0,
        "log_every": 0,
        "save_every": -1,
        "save_minutes": 0.0,
    }.items():
        with pytest.raises(UsageError, match=field):
            Config(**{field: value})
    with pytest.raises(UsageError, match='did you mean "fp16"'):
        Config(precision="fp15")


def test_files_override_a_preset(tmp_path):
    (tmp_path / "a.toml").write_text("alpha = 0.7\n[group]\nsizes = [8]\n")
    config = override(Config(seed=9), read_overrides(tmp_path / "a.toml"), source="a.toml")
    assert config == Config(seed=9, alpha=0.7, group=Group(sizes=(8,)))
    (tmp_path / "bad.toml").write_text("alpha = = 1")
    with pytest.raises(UsageError, match="not TOML"):
        read_overrides(tmp_path / "bad.toml")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(UsageError, match="expected an object"):
        read_overrides(tmp_path / "list.json")
    with pytest.raises(UsageError, match="ends in"):
        read_overrides(tmp_path / "a.yaml")
    with pytest.raises(DataError):
        read_overrides(tmp_path / "absent.json")


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UsageError, match='did you mean "quick"'):
        preset({"quick": Config, "paper": Config}, "quik")


def test_difference_and_resume_rules():
    before, after = (
        config_module.to_dict(Config()),
        config_module.to_dict(Config(workers="process:2", seed=1)),
    )
    assert difference(before, after) == {"seed": [0, 1], "workers": ["inline", "process:2"]}
    with pytest.raises(UsageError, match="seed: 0 -> 1"):
        check_resumable(Config, before, after)
    after["seed"] = 0
    assert check_resumable(Config, before, after) == {"workers": ["inline", "process:2"]}
