"""The web server around any recipe's page: who may ask, how much at once, and how it starts and stops.

It listens on the loopback interface unless told otherwise, and wants a token elsewhere. Bodies, messages, headers and
connections have limits; no part of a request becomes a path of a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from starlette.datastructures import URL
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sextet import __version__
from sextet.core.errors import SextetError, UsageError
from sextet.core.files import read_json
from sextet.registry import find
from sextet.serve import Demo, Options

MAX_BODY = 64 * 1024
MAX_UPLOADS = 20  # bodies of a demo's larger limits that are held at the same time
MAX_HEADERS = 16 * 1024
MAX_MESSAGE = 4 * 1024
SLOW_SECONDS = 10.0  # for a request's headers, and for its body
STOP_SECONDS = 1
log = logging.getLogger("sextet.serve")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
ANYWHERE = ("0.0.0.0", "::")
MEDIA = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # a token or an invitation in the address goes nowhere
    "Cache-Control": "no-cache",
}


class Refused(Exception):  # noqa: N818 - an answer, not a failure
    """A request that goes no further."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers


class Guard:
    """Checks host, origin, token and body of every request and WebSocket before the application sees it."""

    def __init__(self, app: ASGIApp, *, host: str, token: str | None, cookie: str, uploads: Mapping[str, int]) -> None:
        self.app, self.token, self.cookie, self.uploads, self.uploading = app, token, cookie, uploads, 0
        self.hosts = None if host in ANYWHERE else {*LOOPBACK, host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                had = {name for name, _ in message["headers"]}
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(item for item in more if item[0] not in had)]
            await send(message)

        connection, http = HTTPConnection(scope), scope["type"] == "http"
        reply = send_with_headers if http else send
        upload = scope.get("method") == "POST" and scope["path"] in self.uploads
        limit = self.uploads[scope["path"]] if upload else MAX_BODY
        refusal = Refused(413, f"the body is over the limit of {limit:,} bytes")
        if upload and self.uploading >= MAX_UPLOADS:
            limit, refusal = 0, Refused(429, "the server is busy; try again in a few seconds", {"Retry-After": "5"})
        self.uploading += upload
        try:
            self._check_source(connection)
            answer = self._check_token(connection)
            if answer is None and http:
                receive = await _with_body(receive, limit, refusal)
            await (answer or self.app)(scope, receive, reply)
        except Refused as refused:
            await JSONResponse({"error": str(refused)}, refused.status, refused.headers)(scope, receive, reply)
        finally:
            self.uploading -= upload

    def _check_source(self, connection: HTTPConnection) -> None:
        """Another site's page may reach this address through the visitor's browser; it must not be served."""
        host, origin = connection.headers.get("host", ""), connection.headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if not name or (self.hosts is not None and name not in self.hosts):
            raise Refused(400, f"host {host[:80]!r} is not served here; use the address that the server printed")
        reads = connection.scope["type"] == "http" and connection.scope["method"] in ("GET", "HEAD")
        if not reads and origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise Refused(403, f"origin {origin[:80]!r} is another site; open the page from this server")

    def _check_token(self, connection: HTTPConnection) -> Response | None:
        if self.token is None or connection.scope["path"] == "/healthz":
            return None
        query, scheme = connection.query_params.get("token"), "Bearer "
        header = connection.headers.get("authorization", "")
        given = (query, connection.cookies.get(self.cookie), header.removeprefix(scheme))
        if not any(value and secrets.compare_digest(value.encode(), self.token.encode()) for value in given):
            raise Refused(401, "a token is needed: open the address with ?token=... that the server printed")
        if query is None or connection.scope["path"] != "/" or connection.scope["type"] != "http":
            return None
        rest = URL(scope=connection.scope).remove_query_params("token").query
        answer = RedirectResponse("/" + (f"?{rest}" if rest else ""), 303)
        answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
        return answer


async def _with_body(receive: Receive, limit: int, refusal: Refused) -> Receive:
    """Reads a body of at most `limit` bytes within SLOW_SECONDS; returns a `receive` that gives it again.

    The end of a longer one is read and dropped, because a sender that is cut off does not hear why.
    """
    body, size, more = bytearray(), 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SLOW_SECONDS):
            while more:
                message = await receive()
                piece, more = message.get("body", b""), message.get("more_body", False)
                size += len(piece)
                body += piece if size <= limit else b""
    if size > limit:
        raise refusal
    if more:
        raise Refused(408, f"the body did not arrive within {SLOW_SECONDS:.0f} seconds")
    first: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


def build(demo: Demo, *, host: str, port: int, token: str | None) -> FastAPI:
    """Returns the application: the recipe's routes and page, /healthz and /metrics, behind the guard."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await demo.close()

    app = FastAPI(openapi_url=None, lifespan=lifespan, redirect_slashes=False)
    app.include_router(demo.router)
    app.add_middleware(Guard, host=host, token=token, cookie=f"sextet_{port}", uploads=demo.uploads)
    folders = (Path(__file__).with_name("page"), demo.page)  # what all pages share, and the recipe's own
    assets = {p.relative_to(folder).as_posix(): p for folder in folders for p in folder.rglob("*") if p.suffix in MEDIA}
    registry = CollectorRegistry()
    for collector in (ProcessCollector(registry=None), *demo.collectors):
        registry.register(collector)
    for name, value in demo.gauges.items():
        Gauge(name, name.replace("_", " "), registry=registry).set_function(value)

    @app.get("/healthz")
    async def healthz() -> Any:
        return {"status": "ok", "version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    @app.get("/")
    @app.get("/page/{name:path}")
    async def page(name: str = "index.html") -> Response:
        if name not in assets:
            raise HTTPException(404, f"no file {name[:80]!r} in the page")
        return FileResponse(assets[name], media_type=MEDIA[assets[name].suffix])

    def failed(_: Any, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return JSONResponse({"error": error.detail}, error.status_code, error.headers)
        if isinstance(error, RequestValidationError):
            items = [f"{'.'.join(map(str, item['loc'][1:])) or 'body'}: {item['msg']}" for item in error.errors()]
            return JSONResponse({"error": "; ".join(items)}, 400)
        if hasattr(error, "status"):
            return JSONResponse({"error": str(error)}, error.status)
        log.error("%s", error)  # it may name files, which are nobody's business
        return JSONResponse({"error": "the server failed; its console says how"}, 500)

    for kind in (HTTPException, RequestValidationError, SextetError, Exception):
        app.add_exception_handler(kind, failed)
    return app


class _Http(H11Protocol):  # type: ignore[misc]
    """HTTP that closes connections whose first request does not come."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(SLOW_SECONDS, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self in self.connections and self.cycle is None:
            self.transport.abort()


class Server(uvicorn.Server):  # type: ignore[misc]
    """uvicorn that says when it listens, and treats a stop signal as the normal end.

    `listening` is called once, in the event loop.
    """

    def __init__(self, app: FastAPI, *, connections: int, listening: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app, http=_Http, log_config=None, log_level="warning", access_log=False,
                ws_max_size=MAX_MESSAGE, ws_per_message_deflate=False, ws_ping_interval=20, ws_ping_timeout=20,
                limit_concurrency=connections, timeout_keep_alive=5, timeout_graceful_shutdown=STOP_SECONDS,
                h11_max_incomplete_event_size=MAX_HEADERS, server_header=False, proxy_headers=False,
            )
        )  # fmt: skip
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen."""
        await super().startup(sockets)
        self._listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends on SIGINT and SIGTERM; a second SIGINT does not wait."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises UsageError naming a free port when this one is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError), socket.create_server((host, 0), family=family) as other:
            free = f"; port {other.getsockname()[1]} is free, or use --port 0 for any"
        raise UsageError(f"cannot listen on {host} port {port} ({error.strerror or error}){free}") from error
    except OverflowError as error:
        raise UsageError(f"port {port} is not allowed; it must be 0 to 65535") from error
    # Connections inherit both: what waits in the kernel for a slow reader is bounded, in size and in time.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BODY)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(3e3 * SLOW_SECONDS))
    return listener


def demo_of(runs: Sequence[Path], options: Options) -> Demo:
    """Returns the page of the recipe that made `runs`; raises UsageError where there is none, or several."""
    names = []
    for run in runs:
        if not (run / "config.json").is_file():
            raise UsageError(f"{run} holds no run (no config.json); see the folders in runs/")
        config = read_json(run / "config.json")
        names.append(str(config.get("recipe")) if isinstance(config, dict) else "")
    if len(set(names)) > 1:
        raise UsageError(f"these runs are of several recipes ({', '.join(sorted(set(names)))}); serve one at a time")
    demo: Demo = find(names[0]).module("demo").demo(runs, options)
    return demo


def serve(runs: Sequence[Path], options: Options) -> None:
    """Serves the page of the runs until a stop signal.

    Raises:
        SextetError: The runs, the study or the games' folder cannot be used, or the port is taken.
    """
    logging.basicConfig(level=logging.WARNING, format="sextet: %(message)s")
    host, token = options.host, options.token or None
    if token is not None and not (token.isascii() and token.isprintable()):
        raise UsageError("--token must be printable ASCII, because it travels in a header")
    listener = bind(host, options.port)
    if token is None and host not in LOOPBACK:
        token = secrets.token_urlsafe(16)
    port = listener.getsockname()[1]
    name = socket.gethostname() if host in ANYWHERE else host
    address = f"http://{f'[{name}]' if ':' in name else name}:{port}/" + (f"?token={quote(token)}" if token else "")

    def listening() -> None:
        print(f"serving on {address}  (Ctrl+C ends)", flush=True)
        if options.browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    with listener:
        demo = demo_of(runs, options)
        app = build(demo, host=host, port=port, token=token)
        gc.freeze()  # what is loaded stays: no pauses to look at it while serving, nor seconds at the end
        sys.setswitchinterval(0.001)  # saving and replaying in threads must not hold up the games' clock
        Server(app, connections=4 * options.max_games + 64, listening=listening).run([listener])
