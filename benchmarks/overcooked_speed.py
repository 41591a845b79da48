"""How fast Overcooked steps with the observations of both players, beside two public implementations.

    python benchmarks/overcooked_speed.py [rounds]

All contestants play random joint actions drawn in the timed loop, on one core and one thread, in turns, and the
median over the rounds counts. `overcooked` 0.2.1 is stepped as its users do (step, then its 26-plane encoding);
JaxMARL runs whole episodes in one compiled scan without its automatic reset, compilation not counted, observations
kept in the loop so that they are computed. Peers that cannot be imported are named in the result and left out;
an environment that has them all:

    pip install --no-deps jaxmarl==0.2.0
    pip install jax flax chex gymnax jaxtyping safetensors pillow matplotlib scipy overcooked==0.2.1 numba
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np  # noqa: E402

from sextet.mep.overcooked import LAYOUTS, Overcooked, observation_shape  # noqa: E402

HORIZON, PEER_LAYOUT = 400, "cramped_room"
RESULTS = Path(__file__).parent / "results" / "overcooked_speed.json"
FIRST_STEP = """
import time
from sextet.mep.overcooked import Overcooked
start = time.perf_counter()
env = Overcooked("cramped_room", 1024)
env.step([[4, 4]] * 1024)
env.observe("planes20")
print(time.perf_counter() - start)
"""
Contestant = Callable[[], int]  # plays for a while and returns the number of environment steps


def ours(layout: str, num_envs: int, encoding: str | None, backend: str, steps: int) -> Contestant:
    env, rng = Overcooked(layout, num_envs, horizon=HORIZON, backend=backend), np.random.default_rng(0)
    seen = None
    if encoding:
        seen = np.empty((num_envs, 2, *observation_shape(env.layout, encoding)), np.uint8)

    def play() -> int:
        for actions in rng.integers(0, 6, (steps, num_envs, 2)):
            _, _, done = env.step(actions)
            if done[0]:
                env.reset()
            if encoding:
                env.observe(encoding, out=seen)
        return steps * num_envs

    return play


def reference(steps: int = 400) -> Contestant:
    from overcooked.mdp.actions import Action
    from overcooked.mdp.overcooked_mdp import OvercookedGridworld

    mdp = OvercookedGridworld.from_layout_name(PEER_LAYOUT, old_dynamics=True)
    rng = np.random.default_rng(0)

    def play() -> int:
        state = mdp.get_standard_start_state()
        for _ in range(steps):
            actions = [Action.INDEX_TO_ACTION[a] for a in rng.integers(0, 6, 2)]
            state, _ = mdp.get_state_transition(state, actions)
            mdp.lossless_state_encoding(state)
        return steps

    return play


def jaxmarl(num_envs: int) -> tuple[Contestant, float]:
    """Returns the contestant and the seconds it took to compile."""
    import jax

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jaxmarl.environments.overcooked import Overcooked as Theirs
        from jaxmarl.environments.overcooked import overcooked_layouts

        env = Theirs(layout=overcooked_layouts[PEER_LAYOUT], max_steps=HORIZON + 1)

    def one(carry, _):
        key, state, _ = carry
        key, draw = jax.random.split(key)
        actions = jax.random.randint(draw, (2, num_envs), 0, 6)
        joint = {"agent_0": actions[0], "agent_1": actions[1]}
        seen, state, reward, _, info = jax.vmap(env.step_env, (None, 0, 0))(key, state, joint)
        return (key, state, seen), (reward["agent_0"].sum(), info["shaped_reward"]["agent_0"].sum())

    @jax.jit
    def episode(key):
        seen, state = jax.vmap(env.reset)(jax.random.split(key, num_envs))
        return jax.lax.scan(one, (key, state, seen), None, length=HORIZON)

    start = time.perf_counter()
    jax.block_until_ready(episode(jax.random.key(0)))
    compiled = time.perf_counter() - start

    def play() -> int:
        jax.block_until_ready(episode(jax.random.key(1)))
        return HORIZON * num_envs

    return play, compiled


def first_step_seconds() -> dict[str, float]:
    """Seconds from the import to the end of the first step and observation, without and with compiled code on disk."""
    with tempfile.TemporaryDirectory() as folder:
        command, env = [sys.executable, "-c", FIRST_STEP], os.environ | {"NUMBA_CACHE_DIR": folder}
        cold, warm = (
            float(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout) for _ in range(2)
        )
    return {"cold": round(cold, 2), "warm": round(warm, 2)}


def contestants() -> tuple[dict[str, Contestant], list[str], dict[str, float]]:
    entries: dict[str, Contestant] = {}
    for num_envs in (1, 64, 1024, 8192):
        steps = max(50, min(4000, 400_000 // num_envs))
        for encoding in ("planes20", "planes26", None):
            name = f"sextet {PEER_LAYOUT} n={num_envs} {encoding or 'step only'}"
            entries[name] = ours(PEER_LAYOUT, num_envs, encoding, "numba", steps)
    for layout in LAYOUTS:
        if layout != PEER_LAYOUT:
            entries[f"sextet {layout} n=1024 planes20"] = ours(layout, 1024, "planes20", "numba", 400)
    entries[f"sextet {PEER_LAYOUT} n=1024 planes20 numpy"] = ours(PEER_LAYOUT, 1024, "planes20", "numpy", 100)
    missing, compile_seconds = [], {}
    try:
        entries["overcooked 0.2.1 planes26"] = reference()
    except ImportError as error:
        missing.append(f"overcooked: no module {error.name}")
    for num_envs in (64, 1024):
        name = f"jaxmarl n={num_envs} planes26"
        try:
            entries[name], seconds = jaxmarl(num_envs)
            compile_seconds[name] = round(seconds, 1)
        except ImportError as error:
            missing.append(f"jaxmarl: no module {error.name}")
            break
    return entries, missing, compile_seconds


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in ("numpy", "numba", "overcooked", "jaxmarl", "jax"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main(rounds: int = 5) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    first = first_step_seconds()
    entries, missing, compile_seconds = contestants()
    wall: dict[str, list[float]] = {name: [] for name in entries}
    cpu: dict[str, list[float]] = {name: [] for name in entries}
    for number in range(rounds + 1):
        for name, play in entries.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            steps = play()
            if number:  # the first round warms up
                wall[name].append(steps / (time.perf_counter() - start))
                cpu[name].append(steps / (time.process_time() - start_cpu))
    rates = {
        name: {
            "steps_per_second": round(statistics.median(wall[name])),
            "steps_per_cpu_second": round(statistics.median(cpu[name])),
        }
        for name in entries
    }
    ratios = {}
    for encoding in ("planes20", "planes26"):
        mine = rates[f"sextet {PEER_LAYOUT} n=1024 {encoding}"]
        for peer in ("overcooked", "jaxmarl"):
            for unit in mine:
                theirs = max((rate[unit] for name, rate in rates.items() if name.startswith(peer)), default=0)
                if theirs:
                    ratios[f"n=1024 {encoding} / {peer} at its best, {unit}"] = round(mine[unit] / theirs, 1)
    result = {
        "what": "environment steps with both players' observations, one core, one thread, random actions",
        "layout_of_the_race": PEER_LAYOUT,
        "rounds": rounds,
        "cpu_count": os.cpu_count(),
        "versions": versions(),
        "rates": rates,
        "ratios": ratios,
        "first_step_seconds": first,
        "jaxmarl_compile_seconds": compile_seconds,
        "not_measured": missing,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
