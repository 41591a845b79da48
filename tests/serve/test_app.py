import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from serve.harness import live
from sextet import cli
from sextet.core.errors import UsageError
from sextet.serve import Options, app
from sextet.serve.app import bind, serve


@pytest.fixture
def page(tmp_path):
    folder = tmp_path / "page"
    (folder / "more").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>page</title>")
    (folder / "app.js").write_text("export {};")
    (folder / "secret.txt").write_text("not an asset")
    return folder


@pytest.fixture
def client(served, page, tmp_path):
    with live(served, page=page, games=tmp_path / "games") as client:
        yield client


def test_page_and_assets(client):
    index, script = client.get("/"), client.get("/page/app.js")
    assert index.text.startswith("<!doctype html>") and index.headers["content-type"].startswith("text/html")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "default-src 'self'" in index.headers["content-security-policy"]
    assert index.headers["x-content-type-options"] == "nosniff" and "server" not in index.headers
    metrics = client.get("/metrics").text
    assert "sextet_games_playing 0.0" in metrics and "sextet_tick_lateness_seconds_bucket" in metrics
    assert client.get("/healthz").json()["status"] == "ok"


@pytest.mark.parametrize(
    "path",
    [
        *("/page/../demo.py", "/page/%2e%2e/demo.py", "/page/..%2fdemo.py", "/page//etc/passwd", "/page/secret.txt"),
        *("/page/", "/page/%00", "/nothing", "/docs", "/openapi.json", "/api/games/..%2f..%2fconfig/file"),
        *("/api/games/%2e%2e/replay", "/api/games/g0000000000000000000000/file", "/api/study"),
    ],
)
def test_nothing_else_is_readable(client, path):
    with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:  # clients tidy up paths
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 405")) and b'{"error":' in answer


@pytest.mark.parametrize("method, path", [("PUT", "/api/games"), ("DELETE", "/"), ("POST", "/healthz")])
def test_wrong_methods(client, method, path):
    answer = client.request(method, path)
    assert answer.status_code == 405 and answer.json() == {"error": "Method Not Allowed"}


def test_bodies_are_limited_while_they_stream(client, monkeypatch):
    assert client.post("/api/games", content=b"x" * 70_000).status_code == 413
    answer = client.post("/api/games", content=(b"x" * 1000 for _ in range(100)))  # chunked: no length is given
    assert answer.status_code == 413 and "65,536" in answer.json()["error"]
    for content in (b"{", b"[]", b"\xff", b"[" * 60_000):
        answer = client.post("/api/games", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]


def test_slow_clients_are_cut_off(client, monkeypatch):
    monkeypatch.setattr(app, "SLOW_SECONDS", 0.3)
    place = (client.base_url.host, client.base_url.port)
    with socket.create_connection(place) as raw:
        raw.sendall(b"POST /api/games HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert raw.recv(65536).startswith(b"HTTP/1.1 408")
    with socket.create_connection(place, timeout=5) as raw:
        raw.sendall(b"GET /api/setup HTTP/1.1\r\nHost: loc")
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(65536) == b""
    with socket.create_connection(place, timeout=5) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000)
        assert raw.recv(65536).startswith(b"HTTP/1.1 400")


def test_another_host_or_origin_is_refused(client):
    port = client.base_url.port
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400
    assert client.get("/", headers={"host": f"localhost:{port}"}).status_code == 200
    assert client.get("/", headers={"host": f"[::1]:{port}"}).status_code == 200
    body = {"kitchen": "cramped_room", "partner": "p0"}
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{port + 1}"):
        answer = client.post("/api/games", json=body, headers={"origin": origin})
        assert answer.status_code == 403 and "another site" in answer.json()["error"]
    ticket = client.open_game()
    with pytest.raises(InvalidStatus) as refused:
        client.socket(ticket, origin="http://evil.example")
    assert refused.value.response.status_code == 403
    with client.socket(ticket, origin=f"http://127.0.0.1:{port}") as connection:
        assert "start" in connection.recv()


def test_a_token_guards_everything_but_health(served, page, tmp_path):
    with live(served, page=page, token="s3cret", games=tmp_path) as client:
        assert client.get("/healthz").status_code == 200
        for path in ("/", "/page/app.js", "/api/setup", "/metrics", "/?token=s3cre", "/?token=é"):
            answer = client.get(path)
            assert answer.status_code == 401 and "token" in answer.json()["error"]
        assert client.get("/api/setup", headers={"authorization": "Bearer s3cret"}).status_code == 200
        assert client.get("/api/setup?token=s3cret").status_code == 200
        with pytest.raises(InvalidStatus) as refused:
            client.socket({"game": "g", "player": ""})
        assert refused.value.response.status_code == 401
        entry = client.get("/?token=s3cret&invite=abc")
        assert (entry.status_code, entry.headers["location"]) == (303, "/?invite=abc")
        cookie = entry.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie
        assert client.get("/").status_code == 200, "the cookie is enough now"
        headers = {"Cookie": cookie.split(";")[0]}
        with client.socket(client.open_game(), additional_headers=headers) as connection:
            assert "start" in connection.recv()


@pytest.mark.parametrize(
    "host, token, expected",
    [
        ("127.0.0.1", None, r"http://127\.0\.0\.1:\d+/ "),
        ("127.0.0.1", "a b", r"http://127\.0\.0\.1:\d+/\?token=a%20b "),
        ("0.0.0.0", None, r"http://[^/]+:\d+/\?token=[\w-]{22} "),
        ("192.0.2.1", None, r"http://192\.0\.2\.1:\d+/\?token=[\w-]{22} "),
    ],
)
def test_a_token_is_made_where_others_can_reach_the_server(served, monkeypatch, capsys, host, token, expected):
    class Fake:
        def __init__(self, app, *, connections, listening):
            self.run = lambda sockets: listening()

    monkeypatch.setattr(app, "Server", Fake)
    monkeypatch.setattr(app, "bind", lambda host, port: bind("127.0.0.1", 0))
    monkeypatch.setattr("gc.freeze", lambda: None)
    serve([served], Options(host=host, token=token))
    with pytest.raises(UsageError, match="printable ASCII"):
        serve([served], Options(token="é"))
    assert re.match(f"serving on {expected}", capsys.readouterr().out)


def test_a_taken_port_is_named_with_a_free_one(served, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=rf"cannot listen on 127.0.0.1 port {port}.*port \d+ is free"):
            serve([served], Options(port=port))
    with pytest.raises(UsageError, match="0 to 65535"):
        bind("127.0.0.1", 70_000)
    with pytest.raises(UsageError, match="cannot listen on 203.0.113.1"):
        bind("203.0.113.1", 0)


def test_runs_that_cannot_be_served(tmp_path, capsys, monkeypatch):
    def run(*arguments):
        code = cli.main([*map(str, arguments)])
        return code, capsys.readouterr().err

    monkeypatch.chdir(tmp_path)
    assert run("play", "--no-browser") == (2, "sextet: error: no finished run in runs; make one: sextet train mep "
                                           "--preset quick\n")  # fmt: skip
    code, err = run("serve", "absent", "--port", 0)
    assert code == 2 and "absent holds no run" in err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"recipe": "mep", "config": {}}')
    code, err = run("serve", "run", "--port", 0)
    assert code == 2 and "no agent that can play in run" in err and "sextet resume run" in err
    (tmp_path / "run" / "config.json").write_text('{"recipe": "mpe"}')
    code, err = run("serve", "run", "--port", 0)
    assert code == 2 and 'did you mean "mep"' in err
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for name in [name for name in sys.modules if name.startswith("sextet.serve.app")]:
        monkeypatch.delitem(sys.modules, name)
    code, err = run("serve", "run")
    assert code == 2 and 'pip install "sextet[serve]"' in err


def test_unreadable_agents_are_left_out_with_a_warning(served, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(served, run)
    (run / "agents" / "mep-0" / "model.safetensors").write_bytes(b"short")
    (run / "agents" / "mep-1" / "config.json").write_text("[]")
    with live(run) as client:
        partners = client.get("/api/setup").json()["partners"]
    assert [item["label"] for item in partners if item["kind"] == "agent"] == ["MEP seed 2"]
    assert caplog.text.count("left out") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_the_server_soon(served, tmp_path, number):
    command = [sys.executable, "-m", "sextet", "serve", str(served), "--port", "0", "--games", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().split()[2]
        with httpx.Client(base_url=address) as client:
            assert client.get("/healthz").status_code == 200
            ticket = client.post("/api/games", json={"kitchen": "cramped_room", "partner": "p0"}).json()
            assert ticket["player"]
            before = time.monotonic()
            os.kill(process.pid, number)
            out, err = process.communicate(timeout=20)
        assert time.monotonic() - before < 10  # 3 on an idle machine
        assert (process.returncode, out, err) == (0, "", "")
    finally:
        process.kill()
