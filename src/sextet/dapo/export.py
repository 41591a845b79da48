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
from sextet.core.stats import Interval
from sextet.dapo.evaluate import Policy, Reader, load
from sextet.dapo.foreign import Foreign
from sextet.dapo.model import Characters, Language
from sextet.dapo.tasks import load_task

FORMATS = {"safetensors": torch.float32, "bf16": torch.bfloat16}
DEFAULT = "safetensors"
TOLERANCE = {"safetensors": 1e-3, "bf16": 0.5}
"""Largest difference of a log-probability between the folder and the model."""
END = "<end>"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def write_model(
    record: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path, dtype: torch.dtype, *, head: bool = False
) -> None:
    """Writes ``config.json`` and ``model.safetensors`` as transformers and vLLM read them.

    Args:
        record: The model's configuration.
        weights: With the names of our networks.
        folder: To write to.
        dtype: Number format of the weights.
        head: Write tied output embeddings a second time, by their own name.

    Raises:
        DataError: The disk is full or not writable.
    """
    plain = {
        name.removeprefix("network."): value.detach().to("cpu", dtype).contiguous() for name, value in weights.items()
    }
    if record.get("tie_word_embeddings"):
        tied = plain.pop("lm_head.weight", plain.get("model.embed_tokens.weight"))
        if head and tied is not None:
            plain["lm_head.weight"] = tied.clone()
    own = ("characters", "torch_dtype", "_name_or_path", "quantization_config")
    written = {name: value for name, value in record.items() if name not in own}
    written["dtype"] = str(dtype).removeprefix("torch.")
    if not record.get("architectures"):
        written["architectures"] = [ARCHITECTURES[str(record["model_type"])]]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(plain, folder / "model.safetensors", {"format": "pt"})
        write_json(folder / "config.json", written)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder}: the model could not be written ({error})") from error


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
    final = directory if (directory / "model.safetensors").exists() else directory / "final"
    if not (final / "model.safetensors").exists():
        raise UsageError(f"{directory} holds no finished model; finish it with: sextet resume {directory}")
    policy = load(final)
    part = out / ".part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        write_model(policy.language.record, policy.language.model.state_dict(), part, FORMATS[format])
        stop = write_tokenizer(policy, part)
        sizes = policy.config.sampling
        sampling = {"do_sample": True, "temperature": sizes.temperature, "top_p": sizes.top_p, "eos_token_id": stop}
        more = {"pad_token_id": stop[0], "max_new_tokens": sizes.max_tokens}
        write_json(part / "generation_config.json", sampling | more)
        atomic_write_text(part / "README.md", model_card(policy, final.parent, format))
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
    """Writes the tokenizer's files, for tiny models one that does what theirs does; returns what ends an answer."""
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise missing_extra(error.name or "transformers", "llm", "sextet export of a language model") from error
    own: Any = policy.language.tokenizer
    if isinstance(own, Characters):
        plain = Tokenizer(models.WordLevel({**dict(zip(own.characters, range(own.end), strict=True)), END: own.end}))
        plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        plain.decoder = decoders.Fuse()
        made = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=END, pad_token=END)
    else:
        made = own.tokenizer
    made.save_pretrained(folder)
    with contextlib.suppress(SextetError):  # a task whose files are not here says nothing of its end
        return list(Reader.of(own, policy.config.task, load_task(policy.config.task, policy.config.seed)).stop)
    return list(policy.reader.stop)


@torch.no_grad()
def difference(language: Language, folder: Path) -> float:
    """Largest difference of a log-probability between the model of a folder, as transformers reads it, and ours."""
    texts = numpy_rng(0, "evaluate", "export").integers(0, language.record["vocab_size"], (4, 32))
    mask = torch.full((32, 32), -torch.inf).triu(1)[None, None]
    models: list[Any] = [language.model.cpu().float().eval(), Foreign.load(folder).eval()]
    states = [model(torch.from_numpy(texts), torch.arange(32).expand(4, -1), mask) for model in models]
    ours, theirs = ((state @ model.head.T).log_softmax(-1) for state, model in zip(states, models, strict=True))
    return float((ours - theirs).abs().max())


def model_card(policy: Policy, directory: Path, format: str) -> str:
    """Returns the model card: what the run recorded, and what it did not look at."""
    config, summary = policy.config, directory / "summary.json"
    results = read_json(summary)["summary"] if summary.exists() else {}
    lines = [
        f"- {name}: {Interval(**value) if isinstance(value, dict) else value}"
        for name, value in sorted(results.items())
    ]
    source, sizes = Path(config.model.source).name, config.sampling
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {source}, trained on {config.task.name}

Trained by sextet {__version__} with method `{config.method}`, seed {config.seed}: {config.optim.steps} rollout steps of
{sizes.prompts} prompts with {sizes.answers} answers each, starting from `{source}`. Weights: {format}.

## Results on held-out problems, in percent

{chr(10).join(lines) or "none recorded"}

## Limits

Trained for one kind of problem with a reward that looks at the final answer only; nothing else was measured. The
licence is that of the model it started from and of the data it was trained on.
"""
