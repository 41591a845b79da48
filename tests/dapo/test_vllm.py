import importlib.util
import sys
import threading
from dataclasses import replace

import pytest
import torch

from dapo.fake_vllm import FakeServer, fake_module
from dapo.lm import STOP, direct_scores, limits, requests, small_decoder
from sextet.core.errors import DivergenceError, SextetError, UsageError
from sextet.core.metrics import read_metrics
from sextet.dapo import vllm
from sextet.dapo.export import write_model
from sextet.dapo.generators import Setting, make_generator
from sextet.dapo.rollout import Request
from sextet.dapo.settings import Config, RolloutConfig, SamplingConfig
from sextet.launch import launch


def record_of(model):
    shape = vars(model.shape)
    return {**{name: value for name, value in shape.items() if name != "kind"}, "model_type": shape["kind"]}


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("SEXTET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vllm, "PATIENCE", 20.0)


@pytest.fixture(scope="module")
def model():
    return small_decoder(1)


@pytest.fixture
def server(tmp_path, model):
    """A server that was started with other weights than those of the run."""
    base = small_decoder(0)
    write_model(record_of(base), base.state_dict(), tmp_path / "base", torch.float32)
    server = FakeServer(tmp_path / "base")
    yield server
    server.stop()


@pytest.fixture
def module(monkeypatch):
    module = fake_module()
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


def generator_of(model, backend, *, version=1, **fields):
    config = Config(rollout=RolloutConfig(backend=backend), sampling=SamplingConfig(**fields))
    generator = make_generator(Setting(config=config, record=record_of(model), folder="", builtin=True))
    generator.load_weights({"model": model.state_dict(), "version": version})
    return generator


def plain(groups):
    return [[answer.tokens for answer in group] for group in groups]


def check_scores(model, asked, groups, temperature=1.0):
    for request, group in zip(asked, groups, strict=True):
        for answer in group:
            logits = direct_scores(model, request.prompt, answer.tokens, temperature)
            torch.testing.assert_close(torch.tensor(answer.logp), logits, atol=1e-4, rtol=0)
            assert answer.stopped == (answer.tokens[-1] == STOP) and STOP not in answer.tokens[:-1]
            assert answer.stopped or len(answer.tokens) == 20
            assert len(answer.versions) == len(answer.logp) == len(answer.tokens)


@pytest.mark.parametrize("form", ["server", "module"])
def test_answers_have_their_stop_token_exact_log_probabilities_and_seeds_of_their_own(model, form, request):
    fake = request.getfixturevalue(form)
    generator = generator_of(model, fake.address if form == "server" else "vllm", version=7)
    asked = requests(number=4, answers=4)
    groups, computed = generator.generate(asked, limits())
    check_scores(model, asked, groups)
    assert {version for group in groups for answer in group for version in answer.versions} == {7}
    assert any(answer.stopped for group in groups for answer in group)
    assert all(len({tuple(answer.tokens) for answer in group}) > 1 for group in groups)
    assert plain(generator.generate(asked, limits())[0]) == plain(groups), "the same seeds give the same answers"
    assert plain(generator.generate(asked, limits(seed=2))[0]) != plain(groups)
    prompts = sum(4 * len(request.prompt) for request in asked)
    assert computed == prompts - (0 if form == "server" else 16)


@pytest.mark.parametrize("form", ["server", "module"])
def test_new_weights_change_the_answers_and_old_folders_go(model, form, request, tmp_path):
    fake = request.getfixturevalue(form)
    generator = generator_of(model, fake.address if form == "server" else "vllm")
    before = generator.generate(requests(number=3, answers=3), limits())[0]
    other = small_decoder(2)
    generator.load_weights({"model": other.state_dict(), "version": 2})
    after = generator.generate(requests(number=3, answers=3), limits())[0]
    check_scores(other, requests(number=3, answers=3), after)
    assert plain(before) != plain(after) and after[0][0].versions[0] == 2
    assert len(list((tmp_path / "cache").iterdir())) == 1
    if form == "module":
        assert len(fake.made) == 1 and fake.made[0].reloads == fake.made[0].resets == 1


@pytest.mark.parametrize("form", ["server", "module"])
def test_answers_in_slices_go_on_where_they_were(model, form, request):
    fake = request.getfixturevalue(form)
    generator = generator_of(model, fake.address if form == "server" else "vllm")
    current, ended = requests(number=3), {}
    for version in range(1, 6):
        generator.version = version
        groups = generator.generate(current, limits(slice_tokens=5))[0]
        ended |= {request.key: group for request, group in zip(current, groups, strict=True)}
        current = [
            Request(key=asked.key, prompt=asked.prompt, numbers=asked.numbers, begun=dict(enumerate(ended[asked.key])))
            for asked in current
            if any(not answer.stopped and len(answer.tokens) < 20 for answer in ended[asked.key])
        ]
    assert current == []
    check_scores(model, requests(number=3), list(ended.values()))
    for group in ended.values():
        assert all(answer.versions == [1 + place // 5 for place in range(len(answer.tokens))] for answer in group)


@pytest.mark.parametrize("form", ["server", "module"])
def test_log_probabilities_are_those_at_the_temperature(model, form, request):
    if form == "server":
        fake = request.getfixturevalue(form)
        fake.network.mode = "processed_logprobs"
        generator = generator_of(model, fake.address, temperature=0.5)
    else:
        request.getfixturevalue(form)
        generator = generator_of(model, "vllm", temperature=0.5)
    groups = generator.generate(requests(number=3, answers=3), limits(temperature=0.5))[0]
    check_scores(model, requests(number=3, answers=3), groups, temperature=0.5)


def test_a_server_with_another_kind_of_log_probabilities_is_refused(model, server):
    with pytest.raises(SextetError, match="--logprobs-mode processed_logprobs"):
        generator_of(model, server.address, temperature=0.5)


def test_a_server_that_keeps_its_old_weights_is_refused(model, server):
    server.ignores_weights = True
    with pytest.raises(SextetError, match=r"log-probabilities of a few tokens differ by \d+\.\d+"):
        generator_of(model, server.address)


def test_a_server_that_does_not_see_the_folder_is_told_apart(model, server):
    server.network.read = lambda folder: open(f"/elsewhere{folder}")  # noqa: SIM115, PTH123
    with pytest.raises(SextetError, match="must see that folder under the same path"):
        generator_of(model, server.address)


def test_nothing_of_the_servers_defaults_is_left(model, server):
    generator_of(model, server.address).generate(requests(number=1), limits(top_p=0.7))
    asked = server.requests[-1]
    assert asked["top_p"] == 0.7 and asked["top_k"] == 0 and asked["repetition_penalty"] == 1


@pytest.mark.parametrize(
    "fault", ["drop", 500, 503, b"<html>", b"{}", b'{"choices": [], "usage": {}}', b"null"], ids=str
)
def test_what_fails_now_and_then_is_sent_again(model, server, fault):
    generator = generator_of(model, server.address)
    expected = plain(generator.generate(requests(number=3, answers=3), limits())[0])
    server.faults = [None, None, fault, None, fault]
    assert plain(generator.generate(requests(number=3, answers=3), limits())[0]) == expected
    assert server.faults == []


def test_a_server_that_dies_in_the_middle_gets_the_weights_again(model, server):
    generator = generator_of(model, server.address)
    expected = plain(generator.generate(requests(number=3, answers=3), limits())[0])

    def die():
        threading.Thread(target=server.stop).start()
        server.thread.join()
        server.restart_after(1.0)
        return "drop"

    loads = len(server.loads)
    server.faults = [None] * 4 + [die]
    assert plain(generator.generate(requests(number=3, answers=3), limits())[0]) == expected
    assert len(server.loads) == loads + 1


def test_answers_of_a_server_that_was_restarted_unseen_are_thrown_away(model, server):
    generator = generator_of(model, server.address)
    expected = plain(generator.generate(requests(number=3, answers=3), limits())[0])
    server.stop()
    server.start()
    assert plain(generator.generate(requests(number=3, answers=3), limits())[0]) == expected


def test_two_runs_on_one_server_are_noticed(model, server, monkeypatch):
    generator = generator_of(model, server.address)
    server.always = lambda: setattr(server, "label", "another")
    with pytest.raises(SextetError, match="no one else may load weights into it"):
        generator.generate(requests(number=1), limits())


def test_a_server_that_never_comes_back_ends_the_run_with_the_next_command(model, server, monkeypatch):
    generator = generator_of(model, server.address)
    monkeypatch.setattr(vllm, "PATIENCE", 1.0)
    server.stop()
    with pytest.raises(SextetError, match=r"no vLLM server answers \(for 1 s.*vllm serve MODEL.*sextet resume"):
        generator.generate(requests(number=3, answers=3), limits())
    server.start()


@pytest.mark.parametrize("fault", [b"no JSON", b'{"choices": [{"token_ids": [1]}], "usage": {}}', 500, 400, "hang"])
def test_lasting_nonsense_ends_the_run(model, server, monkeypatch, fault):
    monkeypatch.setattr(vllm, "SILENCE", 0.5 if fault == "hang" else 20.0)
    monkeypatch.setattr(vllm, "TOKEN_SECONDS", 0.0)
    monkeypatch.setattr(vllm, "PROBES", 1)
    generator = generator_of(model, server.address)
    server.always = fault
    with pytest.raises(SextetError, match=f"{server.address} (failed 4 times|refuses)"):
        generator.generate(requests(number=1, answers=2), limits())


def test_log_probabilities_that_are_not_finite_stop_the_training(model, module):
    generator = generator_of(model, "vllm")
    module.made[0].network.complete = lambda text, settings: ([5], [float("nan")])
    with pytest.raises(DivergenceError, match="not finite"):
        generator.generate(requests(number=1), limits())


def test_wrong_settings_are_refused_before_anything_is_sent(server, monkeypatch):
    config = Config(rollout=RolloutConfig(backend=server.address))
    vllm.ready(config)
    with pytest.raises(UsageError, match="is not builtin, vllm or the address"):
        vllm.ready(replace(config, rollout=RolloutConfig(backend="vlm")))
    with pytest.raises(UsageError, match="several workers"):
        vllm.ready(replace(config, workers="process:2"))
    with pytest.raises(UsageError, match=r"no vLLM server answers .*--port 9;"):
        vllm.ready(replace(config, rollout=RolloutConfig(backend="http://127.0.0.1:9")))
    mixed = replace(config, sampling=SamplingConfig(temperature=0.7, top_p=0.9))
    with pytest.raises(UsageError, match="before top-p"):
        make_generator(Setting(config=mixed, record={}, folder="", builtin=True))
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(UsageError, match=r'pip install "sextet\[vllm\]"'):
            vllm.ready(replace(config, rollout=RolloutConfig(backend="vllm")))


def test_a_training_on_a_server_logs_how_far_its_log_probabilities_are_off(tmp_path, server):
    fields = {
        "rollout": {"backend": server.address}, "loss": {"old": "recompute", "importance": "truncate"},
        "model": {"width": 16, "warm_steps": 5}, "evaluation": {"problems": 2, "samples": 1}, "workers": "process:1",
        "optim": {"steps": 2, "minibatches": 1}, "sampling": {"dynamic": False, "prompts": 2}, "samples_kept": 0,
    }  # fmt: skip
    run = launch("dapo", "smoke", fields, directory=tmp_path / "run", quiet=True)
    assert len(server.loads) == 3, "one for each step, and one for the last test"
    rows = [row for row in read_metrics(run.directory / "metrics.jsonl") if "policy/rollout_difference" in row]
    assert len(rows) == 2 and all(0 <= row["policy/rollout_difference"] < 1e-4 for row in rows)


@pytest.mark.slow
def test_real_vllm_answers_with_the_log_probabilities_of_our_network():
    pytest.importorskip("vllm", reason='vLLM is not installed: pip install "sextet[vllm]"')
    shape = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model = small_decoder(3, **shape)
    generator = generator_of(model, "vllm", max_tokens=20)
    asked = requests(number=4, answers=4, vocabulary=128)
    before = generator.generate(asked, limits())[0]
    check_scores(model, asked, before)
    other = small_decoder(4, **shape)
    generator.load_weights({"model": other.state_dict(), "version": 2})
    after = generator.generate(asked, limits())[0]
    check_scores(other, asked, after)
    assert plain(before) != plain(after)
