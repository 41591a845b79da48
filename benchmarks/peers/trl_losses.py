"""Losses and gradients of TRL's GRPOTrainer for batches on stdin; the peer of `dapo_losses.py`.

Its `_compute_loss` is called on an object that has what it reads, in place of a trainer: the log-probabilities come
from the batch. Reads and prints one JSON object.
"""

from __future__ import annotations

import collections
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import trl
from trl import GRPOTrainer


def loss_of(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the loss of a batch and its gradient by the log-probabilities."""
    batch, options = case["batch"], case["trl"]
    logp, old, reference = (torch.tensor(batch[name]) for name in ("logp", "old", "reference"))
    logp.requires_grad_()
    mask = torch.tensor(batch["mask"])
    arguments = {"delta": None, "steps_per_generation": 1, "use_bias_correction_kl": False}
    arguments |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    trainer = SimpleNamespace(
        args=SimpleNamespace(**arguments | {"delta": options.get("delta")}),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, reduce=lambda value, reduction: value, gather=lambda value: value
        ),
        loss_type=options["loss_type"], importance_sampling_level=options.get("level", "token"),
        epsilon_low=options.get("epsilon", 0.2), epsilon_high=options.get("epsilon_high", 0.2),
        beta=options.get("beta", 0.0), max_completion_length=mask.shape[1], current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, aux_loss_enabled=False,
        vllm_importance_sampling_correction=False, _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long), "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.zeros_like(mask), "completion_mask": mask, "num_items_in_batch": mask.sum(),
        "advantages": torch.tensor(batch["advantage"]), "old_per_token_logps": old, "ref_per_token_logps": reference,
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return {"loss": loss.item(), "gradient": (logp.grad * mask).tolist()}


if __name__ == "__main__":
    versions = {module.__name__: module.__version__ for module in (torch, transformers, trl)}
    json.dump({"versions": versions, "results": [loss_of(case) for case in json.load(sys.stdin)]}, sys.stdout)
