"""Our losses beside those of TRL's GRPOTrainer, on random batches.

    python benchmarks/dapo_losses.py --trl-python PATH_OF_A_PYTHON_WITH_TRL

Loss and gradient of each method are compared where the conventions agree; where they do not, ours is set to TRL's
convention, and the row says how. Writes results/dapo_losses.json, and tests/golden/dapo_trl_losses.json, with which
the tests compare ours without TRL. Takes a minute, most of it TRL's imports. The peer's environment:

    pip install torch==2.13.0 transformers==5.24.0 trl==1.16.0 datasets accelerate
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sextet.core.records import environment
from sextet.core.seeding import numpy_rng
from sextet.dapo.loss import Tokens, advantages, policy_loss, token_weights
from sextet.dapo.settings import METHODS, LossConfig

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "tests" / "golden" / "dapo_trl_losses.json"
BATCHES, TOLERANCE = 20, 1e-6
# name: our method and changes to it, TRL's options, how ours differs from what the method has on its own
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "dapo": ("dapo", {"dual_clip": 0.0}, {"loss_type": "dapo", "epsilon_high": 0.28},
             "no dual clip, which TRL lacks; one mini-batch: TRL divides by the mean of the tokens of a rollout's "
             "mini-batches, ours by those of the mini-batch"),
    "dapo, cut-off answers masked": ("dapo", {"dual_clip": 0.0},
             {"loss_type": "dapo", "epsilon_high": 0.28}, "as above"),
    "grpo": ("grpo", {}, {"loss_type": "grpo"}, ""),
    "grpo with a KL term": ("grpo", {"kl": 0.04}, {"loss_type": "grpo", "beta": 0.04}, ""),
    "grpo, two-sided clip": ("grpo", {"ratio_cap": 1.5}, {"loss_type": "grpo", "delta": 1.5}, ""),
    "dr_grpo": ("dr_grpo", {}, {"loss_type": "dr_grpo"}, ""),
    "gspo": ("gspo", {"clip_low": 0.02, "clip_high": 0.03},
             {"loss_type": "grpo", "level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03}, "wider bounds"),
    "cispo": ("cispo", {"clip_low": 0.0, "clip_high": 0.4}, {"loss_type": "cispo", "epsilon_high": 1.4},
              "clipped from above only, and TRL's epsilon_high is the bound itself: ours is 1 + clip_high"),
    "sapo": ("sapo", {}, {"loss_type": "sapo"}, ""),
}  # fmt: skip


def random_batch(rng: np.random.Generator, masked: bool) -> dict[str, Any]:
    """Log-probabilities (B, T) of B answers to 3 prompts, before and after updates, some answers cut off."""
    answers, longest = 12, 9
    lengths = rng.integers(1, longest + 1, answers)
    mask = np.arange(longest) < lengths[:, None]
    if masked:
        mask &= rng.random((answers, 1)) < 0.7
        mask[0, 0] = True
    old = -rng.exponential(1.0, (answers, longest))
    spread = rng.normal(0, 0.3, (2, answers, longest))
    rewards = torch.from_numpy(rng.choice([-1.0, 1.0], answers) + rng.normal(0, 0.1, answers))
    found = advantages(rewards, torch.arange(answers) // 4, "group").tolist()
    tables = {"logp": old + spread[0], "old": old, "reference": old + spread[1]}
    rounded = {name: np.round(value * mask, 4).tolist() for name, value in tables.items()}
    return rounded | {"mask": mask.astype(int).tolist(), "advantage": np.round(found, 4).tolist()}


def ours(batch: dict[str, Any], method: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Returns our loss of a batch and its gradient by the log-probabilities."""
    fields = {name: value for name, value in METHODS[method].items() if name != "dynamic"}
    config = LossConfig(**fields | changes)
    mask = torch.tensor(batch["mask"], dtype=torch.bool)
    table = torch.tensor(batch["logp"]).requires_grad_()
    lengths = mask.sum(1)
    weights = token_weights(
        lengths.tolist(), (torch.arange(len(mask)) // 4).tolist(), str(config.aggregate), horizon=mask.shape[1]
    )
    spread = lambda values: values.float()[:, None].expand(mask.shape)[mask]  # noqa: E731
    tokens = Tokens(
        old=torch.tensor(batch["old"])[mask], rollout=torch.tensor(batch["old"])[mask],
        advantage=spread(torch.tensor(batch["advantage"])), weight=spread(weights),
        answer=torch.arange(len(mask))[:, None].expand(mask.shape)[mask],
        reference=torch.tensor(batch["reference"])[mask],
    )  # fmt: skip
    loss, _ = policy_loss(table[mask], torch.zeros(int(mask.sum())), tokens, config)
    loss.backward()
    return {"loss": loss.item(), "gradient": table.grad.tolist()}  # type: ignore[union-attr]


def difference(a: dict[str, Any], b: dict[str, Any]) -> dict[str, float]:
    """Returns the largest absolute differences of two results."""
    gradient = np.abs(np.array(a["gradient"]) - np.array(b["gradient"])).max()
    return {"loss": abs(a["loss"] - b["loss"]), "gradient": float(gradient)}


def main() -> None:
    """Compares, prints and writes; exit code 1 where a difference is over the tolerance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trl-python", help="interpreter that can import trl; see the top of this file")
    python = parser.parse_args().trl_python
    if not python:
        parser.error("there is nothing to compare with: give --trl-python PATH_OF_A_PYTHON_WITH_TRL")
    rng = numpy_rng(0, "losses")
    cases = [
        {"name": name, "batch": random_batch(rng, "masked" in name), "trl": options}
        for name, (_, _, options, _) in CASES.items()
        for _ in range(BATCHES)
    ]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(HERE / "peers" / "trl_losses.py")], input=json.dumps(cases), env=kept | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{python} could not run the peer:\n{done.stderr[-2000:]}")
    peer = json.loads(done.stdout)
    rows: dict[str, Any] = {}
    golden = []
    for case, theirs in zip(cases, peer["results"], strict=True):
        method, changes, options, note = CASES[case["name"]]
        found = difference(ours(case["batch"], method, changes), theirs)
        row = rows.setdefault(
            case["name"], {"ours": {"method": method, **changes}, "trl": options, "convention": note, "batches": 0}
        )
        row["batches"] += 1
        for name, value in found.items():
            row[f"largest difference, {name}"] = max(row.get(f"largest difference, {name}", 0.0), value)
        if row["batches"] == 1:
            golden.append(
                {"name": case["name"], "method": method, "changes": changes, "batch": case["batch"], **theirs}
            )
    for name, row in rows.items():
        print(f"{name:32}", *(f"{key[20:]} {value:.1e}" for key, value in row.items() if key.startswith("largest")))
    apart = [name for name, row in rows.items() if max(row["largest difference, loss"],
             row["largest difference, gradient"]) > TOLERANCE]  # fmt: skip
    result = {
        "what": "largest absolute differences between our losses and gradients and those of TRL, float32",
        "machine": environment(),
        "peer": peer["versions"],
        "tolerance": TOLERANCE,
        "other differences": [
            "advantages: TRL adds 1e-4 to the group's standard deviation, ours 1e-6 (as verl); both got ours here",
            "masked answers: under grpo TRL still counts them among the answers, ours do not",
        ],
        "rows": rows,
    }
    (HERE / "results" / "dapo_losses.json").write_text(json.dumps(result, indent=1) + "\n")
    GOLDEN.write_text(json.dumps({"source": f"TRL {peer['versions']['trl']}", "cases": golden}) + "\n")
    if apart:
        sys.exit(f"over {TOLERANCE:g}: {', '.join(apart)}")


if __name__ == "__main__":
    main()
