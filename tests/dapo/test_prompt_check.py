"""`sextet data prompts`: every kind of bad row is in the report, with its line, and leaks are found."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tyro

from sextet.core.errors import DataError
from sextet.dapo.check import check
from sextet.dapo.data import TEMPLATES

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


def jsonl(path: Path, *pairs: Any) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in pairs))
    return str(path)


def test_a_clean_set_is_ready_without_a_warning(tmp_path: Path) -> None:
    report = check(jsonl(tmp_path / "a.jsonl", ("What is 1 + 1?", 2), ("And 2 + 2?", "4")))
    assert report["verdict"] == "ready" and not report["warnings"] and not report["not used"]
    assert (report["rows"], report["different prompts"]) == (2, 2)


def test_the_hundredfold_set_is_told(tmp_path: Path) -> None:
    records = [{"prompt": f"What is {n}?", "reward_model": {"ground_truth": f"1{n}"}} for n in range(7)] * 100
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    report = check(str(tmp_path / "a.parquet"), answer_field="reward_model.ground_truth", named=2)
    assert (report["rows"], report["different prompts"], report["verdict"]) == (700, 7, "ready")
    assert report["warnings"] == [
        "693 rows are copies; 7 prompts are there more than once (a.parquet:1 100 times, a.parquet:2 100 times, ...)"
    ]


def test_rows_that_cannot_be_used_end_in_an_error_with_the_whole_report(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl", ("a", "1"), ("b", None), ("c", 0.5), ("d", "9" * 301), (" ", "1"), ("e", ["1"]),
        ("f", "1"), ("f", "2"), ("g", ""), ("h", "x"), ("h", "x"),
    )  # fmt: skip
    with pytest.raises(DataError) as caught:
        check(path)
    assert caught.value.exit_code == 3
    assert str(caught.value).splitlines() == [
        f"{path}: 8 of 11 rows cannot be used",
        "  11 rows, 2 different prompts that can be used",
        "  not used: 2 without an answer (a.jsonl:2, a.jsonl:9)",
        "  not used: 1 whose answer is a float (a.jsonl:3)",
        "  not used: 1 whose answer is over 300 characters (a.jsonl:4)",
        "  not used: 1 with an empty prompt (a.jsonl:5)",
        "  not used: 1 whose answer is neither text nor a number (a.jsonl:6)",
        "  not used: 2 with another answer than a copy of the prompt (a.jsonl:7, a.jsonl:8)",
        "  warning: 1 rows are copies; 1 prompts are there more than once (a.jsonl:10 2 times)",
        "  warning: 1 answers are not whole numbers, which the rules dapo and number are made for (a.jsonl:10)",
    ]


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 of 0 rows cannot be used"):
        check(jsonl(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("prompt", "answer", "given"),
    [
        ("Show that the sum is 34.", "34", True), ("Show that the sum is 340.", "34", False),
        ("What is 3 + 4?", "4", False), ("Is $\\frac{1}{2}$ half?", "\\frac{1}{2}", True),
        (TEMPLATES["dapo"].format("Which word?"), "Answer", False),
    ],
)  # fmt: skip
def test_answers_in_prompts_are_told(tmp_path: Path, prompt: str, answer: str, given: bool) -> None:
    warnings = check(jsonl(tmp_path / "a.jsonl", (prompt, answer)))["warnings"]
    assert ("1 prompts have their answer in them (a.jsonl:1)" in warnings) is given


def test_long_prompts_are_told_as_an_estimate(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ("x" * 40, "1"), ("y" * 41, "1"))
    assert check(path, max_prompt_tokens=10)["warnings"] == [
        "1 prompts are over 10 tokens by an estimate of 4 characters a token, the longest 11 (a.jsonl:2)"
    ]
    assert not check(path, max_prompt_tokens=11)["warnings"]


def test_a_tokenizer_counts_exactly(tmp_path: Path) -> None:
    tokenizers, transformers = (pytest.importorskip(name) for name in ("tokenizers", "transformers"))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "tokenizer"
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    path = jsonl(tmp_path / "a.jsonl", ("a a a", "1"), ("a a a a", "1"))
    assert check(path, max_prompt_tokens=3, tokenizer=folder)["warnings"] == [
        "1 prompts are over 3 tokens without a chat template, the longest 4 (a.jsonl:2)"
    ]


def test_leaks_of_the_evaluation_are_found_for_what_they_are(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl", (TEMPLATES["dapo"].format("How  many?"), "1"), (f"Count: {LONG} fifteen!", "2"),
        ("one two three four five six seven eight nine ten eleven twelve", "3"), ("unrelated", "4"),
    )  # fmt: skip
    held = jsonl(tmp_path / "held.jsonl", ("how many?", None), (LONG, 0.5), ("another", "1"))
    report = check(path, against=(held,))
    assert report["verdict"] == "ready"
    assert report["warnings"] == [
        f"1 prompts are in {held} (a.jsonl:1 = held.jsonl:1)",
        f"1 prompts have 13 words in a row in common with {held} without being equal "
        "(a.jsonl:2 ~ held.jsonl:2: one two three four five six seven eight nine ten eleven twelve thirteen)",
    ]
    assert "13 words in a row" in report["compared with"]


def test_a_template_of_the_evaluation_is_no_leak(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", (f"{LONG}: new?", "1"))
    for count, leaks in ((10, 1), (11, 0)):
        held = jsonl(tmp_path / f"{count}.jsonl", *((f"{LONG}: problem {number}?", "1") for number in range(count)))
        assert len(check(path, against=(held,))["warnings"]) == leaks


def test_the_command_line_takes_all_of_it(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ("How many?", "1"))
    (tmp_path / "b.jsonl").write_text('{"question": "How many?", "gold": {"text": "1"}}\n')
    arguments = ["--prompt-field", "question", "--answer-field", "gold.text", "--max-prompt-tokens", "2"]
    report = tyro.cli(check, args=[str(tmp_path / "b.jsonl"), *arguments, "--named", "1"])
    assert report["warnings"] == [
        "1 prompts are over 2 tokens by an estimate of 4 characters a token, the longest 3 (b.jsonl:1)"
    ]
    assert "1 prompts are in" in tyro.cli(check, args=[path, "--against", path, path])["warnings"][1]


def test_the_real_aime_sets_are_told_apart_from_their_copies(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (real_data / "math").is_dir():
        pytest.skip(f"no math/ in {real_data}")
    monkeypatch.setenv("SEXTET_DATA", str(real_data))
    report = check("aime-2024", against=("aime24", "amc23"))
    assert (report["rows"], report["different prompts"], report["verdict"]) == (960, 30, "ready")
    assert report["warnings"][0].startswith("930 rows are copies; 30 prompts are there more than once")
    assert report["warnings"][1].startswith("29 prompts are in aime24 (")
    assert not any("are in amc23" in line for line in report["warnings"])
