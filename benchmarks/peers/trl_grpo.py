"""Rollout steps of TRL's GRPOTrainer, one for every line read from stdin; the peer of `dapo_speed.py`.

The argument is a JSON object: folder (of the model), prompts, flat (prompts without spread), groups, answers, tokens
(most of an answer), least (fewest), minibatches, accumulate (micro-batches of each), steps, dtype, rate.
Prints a JSON object a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import transformers
import trl
from dapo_reward import score
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

OPTIONS = json.loads(sys.argv[1])
SEEN: dict[str, float] = {"tokens": 0, "generate": 0.0}


def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Rewards answers and counts their tokens."""
    SEEN["tokens"] += sum(map(len, completion_ids))
    return [score(text, "", {"flat": flat})[0] for text, flat in zip(completions, columns["flat"], strict=True)]


class Turns(TrainerCallback):  # type: ignore[misc]
    """Waits before each rollout step, and reports it."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Waits for a line."""
        if state.global_step % OPTIONS["minibatches"] == 0:
            if not sys.stdin.readline():
                os._exit(0)
            SEEN.update(tokens=0, generate=0.0, began=time.process_time())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Reports the step after its last update."""
        if state.global_step % OPTIONS["minibatches"] == 0:
            cpu = time.process_time() - SEEN["began"]
            say({"cpu": cpu, "tokens": SEEN["tokens"], "generate": SEEN["generate"], "updates": state.global_step})


def say(message: dict[str, Any]) -> None:
    """Prints a line of JSON."""
    print(json.dumps(message), file=sys.__stdout__, flush=True)


def timed(function: Any) -> Any:
    """Adds the CPU seconds of generation to what is seen."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            SEEN["generate"] += time.process_time() - began

    return wrapped


def main() -> None:
    """Trains in turns."""
    torch.set_num_threads(1)
    micro = OPTIONS["groups"] * OPTIONS["answers"] // OPTIONS["minibatches"] // OPTIONS["accumulate"]
    tokenizer = AutoTokenizer.from_pretrained(OPTIONS["folder"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(OPTIONS["folder"], dtype=getattr(torch, OPTIONS["dtype"]))
    least = {"min_new_tokens": OPTIONS["least"]} if OPTIONS["least"] else {}
    config = GRPOConfig(
        output_dir=OPTIONS["output"], use_cpu=True, bf16=False, gradient_checkpointing=False, loss_type="dapo",
        epsilon=0.2, epsilon_high=0.28, beta=0.0, num_generations=OPTIONS["answers"],
        per_device_train_batch_size=micro, gradient_accumulation_steps=OPTIONS["accumulate"],
        steps_per_generation=OPTIONS["minibatches"] * OPTIONS["accumulate"],
        max_completion_length=OPTIONS["tokens"], temperature=1.0, top_p=1.0, top_k=0,
        learning_rate=OPTIONS["rate"], lr_scheduler_type="constant", weight_decay=0.0,
        max_grad_norm=1.0, max_steps=OPTIONS["steps"] * OPTIONS["minibatches"], save_strategy="no",
        logging_strategy="no", report_to=[], disable_tqdm=True, seed=0, generation_kwargs=least,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": OPTIONS["prompts"], "flat": OPTIONS["flat"]})
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer,
        callbacks=[Turns()],
    )  # fmt: skip
    trainer._generate = timed(trainer._generate)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, trl)}
    say({"versions": versions, "parameters": sum(parameter.numel() for parameter in model.parameters())})
    trainer.train()


if __name__ == "__main__":
    main()
