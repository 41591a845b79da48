"""The quick comparison: conventions in matrix games, then SP and MEP in the kitchen, each with a human's stand-in.

Each part is a run of its own, so an interrupted comparison goes on where it was and repeats no finished part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from sextet.core.errors import SextetError
from sextet.core.run import Run
from sextet.core.stats import Interval, bootstrap_interval, welch_test
from sextet.mep import matrix_game
from sextet.mep.config import Config
from sextet.mep.evaluate import Agent, cross_play, evaluate_pairs, heat_map, play
from sextet.mep.human import HumanProxy, train_proxy
from sextet.mep.human_data import find_human_data, load_human_data
from sextet.mep.overcooked import Layout, Overcooked
from sextet.mep.picture import moving_picture, record
from sextet.mep.policy import Policy, PolicyAgent
from sextet.mep.train import open_workers, train_population, train_responses
from sextet.report.build import save_figure, save_table, save_text

HUMAN = "human proxy"
CROSS_PLAY_GAMES, CROSS_PLAY_SEEDS = 20, 2
UNIFORM = "MEP, uniform partners"


def compare(config: Config, run: Run) -> None:
    """Runs all parts and writes the tables, figures and summary of the comparison."""
    seeds = range(config.num_seeds)
    together = replace(config, method="mep")
    variants = {"MEP": together}
    if config.response.beta > 0:  # prioritised sampling does not always help, so both are shown
        variants[UNIFORM] = replace(together, response=replace(config.response, beta=0.0))
    stages = 3 + config.num_proxies + config.num_seeds + len(variants)
    done = [path.parent.name for path in run.directory.glob("parts/*/summary.json")]
    before = len(done) + ("human-proxies" in done) * (config.num_proxies - 1)
    with run.console.task("comparison", stages, start=before):
        rows = matrix_part(config, run.child("matrix-games"), run)
        proxies = proxy_part(config, run.child("human-proxies"), run)
        # Without a bonus the members of a population never see each other: each is one seed of self-play.
        alone = replace(config, method="sp", population=replace(config.population, size=config.num_seeds, alpha=0.0))
        with open_workers(config) as workers:
            selfish = train_population(alone, run.child("sp"), workers)
            groups = [train_population(together, run.child(f"mep-population-seed{seed}"), workers) for seed in seeds]
            methods = {"SP": [selfish.policy(config, seed) for seed in seeds]}
            for name, variant in variants.items():
                part = run.child("mep-response" if name == "MEP" else "mep-response-uniform")
                methods[name] = train_responses(variant, part, [group.pool() for group in groups], workers)
        with run.console.task("games with each other and with the human proxies", None):
            summary = judge(config, run, methods, proxies)
    matrix_tables(run, rows, summary)
    run.finish(summary, methods["MEP"][0].state_dict())


def matrix_part(config: Config, part: Run, run: Run) -> list[matrix_game.Row]:
    """Solves the matrix games, or reads the rows of an earlier session."""
    if not part.finished:
        with run.console.task("matrix games", None):
            rows = matrix_game.run_matrix_games(
                num_seeds=config.matrix_seeds, alphas=config.matrix_alphas, seed=part.key("init"), between=run.poll
            )
        part.finish({"rows": [asdict(row) for row in rows]})
    return [matrix_game.Row(**row) for row in part.summary["rows"]]


def proxy_part(config: Config, part: Run, run: Run) -> list[HumanProxy]:
    """Clones several human proxies, or reads them back; none where the human games are not at hand.

    Clones of the same games differ more than seeds of an agent do, so agents meet several and are judged by the mean.
    """
    folders = [part.directory / "final" / str(index) for index in range(config.num_proxies)]
    if not part.finished:
        try:
            data = load_human_data(find_human_data(), config.layout, "test")
        except SextetError as error:
            run.say(f"no human proxy in this comparison: {error}")
            run.event("warning", text=f"no human proxy: {error}")
            return []

        def progress(done: int, _: int, loss: float) -> None:
            run.console.update(done, {"validation_loss": loss})
            run.poll()

        for index, folder in enumerate(folders):
            with run.console.task(f"human proxy {index} from 2019 games", None):
                train_proxy(config.layout, data, seed=part.key("init", index), progress=progress).save(folder)
        part.finish({"proxies": len(folders)})
    return [HumanProxy.load(folder) for folder in folders]


def judge(
    config: Config, run: Run, methods: Mapping[str, Sequence[Policy]], proxies: Sequence[HumanProxy]
) -> dict[str, Any]:
    """Plays all agents with each other and the proxies; writes table, heat map and picture, returns the summary."""
    layout, seed = Layout.load(config.layout), run.key("evaluate")
    agents: dict[str, Agent] = {
        f"{method} {index}": PolicyAgent(policy, name=f"{method} seed {index}")
        for method, policies in methods.items()
        for index, policy in enumerate(policies)
    }
    few = {name: agent for name, agent in agents.items() if int(name.rpartition(" ")[2]) < CROSS_PLAY_SEEDS}
    everyone = {**few, **{f"{HUMAN} {index}": proxy for index, proxy in enumerate(proxies)}}
    matrix = cross_play(layout, everyone, episodes=CROSS_PLAY_GAMES, seed=seed)
    names = list(everyone)
    note = (
        f"Mean of {CROSS_PLAY_GAMES} games of {config.ppo.horizon} steps; 20 points a soup; the diagonal is self-play."
    )
    figure = heat_map(names, matrix, f"cross-play on {layout.name}")
    save_figure(run.artifact("13-cross-play"), figure, title="Everyone with everyone", note=note)
    pairs = [evaluate_pairs(layout, agents, proxy, episodes=config.games, seed=seed) for proxy in proxies]

    def with_human(place: str) -> dict[str, float]:
        rows = [{row.name: getattr(row, place).mean for row in pair} for pair in pairs]
        return {name: sum(row[name] for row in rows) / len(rows) for name in agents}

    def over_seeds(method: str, values: Mapping[str, float]) -> Interval:
        return bootstrap_interval([values[f"{method} {index}"] for index in range(len(methods[method]))])

    env = Overcooked(layout, config.games, horizon=config.ppo.horizon)
    own = {
        name: float(play(env, (agent, agent), episodes=config.games, rng=run.rng("evaluate", name).numpy).mean())
        for name, agent in agents.items()
    }
    columns = {"self-play": own}
    if proxies:
        columns["with human, agent in seat 0"] = with_human("seat0")
        columns["with human, agent in seat 1"] = with_human("seat1")
        columns["with human, both seats"] = with_human("mean")
    cells = {method: {name: over_seeds(method, values) for name, values in columns.items()} for method in methods}
    headlines = ("self-play", "with human, both seats")
    summary = {f"{m} {name}": row[name].as_dict() for m, row in cells.items() for name in headlines if name in row}
    rows: list[list[Any]] = [[method, *row.values()] for method, row in cells.items()]
    if proxies:
        own_human = [matrix[index][index].mean for index, name in enumerate(names) if name.startswith(HUMAN)]
        rows.append([HUMAN, bootstrap_interval(own_human), *[None] * (len(columns) - 1)])
    number = config.num_seeds
    budget = config.population.steps, config.population.size, config.response.steps
    save_table(
        run.artifact("10-kitchen"),
        title=f"{layout.name}: points in {config.ppo.horizon} steps",
        columns=["method", *columns],
        rows=rows,
        note=f"Mean and 95 % interval over {number} training seeds, {config.games} games a seat, sampled actions. "
        f"SP: {budget[0]:,.0f} environment steps. MEP: {budget[1]} members of {budget[0]:,.0f} each, then a best "
        f"response of {budget[2]:,.0f}. Agents meet {len(proxies)} human proxies, clones of the 2019 test games, and "
        f"are judged by the mean; the last row is these proxies with themselves.",
    )
    save_text(run.artifact("11-words"), title="In words", text=in_words(columns, list(methods), number))
    partner: tuple[str, Agent] = (HUMAN, proxies[0]) if proxies else ("SP seed 0", agents["SP 0"])
    frames = record(layout, (agents["MEP 0"], partner[1]), steps=config.ppo.horizon, seed=seed)
    picture = moving_picture(layout, frames, ("MEP, seed 0", partner[0]))
    save_figure(
        run.artifact("12-game"), picture, title=f"One game: MEP with the {partner[0]}", note="At the speed of 2019."
    )
    return summary


def in_words(columns: Mapping[str, Mapping[str, float]], methods: Sequence[str], number: int) -> str:
    """Says what the table shows, and what it does not."""
    scores = columns.get("with human, both seats")
    if scores is None:
        return "The human games are not here, so no agent met a stand-in for a human: sextet data human --download"
    base, lines = [scores[f"SP {index}"] for index in range(number)], []
    for method in methods[1:]:
        values = [scores[f"{method} {index}"] for index in range(number)]
        gain = (sum(values) - sum(base)) / number
        line = f"{method}: {abs(gain):.1f} points {'more' if gain >= 0 else 'fewer'} with the human proxies than SP"
        if number > 1:
            p = welch_test(values, base)
            verdict = "a difference that chance alone rarely makes" if p < 0.05 else "not enough to tell them apart"
            line += f" (Welch p = {p:.2g}, {number} seeds each: {verdict})"
        lines.append(line + ".")
    lines.append("These agents are small and briefly trained; the preset fast trains longer.")
    return "\n".join(lines)


def matrix_tables(run: Run, rows: Sequence[matrix_game.Row], summary: dict[str, Any]) -> None:
    """Writes the matrix games' table and figure, and adds the headline numbers to the summary."""
    from matplotlib.figure import Figure

    table = [(row, {name: bootstrap_interval(values) for name, values in row.values.items()}) for row in rows]
    one_shot = [(row, cells) for row, cells in table if row.beta is None]
    save_table(
        run.artifact("20-matrix-games"),
        title="Matrix games: does the population find many conventions?",
        columns=["game", "method", "alpha", *(name.replace("_", " ") for name in one_shot[0][1])],
        rows=[[row.game, row.method, row.alpha, *cells.values()] for row, cells in one_shot],
        note="Mean and 95 % interval over seeds of 8 members each. Conventions: different likeliest actions in the "
        "population (8 levers; 5 blocks). The games and their settings are ours: the paper's pay-offs are not public.",
    )
    save_table(
        run.artifact("21-repeated"),
        title="Repeated game: meeting a convention never seen",
        columns=["method", "alpha", "beta", "mean return", "worst convention"],
        rows=[[row.method, row.alpha, row.beta, *cells.values()] for row, cells in table if row.beta is not None],
        note="Ten rounds with each of 8 pure conventions; 1 is perfect from the first round. beta 0: uniform partners.",
    )
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    for place, name in enumerate(("conventions", "self_play"), 1):
        axes = figure.add_subplot(1, 2, place)
        for game in dict.fromkeys(row.game for row, _ in one_shot):
            points = [(f"{row.alpha:g}", cells[name]) for row, cells in one_shot if row.game == game]
            means = [cell.mean for _, cell in points]
            axes.plot([alpha for alpha, _ in points], means, marker="o", label=game.replace("_", " "))
            if points[0][1].low is not None:
                low, high = zip(*((cell.low, cell.high) for _, cell in points), strict=True)
                axes.fill_between(range(len(points)), low, high, alpha=0.2)
        axes.set(xlabel="alpha (0: SP)", title=name.replace("_", " "), ylim=(0, None))
    axes.legend(frameon=False)
    save_figure(run.artifact("22-alpha"), figure, title="What alpha buys, and what it costs")
    graded = [(row, cells["conventions"]) for row, cells in one_shot if row.game == "lever_graded"]
    for row, found in (graded[0], max(graded, key=lambda pair: pair[1].mean)):
        summary[f"{row.method} conventions of 8 levers"] = found.as_dict()
