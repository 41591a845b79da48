"""Collects the tables of finished comparisons of a recipe into results/RECIPE_comparison.json, with settings and times.

The comparisons are made by the command line, for example
    sextet train mep --preset compare --layouts cramped_room,coordination_ring --name study
    sextet train mgn --preset compare --name study
Usage: comparison.py RUN [RUN ...]; without any it says so and writes nothing.
"""

import sys
from pathlib import Path

from sextet.core.files import read_json, write_json
from sextet.core.records import environment


def collect(run):
    """Returns settings, tables, words and seconds of one run."""
    pieces = [read_json(path) for path in sorted((run / "artifacts").glob("*.json"))]
    seconds = {
        path.parent.name: round(read_json(path).get("seconds", 0.0), 1)
        for path in sorted(run.glob("parts/*/summary.json"))
    }
    return {
        "settings": read_json(run / "config.json")["config"],
        "tables": [piece for piece in pieces if piece["kind"] == "table"],
        "words": {piece["title"]: piece["text"] for piece in pieces if piece["kind"] == "text"},
        "seconds_of_parts": seconds,
    }


def main():
    """Writes the file and prints where it is."""
    runs = [Path(argument) for argument in sys.argv[1:]]
    if not runs:
        print("give finished comparisons of one recipe: comparison.py runs/mep/compare")
        return
    (recipe,) = {read_json(run / "config.json")["recipe"] for run in runs}
    path = Path(__file__).with_name("results") / f"{recipe}_comparison.json"
    write_json(path, {"machine": environment(), "runs": [collect(run) for run in runs]})
    print(path)


if __name__ == "__main__":
    main()
