"""Answers of given lengths from vLLM for CPUs on one core; the peer of `dapo_speed.py`.

    python vllm_generate.py FOLDER MOST_AT_A_TIME < jobs.json

Prints a JSON object: tokens per CPU second of each job, in float32 and in bfloat16.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip

from vllm import LLM, SamplingParams


def main() -> None:
    """Generates each job twice; the first time is not counted."""
    folder, batch, jobs = sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)
    found: dict[str, object] = {"vllm-cpu": version("vllm-cpu")}
    for dtype in ("bfloat16", "float32"):
        model = LLM(folder, dtype=dtype, enforce_eager=True, max_num_seqs=batch, max_model_len=256, seed=0)
        for name, job in jobs.items():
            texts = [text for text in job["prompts"] for _ in range(job["answers"])]
            settings = [
                SamplingParams(
                    temperature=1.0, max_tokens=length, min_tokens=length, ignore_eos=True, logprobs=0, seed=i
                )
                for i, length in enumerate(job["lengths"])
            ]
            model.generate(texts[:batch], settings[:batch], use_tqdm=False)
            began = time.process_time()
            outputs = model.generate(texts, settings, use_tqdm=False)
            spent = time.process_time() - began
            assert [len(output.outputs[0].token_ids) for output in outputs] == job["lengths"]
            found[f"{name}, {dtype}"] = round(sum(job["lengths"]) / spent, 1)
        del model
    print(json.dumps(found))


if __name__ == "__main__":
    main()
