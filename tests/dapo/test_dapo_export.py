import json

import pytest
import torch

import sextet
from dapo.lm import direct_scores
from sextet.cli import main
from sextet.core.errors import DataError, UsageError
from sextet.core.files import write_json
from sextet.core.records import write_final
from sextet.core.seeding import torch_rng
from sextet.dapo import export as exporting
from sextet.dapo.config import smoke
from sextet.dapo.export import export
from sextet.dapo.model import Pretrained, load_language, tiny, write_about
from sextet.dapo.settings import ModelConfig
from sextet.dapo.tasks import load_task


@pytest.fixture
def run(tmp_path):
    """A finished run of a tiny model, as `train.finish` leaves it."""
    config = smoke()
    task = load_task(config.task, config.seed)
    language = tiny(ModelConfig(width=32, layers=2), task.characters, torch_rng(0, "init"))
    run = tmp_path / "run"
    summary = {"steps": 3, "avg@2": {"mean": 25.0, "low": 20.0, "high": 30.0, "n": 16}}
    write_about(language, run / "language")
    write_final(run / "final", "dapo", config, summary, language.model.state_dict())
    write_about(language, run / "final" / "language")
    write_json(run / "config.json", json.loads((run / "final" / "config.json").read_text()))
    write_json(run / "summary.json", {"summary": summary})
    return run


def test_transformers_reads_the_folder_and_gives_the_same_log_probabilities(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    report = export(run, "safetensors", tmp_path / "out")
    policy = sextet.load(str(run))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    characters = policy.language.tokenizer.characters
    ids = tokenizer.encode(characters)
    assert ids == policy.language.tokenizer.encode(characters) and tokenizer.decode(ids) == characters
    assert tokenizer.eos_token_id == policy.language.tokenizer.end
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits.log_softmax(-1)[0]
    expected = direct_scores(policy.language.model, ids[:1], ids[1:])
    found = logp[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert report["largest_difference"] < 1e-4
    assert model.generation_config.eos_token_id == [policy.language.tokenizer.end]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- avg@2: 25" in card and "method `dapo`" in card and "3 rollout steps" in card


def test_what_was_exported_can_be_trained_and_exported_again(run, tmp_path):
    export(run, "safetensors", tmp_path / "out")
    language = load_language(tmp_path / "out")
    assert isinstance(language.tokenizer, Pretrained)
    before = sextet.load(str(run)).language
    for name, value in before.model.state_dict().items():
        assert torch.equal(language.model.state_dict()[name], value), name
    write_final(tmp_path / "second", "dapo", smoke(), {}, language.model.state_dict())
    write_about(language, tmp_path / "second" / "language")
    again = export(tmp_path / "second", "bf16", tmp_path / "half")
    assert again["bytes"] < sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert load_language(tmp_path / "half").record["dtype"] == "bfloat16"


def test_the_command_line_exports(run, tmp_path, capsys):
    assert main(["export", str(run), "--format", "safetensors", "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["serve"] == f"vllm serve {tmp_path / 'out'}"
    assert main(["export", str(run), "--format", "safetensor"]) == 2
    assert 'did you mean "safetensors"' in capsys.readouterr().err


def test_a_folder_that_differs_does_not_stay(run, tmp_path, monkeypatch):
    monkeypatch.setitem(exporting.TOLERANCE, "bf16", 0.0)
    with pytest.raises(DataError, match="would differ from the model by"):
        export(run, "bf16", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(UsageError, match=r"no finished model; finish it with: sextet resume"):
        export(tmp_path, "bf16", tmp_path / "out")
