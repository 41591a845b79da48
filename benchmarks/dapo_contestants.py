"""What `dapo_speed.py` lets learn: our training in this process, TRL's in another; models, prompts, and switches."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from sextet.core.checkpoint import pack_tensors
from sextet.core.device import Device
from sextet.core.run import Run
from sextet.core.seeding import numpy_rng, torch_rng
from sextet.dapo import learner as learning
from sextet.dapo import rollout
from sextet.dapo.config import Config, ModelConfig, OptimConfig, RolloutConfig, SamplingConfig, resolve
from sextet.dapo.decoder import Decoder, Shape
from sextet.dapo.generators import Pool
from sextet.dapo.groups import Collector
from sextet.dapo.learner import Learner, Scorer, samples_of
from sextet.dapo.logprob import token_scores
from sextet.dapo.model import load_language, plain_weights
from sextet.dapo.rollout import Engine, Limits, Request
from sextet.dapo.tasks import Problem
from sextet.dapo.verifier import Verifier

CHARACTERS = "0123456789+=,#"
RATE = 1e-6
PEERS = Path(__file__).parent / "peers"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What both learn: ``groups`` prompts with ``answers`` each, of at most or exactly (``fixed``) ``tokens``."""

    name: str
    what: str
    groups: int
    answers: int
    tokens: int
    minibatches: int
    accumulate: int
    """Micro-batches into which TRL cuts a mini-batch, for its memory."""
    fixed: bool
    chat: bool
    warm: bool
    rounds: int
    dtypes: tuple[str, ...] = ("float32",)
    flat: bool = False

    def half_flat(self) -> Case:
        """The same where every answer to half of the prompts has the same reward."""
        return replace(self, name=f"{self.name}, half flat", what=f"{self.what}; half of the groups without spread",
                       flat=True)  # fmt: skip


TINY = Case(
    name="tiny", what="random Llama of 335,520 parameters, 32 prompts x 8 answers of at most 40 tokens, 4 updates",
    groups=32, answers=8, tokens=40, minibatches=4, accumulate=1, fixed=False, chat=False, warm=True, rounds=5,
)  # fmt: skip
SMOLLM2 = Case(
    name="SmolLM2", what="SmolLM2-135M-Instruct, 8 prompts of 39 tokens x 8 answers of 32 tokens, 2 updates; TRL cuts "
    "each of them into 4 micro-batches, so that 8 GB are enough", groups=8, answers=8, tokens=32, minibatches=2,
    accumulate=4, fixed=True, chat=True, warm=True, rounds=2, dtypes=("float32", "bfloat16"),
)  # fmt: skip


def make_tiny(folder: Path) -> Path:
    """Writes a random Llama and a tokenizer of 16 ids, which both can read."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {character: index for index, character in enumerate([*CHARACTERS, "<pad>", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)  # noqa: S106
    shape = Shape(
        vocab_size=16, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, head_dim=24, tie_word_embeddings=False,
    )  # fmt: skip
    model, rng = Decoder(shape), torch_rng(0, "init")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=rng)
    (folder / "model.safetensors").write_bytes(pack_tensors(dict(model.state_dict())))
    record = {name: value for name, value in vars(shape).items() if name != "kind"}
    record |= {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "pad_token_id": 14,
        "eos_token_id": 15, "bos_token_id": None, "max_position_embeddings": 256,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(record))
    return folder


def sums(number: int) -> list[str]:
    """Prompts of 4 to 14 characters."""
    rng = numpy_rng(0, "data")
    return ["+".join(map(str, rng.integers(1, 10, int(rng.integers(2, 8))))) + "=" for _ in range(number)]


def chat_prompts(number: int, folder: Path) -> list[str]:
    """Questions in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = numpy_rng(0, "data").integers(10, 100, (number, 2)).tolist()
    chats = [[{"role": "user", "content": f"What is {a}+{b}?"}] for a, b in pairs]
    return [str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)) for chat in chats]


def judges_cpu(verifier: Verifier) -> float:
    """CPU seconds so far of the processes that judge answers; 0 where there is no /proc."""
    total, sessions = 0.0, {process.popen.pid for process in verifier._pool}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions:
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def cpu(verifier: Verifier) -> float:
    """CPU seconds so far of this process and those that judge."""
    return time.process_time() + judges_cpu(verifier)


class Ours:
    """Our training, a step at a time."""

    def __init__(self, case: Case, folder: Path, prompts: Sequence[str], flat: Sequence[bool], scratch: Path) -> None:
        self.config = resolve(
            Config(
                method="dapo",
                model=ModelConfig(source=str(folder)),
                sampling=SamplingConfig(
                    prompts=case.groups, answers=case.answers, max_tokens=case.tokens, dynamic=False
                ),
                optim=OptimConfig(
                    learning_rate=RATE, minibatches=case.minibatches, weight_decay=0.0, micro_tokens=2048
                ),
                rollout=RolloutConfig(slots=case.groups * case.answers),
            )
        )
        language = load_language(folder)
        end, encode = language.tokenizer.end, language.tokenizer.encode
        self.decode = lambda answer: language.tokenizer.decode(answer.tokens)
        self.learner = Learner(language.model, self.config, Device("cpu", "fp32"))
        self.run = Run.open(self.config, recipe="dapo", directory=scratch, quiet=True)
        self.pool, self.verifier = Pool(self.config, language), Verifier("dapo_reward:score")
        problems = [
            Problem(prompt=text, answer="", extra={"flat": is_flat})
            for text, is_flat in zip(prompts, flat, strict=True)
        ]
        self.collector = Collector(
            self.config.sampling, problems, [encode(text) for text in prompts], self.pool, self.verifier,
            Limits(max_tokens=case.tokens, stop=() if case.fixed else (end,), seed=1), seed=0,
        )  # fmt: skip
        self.generating = 0.0
        self.samples_of: Callable[..., Any] = samples_of

    def step(self) -> dict[str, float]:
        """Takes a step; returns CPU seconds: all, generation, update, and collection besides generation."""
        generate = Engine.generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            found = generate(*args, **kwargs)
            self.generating += time.process_time() - started
            return found

        self.generating, began = 0.0, cpu(self.verifier)
        with patch.object(Engine, "generate", timed):
            self.pool.publish(plain_weights(self.learner.model), self.run.step)
            groups, _, counts = self.collector.collect(self.run.step, self.run, self.decode)
        collected = cpu(self.verifier)
        samples, _ = self.samples_of(groups, self.config)
        self.learner.update(samples, self.run)
        self.run.step += 1
        ended = cpu(self.verifier)
        return {
            "cpu": ended - began, "tokens": counts["tokens"], "generate": self.generating,
            "update": ended - collected, "collect besides": collected - began - self.generating,
        }  # fmt: skip

    @contextlib.contextmanager
    def without(self, names: Sequence[str]) -> Iterator[None]:
        """Switches savings off, see `SWITCHES`."""
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(SWITCHES[name](self))
            yield

    def close(self) -> None:
        """Ends the processes."""
        self.pool.workers.close()
        self.verifier.close()
        self.run.close()


@contextlib.contextmanager
def prefilled_alone(ours: Ours) -> Iterator[None]:
    """Every answer computes its prompt."""
    generate = Engine.generate

    def each(engine: Engine, requests: Sequence[Request], limits: Limits, *rest: Any) -> Any:
        single = [replace(request, numbers=(number,)) for request in requests for number in request.numbers]
        found = iter(generate(engine, single, limits, *rest))
        return [[next(found)[0] for _ in request.numbers] for request in requests]

    with patch.object(Engine, "generate", each), patch.object(rollout, "WORTH_SHARING", 10**9):
        yield


@contextlib.contextmanager
def slots_kept(ours: Ours) -> Iterator[None]:
    """No slot is given up before all of a batch have ended."""
    retire = Engine._retire

    def together(engine: Engine, requests: Any, slots: Any, keys: Any, answers: Any, limits: Limits) -> None:
        count = slots.count[: slots.active]
        if not slots.active:
            return
        ends = np.isin(slots.tokens[: slots.active], list(limits.stop))
        ends &= np.arange(ends.shape[1]) < count[:, None]
        if bool((ends.any(1) | (count >= slots.room[: slots.active])).all()):
            count[:] = np.where(ends.any(1), ends.argmax(1) + 1, count)
            retire(engine, requests, slots, keys, answers, limits)

    with patch.object(Engine, "_retire", together):
        yield


@contextlib.contextmanager
def rows_alone(ours: Ours) -> Iterator[None]:
    """Every answer has a row with its prompt, padded to the longest of its micro-batch."""
    with patch.object(learning, "best_rows", lambda pieces, *_: [[piece] for piece in pieces]):
        yield


@contextlib.contextmanager
def logits_everywhere(ours: Ours) -> Iterator[None]:
    """Prompt and padding have logits too."""

    def forward(scorer: Scorer, tokens: Any, positions: Any, mask: Any, source: Any, target: Any) -> Any:
        hidden = scorer.model(tokens, positions, mask).flatten(0, 1)
        order = torch.full((len(hidden),), -1).scatter_(0, source, torch.arange(len(source)))
        targets = torch.where(order >= 0, target[order], 0)
        logp, entropy = token_scores(hidden, scorer.model.head, targets, scorer.temperature)  # type: ignore[arg-type]
        extra = torch.ones(len(source), dtype=torch.bool)
        extra[order[order >= 0]] = False  # answers' first tokens share the place where the prompt ends
        logp, entropy = logp[source], entropy[source]
        if bool(extra.any()):
            again = token_scores(hidden[source[extra]], scorer.model.head, target[extra], scorer.temperature)  # type: ignore[arg-type]
            logp = logp.masked_scatter(extra, again[0])
            entropy = entropy.masked_scatter(extra, again[1])
        return logp, entropy

    with patch.object(Scorer, "forward", forward):
        yield


@contextlib.contextmanager
def old_again(ours: Ours) -> Iterator[None]:
    """Log-probabilities before the update are computed again."""
    config = ours.learner.config
    ours.learner.config = replace(config, loss=replace(config.loss, old="recompute"))
    yield
    ours.learner.config = config


@contextlib.contextmanager
def spread_everywhere(ours: Ours) -> Iterator[None]:
    """Answers without an advantage are computed: theirs is next to nothing, but not zero."""

    def found(groups: Any, config: Any) -> Any:
        samples, logs = samples_of(groups, config)
        return [replace(sample, advantage=sample.advantage or 1e-6) for sample in samples], logs

    ours.samples_of = found
    yield
    ours.samples_of = samples_of


SWITCHES: dict[str, Callable[[Ours], contextlib.AbstractContextManager[None]]] = {
    "a prompt is prefilled once for its answers": prefilled_alone,
    "slots of answers that ended are given up": slots_kept,
    "answers share rows and their prompt in the update": rows_alone,
    "no logits for prompt and padding": logits_everywhere,
    "no second pass for the old log-probabilities": old_again,
    "groups without spread are not computed": spread_everywhere,
}


class Trl:
    """TRL's trainer in its own interpreter; it takes a step when asked."""

    def __init__(
        self, python: str, case: Case, folder: Path, prompts: Sequence[str], flat: Sequence[bool], dtype: str,
        scratch: Path,
    ) -> None:  # fmt: skip
        options = {
            "folder": str(folder), "prompts": prompts, "flat": flat, "groups": case.groups, "answers": case.answers,
            "tokens": case.tokens, "least": case.tokens * case.fixed, "minibatches": case.minibatches,
            "accumulate": case.accumulate, "steps": 100, "dtype": dtype, "rate": RATE, "output": str(scratch),
        }  # fmt: skip
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        scratch.mkdir(parents=True)
        self.errors = scratch / "errors"
        self.process = subprocess.Popen(
            [python, str(PEERS / "trl_grpo.py"), json.dumps(options)], env=kept, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.errors.open("w"),
        )  # fmt: skip
        self.versions = self._read()["versions"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                message: dict[str, Any] = json.loads(line)
                return message
        sys.exit(f"TRL ended with {self.process.wait()}:\n{self.errors.read_text()[-2000:]}")

    def step(self) -> dict[str, float]:
        """Takes a step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
