"""Training: repeatable, resumable at any step, checked before it starts; what a finished run gives."""

import json
import math
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import sextet
from faults.harness import call, kill_until_done, result, start
from sextet.core.errors import DataError, DivergenceError, UsageError
from sextet.core.metrics import read_metrics
from sextet.core.run import Run
from sextet.launch import launch, resume_run
from sextet.reid import train as training
from sextet.reid.config import MGN_PRESETS, Config, ModelConfig, OptimConfig
from sextet.reid.data import Split, load_data
from sextet.reid.evaluate import evaluate
from sextet.reid.model import build_model
from sextet.reid.synthetic import ArrayImages
from sextet.reid.train import check, fit, make_optimiser, schedule, set_rates
from sextet.reid.weights import load_weights

SMALL = {"height_px": 48, "width_px": 16, "save_every": 10, "device": "cpu"}


def smoke(**fields):
    base = MGN_PRESETS["smoke"]()
    optim = replace(base.optim, epochs=0.72, trunk_epochs=0.0)  # 20 steps of 27 an epoch
    return replace(base, optim=optim, **SMALL, **fields)


def trained(config, directory, *, stop_at=None, monkeypatch=None):
    """Fits in a run of its own, or goes on with it; `stop_at` ends it at that step as a power cut would."""
    data = load_data(config.data, config.size, seed=config.seed)
    with Run.open(
        config, recipe="mgn", directory=directory, resume=(directory / "config.json").exists(), quiet=True
    ) as run:
        network = build_model(config.method, config.model, len(data.classes), rng=run.rng("init").torch)
        if stop_at is None:
            fit(config, run, network, data)
        else:
            with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
                rates = training.set_rates
                patch.setattr(
                    training, "set_rates", lambda o, c, step, n: rates(o, c, step, n if step < stop_at else 0)
                )
                fit(config, run, network, data)
    return network


def left(directory):
    """What a training leaves: weights, optimiser, the half-finished row, and the metrics file."""
    newest = max((directory / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    files = {path.name: path.read_bytes() for path in newest.iterdir() if path.suffix == ".safetensors"}
    assert {"network.safetensors", "optimiser.safetensors"} <= files.keys()
    return int(newest.name), files, (directory / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    directory = tmp_path_factory.mktemp("straight")
    trained(smoke(), directory)
    return left(directory)


def test_the_same_seed_gives_the_same_twenty_steps_for_any_readers(tmp_path, straight):
    trained(smoke(data=replace(smoke().data, readers=0)), tmp_path)
    assert straight[0] == 20 and left(tmp_path) == straight
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) == 20 and all(math.isfinite(row["loss"]) for row in rows)
    assert len({row["loss"] for row in rows}) == 20


def test_another_seed_gives_other_losses(tmp_path, straight):
    config = smoke(seed=1)
    trained(replace(config, optim=replace(config.optim, epochs=0.05)), tmp_path)
    first = [json.loads(line)["loss"] for line in straight[2].splitlines()[:2]]
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] != first


@pytest.mark.parametrize("stop_at", [13])
def test_a_run_cut_off_and_resumed_equals_one_that_was_not(tmp_path, straight, monkeypatch, stop_at):
    trained(smoke(), tmp_path, stop_at=stop_at, monkeypatch=monkeypatch)
    assert left(tmp_path)[0] == 10
    trained(smoke(), tmp_path)
    assert left(tmp_path) == straight
    assert '"step": 10' in (tmp_path / "events.jsonl").read_text()  # from there it went on


def test_a_loss_that_is_not_finite_ends_the_run_before_its_step(tmp_path, monkeypatch):
    config, kept = smoke(), {}
    real = training.total_loss

    def spoiled(outputs, *arguments, **options):
        loss, parts = real(outputs, *arguments, **options)
        kept["calls"] = kept.get("calls", 0) + 1
        return (loss * math.nan if kept["calls"] == 3 else loss), parts

    monkeypatch.setattr(training, "total_loss", spoiled)
    stepped = []
    real_step = torch.optim.Adam.step
    monkeypatch.setattr(
        torch.optim.Adam, "step", lambda self, *a, **k: (stepped.append(1), real_step(self, *a, **k))[1]
    )
    with pytest.raises(DivergenceError, match="step 2: loss is not finite; nothing was applied"):
        trained(config, tmp_path)
    assert len(stepped) == 2 and len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_labels_are_places_among_the_sorted_people(tmp_path, monkeypatch):
    config = smoke()
    data = load_data(config.data, config.size)
    odd = np.array([907, 3, 41, 5, 600, 77, 8, 9, 1000, 11, 12, 13])
    train = replace(data.train, ids=odd[data.train.ids - 1])
    seen = {}
    real = training.total_loss

    def spy(outputs, labels, *arguments, **options):
        seen.setdefault("labels", []).append(labels)
        return real(outputs, labels, *arguments, **options)

    orders = []
    real_prefetch = training.prefetch
    monkeypatch.setattr(training, "total_loss", spy)
    monkeypatch.setattr(
        training,
        "prefetch",
        lambda images, batches, threads: real_prefetch(
            images, (orders.append(rows) or rows for rows in batches), threads
        ),
    )
    config = replace(config, optim=replace(config.optim, epochs=0.1))
    with Run.open(config, recipe="mgn", directory=tmp_path, quiet=True) as run:
        fit(config, run, build_model("global", config.model, 12), replace(data, train=train))
    assert len(orders) == len(seen["labels"]) == 3
    for rows, labels in zip(orders, seen["labels"], strict=True):
        assert [sorted(odd.tolist()).index(train.ids[row]) for row in rows] == labels.tolist()


# --- schedules and optimisers ---


def test_milestones_warm_up_and_cosine():
    steps = OptimConfig(schedule="steps", milestones="40,60", epochs=80, warmup=10)
    assert schedule(steps, 0) == pytest.approx(0.001)
    assert schedule(steps, 4.99) == pytest.approx(0.5)
    assert [schedule(steps, epoch) for epoch in (10, 39.9, 40, 59.9, 60, 79)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01]
    )
    cosine = OptimConfig(epochs=60, cosine_start=30, learning_rate=1e-3, final_rate=1e-5)
    assert [schedule(cosine, epoch) for epoch in (0, 30, 45, 60, 61)] == pytest.approx([1, 1, 0.505, 0.01, 0.01])
    rates = [schedule(cosine, epoch) for epoch in range(30, 61)]
    assert rates == sorted(rates, reverse=True)


def test_trunk_and_heads_have_their_own_rates_and_heads_learn_first():
    config = OptimConfig(trunk_rate=0.1, freeze=5, learning_rate=1.0, cosine_start=10.0)
    network = build_model("mgn", ModelConfig(width=0.34, feature_size=6), 5)
    optimiser = make_optimiser(network, config)
    trunk, heads = (group["params"] for group in optimiser.param_groups)
    named = {id(value): name for name, value in network.named_parameters()}
    assert all("stages" in named[id(one)] or named[id(one)].startswith("shared") for one in trunk)
    assert all("reductions" in named[id(one)] or "classifiers" in named[id(one)] for one in heads)
    assert len(trunk) + len(heads) == len(named)
    for step, expected in ((4, [0.0, 1.0]), (5, [0.1, 1.0])):
        assert set_rates(optimiser, config, step, per_epoch=10) == 1.0
        assert [group["lr"] for group in optimiser.param_groups] == pytest.approx(expected)


@pytest.mark.parametrize(
    "name, kind", [("sgd", "SGD"), ("adam", "Adam"), ("amsgrad", "Adam"), ("adamw", "AdamW")]
)  # fmt: skip
def test_optimisers(name, kind):
    network = build_model("global", ModelConfig(width=0.34, feature_size=6), 5)
    optimiser = make_optimiser(network, OptimConfig(name=name, weight_decay=0.02))
    assert type(optimiser).__name__ == kind
    for group in optimiser.param_groups:
        assert group["weight_decay"] == 0.02 and group.get("momentum", 0.9) == 0.9
        assert group.get("amsgrad", False) is (name == "amsgrad")


# --- what is refused before anything starts ---


def changed(part, **fields):
    return replace(smoke(), **{part: replace(getattr(smoke(), part), **fields)})


@pytest.mark.parametrize(
    "make, error, match",
    [
        (lambda: replace(smoke(), height_px=56), UsageError, "7 rows has no 2 equal stripes.*height_px"),
        (lambda: replace(smoke(), device="cudaa"), UsageError, 'did you mean "cuda"'),
        (lambda: replace(smoke(), methods="mgn,pcbb"), UsageError, 'did you mean "pcb"'),
        (lambda: changed("model", weights="/nowhere/trunk.pth"), DataError, "/nowhere/trunk.pth: no such file"),
        (lambda: changed("loss", metric=0.0), UsageError, "nothing trains the reduction.*--model.classify reduced"),
        (lambda: changed("loss", softmax=0.0), UsageError, "loss.softmax"),
        (lambda: changed("optim", people=1), UsageError, "triplets need another person"),
        (lambda: changed("optim", images=1), UsageError, "triplets need another image"),
        (lambda: changed("optim", milestones="4.0.0"), UsageError, "milestones"),
        (lambda: changed("model", branches="1,x"), UsageError, "branches"),
        (lambda: changed("data", format="market1501"), UsageError, "--data.root"),
    ],
)
def test_bad_settings_are_named(make, error, match):
    with pytest.raises(error, match=match):
        check(make())


@pytest.mark.parametrize(
    "method, model",
    [("rmgl", {}), ("pcb", {}), ("bot", {}), ("mgn", {"classify": "reduced"}), ("mgn", {"neck": "bn"})],
)
def test_without_triplets_only_what_would_not_learn_is_refused(method, model):
    config = changed("loss", metric=0.0)
    check(replace(config, method=method, height_px=96, model=replace(config.model, **model)))


def test_ranks_that_do_not_divide_a_batch_are_refused(tmp_path):
    config = smoke()
    world = SimpleNamespace(world=SimpleNamespace(size=3, rank=0))
    with pytest.raises(UsageError, match="3 ranks cannot share 4 people"):
        fit(config, world, torch.nn.Linear(1, 1), load_data(config.data, config.size))


def test_the_first_weights_of_a_trunk_are_the_seed_s_whatever_was_drawn_before(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "fit", lambda *_: None)
    found = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(number)
        config = replace(changed("optim", trunk_epochs=0.1), seed=seed)
        with Run.open(config, recipe="mgn", directory=tmp_path / str(number), quiet=True) as run:
            training.train_trunk(config, run, SimpleNamespace(classes=range(12)))
        found.append(training.trunk_weights(run.directory)["layer2.0.conv1.weight"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


# --- data that cannot be tested ---


@pytest.mark.parametrize("people", ["nobody", "unknown cameras"])
def test_what_cannot_be_tested_is_trained_all_the_same_and_notes_are_said(tmp_path, monkeypatch, capsys, people):
    config = changed("optim", epochs=0.07)
    config = replace(config, evaluation=replace(config.evaluation, every=0.04))
    data = load_data(config.data, config.size)
    query, count = data.query, 0 if people == "nobody" else 60
    images = ArrayImages(query.images.array[:count])
    blind = Split(images=images, ids=query.ids[:count], cameras=np.full(count, -1), names=query.names[:count])
    other = replace(data, query=blind, notes=("3 files left out: empty file",))
    monkeypatch.setattr(training, "load_data", lambda *_, **__: other)
    run = launch("mgn", "smoke", config, directory=tmp_path)
    said = "".join(capsys.readouterr())
    assert run.finished and "not tested" in run.summary and "mAP" not in run.summary
    assert "3 files left out: empty file" in said and "not tested" in said
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert sextet.load(str(tmp_path)).feature_size == 128


# --- finished runs ---


@pytest.fixture(scope="module", params=["mgn", "rmgl"])
def finished(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    launch(request.param, "smoke", {**SMALL, "evaluation": {"every": 0.1}}, directory=directory, quiet=True)
    return directory


def test_smoke_presets_run_end_to_end(finished):
    summary = json.loads((finished / "summary.json").read_text())["summary"]
    assert 0 < summary["mAP"]["mean"] < 100 and "mAP, re-ranked" in summary and summary["queries"] == 60
    rows = read_metrics(finished / "metrics.jsonl")
    assert len(rows) == 6 and [row["step"] for row in rows if "eval/mAP" in row] == [2]
    assert (finished / "parts" / "trunk" / "final" / "model.safetensors").exists()
    again = evaluate(sextet.load(str(finished)).config, finished)
    assert again == summary


def test_a_loaded_run_embeds_paths_pictures_and_tensors_alike(finished, tmp_path):
    model = sextet.load(str(finished))
    images = load_data(model.config.data, model.size).query.images.read(range(3))
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    for path, picture in zip(paths, pictures, strict=True):
        picture.save(path)
    features = model.embed(images)
    assert features.shape == (3, model.feature_size) and features.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, rtol=1e-5)
    for others in (pictures, paths, [str(path) for path in paths], [paths[0], pictures[1], str(paths[2])]):
        np.testing.assert_array_equal(model.embed(others), features)
    np.testing.assert_allclose(model.embed(images, batch=2), features, atol=1e-5)
    np.testing.assert_allclose(model.embed(images.flip(3)), features, atol=1e-5)  # the mirror image is added
    assert model.embed([]).shape == (0, model.feature_size)
    larger = images.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert (model.embed(larger) * features).sum(1).min() > 0.9  # resized to the network's size
    cuts = model.cuts(paths[0])
    assert cuts.keys() == {"part-2", "part-3"} and all(row[0] == 0 and row[-1] == 1 for row in cuts.values())
    with pytest.raises(UsageError, match=r"uint8 \(N, 3, H, W\), not float32 of shape \(3, 3, 48, 16\)"):
        model.embed(images.float())
    with pytest.raises(DataError, match="absent.png"):
        model.embed([tmp_path / "absent.png"])


def test_weights_of_another_number_of_people_fit_but_for_the_classifiers(finished):
    model = sextet.load(str(finished))
    torch.manual_seed(0)
    other = build_model(model.config.method, model.config.model, 7)
    fresh = {name: value.clone() for name, value in other.state_dict().items()}
    said = load_weights(other, finished / "final")
    people = {len(value) for name, value in other.state_dict().items() if "classifier" in name}
    assert people == {7} and any("initialised anew" in line and "classifier" in line for line in said), said
    classifiers = [name for name in fresh if "classifiers" in name]
    assert classifiers and all(torch.equal(other.state_dict()[name], fresh[name]) for name in classifiers)
    image = torch.randn(2, 3, *model.size)
    with torch.no_grad():
        assert torch.equal(other.eval()(image), model.network(image))


def test_the_file_of_the_trunk_is_needed_for_training_only(tmp_path):
    trunk = tmp_path / "trunk.safetensors"
    from safetensors.torch import save_file

    from sextet.reid.model import build_trunk

    config = changed("optim", epochs=0.04)
    save_file(build_trunk(config.model, "mgn").state_dict(), trunk)
    config = replace(
        config, model=replace(config.model, weights=str(trunk)), evaluation=replace(config.evaluation, rerank=False)
    )
    launch("mgn", "smoke", config, directory=tmp_path / "run", quiet=True)
    trunk.unlink()
    assert sextet.load(str(tmp_path / "run")).feature_size == 128


def test_a_finished_trunk_is_not_learned_again(tmp_path, monkeypatch):
    base = smoke()
    config = replace(
        base, optim=replace(base.optim, epochs=0.1, trunk_epochs=0.1), evaluation=replace(base.evaluation, rerank=False)
    )
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="cut"):
        patch.setattr(training, "build_model", refuse_after(1, training.build_model))
        launch("mgn", "smoke", config, directory=tmp_path, quiet=True)
    part = tmp_path / "parts" / "trunk"
    before = (part / "final" / "model.safetensors").read_bytes()
    run = resume_run(tmp_path, {}, quiet=True)
    assert run.finished and (part / "final" / "model.safetensors").read_bytes() == before
    events = [json.loads(line)["event"] for line in (part / "events.jsonl").read_text().splitlines()]
    assert events.count("finished") == 1
    trunk, start_of = load_file(part / "final" / "model.safetensors"), training.trunk_weights(part)
    assert all(torch.equal(trunk[name], start_of[name]) for name in trunk)


def refuse_after(calls, function):
    """The function, which fails when it is called more often."""
    done = []

    def limited(*arguments, **options):
        if options.get("trunk") is not None:
            done.append(1)
            if len(done) >= calls:
                raise RuntimeError("cut")
        return function(*arguments, **options)

    return limited


ARGUMENTS = (
    *("train", "mgn", "--preset", "smoke", "--quiet", "--name", "run", "--save-every", "1", "--device", "cpu"),
    *("--height-px", "48", "--width-px", "16", "--optim.epochs", "2", "--optim.trunk-epochs", "1"),
)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("recipe", ["mgn", "rmgl"])
def test_kills_at_random_moments_change_nothing(tmp_path, recipe):
    arguments = ("train", recipe, *ARGUMENTS[2:])
    code, _, err = call(*arguments, "--out", tmp_path / "straight", timeout=900)
    assert code == 0, err
    straight = result(tmp_path / "straight" / recipe / "run")
    directory = tmp_path / "killed" / recipe / "run"
    process = start(*arguments, "--out", tmp_path / "killed")
    while not (directory / "config.json").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.kill()
    process.communicate()
    tally = kill_until_done(directory, kills=int(os.environ.get("SEXTET_KILLS", "6")), seed=1)
    assert tally["SIGKILL"] and tally["SIGTERM"], tally
    assert result(directory) == straight


def test_defaults_are_checked_too():
    check(Config(device="cpu"))
