"""A trained model as the folder that transformers and vLLM read, compared with the model before it stays."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sextet import __version__
from sextet.core.errors import DataError, SextetError, UsageError, missing_extra, unknown
from sextet.core.files import atomic_write_text, read_json, write_json
from sextet.core.seeding import numpy_rng
from sextet.dapo.evaluate import Policy, Reader, load
from sextet.dapo.foreign import Foreign
from sextet.dapo.model import Characters, Language, Pretrained, load_language, model_folder
from sextet.dapo.tasks import load_task

FORMATS = {"safetensors": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"safetensors": 1e-3, "bf16": 0.5}
"""Largest difference of a log-probability between the folder and the model."""
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def write_model(
    record: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path, dtype: torch.dtype, *, untie: bool = False
) -> None:
    """Writes ``config.json`` and ``model.safetensors`` as transformers and vLLM read them.

    Args:
        record: The model's configuration.
        weights: With the names of our networks.
        folder: To write to.
        dtype: Number format of the weights.
        untie: Write tied output embeddings as weights of their own.

    Raises:
        DataError: The disk is full or not writable.
    """
    tied, plain = bool(record.get("tie_word_embeddings")), {}
    for name, value in weights.items():
        plain[name.removeprefix("network.")] = value.detach().to("cpu", dtype if value.is_floating_point() else None)
    if tied:
        plain.pop("lm_head.weight", None)
    if tied and untie:
        plain["lm_head.weight"] = plain["model.embed_tokens.weight"]
    own = ("characters", "torch_dtype", "_name_or_path", "quantization_config")
    written = {name: value for name, value in record.items() if name not in own} | {
        "architectures": record.get("architectures") or [ARCHITECTURES[str(record["model_type"])]],
        "dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": tied and not untie,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: value.clone() for name, value in plain.items()}, folder / "model.safetensors", {"format": "pt"}
        )
        write_json(folder / "config.json", written)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder}: the model could not be written ({error})") from error


def untie(source: str, folder: Path) -> None:
    """Writes a model (smollm2, or a folder) with output embeddings of their own, to be served by vLLM on CPUs.

    vLLM's CPU backend keeps a packed copy of the output embeddings, which stays old when tied ones get new weights.
    """
    language = load_language(model_folder(source))
    write_model(language.record, language.model.state_dict(), folder, torch.float32, untie=True)
    if isinstance(language.tokenizer, Pretrained):
        language.tokenizer.tokenizer.save_pretrained(folder)


def export(directory: Path, format: str, out: Path) -> dict[str, Any]:
    """Writes the model of a finished run as a folder of transformers, and checks it; ``sextet export``.

    Args:
        directory: A run, or its ``final`` folder.
        format: safetensors (float32, as it was trained) or bf16 (half the size).
        out: Folder to write to.

    Returns:
        The folder, its size in bytes, and the largest difference of a log-probability from the model.

    Raises:
        UsageError: Unknown format, no finished run, or transformers is not installed.
        DataError: The folder gives other log-probabilities than the model; it was deleted.
    """
    if format not in FORMATS:
        raise UsageError(unknown("format", format, FORMATS))
    final = (
        directory if (directory / "language").is_dir() and not (directory / "final").is_dir() else directory / "final"
    )
    if not (final / "model.safetensors").exists():
        raise UsageError(f"{directory} holds no finished model; finish it with: sextet resume {directory}")
    policy = load(final)
    part = out / ".part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        write_model(policy.language.record, policy.language.model.state_dict(), part, FORMATS[format])
        stop = write_tokenizer(policy, part)
        config = policy.config
        sampling = {"do_sample": True, "temperature": config.sampling.temperature, "top_p": config.sampling.top_p}
        sampling |= {"eos_token_id": stop, "pad_token_id": stop[0], "max_new_tokens": config.sampling.max_tokens}
        write_json(part / "generation_config.json", sampling)
        atomic_write_text(part / "README.md", model_card(policy, directory, format))
        largest = difference(policy.language, part)
        if not largest <= TOLERANCE[format]:
            raise DataError(
                f"{out} would differ from the model by {largest:.1e} in a log-probability (allowed: "
                f"{TOLERANCE[format]:.0e}); not written"
            )
        for file in part.iterdir():
            file.replace(out / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    size = sum(file.stat().st_size for file in out.iterdir() if file.is_file())
    return {"folder": str(out), "bytes": size, "largest_difference": largest, "serve": f"vllm serve {out}"}


def write_tokenizer(policy: Policy, folder: Path) -> list[int]:
    """Writes the tokenizer's files; returns the tokens that end an answer in training."""
    tokenizer = policy.language.tokenizer
    stop = list(policy.reader.stop)
    with contextlib.suppress(SextetError):  # files of the task that are not here say nothing about the end
        stop = list(Reader.of(tokenizer, policy.config.task, load_task(policy.config.task, policy.config.seed)).stop)
    if isinstance(tokenizer, Characters):
        character_tokenizer(tokenizer).save_pretrained(folder)
    else:
        tokenizer.tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
    return stop


def character_tokenizer(tokenizer: Characters) -> Any:
    """Returns the tokenizer of transformers that does what the tiny models' does."""
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise missing_extra(error.name or "transformers", "llm", "sextet export of a language model") from error
    vocabulary = {text: index for index, text in enumerate(tokenizer.characters)} | {"<end>": tokenizer.end}
    plain = Tokenizer(models.WordLevel(vocabulary))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    plain.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<end>", pad_token="<end>", clean_up_tokenization_spaces=False
    )


@torch.no_grad()
def difference(language: Language, folder: Path) -> float:
    """Largest difference of a log-probability between the model of a folder, as transformers reads it, and ours."""
    read = Foreign.load(folder).eval()
    length = 32
    texts = numpy_rng(0, "evaluate", "export").integers(0, language.record["vocab_size"], (4, length))
    tokens, positions = torch.from_numpy(texts), torch.arange(length).expand(4, -1)
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    found = [
        (model(tokens, positions, mask) @ model.head.T).float().log_softmax(-1)  # type: ignore[operator, union-attr]
        for model in (language.model.cpu().float().eval(), read)
    ]
    return float((found[0] - found[1]).abs().max())


def model_card(policy: Policy, directory: Path, format: str) -> str:
    """Returns the model card: what the run recorded, and what it did not look at."""
    config, summary = policy.config, directory / "summary.json"
    results = read_json(summary)["summary"] if summary.exists() else {}
    lines = [f"- {name}: {value}" for name, value in sorted(results.items())]
    source = Path(config.model.source).name
    return "\n".join(
        [
            "---", "library_name: transformers", "pipeline_tag: text-generation", "---", "",
            f"# {source}, trained on {config.task.name}", "",
            f"Trained by sextet {__version__}, method `{config.method}`, seed {config.seed}, {config.optim.steps} "
            f"rollout steps of {config.sampling.prompts} prompts with {config.sampling.answers} answers each, starting from "
            f"`{source}`. Weights: {format}." + (" Low-rank adapters are merged." if config.model.lora_rank else ""),
            "", "## Results on held-out problems, in percent", "", *(lines or ["none recorded"]), "",
            "## Limits", "",
            "Trained for one kind of problem with a reward that looks at the final answer; nothing else was measured. "
            "The licence is that of the model it started from and of the data.", "",
        ]
    )  # fmt: skip
