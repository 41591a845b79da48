"""The comparison: conventions in matrix games, then every method on every kitchen, with human proxies and the others.

Each piece is a run of its own, so an interrupted comparison goes on where it was and repeats no finished piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from sextet.core.errors import SextetError
from sextet.core.run import Run
from sextet.core.stats import bootstrap_interval
from sextet.core.workers import Workers
from sextet.mep import matrix_game
from sextet.mep.config import METHODS, Config
from sextet.mep.human import HumanProxy, train_proxy
from sextet.mep.human_data import HumanData, find_human_data, load_human_data
from sextet.mep.jobs import Parts, open_workers, run_jobs
from sextet.mep.judge import HUMAN, PUBLISHED, Role, measure_entropies, play_pairs, schedule
from sextet.mep.members import Population
from sextet.mep.overcooked import Layout, Overcooked
from sextet.mep.policy import Policy
from sextet.mep.published import METHODS as PUBLISHED_METHODS
from sextet.mep.published import find_published, load_published
from sextet.mep.tables import Kitchen, kitchen_tables, overall_tables
from sextet.mep.train import train_agents
from sextet.report.build import save_figure, save_table

POPULATIONS = ("trajedi", "fcp", "mep")  # methods with a population of their own and a best response
CLOSE_SEEDS, CLOSE_GAMES = 2, 20  # of the cross-play matrix


def compare(config: Config, run: Run) -> None:
    """Runs all pieces and writes the tables, figures and summary of the comparison."""
    kitchens, methods = config.kitchens, config.compared
    stages = 1 + len(kitchens) * (len(methods) + sum(method in POPULATIONS for method in methods) + 1)
    done = [path.parent.name for path in run.directory.glob("parts/*/summary.json")]
    before = sum(not name.endswith(("-proxies", "-entropy")) for name in done)
    results, models = [], []
    with run.console.task("comparison", stages, start=before):
        rows = matrix_part(config, run.child("matrix-games"), run)
        for layout in kitchens:
            here = replace(config, layout=layout)
            with open_workers(here) as workers:
                kitchen, first = kitchen_part(here, run, workers)
            results.append(kitchen)
            models.append(first)
    summary = overall_tables(config, run, results)
    for number, kitchen in enumerate(results):
        summary |= kitchen_tables(config, run, kitchen, number)
    matrix_tables(run, rows, summary)
    run.say(f"play with these agents in the browser: sextet serve {run.directory}")
    run.finish(summary, models[0].state_dict())


def matrix_part(config: Config, part: Run, run: Run) -> list[matrix_game.Row]:
    """Solves the matrix games, or reads the rows of an earlier session."""
    if not part.finished:
        with run.console.task("matrix games", None):
            rows = matrix_game.run_matrix_games(
                num_seeds=config.matrix_seeds, alphas=config.matrix_alphas, seed=part.key("init"), between=run.poll
            )
        part.finish({"rows": [asdict(row) for row in rows]})
    return [matrix_game.Row(**row) for row in part.summary["rows"]]


def kitchen_part(config: Config, run: Run, workers: Workers) -> tuple[Kitchen, Policy]:
    """Trains all methods on one kitchen and plays all games; returns the results and the model of the run."""
    layout = config.layout
    cast, populations = list[Role](), dict[str, list[Population]]()
    stem = Layout.load(layout).name
    for method in config.compared:
        label = METHODS[method]
        policies, behind = train_method(config, method, run, workers, stem)
        cast += [Role(name=f"{label} seed {s}", group=label, seed=s, player=p) for s, p in enumerate(policies)]
        if method in POPULATIONS:
            populations[label] = behind
    learned = len(cast)
    best = next((role for role in cast if role.group == METHODS["mep"]), cast[0]).player
    assert isinstance(best, Policy)
    proxies = proxy_part(config, run.child(f"{stem}-proxies"), run, workers)
    cast += [Role(name=f"{HUMAN} {index}", group=HUMAN, seed=index, player=p) for index, p in enumerate(proxies)]
    for index, (name, folder) in enumerate(item for item in find_published().items() if item[0].endswith(stem)):
        label = f"{PUBLISHED} {PUBLISHED_METHODS[name.removesuffix(f'_{stem}')]}"
        cast.append(Role(name=label, group=PUBLISHED, seed=index, player=load_published(folder)))
    close = [index for index, role in enumerate(cast) if index >= learned or role.seed < CLOSE_SEEDS]
    pairs = schedule(cast, range(learned, len(cast)), close, config.games, CLOSE_GAMES)
    scores = play_pairs(config, run.child(f"{stem}-games"), cast, pairs, workers)
    entropy = measure_entropies(config, run.child(f"{stem}-entropy"), populations, workers)
    for role in cast:
        role.save(run.directory / "agents" / f"{stem}-{role.name}".lower().replace(",", "").replace(" ", "-"))
    kitchen = Kitchen(layout=Layout.load(layout), cast=cast, close=close, scores=scores, entropy=entropy)
    return kitchen, best


def train_method(
    config: Config, method: str, run: Run, workers: Workers, stem: str
) -> tuple[list[Policy], list[Population]]:
    """Trains one agent a seed; single learners get as many environment steps as a best response gets."""
    prefix = f"{stem}-{method}"
    names = {"population": f"{prefix}-population", "response": f"{prefix}-response"}
    steps = config.response.steps
    if method in ("sp", "sp_random_starts"):
        config = replace(config, population=replace(config.population, steps=steps))
    if method == "mep_uniform":  # prioritised partners do not always help, so both are shown
        method, names["population"] = "mep", f"{stem}-mep-population"
        config = replace(config, response=replace(config.response, beta=0.0))
    config = replace(config, method=method, pbt=replace(config.pbt, steps=steps))  # type: ignore[arg-type]
    return train_agents(config, run, config.num_seeds, workers, **names)


def proxy_part(config: Config, part: Run, run: Run, workers: Workers) -> list[HumanProxy]:
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
        run.say(f"cloning {len(folders)} human proxies of {config.layout} from the 2019 games")
        keys = [part.key("init", index) for index in range(len(folders))]
        proxies, _ = run_jobs(workers, clone, config, data, keys)
        for folder, proxy in zip(folders, proxies, strict=True):
            proxy.save(folder)
        part.finish({"proxies": len(folders)})
    return [HumanProxy.load(folder) for folder in folders]


def clone(config: Config, _: Overcooked, data: HumanData, index: int, key: int) -> tuple[HumanProxy, Parts]:
    """Clones one human proxy, a `Job`."""
    return train_proxy(config.layout, data, seed=key), {}


def matrix_tables(run: Run, rows: Sequence[matrix_game.Row], summary: dict[str, Any]) -> None:
    """Writes the matrix games' table and figure, and adds the headline numbers to the summary."""
    from matplotlib.figure import Figure

    table = [(row, {name: bootstrap_interval(values) for name, values in row.values.items()}) for row in rows]
    one_shot = [(row, cells) for row, cells in table if row.beta is None]
    ours = [(row, cells) for row, cells in one_shot if row.method in ("SP", "MEP")]
    save_table(
        run.artifact("70-matrix-games"),
        title="Matrix games: does the population find many conventions?",
        columns=["game", "method", "alpha", *(name.replace("_", " ") for name in one_shot[0][1])],
        rows=[[row.game, row.method, row.alpha, *cells.values()] for row, cells in one_shot],
        note="Mean and 95 % interval over seeds of 8 members each. Conventions: different likeliest actions in the "
        "population (8 levers; 5 blocks). TrajeDi's alpha is its weight. The games and their settings are ours: the "
        "paper's pay-offs are not public.",
    )
    save_table(
        run.artifact("71-repeated"),
        title="Repeated game: meeting a convention never seen",
        columns=["method", "alpha", "beta", "mean return", "worst convention"],
        rows=[[row.method, row.alpha, row.beta, *cells.values()] for row, cells in table if row.beta is not None],
        note="Ten rounds with each of 8 pure conventions; 1 is perfect from the first round. beta 0: uniform partners.",
    )
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    for place, name in enumerate(("conventions", "self_play"), 1):
        axes = figure.add_subplot(1, 2, place)
        for game in dict.fromkeys(row.game for row, _ in ours):
            points = [(f"{row.alpha:g}", cells[name]) for row, cells in ours if row.game == game]
            means = [cell.mean for _, cell in points]
            axes.plot([alpha for alpha, _ in points], means, marker="o", label=game.replace("_", " "))
            if points[0][1].low is not None:
                low, high = zip(*((cell.low, cell.high) for _, cell in points), strict=True)
                axes.fill_between(range(len(points)), low, high, alpha=0.2)
        axes.set(xlabel="alpha (0: SP)", title=name.replace("_", " "), ylim=(0, None))
    axes.legend(frameon=False)
    save_figure(run.artifact("72-alpha"), figure, title="What alpha buys, and what it costs")
    graded = [(row, cells["conventions"]) for row, cells in ours if row.game == "lever_graded"]
    for row, found in (graded[0], max(graded, key=lambda pair: pair[1].mean)):
        summary[f"{row.method} conventions of 8 levers"] = found.as_dict()
