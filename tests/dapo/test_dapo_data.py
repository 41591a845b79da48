"""Prompts from files: every format gives the same problems, and every bad row is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sextet.core.errors import DataError, UsageError
from sextet.dapo.data import TEMPLATES, bare, examine, normalised, read_problems, templated
from sextet.dapo.readers import SETS, Row, read_rows
from sextet.dapo.settings import TaskConfig
from sextet.dapo.sources import gym_problems, json_safe, split
from sextet.dapo.tasks import Problem, load_task

RECORDS = [
    {
        "prompt": [{"role": "user", "content": f"What is {number} + {number}?"}],
        "reward_model": {"ground_truth": str(2 * number), "style": "rule"},
        "ability": "MATH",
    }
    for number in range(40)
]


def jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_json(folder: Path) -> Path:
    (folder / "a.json").write_text(json.dumps(RECORDS))
    return folder / "a.json"


def write_parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(RECORDS), folder / "a.parquet", row_group_size=16)
    return folder / "a.parquet"


def write_parquet_folder(folder: Path) -> Path:
    (folder / "parts").mkdir()
    for number in range(2):
        part = pa.Table.from_pylist(RECORDS[20 * number :][:20])
        pq.write_table(part, folder / "parts" / f"train-0000{number}.parquet")
    return folder / "parts"


def write_saved(folder: Path, order: tuple[int, int] = (0, 1)) -> Path:
    """A folder as ``Dataset.save_to_disk`` writes it; the order of its files is that of state.json."""
    saved = folder / "saved"
    saved.mkdir()
    for number, place in enumerate(order):
        table = pa.Table.from_pylist(RECORDS[20 * number :][:20])
        with pa.ipc.new_stream(str(saved / f"data-{place:05}-of-00002.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    files = [{"filename": f"data-{place:05}-of-00002.arrow"} for place in order]
    (saved / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    (saved / "dataset_info.json").write_text("{}")
    return saved


WRITERS: dict[str, Callable[[Path], Path]] = {
    "jsonl": lambda folder: jsonl(folder / "a.jsonl", *RECORDS),
    "json": write_json,
    "parquet": write_parquet,
    "folder of parquet": write_parquet_folder,
    "saved": write_saved,
    "saved, files in another order": lambda folder: write_saved(folder, (1, 0)),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_problems(tmp_path: Path, kind: str) -> None:
    found = read_problems(WRITERS[kind](tmp_path), answer_field="reward_model.ground_truth")
    assert [(p.prompt[0], p.answer) for p in found.problems] == [
        ({"role": "user", "content": f"What is {n} + {n}?"}, str(2 * n)) for n in range(40)
    ]
    assert found.rows == 40 and not found.notes()
    assert len(set(found.places)) == 40 and found.places[2].endswith(":3")


def test_a_byte_order_mark_windows_newlines_and_empty_lines_are_read(tmp_path: Path) -> None:
    text = '\ufeff{"prompt": "é?", "answer": "1"}\r\n\r\n{"prompt": "b", "answer": 2}\r\n'
    (tmp_path / "a.jsonl").write_bytes(text.encode())
    assert list(read_rows(tmp_path / "a.jsonl")) == [Row("a.jsonl:1", "é?", "1"), Row("a.jsonl:3", "b", 2)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a", "answer": "1"}\n{"prompt": "\xff"}\n', r"a\.jsonl:2: not UTF-8 text \(byte 12"),
        (b'{"prompt": "a", "answer": "1"}\n{"prompt": \n', r"a\.jsonl:2: not JSON"),
        (b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}\n", r"a\.jsonl:1: not JSON"),
        (b"[" * 100_000 + b"\n", r"a\.jsonl:1: not JSON"),
        (b'["a", "1"]\n', r"a\.jsonl:1: a row must be an object with fields, not list"),
        (b'{"promt": "a", "answer": "1"}\n', r'unknown field "prompt" \(did you mean "promt"\?\)'),
        (b"", r"a\.jsonl: no rows"),
        (b'{"prompt": "a"}\n', r"none of 1 rows can be used: 1 without an answer \(a\.jsonl:1\)"),
        (b"a" * (17 * 2**20), r"a\.jsonl:1: the line is over 16,777,216 bytes"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_problems(tmp_path / "a.jsonl")


def damage_parquet(folder: Path) -> Path:
    path = write_parquet(folder)
    path.write_bytes(path.read_bytes()[:-30])
    return path


def drop_shard(folder: Path) -> Path:
    saved = write_saved(folder)
    (saved / "data-00001-of-00002.arrow").unlink()
    return saved


def cut_shard(folder: Path) -> Path:
    saved = write_saved(folder)
    shard = saved / "data-00001-of-00002.arrow"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    return saved


def several_splits(folder: Path) -> Path:
    write_saved(folder)
    (folder / "dataset_dict.json").write_text('{"splits": ["saved"]}')
    return folder


def written(folder: Path, name: str, text: str = "") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (damage_parquet, r"a\.parquet: cannot be read"),
        (drop_shard, r"data-00001-of-00002\.arrow: the file is missing; state\.json names it"),
        (cut_shard, r"data-00001-of-00002\.arrow: cannot be read"),
        (several_splits, "holds several splits; give the folder of one: saved"),
        (lambda folder: written(folder, "state.json", '{"_data_files": 3}').parent, "no list of files"),
        (lambda folder: folder, "no .arrow or .parquet files"),
        (lambda folder: folder / "absent.jsonl", "no such file or folder; give .jsonl.* one of: gsm8k_train"),
        (lambda folder: written(folder, "a.csv"), "cannot be read; allowed: .jsonl"),
        (lambda folder: written(folder, "a.json", '{"a": 1}'), "a list of rows is expected, not dict"),
    ],
)
def test_unusable_sources_say_what_is_allowed(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_problems(make(tmp_path), answer_field="reward_model.ground_truth")


def test_a_table_without_the_field_names_its_columns(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match='unknown field "prompts".*did you mean "prompt".*ability, prompt, reward_model'
    ):
        read_problems(write_parquet(tmp_path), prompt_field="prompts")


def test_a_file_named_like_a_public_set_may_have_other_fields(tmp_path: Path) -> None:
    record = {"prompt": "a", "a.b": "c", "answer": "1"}
    path = jsonl(tmp_path / "math500.jsonl", record)
    assert list(read_rows(path)) == [Row("math500.jsonl:1", "a", "1")]
    assert list(read_rows(path, prompt_field="a.b")) == [Row("math500.jsonl:1", "c", "1")]
    theirs = jsonl(tmp_path / "svamp.jsonl", {"Body": "Two apples", "Question": "How many?", "Answer": 2.0})
    assert list(read_rows(theirs, prompt_field="text")) == [Row("svamp.jsonl:1", "Two apples. How many?", 2.0)]


@pytest.mark.parametrize(
    ("prompt", "answer", "outcome"),
    [
        ("a", " 7 ", "7"), ("a", 7, "7"), ("a", 27.0, "27"), ("a", -3.0, "-3"), ("a", "x", "x"),
        ("a", "1" * 300, "1" * 300),
        ("a", 0.5, "whose answer is a float"), ("a", float("nan"), "without an answer"),
        ("a", float("inf"), "whose answer is a float"), ("a", 1e300, "whose answer is over 300 characters"),
        ("a", None, "without an answer"), ("a", "  ", "without an answer"),
        ("a", True, "whose answer is neither text nor a number"),
        ("a", ["7"], "whose answer is neither text nor a number"),
        ("a", "1" * 301, "whose answer is over 300 characters"),
        ("", "1", "with an empty prompt"), (" \n", "1", "with an empty prompt"), (None, "1", "with an empty prompt"),
        ([], "1", "with an empty prompt"), ([{"role": "user", "content": " "}], "1", "with an empty prompt"),
        (TEMPLATES["dapo"].format(""), "1", "with an empty prompt"),
        (3, "1", "whose prompt is neither text nor chat messages"),
        ({"a": "b"}, "1", "whose prompt is neither text nor chat messages"),
        ([{"role": "user"}], "1", "whose prompt is neither text nor chat messages"),
        ([{"role": "user", "content": None}], "1", "whose chat messages are not text"),
        ("a\ud800", "1", "with half a character (a lone surrogate)"),
    ],
)  # fmt: skip
def test_a_row_is_used_or_left_out_for_one_reason(prompt: Any, answer: Any, outcome: str) -> None:
    found = examine([Row("a.jsonl:9", prompt, answer)])
    if found.problems:
        assert found.problems[0].answer == outcome and not found.left_out
    else:
        assert found.notes() == [f"left out: 1 {outcome} (a.jsonl:9)"]


def test_copies_are_counted_and_prompts_with_two_answers_left_out() -> None:
    pairs = [("a  b", "1"), ("a b\n", "1"), ("A b", "1"), ("c", "2"), ("c", "2"), ("c", "3"), ("c", "2"), ("d", "4")]
    found = examine([Row(f"f:{number}", *pair) for number, pair in enumerate(pairs, 1)])
    assert [(problem.prompt, place) for problem, place in zip(found.problems, found.places, strict=True)] == [
        ("a  b", "f:1"), ("A b", "f:3"), ("d", "f:8"),
    ]  # fmt: skip
    assert found.copies == {"f:1": 1}
    assert len(found.problems) + found.copies.total() + found.left_out.total() == found.rows
    assert found.notes() == [
        "left out: 4 with another answer than a copy of the prompt (f:4, f:6, f:7, ...)",
        "left out: 1 copies of 1 problems",
    ]


def test_a_template_goes_around_the_problem_once() -> None:
    problem = Problem(prompt="Find {x}.", answer="1", extra={"row": "f:1"})
    once = templated(problem, "dapo")
    assert once.prompt == TEMPLATES["dapo"].replace("{}", "Find {x}.") and once.extra == problem.extra
    assert templated(once, "dapo") == once and templated(once, "plain") == problem
    chat = Problem(prompt=({"role": "system", "content": "s"}, {"role": "user", "content": "Find {x}."}), answer="1")
    assert templated(chat, "dapo").prompt == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": once.prompt},
    )


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {number}?", "answer": number} for number in range(count)]


def test_what_is_held_out_is_never_trained_on_and_depends_on_the_seed_alone(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *numbered(50), *numbered(50), {"prompt": "x", "answer": 0.5})
    config = TaskConfig(name="file", train=str(path), held_out=10)
    task, again, other = load_task(config, 3), load_task(config, 3), load_task(config, 4)
    assert (len(task.train), len(task.test), task.reward) == (40, 10, "robust")
    assert {p.prompt for p in task.train} | {p.prompt for p in task.test} == {f"What is {n}?" for n in range(50)}
    assert task == again and {p.prompt for p in task.test} != {p.prompt for p in other.test}
    assert task.notes == (
        f"{path}: left out: 1 whose answer is a float (a.jsonl:101)", f"{path}: left out: 50 copies of 50 problems",
    )  # fmt: skip
    with pytest.raises(DataError, match=r"50 problems: with task.held_out = 50 none is left"):
        split([Problem(prompt=str(n), answer="") for n in range(50)], 50, 0, "f")


def test_a_test_file_is_used_whole_and_shared_problems_are_told(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "a.jsonl", *numbered(20))
    test = jsonl(tmp_path / "b.jsonl", *numbered(3), {"prompt": "new", "answer": "1"})
    config = TaskConfig(name="math", train=str(train), test=str(test), template="dapo", reward="dapo")
    task = load_task(config, 0)
    assert (len(task.train), len(task.test), task.reward) == (20, 4, "dapo")
    assert task.train[1].prompt == TEMPLATES["dapo"].format("What is 1?")
    assert task.notes == (f"3 problems of {train} are in {test} too: sextet data prompts {train} --against {test}",)


def test_gsm8k_is_found_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEXTET_DATA", str(tmp_path))
    with pytest.raises(DataError, match="gsm8k_train.jsonl: no such file"):
        load_task(TaskConfig(name="gsm8k"), 0)
    (tmp_path / "math").mkdir()
    for name, answer in (("gsm8k_train", "So 1,000.\n#### 1,000"), ("gsm8k_test", "#### -5")):
        jsonl(tmp_path / "math" / f"{name}.jsonl", {"question": f"How many of {name}?", "answer": answer})
    task = load_task(TaskConfig(name="gsm8k"), 0)
    assert (task.train[0].answer, task.test[0].answer, task.reward) == ("1000", "-5", "number")
    assert task.train[0].prompt == TEMPLATES["gsm8k"].format("How many of gsm8k_train?")
    assert load_task(TaskConfig(name="gsm8k", template="plain"), 0).train[0].prompt == "How many of gsm8k_train?"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TaskConfig(name="math"), "task math needs a file: set task.train"),
        (TaskConfig(name="gsm9k"), r'unknown task "gsm9k" \(did you mean "gsm8k"\?\)'),
    ],
)
def test_wrong_settings_name_what_is_allowed(config: TaskConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_task(config, 0)


def test_reasoning_gym_generates_the_same_problems_from_a_seed() -> None:
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    config = TaskConfig(name="gym:chain_sum", size=30, held_out=10)
    task = load_task(config, 1)
    assert task == load_task(config, 1) and task.train != load_task(config, 2).train and task.reward == "gym"
    assert not {normalised(p.prompt) for p in task.train} & {normalised(p.prompt) for p in task.test}
    assert len(task.test) == 10 and 20 <= len(task.train) <= 30
    for problem in task.train:
        assert json.loads(json.dumps(problem.extra)) == problem.extra
        assert problem.extra["dataset"] == "chain_sum" and problem.extra["entry"]["answer"] == problem.answer
    assert load_task(TaskConfig(name="gym:chain_sum", size=30, held_out=10, reward="number"), 1).reward == "number"


def test_wrong_names_of_reasoning_gym_get_the_nearest() -> None:
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    with pytest.raises(UsageError, match='unknown task "gym:chainsum"; nearest: chain_sum'):
        gym_problems("chainsum", 1, 0)
    with pytest.raises(UsageError, match="gym:composite cannot be generated"):
        gym_problems("composite", 1, 0)
    assert gym_problems("graph_color", 1, 0)[0].answer == "", "it has no answer of its own"


def test_entries_become_json_values() -> None:
    import numpy as np

    value = {1: (1, {3, 2}), "a": np.int64(4), "b": np.array([1.5]), "c": complex(1, 2), "d": None}
    assert json_safe(value) == {"1": [1, [2, 3]], "a": 4, "b": [1.5], "c": "(1+2j)", "d": None}


@pytest.fixture
def math(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not (real_data / "math").is_dir():
        pytest.skip(f"no math/ in {real_data}")
    monkeypatch.setenv("SEXTET_DATA", str(real_data))
    return real_data / "math"


def test_the_named_sets_are_read_whole(math: Path) -> None:
    sizes = {
        "gsm8k_train": 7473, "gsm8k_test": 1319, "math500": 500, "aime24": 30, "amc23": 40, "svamp": 1000,
        "aime-2024": 30,
    }  # fmt: skip
    assert set(SETS) == set(sizes)
    for name, size in sizes.items():
        found = read_problems(name)
        assert (len(found.problems), found.left_out.total()) == (size, 0), name
        if name not in ("math500", "aime-2024"):
            assert all(problem.answer.lstrip("-").isdigit() for problem in found.problems), name


def test_the_template_is_that_of_the_public_data_byte_for_byte(math: Path) -> None:
    found = read_problems("aime-2024")
    assert (found.rows, len(found.problems), found.copies.total()) == (960, 30, 930)
    raw = pq.read_table(math / "aime-2024.parquet").to_pylist()
    for record in raw:
        assert record["prompt"][0]["content"] == TEMPLATES["dapo"].format(record["extra_info"]["raw_problem"])
    prompts = {problem.prompt[0]["content"]: problem.answer for problem in found.problems}  # type: ignore[index]
    matching = 0
    for problem in read_problems("aime24").problems:
        text = TEMPLATES["dapo"].format(problem.prompt)
        if text in prompts:
            matching += 1
            assert int(prompts[text]) == int(problem.answer)
            assert bare(text) == problem.prompt
    assert matching == 29, "one of the two files writes a problem differently"
