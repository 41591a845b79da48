"""The 15 published agents of 2019, imported: self-play, and each with human proxies, beside the study's own numbers.

Writes results/published_agents.json. Usage: published_agents.py [games] [proxies], by default 100 and 2; 0 proxies
leaves the pairs out. The agents are looked for as `sextet.mep.published.find_published` says. The study reports means
over five seeds, and its result files also the value of the very seed that was exported; both are compared. The study's
partner in the pairs is its own human proxy, ours are clones of the same games by our code.
"""

import json
import sys
import time
from pathlib import Path

import torch

from sextet.core.records import environment
from sextet.core.seeding import numpy_rng
from sextet.core.stats import bootstrap_interval
from sextet.mep.evaluate import HORIZON, evaluate_pairs, play
from sextet.mep.human import train_proxy
from sextet.mep.human_data import find_human_data, load_human_data
from sextet.mep.overcooked import LAYOUTS, Overcooked
from sextet.mep.policy import PolicyAgent
from sextet.mep.published import METHODS, find_published, load_published

# Of every agent, kitchens in the order of LAYOUTS: self-play over five seeds, self-play of the exported seed, and
# the exported seed with the study's human proxy (agent in seat 0, in seat 1). PPO_BC has no self-play in the files.
# Source: human_aware_rl/data/{ppo_runs,pbt_runs}/*_models_performance.pickle, seeds from the experiment scripts.
PUBLISHED = {
    "ppo_sp": (
        (198.8, 205.5, 104.5, 108.5), (167.2, 175.5, 48.0, 98.5), (190.8, 196.5, 35.5, 46.0),
        (151.9, 163.5, 31.5, 63.0), (122.3, 131.0, 32.0, 32.5),
    ),
    "pbt": (
        (216.9, 213.5, 82.5, 109.0), (190.1, 223.5, 37.0, 103.5), (173.8, 223.0, 80.5, 83.0),
        (169.5, 199.5, 13.0, 23.0), (140.1, 179.0, 47.5, 30.0),
    ),
    "ppo_bc": (
        (None, None, 163.5, 169.0), (None, None, 179.5, 184.0), (None, None, 149.0, 142.5),
        (None, None, 97.0, 78.5), (None, None, 92.5, 102.0),
    ),
}  # fmt: skip


def with_proxies(layout, agents, proxies, games):
    """Returns for each agent its mean with every proxy: {name: [[seat 0, seat 1], ...]}."""
    data, rows = load_human_data(find_human_data(), layout, "test"), {name: [] for name in agents}
    for seed in range(proxies):
        proxy = train_proxy(layout, data, seed=seed)
        for row in evaluate_pairs(layout, agents, proxy, episodes=games, seed=seed):
            rows[row.name].append([row.seat0.mean, row.seat1.mean])
    return rows


def main():
    """Plays every kitchen, prints a line for each agent and writes the JSON file."""
    torch.set_num_threads(1)
    games = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    proxies = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    folders, started = find_published(), time.perf_counter()
    if not folders:
        sys.exit("no published agents: set SEXTET_DATA to the folder that holds overcooked/agents")
    results = {"machine": environment(), "games": games, "proxies": proxies, "agents": {}}
    for place, layout in enumerate(LAYOUTS):
        methods = [method for method in METHODS if f"{method}_{layout}" in folders]
        agents = {name: PolicyAgent(load_published(folders[f"{name}_{layout}"]), name=name) for name in methods}
        pairs = with_proxies(layout, agents, proxies, games) if proxies else {}
        env = Overcooked(layout, games, horizon=HORIZON)
        for method, agent in agents.items():
            five_seeds, same_seed, *with_human = PUBLISHED[method][place]
            own = play(env, (agent, agent), episodes=games, rng=numpy_rng(0, "evaluate", method, layout))
            row = {"self_play": bootstrap_interval(own).as_dict()}
            text = f"{METHODS[method]:7}{layout:22} self-play {own.mean():6.1f}"
            if five_seeds:
                row |= {"published_five_seeds": five_seeds, "published_same_seed": same_seed}
                row |= {"ratio_five_seeds": own.mean() / five_seeds, "ratio_same_seed": own.mean() / same_seed}
                text += f" = {own.mean() / five_seeds:.3f} x {five_seeds} (five seeds)"
                text += f" = {own.mean() / same_seed:.3f} x {same_seed} (same seed)"
            if pairs:
                row |= {"with_human_proxies": pairs[method], "published_same_seed_with_human_proxy": with_human}
                seats = [sum(pair[seat] for pair in pairs[method]) / proxies for seat in (0, 1)]
                text += f"; with human proxies {seats[0]:.1f} {seats[1]:.1f}, published {with_human}"
            results["agents"][f"{method}_{layout}"] = row
            print(text, flush=True)
    results["seconds"] = round(time.perf_counter() - started, 1)
    path = Path(__file__).with_name("results")
    path.mkdir(exist_ok=True)
    path.joinpath("published_agents.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
