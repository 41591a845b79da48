"""Many visitors of the page at once, on loopback: lateness of ticks, errors, and memory after they left.

Each visitor opens a game of about ten seconds with an agent, acts at every state it sees, and leaves at the end. The
server and the visitors are two processes. Lateness is the server's own measure, from a tick's deadline until its state
is sent. Writes results/serve_visitors.json.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import torch
from websockets.asyncio.client import connect

from sextet.core.files import write_json
from sextet.core.records import environment
from sextet.mep.overcooked import Layout
from sextet.mep.policy import Policy
from sextet.mep.rooms import LATE_READERS_SECONDS

HISTOGRAM = "sextet_tick_lateness_seconds"


def make_run(run: Path):
    """A run with one agent of the default network; its weights do not matter for its cost."""
    write_json(run / "config.json", {"recipe": "mep", "config": {}})
    Policy(Layout.load("cramped_room"), "planes20", "mlp", torch.Generator().manual_seed(0)).save(run / "final")


def call(address: str, body=None):
    """One request; returns the text of the answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def measures(address: str):
    """Returns resident bytes, and the counts of ticks by lateness: upper bound in seconds to number."""
    rows = [line.rsplit(" ", 1) for line in call(address + "metrics").splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in rows}
    counts = {
        float(name.split('"')[1]): value for name, value in values.items() if name.startswith(HISTOGRAM + "_bucket")
    }
    return values["process_resident_memory_bytes"], values["process_cpu_seconds_total"], counts


async def visit(address: str, seconds: float):
    """One visitor; returns the number of states seen. Raises when anything but a whole, saved game happens."""
    await asyncio.sleep(random.uniform(0, 1))
    body = {"kitchen": "cramped_room", "partner": "p0", "seat": "random", "seconds": seconds}
    ticket = json.loads(await asyncio.to_thread(call, address + "api/games", body))
    states = 0
    place = f"{address.replace('http', 'ws')}api/games/{ticket['game']}?player={ticket['player']}"
    async with connect(place, compression=None, open_timeout=30) as socket:
        await socket.send('{"type": "ready"}')
        async for text in socket:
            message = json.loads(text)
            if message["type"] == "state" and message["phase"] == "playing":
                states += 1
                await socket.send(json.dumps({"type": "action", "action": random.randrange(6)}))
            elif message["type"] == "over":
                assert message["saved"], message
                return states
            elif message["type"] == "error":
                raise RuntimeError(message["message"])
    raise RuntimeError("the connection ended before the game")


def bound(before, after, share: float):
    """Least bucket bound, in milliseconds, that `share` of the ticks between two measures kept."""
    ticks = {limit: after[limit] - before[limit] for limit in after}
    return 1000 * min(limit for limit, number in ticks.items() if number >= share * ticks[float("inf")])


def cores_taken():
    """CPU seconds of all processes of this machine; Linux only."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def measure(visitors: int, seconds: float, rounds: int, wait: float):
    """Returns one row per round of visitors; memory is read `wait` seconds after each."""
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder))
        command = [sys.executable, "-m", "sextet", "serve", folder, "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            address, rows = server.stdout.readline().split()[2], []
            for _ in range(rounds):
                _, cpu, before = measures(address)
                started, own, all_before = time.monotonic(), time.process_time(), cores_taken()

                async def everybody():
                    visits = (visit(address, seconds) for _ in range(visitors))
                    return await asyncio.gather(*visits, return_exceptions=True)

                results = asyncio.run(everybody())
                took = time.monotonic() - started
                _, cpu_after, after = measures(address)
                others = cores_taken() - all_before - (cpu_after - cpu) - (time.process_time() - own)
                time.sleep(wait)
                errors = [repr(result) for result in results if isinstance(result, BaseException)]
                rows.append(
                    {
                        "visitors": visitors,
                        "errors": len(errors),
                        "first_error": errors[0] if errors else None,
                        "states_seen": sum(result for result in results if isinstance(result, int)),
                        "ticks": after[float("inf")] - before[float("inf")],
                        "lateness_ms_at_most": {
                            name: bound(before, after, share) for name, share in (("p50", 0.5), ("p99", 0.99))
                        },
                        "share_within_50_ms": (after[0.05] - before[0.05])
                        / (after[float("inf")] - before[float("inf")]),
                        "server_cpu_share": (cpu_after - cpu) / took,
                        "cores_taken_by_other_programs": others / took,
                        "server_cpu_ms_per_tick": 1000
                        * (cpu_after - cpu)
                        / (after[float("inf")] - before[float("inf")]),
                        "resident_mb_after_they_left": measures(address)[0] / 2**20,
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
            return rows
        finally:
            server.terminate()
            server.wait(10)


def main():
    """Measures, prints and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--visitors", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3, help="the first warms up")
    parser.add_argument(
        "--wait", type=float, default=LATE_READERS_SECONDS + 3, help="until finished games are forgotten"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "serve_visitors.json")
    options = parser.parse_args()
    rows = measure(options.visitors, options.seconds, options.rounds, options.wait)
    memory = [row["resident_mb_after_they_left"] for row in rows]
    result = {"machine": environment(), "rounds": rows, "growth_after_warm_up": memory[-1] / memory[0] - 1}
    print(f"growth after the first round: {result['growth_after_warm_up']:.2%}")
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
