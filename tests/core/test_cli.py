import json
import subprocess
import sys

import pytest

import sextet
from sextet import cli, registry
from sextet.core.errors import UsageError


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_list_names_recipes_and_presets(capsys):
    code, out, _ = run(capsys, "list", "--json")
    assert code == 0
    table = json.loads(out)
    assert "quick" in table["mep"]["presets"]
    assert sextet.list_recipes()["mep"] == table["mep"]["what"]


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["train", "mpe"], 'unknown recipe "mpe" (did you mean "mep"?)'),
        (["train", "mep", "--preset", "quik"], 'unknown preset "quik" (did you mean "quick"?)'),
        (["train"], "usage: sextet train RECIPE"),
        (["resume"], "usage: sextet resume RUN"),
        (["resume", "absent"], "absent holds no run"),
        (["report", "absent"], "absent holds no run"),
        (["eval", "absent"], "absent holds no run"),
        (["data", "humans"], 'did you mean "human"'),
        (["train", "mep", "--config", "absent.toml"], "absent.toml: cannot read"),
        (["train", "mep", "--population.alpha", "-1"], "population.alpha = -1.0 is not allowed; it must be 0 or more"),
        (["train", "mep", "--response.beta", "-1"], "response.beta = -1.0 is not allowed; it must be 0 or more"),
        (["train", "mep", "--population.size", "0"], "population.size = 0 is not allowed"),
        (["train", "mep", "--ppo.horizon", "0"], "ppo.horizon = 0 is not allowed"),
        (["train", "mep", "--layout", "cramped_rom"], 'unknown layout "cramped_rom" (did you mean "cramped_room"?)'),
        (["train", "mep", "--workers", "procss:2"], 'did you mean "process"'),
        (["train", "mep", "--track", "wandbb"], 'did you mean "wandb"'),
        (["train", "mep", "--precision", "bf16"], "auto or fp32 in this recipe"),
        (["train", "mep", "--device", "cdua"], 'did you mean "cuda"'),
    ],
)
def test_wrong_usage_is_one_line_with_the_nearest_name(capsys, arguments, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code in (2, 3) and out == ""
    assert text in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir()), "a refused run leaves nothing"


def test_a_mistyped_field_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "mep", "--sed", "3"])
    assert stopped.value.code == 2
    assert "--seed" in capsys.readouterr().err


def test_dry_run_prints_the_resolved_configuration_without_torch(tmp_path):
    (tmp_path / "c.toml").write_text("seed = 5\n")
    code = (
        "import sys; from sextet.cli import main; "
        "main(['train', 'mep', '--preset', 'quick', '--threads', '2', '--dry-run', '--json', "
        f"'--config', {str(tmp_path / 'c.toml')!r}]);"
        " assert 'torch' not in sys.modules"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    config = json.loads(out)["config"]
    assert config["seed"] == 5 and config["threads"] == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "c.toml"]


def test_doctor_tells_versions_devices_and_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(cli.EXTRAS, "imaginary", ("no_such_package",))
    code, out, _ = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert code == 0 and "cpu" in report["devices"] and report["versions"]["torch"]
    assert 'pip install "sextet[imaginary]"' in report["extras"]["imaginary"]


def test_unknown_options_of_plain_verbs_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["list", "--nonsense"])
    assert stopped.value.code == 2


class Point:
    def __init__(self, name, value, loaded):
        self.name, self.value, self._loaded = name, value, loaded

    def load(self):
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded


def test_a_broken_plug_in_is_listed_and_harms_no_other(capsys, monkeypatch):
    points = [Point("bad", "bad_package", ImportError("no module named x")), Point("mep", "other", sextet)]
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: points)
    code, out, _ = run(capsys, "list", "--json")
    table = json.loads(out)
    assert code == 0 and "no module named x" in table["bad"]["broken"] and "presets" in table["mep"]
    assert registry.find("mep").package == "sextet.mep"
    with pytest.raises(UsageError, match="is broken"):
        registry.find("bad").module("config")
