import gzip
import json
import math
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serve.harness import listening
from sextet.core.errors import UsageError
from sextet.dapo import demo
from sextet.dapo.rollout import Engine
from sextet.launch import launch
from sextet.serve import Options


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    launch("dapo", "smoke", {}, directory=folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def client(run):
    with listening(demo.demo([run], Options())) as client:
        yield client


def get(client, path, **asked):
    answer = client.get(f"/api/{path}", params=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(client, **question):
    return client.post("/api/ask", json={"prompt": "12=", **question}, timeout=60)


def replace_samples(run, step, groups):
    data = json.dumps({"step": step, "groups": groups}).encode()
    (run / "artifacts" / "samples").mkdir(parents=True, exist_ok=True)
    (run / "artifacts" / "samples" / f"{step:06}.json.gz").write_bytes(gzip.compress(data))


def group(*answers, draw=0, kind="wrong", **fields):
    return {
        "draw": draw, "problem": 1, "kind": kind, "trained": False, "prompt": "1=", "answer": "2",
        "answers": list(answers), **fields,
    }  # fmt: skip


def one(text, **fields):
    known = {
        "text": text, "pieces": list(text), "logp": [-0.5] * len(text), "versions": [0] * len(text), "stopped": True,
        "length": len(text), "score": -1.0, "penalty": 0.0, "reward": -1.0, "advantage": None, "right": False,
        "note": text, "failure": "",
    }  # fmt: skip
    return known | fields


def test_what_a_run_is(client):
    assert get(client, "parts") == [{"name": "", "samples": 3, "finished": True}]
    part = get(client, "part")
    assert part["name"] == "first" and part["finished"] and part["step"] == 3 and part["samples"] == [0, 1, 2]
    assert part["config"]["task"]["name"] == "table" and part["config"]["loss"]["clip_high"] is None
    assert part["method"]["clip_high"] == 0.28 and part["why_not"] == ""
    assert 0 <= part["results"]["avg@2"]["mean"] <= 100
    index = client.get("/")
    assert "DAPO" in index.text and "default-src 'self'" in index.headers["content-security-policy"]


def test_curves_hold_every_series_and_end_with_the_last_test(client, run):
    curves = get(client, "curves")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert curves.keys() == {name for row in rows for name in row} - {"step"}
    assert curves["policy/entropy"] == [[row["step"], row["policy/entropy"]] for row in rows]
    results = get(client, "part")["results"]
    assert curves["eval/avg@2"] == [[0, rows[0]["eval/avg@2"]], [3, results["avg@2"]["mean"]]]


def test_long_curves_are_thinned_within_their_bounds(tmp_path):
    values = [math.sin(step) for step in range(10_001)]
    lines = [json.dumps({"step": step, "a": value}) + "\n" for step, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 1')
    points = demo.curves(tmp_path)["a"]
    assert len(points) == demo.POINTS and points[-1][0] == 10_000
    assert all(least <= mean <= most for _, mean, least, most in points)
    assert min(point[2] for point in points) == min(values) and max(point[3] for point in points) == max(values)


def test_samples_of_a_step_and_a_group_with_its_tokens(client):
    groups = get(client, "samples", step=1)
    assert groups and all(len(group["answers"]) == 4 for group in groups)
    assert not any(name in answer for group in groups for answer in group["answers"] for name in demo.TOKENS)
    whole = get(client, "samples", step=1, draw=groups[0]["draw"])
    for short, answer in zip(groups[0]["answers"], whole["answers"], strict=True):
        assert short.items() <= answer.items() and short["reward"] == answer["score"] + answer["penalty"]
        assert len(answer["pieces"]) == len(answer["logp"]) == len(answer["versions"]) == answer["length"]
        assert "".join(answer["pieces"]) == answer["text"] and max(answer["logp"]) <= 0


def test_the_model_is_asked_as_in_training_and_judged(client):
    model = get(client, "model")
    assert len(model["examples"]) == 8 and model["characters"] == "0123456789=" and model["max_tokens"] == 4
    answer = ask(client, prompt=model["examples"][0], samples=3, seed=5).json()
    assert len(answer["answers"]) == 3 and len(answer["answer"]) == 2 and answer["prompt_tokens"] == 4
    for one in answer["answers"]:
        assert one["right"] == (one["text"] == answer["answer"]) and one["note"] == one["text"] and not one["failure"]
        assert len(one["pieces"]) == len(one["logp"]) <= 4
    assert ask(client, prompt=model["examples"][0], samples=3, seed=5).json() == answer
    other = ask(client, prompt="0=0=", samples=8, max_tokens=30, temperature=2).json()
    assert other["answer"] is None and not any("right" in one for one in other["answers"])
    assert len({one["text"] for one in other["answers"]}) > 1
    greedy = ask(client, prompt="0=0=", samples=8, temperature=0).json()
    assert len({one["text"] for one in greedy["answers"]}) == 1
    nucleus = ask(client, prompt="0=0=", samples=8, top_p=1e-6).json()
    assert [one["text"] for one in nucleus["answers"]] == [one["text"] for one in greedy["answers"]]


@pytest.mark.parametrize(
    "question, text",
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "1" * 20_001}, "20000"),
        ({"prompt": "what is 2?"}, "lacks"),
        ({"samples": 0}, "samples: Input should be greater than or equal to 1"),
        ({"samples": 17}, "samples: Input should be less than or equal to 16"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 1025}, "an answer at most 1,024"),
        ({"samples": 16, "prompt": "1" * 1000}, "all together 16,384"),
        ({"seed": -1}, "seed"),
        ({"tokens": 3}, "tokens: Extra inputs are not permitted"),
    ],
)
def test_impossible_questions_are_answered_in_words(client, question, text):
    if question.get("samples") == 16:
        question = question | {"max_tokens": 25}
    answer = ask(client, **question)
    assert answer.status_code in (400, 422) and text in answer.json()["error"]


@pytest.mark.parametrize(
    "path, status, text",
    [
        ("samples?step=7", 404, "no samples of step 7; there are those of 3 steps, 0 to 2"),
        ("samples?step=-1", 400, "step"),
        ("samples?step=1e99", 400, "step"),
        ("samples?step=1&draw=99999", 404, "no group 99999 in step 1"),
        ("samples", 400, "step: Field required"),
        ("part?part=parts", 404, 'unknown part "parts"'),
        ("curves?part=../../etc", 404, "unknown part"),
    ],
)
def test_wrong_addresses_are_answered_in_words(client, path, status, text):
    answer = client.get(f"/api/{path}")
    assert answer.status_code == status and text in answer.json()["error"]


def test_a_run_in_training_shows_what_there_is(run, tmp_path):
    young = tmp_path / "young"
    shutil.copytree(run, young, ignore=shutil.ignore_patterns("final", "summary.json"))
    with (young / "events.jsonl").open("a") as events:
        events.write('{"event": "warning", "text": "3 prompts are too long"}\n{"event": "warn')
    with listening(demo.demo([young], Options())) as client:
        part = get(client, "part")
        assert not part["finished"] and part["results"] == {} and "no finished model yet" in part["why_not"]
        assert part["warnings"] == ["3 prompts are too long"] and part["samples"] == [0, 1, 2]
        for answer in (ask(client), client.get("/api/model")):
            assert answer.status_code == 409 and answer.json()["error"] == part["why_not"]
        assert get(client, "curves")["policy/entropy"] and get(client, "samples", step=2)
        shutil.copytree(run / "final", young / "final")
        assert get(client, "part")["why_not"] == "" and ask(client).status_code == 200


def test_the_trainings_of_an_ablation_are_parts(run, tmp_path):
    shutil.copytree(run, tmp_path / "all", ignore=shutil.ignore_patterns("parts", "artifacts"))
    (tmp_path / "all" / "metrics.jsonl").write_text("")
    names = ["table-grpo-0.0001-0", "table-dapo-0.0001-0"]
    for name in [*names, "table-start-0"]:
        shutil.copytree(run, tmp_path / "all" / "parts" / name, ignore=shutil.ignore_patterns("parts"))
    with listening(demo.demo([tmp_path / "all"], Options())) as client:
        found = {part["name"]: part["samples"] for part in get(client, "parts")}
        assert found == {"": 0, names[0]: 3, names[1]: 3}
        assert get(client, "curves") == {} and get(client, "curves", part=names[0])["train/loss"]
        assert get(client, "samples", step=0, part=names[1])
        assert ask(client, part=names[0], seed=1).json() == ask(client, seed=1).json()
        answer = client.get("/api/part", params={"part": "table-gpro-0.0001-0"})
        assert answer.status_code == 404 and f'did you mean "{names[0]}"' in answer.json()["error"]
    with listening(demo.demo([tmp_path / "all", run], Options())) as client:
        assert [part["name"] for part in get(client, "parts")] == ["all", *(f"all/{n}" for n in sorted(names)), "first"]


def test_strange_answers_come_whole_and_bounded(run, tmp_path):
    folder = tmp_path / "odd"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("artifacts"))
    html, huge = "<script>alert(1)</script>", "x" * 10_000_000
    odd = one("\ud800\u202e\x00", logp=[-math.inf, math.nan, 0.0], score=math.nan)
    large = one(huge, pieces=[huge], logp=[0.0], versions=[0], note="")
    replace_samples(folder, 4, [group(one(html), large, odd), group(draw=3, kind="failed")])
    (folder / "artifacts" / "samples" / "000005.json.gz").write_bytes(b"not gzip")
    with listening(demo.demo([folder], Options())) as client:
        answer = client.get("/api/samples?step=4&draw=0")
        assert answer.headers["content-type"] == "application/json" and len(answer.content) < 100_000
        first, second, third = answer.json()["answers"]
        assert first["text"] == html and "".join(first["pieces"]) == html
        assert second["pieces"] == ["x" * demo.PIECE + "…"] and second["text"] == "… " + "x" * demo.TEXT
        assert third["text"] == "\ud800\u202e\x00" and third["logp"] == [None, None, 0.0] and third["score"] is None
        assert len(get(client, "samples", step=4)) == 2
        damaged = client.get("/api/samples?step=5")
        assert damaged.status_code == 422 and "000005.json.gz cannot be read" in damaged.json()["error"]
        assert str(tmp_path) not in damaged.text


def test_questions_wait_for_one_another_but_not_for_ever(run, monkeypatch):
    with listening(demo.demo([run], Options())) as client, ThreadPoolExecutor(20) as pool:
        get(client, "model")
        monkeypatch.setattr(demo, "SECONDS", 0.3)
        generate, go = Engine.generate, threading.Event()

        def held(engine, requests, limits, poll):
            go.wait(60)
            return generate(engine, requests, limits, poll)

        monkeypatch.setattr(Engine, "generate", held)
        send = lambda _: httpx.post(f"{client.base_url}/api/ask", json={"prompt": "1="}, timeout=60)  # noqa: E731
        sent = [pool.submit(send, number) for number in range(10)]
        while "sextet_calls_waiting 8.0" not in client.get("/metrics").text:
            assert not any(future.done() for future in sent)
        answer = ask(client)
        assert answer.status_code == 429 and "busy" in answer.json()["error"]
        assert get(client, "samples", step=0), "files are read all the while"
        time.sleep(0.4)  # longer than a question may take
        go.set()
        answers = [future.result() for future in sent]
        assert {answer.status_code for answer in answers} == {503}
        assert all("ask for fewer" in answer.text for answer in answers)
        monkeypatch.setattr(Engine, "generate", generate)
        monkeypatch.setattr(demo, "SECONDS", 60.0)
        assert ask(client).status_code == 200, "the places are free again"


def test_options_of_another_page(run, tmp_path):
    with pytest.raises(UsageError, match="page of mep"):
        demo.demo([run], Options(study=tmp_path))
