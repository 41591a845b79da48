"""Any causal language model of transformers behind the interface of our own decoder."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sextet.core.errors import DataError, UsageError, missing_extra
from sextet.dapo.decoder import Cache


class _Layers:
    """What transformers' attention asks of a cache: it hands keys and values on to ours."""

    is_compileable = False

    def __init__(self, cache: Cache, length: int) -> None:
        self.cache, self.length = cache, length

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keeps the keys and values of a layer."""
        return self.cache.update(layer, keys, values)

    def get_seq_length(self, *_: Any) -> int:
        """Number of tokens kept; positions are given, so nothing follows from it."""
        return self.length


class Foreign(nn.Module):
    """A model of transformers: tokens to hidden states, and the matrix that makes logits of them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.network = model
        # the name of the argument changes between versions of transformers
        known = inspect.signature(model.base_model.forward).parameters
        self.cache_name = "cache" if "cache" in known else "past_key_values"
        settings = model.config
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(settings, name, None) not in (None, 1.0):
                raise UsageError(f"a {settings.model_type} model with {name} is not supported")
        if model.get_output_embeddings() is None or getattr(model.get_output_embeddings(), "bias", None) is not None:
            raise UsageError(f"a {settings.model_type} model has no plain output embeddings")

    @classmethod
    def load(cls, folder: Path) -> Foreign:
        """Reads a folder; safetensors only."""
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise missing_extra("transformers", "llm", "a pretrained model") from error
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32,
                attn_implementation="sdpa", output_loading_info=True,
            )  # fmt: skip
        except Exception as error:  # whatever is wrong with its files
            raise DataError(f"{folder}: the model cannot be read ({error})") from error
        if absent := sorted(found["missing_keys"]):
            raise DataError(f"{folder}: {len(absent)} weights are missing, the first is {absent[0]}; copy it again")
        return cls(model)

    @classmethod
    def of(cls, record: dict[str, Any]) -> Foreign:
        """Makes a model of a configuration, with random weights."""
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise missing_extra("transformers", "llm", "a pretrained model") from error
        try:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**record), attn_implementation="sdpa")
        except Exception as error:  # whatever is wrong with the record
            raise DataError(f"config.json is not of a model that transformers knows ({error})") from error
        return cls(model)

    @property
    def checkpointing(self) -> bool:
        """Whether activations are computed again in the backward pass."""
        return bool(self.network.is_gradient_checkpointing)

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        (self.network.gradient_checkpointing_enable if on else self.network.gradient_checkpointing_disable)()

    @property
    def head(self) -> Tensor:
        """The weights (V, H) of the logits."""
        weight: Tensor = self.network.get_output_embeddings().weight
        return weight

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None = None) -> Tensor:
        """Returns the hidden states (B, L, H), see `decoder.Decoder.forward`."""
        mask = mask.expand(len(tokens), -1, -1, -1)
        mask = mask.to(self.network.dtype).clamp(min=torch.finfo(self.network.dtype).min)
        layers = None if cache is None else _Layers(cache, mask.shape[-1] - tokens.shape[1])
        output = self.network.base_model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=layers is not None,
            **{self.cache_name: layers},
        )  # fmt: skip
        hidden: Tensor = output.last_hidden_state
        return hidden
