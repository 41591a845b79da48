"""Collects the tables of finished comparisons into results/mep_comparison.json, with settings and times of all parts.

The comparisons are made by the command line, for example
    sextet train mep --preset compare --layouts cramped_room,coordination_ring --name study
Usage: mep_comparison.py RUN [RUN ...]; without any it says so and writes nothing.
"""

import sys
from pathlib import Path

from sextet.core.files import read_json, write_json
from sextet.core.records import environment

SETTINGS = (
    "layouts",
    "methods",
    "num_seeds",
    "num_proxies",
    "games",
    "workers",
    "population",
    "response",
    "trajedi",
    "pbt",
)


def collect(run):
    """Returns settings, tables, words and seconds of one run."""
    config = read_json(run / "config.json")["config"]
    pieces = [read_json(path) for path in sorted((run / "artifacts").glob("*.json"))]
    seconds = {
        path.parent.name: round(read_json(path).get("seconds", 0.0), 1)
        for path in sorted(run.glob("parts/*/summary.json"))
    }
    return {
        "settings": {name: config[name] for name in SETTINGS},
        "tables": [piece for piece in pieces if piece["kind"] == "table"],
        "words": {piece["title"]: piece["text"] for piece in pieces if piece["kind"] == "text"},
        "seconds_of_parts": seconds,
    }


def main():
    """Writes the file and prints where it is."""
    runs = [Path(argument) for argument in sys.argv[1:]]
    if not runs:
        print("give finished comparisons: mep_comparison.py runs/mep/compare")
        return
    path = Path(__file__).with_name("results") / "mep_comparison.json"
    write_json(path, {"machine": environment(), "runs": [collect(run) for run in runs]})
    print(path)


if __name__ == "__main__":
    main()
