"""Generation alone, beside transformers and vLLM, and limits of other parts; used by `dapo_speed.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from dapo_contestants import PEERS, chat_prompts, judges_cpu

from sextet.core.seeding import numpy_rng
from sextet.dapo.model import load_language, smollm2_folder
from sextet.dapo.rollout import Engine, Limits, Request
from sextet.dapo.verifier import Verifier

BATCH, ANSWERS, EQUAL = 64, 8, 32
LONG_TAIL = {"answers": 128, "mean": 12, "most": 64}
SCORED = 8192
MEMORY = """
import json, resource, torch
from sextet.dapo.logprob import token_scores
torch.set_num_threads(1)
hidden, head = torch.randn(4096, 576).requires_grad_(), torch.randn(49152, 576).requires_grad_()
targets = torch.randint(0, 49152, (4096,))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
(hidden.sum() + head[:1].sum()).backward()  # gradients exist, as in a training
before = peak()
logp, entropy = token_scores(hidden, head, targets)
forward = peak() - before
logp.sum().backward()
print(json.dumps({"forward": round(forward), "with the backward pass": round(peak() - before)}))
"""


def lengths(kind: str) -> list[int]:
    """Lengths of the answers, in their order."""
    if kind == "equal":
        return [EQUAL] * BATCH
    drawn = numpy_rng(0, "lengths").geometric(1 / LONG_TAIL["mean"], LONG_TAIL["answers"])
    return [min(LONG_TAIL["most"], int(length)) for length in drawn]


def generate_ours(engine: Engine, prompts: Sequence[list[int]], wanted: list[int]) -> float:
    """CPU seconds of answers of the wanted lengths in ``BATCH`` slots."""
    requests = [Request(key=("bench", i), prompt=text, numbers=range(ANSWERS)) for i, text in enumerate(prompts)]
    fill = Engine._fill

    def bounded(engine: Engine, requests: Any, waiting: Any, slots: Any, *rest: Any) -> None:
        first = slots.active
        fill(engine, requests, waiting, slots, *rest)
        for row in range(first, slots.active):
            slots.room[row] = wanted[slots.request[row] * ANSWERS + slots.number[row]]

    with patch.object(Engine, "_fill", bounded):
        began = time.process_time()
        answers = engine.generate(requests, Limits(max_tokens=max(wanted), stop=()))
        spent = time.process_time() - began
    assert [len(answer.tokens) for group in answers for answer in group] == wanted
    return spent


def generate_transformers(model: Any, prompts: Sequence[list[int]], wanted: list[int]) -> float:
    """CPU seconds of the same by ``generate`` in batches of ``BATCH``, each as long as its longest."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    texts = [text for text in prompts for _ in range(ANSWERS)]
    longest = max(map(len, texts))
    began = time.process_time()
    for start in range(0, len(texts), BATCH):
        part, ends = texts[start : start + BATCH], torch.tensor(wanted[start : start + BATCH])

        class Ends(StoppingCriteria):  # type: ignore[misc]
            """Ends each answer at its length."""

            def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
                return ids.shape[1] - longest >= ends  # noqa: B023

        tokens = torch.tensor([[0] * (longest - len(text)) + text for text in part])
        mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in part])
        out = model.generate(
            input_ids=tokens, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=int(ends.max()), min_new_tokens=int(ends.max()),
            stopping_criteria=StoppingCriteriaList([Ends()]),
        )  # fmt: skip
        assert out.shape[1] == longest + int(ends.max())
    return time.process_time() - began


def measure_rollouts(*, quick: bool) -> dict[str, Any]:
    """Ours and transformers in turns, with equal and long-tailed lengths."""
    from transformers import AutoModelForCausalLM
    from transformers import __version__ as version

    folder = smollm2_folder()
    language = load_language(folder)
    engine = Engine(language.model, slots=BATCH)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: dict[str, Any] = {"what": "SmolLM2-135M-Instruct, float32, 64 answers at a time, 8 to a prompt of 39 tokens"}
    for kind in ("equal", "long-tailed"):
        wanted = lengths(kind)
        texts = chat_prompts(len(wanted) // ANSWERS, folder)
        prompts = [language.tokenizer.encode(text) for text in texts]
        pairs = []
        for _ in range(2 if kind == "equal" and not quick else 1):
            pairs.append((generate_ours(engine, prompts, wanted), generate_transformers(peer, prompts, wanted)))
            print(f"{kind}: ours {pairs[-1][0]:.1f}, transformers {pairs[-1][1]:.1f} CPU seconds", flush=True)
        seconds = np.array(pairs).mean(0)
        tokens = sum(wanted)
        found[kind] = {
            "tokens": tokens, "longest": max(wanted),
            "ours, tokens per CPU second": round(float(tokens / seconds[0]), 1),
            "transformers, tokens per CPU second": round(float(tokens / seconds[1]), 1),
            "ratio": round(float(seconds[1] / seconds[0]), 2),
        }  # fmt: skip
    return found | {"transformers": version}


def measure_vllm(python: str) -> dict[str, Any]:
    """The same answers in vLLM for CPUs."""
    folder, found = smollm2_folder(), {}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    jobs = {}
    for kind in ("equal", "long-tailed"):
        wanted = lengths(kind)
        jobs[kind] = {"prompts": chat_prompts(len(wanted) // ANSWERS, folder), "lengths": wanted, "answers": ANSWERS}
    done = subprocess.run(
        [python, str(PEERS / "vllm_generate.py"), str(folder), str(BATCH)], input=json.dumps(jobs), text=True,
        capture_output=True, check=False, env=kept,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{python} could not run vLLM:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {"what": "tokens per CPU second of the answers of `rollouts`, start and first request not counted", **found}


def measure_limits() -> dict[str, Any]:
    """Memory of log-probabilities and speed of verdicts."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    rng = numpy_rng(0, "answers")
    numbers = rng.integers(0, 1000, (SCORED, 2)).tolist()
    items = [(f"We add.\nAnswer: {given}", str(right), {}) for given, right in numbers]
    with Verifier("dapo") as verifier:
        verifier.verdicts(items[:64])
        began, before, others = time.perf_counter(), time.process_time(), judges_cpu(verifier)
        verdicts = verifier.verdicts(items)
        wall, own = time.perf_counter() - began, time.process_time() - before
        judged = judges_cpu(verifier) - others
    assert sum(bool(verdict.right) for verdict in verdicts) == sum(given == right for given, right in numbers)
    return {
        "MB above weights and gradients for log-probabilities and entropies of 4096 tokens, 49152 ids, float32":
            json.loads(done.stdout),
        f"seconds for the verdicts on {SCORED} integer answers": {
            "wall": round(wall, 2), "CPU here": round(own, 2), "CPU of the judges": round(judged, 2),
        },
    }  # fmt: skip
