"""`sextet data prompts`: what a set of prompts holds, which rows cannot be used, and whether it has the test in it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
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
    leaks = [_leaks(found, other, prompt_field, answer_field, named) for other in against]
    count = found.left_out.total()
    report: dict[str, Any] = {
        "prompts": path,
        "verdict": f"{count:,} of {found.rows:,} rows cannot be used" if count or not found.rows else "ready",
        "rows": found.rows,
        "different prompts": len(found.problems),
        "not used": unusable,
        "warnings": warnings + [line for lines in leaks for line in lines],
    }
    if against:
        report["compared with"] = (
            f"{', '.join(against)}: the same text (case and spaces aside), or {GRAM} words in a row in common"
        )
    if unusable or not found.rows:
        lines = [f"not used: {line}" for line in unusable] + [f"warning: {line}" for line in report["warnings"]]
        counts = f"{found.rows:,} rows, {len(found.problems):,} different prompts that can be used"
        raise DataError("\n  ".join([f"{path}: {report['verdict']}", counts, *lines]))
    return report


def _line(count: int, text: str, places: Iterable[str], named: int) -> str:
    first = list(places)[:named]
    return f"{count:,} {text} ({', '.join(first)}{', ...' if count > len(first) else ''})"


def _copies(found: Problems, named: int) -> list[str]:
    if not found.copies:
        return []
    rows = (f"{place} {count + 1:,} times" for place, count in found.copies.most_common())
    text = f"rows are copies; {len(found.copies):,} prompts are there more than once"
    first = [row for row, _ in zip(rows, range(named), strict=False)]
    return [f"{found.copies.total():,} {text} ({', '.join(first)}{', ...' if len(found.copies) > named else ''})"]


def _answers(found: Problems, named: int) -> list[str]:
    pairs = list(zip(found.problems, found.places, strict=True))
    texts = [place for problem, place in pairs if not re.fullmatch(r"[+-]?\d+", problem.answer.replace(",", ""))]
    given = [
        place
        for problem, place in pairs
        if len(problem.answer) > 1
        and re.search(rf"(?<!\w){re.escape(problem.answer)}(?!\w)", bare(text_of(problem.prompt)))
    ]
    lines = []
    if texts:
        text = "answers are not whole numbers, which the rules dapo and number are made for"
        lines.append(_line(len(texts), text, texts, named))
    if given:
        lines.append(_line(len(given), "prompts have their answer in them", given, named))
    return lines


def _lengths(found: Problems, limit: int, tokenizer: Path | None, named: int) -> list[str]:
    texts = [text_of(problem.prompt) for problem in found.problems]
    if tokenizer is None:
        how, lengths = "by an estimate of 4 characters a token", [(len(text) + 3) // 4 for text in texts]
    else:
        from sextet.dapo.model import Pretrained

        encode = Pretrained(tokenizer).encode
        how, lengths = "without a chat template", [len(encode(text)) for text in texts]
    long = [place for place, length in zip(found.places, lengths, strict=True) if length > limit]
    if not long:
        return []
    text = f"prompts are over {limit:,} tokens {how}, the longest {max(lengths):,}"
    return [_line(len(long), text, long, named)]


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
    lines = []
    if same:
        lines.append(_line(len(same), f"prompts are in {other}", same, named))
    if shared:
        text = f"prompts have {GRAM} words in a row in common with {other} without being equal"
        lines.append(_line(len(shared), text, shared, named))
    return lines


def _grams(text: str) -> Sequence[str]:
    words = re.findall(r"\w+", text)
    return list(dict.fromkeys(" ".join(words[at : at + GRAM]) for at in range(len(words) - GRAM + 1)))
