"""`sextet data prompts`: what a set of prompts holds, which rows cannot be used, and whether it has the test in it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from sextet.core.errors import DataError
from sextet.dapo.data import Problems, bare, clean, examine, normalised, text_of
from sextet.dapo.readers import Row, read_rows

GRAM = 13
"""Words in a row that two problems share by more than chance."""
BOILERPLATE = 10
"""Words in a row that more evaluation problems than this have are part of a template and prove nothing."""


def check(
    path: Positional[str],
    *,
    against: tuple[str, ...] = (),
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    max_prompt_tokens: int = 512,
    tokenizer: Path | None = None,
    named: int = 5,
) -> dict[str, Any]:
    """Looks at prompts and answers before training: copies, rows that cannot be used, and leaks of the test.

    Rows are named as FILE:ROW, counted from 1. Copies are prompts of the same text, spaces and DAPO's template aside.

    Args:
        path: .jsonl, .json, .parquet, a folder of a saved Hugging Face dataset or of .parquet files, or one of
            gsm8k_train, gsm8k_test, math500, aime24, amc23, svamp, aime-2024 in the folder SEXTET_DATA.
        against: Evaluation sets that must not be in it; with the same fields, unless they are among those named above.
        prompt_field: Field of the prompt, a text or a list of chat messages; with dots for nested ones.
        answer_field: Field of the right answer (DAPO-Math-17k: reward_model.ground_truth).
        max_prompt_tokens: As `task.max_prompt_tokens` of the training, which leaves out longer prompts.
        tokenizer: Folder of a tokenizer that counts tokens; without it a token is taken as 4 characters, an estimate.
        named: Rows named of each kind.

    Returns:
        The report.

    Raises:
        DataError: A file cannot be read, or rows cannot be used (no answer, a float, over-long, an empty prompt, two
            answers to a prompt); the text has the whole report.
    """
    found = examine(read_rows(path, prompt_field=prompt_field, answer_field=answer_field), named)
    unusable = [found.line(reason) for reason in found.left_out]
    warnings = [*_copies(found, named), *_answers(found, named), *_lengths(found, max_prompt_tokens, tokenizer, named)]
    for other in against:
        warnings += _leaks(found, other, prompt_field, answer_field, named)
    count = found.left_out.total()
    report: dict[str, Any] = {
        "prompts": path,
        "verdict": f"{count:,} of {found.rows:,} rows cannot be used" if count or not found.rows else "ready",
        "rows": found.rows,
        "different prompts": len(found.problems),
        "not used": unusable,
        "warnings": warnings,
    }
    if against:
        report["compared with"] = (
            f"{', '.join(against)}: the same text (case and spaces aside), or {GRAM} words in a row in common"
        )
    if unusable or not found.rows:
        lines = [f"not used: {line}" for line in unusable] + [f"warning: {line}" for line in warnings]
        counts = f"{found.rows:,} rows, {len(found.problems):,} different prompts that can be used"
        raise DataError("\n  ".join([f"{path}: {report['verdict']}", counts, *lines]))
    return report


def _told(places: Sequence[str], text: str, named: int) -> list[str]:
    """Returns a line of how many there are and the first of them, or none."""
    first = ", ".join(places[:named]) + (", ..." if len(places) > named else "")
    return [f"{len(places):,} {text} ({first})"] if places else []


def _copies(found: Problems, named: int) -> list[str]:
    times = [f"{place} {count + 1:,} times" for place, count in found.copies.most_common()]
    lines = _told(times, "prompts are there more than once", named)
    return [f"{found.copies.total():,} rows are copies; {line}" for line in lines]


def _answers(found: Problems, named: int) -> list[str]:
    texts, given = [], []
    for problem, place in zip(found.problems, found.places, strict=True):
        if not re.fullmatch(r"[+-]?\d+", problem.answer.replace(",", "")):
            texts.append(place)
        word = rf"(?<!\w){re.escape(problem.answer)}(?!\w)"
        if len(problem.answer) > 1 and re.search(word, bare(text_of(problem.prompt))):
            given.append(place)
    return [
        *_told(texts, "answers are not whole numbers, which the rules dapo and number are made for", named),
        *_told(given, "prompts have their answer in them", named),
    ]


def _lengths(found: Problems, limit: int, tokenizer: Path | None, named: int) -> list[str]:
    texts = [text_of(problem.prompt) for problem in found.problems]
    if tokenizer is None:
        how, lengths = "by an estimate of 4 characters a token", [(len(text) + 3) // 4 for text in texts]
    else:
        from sextet.dapo.model import Pretrained

        encode = Pretrained(tokenizer).encode
        how, lengths = "without a chat template", [len(encode(text)) for text in texts]
    long = [place for place, length in zip(found.places, lengths, strict=True) if length > limit]
    return _told(long, f"prompts are over {limit:,} tokens {how}, the longest {max(lengths, default=0):,}", named)


def _leaks(found: Problems, other: str, prompt_field: str, answer_field: str, named: int) -> list[str]:
    """Compares with one evaluation set; its answers do not matter."""
    whole: dict[str, str] = {}
    grams: dict[str, str] = {}
    owners: Counter[str] = Counter()
    for row in read_rows(other, prompt_field=prompt_field, answer_field=answer_field):
        problem = clean(Row(row.place, row.prompt, 0))
        if isinstance(problem, str) or (key := normalised(problem.prompt).casefold()) in whole:
            continue
        whole[key] = row.place
        for gram in _grams(key):
            owners[gram] += 1
            grams.setdefault(gram, row.place)
    same, shared = [], []
    for problem, place in zip(found.problems, found.places, strict=True):
        key = normalised(problem.prompt).casefold()
        if key in whole:
            same.append(f"{place} = {whole[key]}")
        elif common := next((gram for gram in _grams(key) if 0 < owners[gram] <= BOILERPLATE), None):
            shared.append(f"{place} ~ {grams[common]}: {common}")
    text = f"prompts have {GRAM} words in a row in common with {other} without being equal"
    return [*_told(same, f"prompts are in {other}", named), *_told(shared, text, named)]


def _grams(text: str) -> list[str]:
    words = re.findall(r"\w+", text)
    return list(dict.fromkeys(" ".join(words[at : at + GRAM]) for at in range(len(words) - GRAM + 1)))
