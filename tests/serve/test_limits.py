"""What protects a recipe's model: larger bodies on the routes that ask for them, turns, and a short queue."""

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi import APIRouter, HTTPException, Request

from serve.harness import listening
from sextet.serve import Demo, app
from sextet.serve.turns import Turns

LIMIT = 300_000


@pytest.fixture
def client(tmp_path):
    router = APIRouter()

    @router.post("/upload")
    @router.post("/other")
    @router.put("/upload")
    async def upload(request: Request):
        return {"bytes": len(await request.body())}

    async def close():
        pass

    (tmp_path / "index.html").write_text("page")
    with listening(Demo(router=router, page=tmp_path, close=close, uploads={"/upload": LIMIT})) as client:
        yield client


def pieces(total):
    return (b"x" * 1000 for _ in range(total // 1000))


def test_only_a_post_to_the_named_path_may_be_large(client):
    assert client.post("/upload", content=b"x" * LIMIT).json() == {"bytes": LIMIT}
    assert client.post("/upload", content=pieces(LIMIT)).json() == {"bytes": LIMIT}
    for answer in (client.post("/other", content=b"x" * 70_000), client.put("/upload", content=b"x" * 70_000)):
        assert answer.status_code == 413 and "65,536" in answer.json()["error"]
    assert client.post("/other", content=b"x" * 60_000).json() == {"bytes": 60_000}


@pytest.mark.parametrize("total", [LIMIT + 1000, 40 * LIMIT])
def test_the_sender_of_a_body_that_is_too_large_hears_why(client, total):
    for content in (b"x" * total, pieces(total)):
        answer = client.post("/upload", content=content)
        assert answer.status_code == 413 and "300,000" in answer.json()["error"]


def test_uploads_at_the_same_time_are_counted_and_their_places_come_back(client, monkeypatch):
    monkeypatch.setattr(app, "MAX_UPLOADS", 3)
    raws = [socket.create_connection((client.base_url.host, client.base_url.port)) for _ in range(3)]
    for raw in raws:
        raw.sendall(b"POST /upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\nConnection: close\r\n\r\n{")
    time.sleep(0.2)
    refused = client.post("/upload", content=b"x" * LIMIT)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "5" and "busy" in refused.json()["error"]
    assert client.post("/other", content=b"x").status_code == 200, "others are not held up"
    raws[0].close()  # a sender that goes away
    raws[1].sendall(b"x" * 89)
    assert raws[1].recv(100).startswith(b"HTTP/1.1 200")
    time.sleep(0.2)
    assert client.post("/upload", content=b"x" * LIMIT).status_code == 200
    for raw in raws[1:]:
        raw.close()


def test_turns_are_few_and_the_queue_is_short():
    turns, go, running, most = Turns(at_once=2, queue=3), threading.Event(), [], []

    def work(number):
        running.append(number)
        most.append(len(running))
        assert go.wait(10)
        running.remove(number)
        return number

    async def crowd():
        tasks = [asyncio.create_task(turns(work, number)) for number in range(5)]
        await asyncio.sleep(0.1)
        assert [gauge() for gauge in turns.gauges.values()] == [2, 3]
        with pytest.raises(HTTPException) as refused:
            await turns(work, 5)
        assert refused.value.status_code == 429 and "Retry-After" in refused.value.headers
        go.set()
        assert await asyncio.gather(*tasks) == [0, 1, 2, 3, 4]
        assert await turns(work, 6) == 6, "there is room again"

    asyncio.run(crowd())
    assert max(most) == 2 and [gauge() for gauge in turns.gauges.values()] == [0, 0]
    asyncio.run(turns.close())


def test_a_call_that_takes_too_long_is_given_up_but_keeps_its_place():
    turns, go = Turns(at_once=1, queue=1, seconds=0.1), threading.Event()

    async def stuck():
        for _ in range(2):  # the second never begins
            with pytest.raises(HTTPException, match="503"):
                await turns(go.wait, 10)
        running, waiting = turns.gauges.values()
        assert running() == 1 and waiting() == 0
        go.set()
        while running():
            await asyncio.sleep(0.01)
        assert await turns(pow, 2, 3) == 8

    asyncio.run(stuck())
    asyncio.run(turns.close())


def test_errors_of_the_function_are_those_of_the_call():
    turns = Turns()

    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(turns(fail))
    assert not any(gauge() for gauge in turns.gauges.values())
    asyncio.run(turns.close())


def test_a_crowd_of_uploads_is_answered_each(client):
    def send(_):
        return httpx.post(f"{client.base_url}/upload", content=b"x" * LIMIT, timeout=20).status_code

    with ThreadPoolExecutor(30) as pool:
        statuses = list(pool.map(send, range(60)))
    assert set(statuses) <= {200, 429} and statuses.count(200) >= 20
