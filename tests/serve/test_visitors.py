import asyncio
import importlib.util
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serve.harness import live
from sextet.mep import rooms

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_visitors.py"


def test_thirty_visitors_at_once_play_whole_games(served, tmp_path):
    spec = importlib.util.spec_from_file_location("serve_visitors", SCRIPT)
    visitors = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(visitors)

    async def everybody(address):
        return await asyncio.gather(*(visitors.visit(address, 10) for _ in range(30)))

    with live(served, games=tmp_path) as client:
        assert asyncio.run(everybody(f"{client.base_url}/")) == [66] * 30
        assert len(client.get("/api/games").json()["games"]) == 30
        assert "sextet_tick_lateness_seconds_count 1980.0" in client.get("/metrics").text


@pytest.mark.slow
def test_two_hundred_visitors_leave_no_memory_behind(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--rounds", "3", "--out", str(out)]
    subprocess.run(command, check=True, timeout=290)
    result = json.loads(out.read_text())
    assert [row["errors"] for row in result["rounds"]] == [0, 0, 0], result
    assert result["growth_after_warm_up"] < 0.05
    print("lateness:", [row["lateness_ms_at_most"] for row in result["rounds"]])  # says more of the machine than of us


def test_a_visitor_that_reads_nothing_is_dropped_and_its_game_waits(served, tmp_path, monkeypatch):
    monkeypatch.setattr(rooms, "TICK_SECONDS", 0.001)
    with live(served, games=tmp_path) as client, socket.socket() as raw:
        ticket = client.open_game(partner="p0", seconds=300)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.connect((client.base_url.host, client.base_url.port))
        lines = (
            f"GET /api/games/{ticket['game']}?player={ticket['player']} HTTP/1.1", "Host: localhost",
            "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "", "",
        )  # fmt: skip
        raw.sendall("\r\n".join(lines).encode())
        assert raw.recv(12) == b"HTTP/1.1 101"
        ready = b'{"type": "ready"}'
        raw.sendall(bytes([0x81, 0x80 | len(ready), 0, 0, 0, 0]) + ready)  # a masked frame of text
        time.sleep(2.5)
        with client.socket(ticket) as reader:
            reader.recv()
            state = json.loads(reader.recv())
    assert state["phase"] == "paused" and 64 < state["step"] < 1980
