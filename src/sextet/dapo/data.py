"""Problems from the rows of files, cleaned and without copies.

A row that cannot be used is left out and counted by reason, with the file and row it is in. The form of a row is that
of the public DAPO data: a prompt, which is a text or a list of chat messages, and the right answer.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sextet.core.errors import DataError
from sextet.dapo.readers import Row, read_rows
from sextet.dapo.tasks import Problem

TEMPLATES = {
    "dapo": "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".',
    "plain": "{}",
    "gsm8k": '{}\n\nWrite the final answer, a number, on the last line after "####".',
}
"""Texts around a problem, for ``str.format``. ``dapo`` is that of the public data; its ``$Answer`` is meant."""
MAX_ANSWER = 300
"""Characters of a right answer; the rule of DAPO sees the last 300 of what the model writes."""
_SURROGATE = re.compile("[\ud800-\udfff]")
NAMED = 5
"""Rows that are named of all that were left out for one reason."""
DISAGREE = "with another answer than a copy of the prompt"


@dataclass
class Problems:
    """Usable problems without copies, and what became of the other rows."""

    problems: list[Problem] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """Row of each problem."""
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows by the reason for which they are not used."""
    copies: Counter[str] = field(default_factory=Counter)
    """Further rows of the same prompt and answer, by the row of the first."""
    named: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The first rows of each reason."""

    def notes(self) -> list[str]:
        """Returns a line for each reason, such as ``left out: 3 without an answer (a.jsonl:12, ...)``."""
        lines = [f"left out: {self.line(reason)}" for reason in self.left_out]
        if self.copies:
            lines.append(f"left out: {self.copies.total():,} copies of {len(self.copies):,} problems")
        return lines

    def line(self, reason: str) -> str:
        """Returns how many rows there are of a reason, and the first of them."""
        count, named = self.left_out[reason], self.named[reason]
        return f"{count:,} {reason} ({', '.join(named)}{', ...' if count > len(named) else ''})"


def read_problems(path: Path | str, *, prompt_field: str = "prompt", answer_field: str = "answer") -> Problems:
    """Reads problems; rows that cannot be used and copies of a prompt (spaces aside) are left out and counted.

    Args:
        path: A name of `SETS`, a file, or a folder.
        prompt_field: Of the prompt; with dots for nested fields. Not used for the files of `SETS`.
        answer_field: Of the right answer.

    Raises:
        DataError: The file cannot be read, lacks the field, or no row of it can be used.
    """
    found = examine(read_rows(path, prompt_field=prompt_field, answer_field=answer_field))
    if not found.problems:
        raise DataError(
            f"{path}: none of {found.rows:,} rows can be used: {'; '.join(map(found.line, found.left_out))}"
            if found.rows
            else f"{path}: no rows"
        )
    return found


def examine(rows: Iterable[Row], named: int = NAMED) -> Problems:
    """Sorts rows into problems, copies and rows that cannot be used; a prompt with two answers is not used at all.

    Args:
        rows: Of a file.
        named: Rows named of each reason.
    """
    found, kept = Problems(), dict[str, tuple[str, Problem | None]]()

    def leave_out(reason: str, place: str) -> None:
        found.left_out[reason] += 1
        if len(found.named[reason]) < named:
            found.named[reason].append(place)

    for row in rows:
        found.rows += 1
        problem = clean(row)
        if isinstance(problem, str):
            leave_out(problem, row.place)
            continue
        key = normalised(problem.prompt)
        first, known = kept.setdefault(key, (row.place, problem))
        if first == row.place:
            continue
        if known is not None and known.answer == problem.answer:
            found.copies[first] += 1
            continue
        if known is not None:
            kept[key] = first, None
            leave_out(DISAGREE, first)
        leave_out(DISAGREE, row.place)
    for place, kept_problem in kept.values():
        if kept_problem is not None:
            found.problems.append(kept_problem)
            found.places.append(place)
        elif place in found.copies:  # copies of a prompt that turned out to have two answers
            found.left_out[DISAGREE] += found.copies.pop(place)
    return found


def clean(row: Row) -> Problem | str:
    """Returns the problem of a row, or why there is none. Whole numbers are taken as text: 27.0 is ``27``."""
    prompt, answer = row.prompt, row.answer
    if isinstance(prompt, list | tuple) and all(
        isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in prompt
    ):
        prompt = tuple({"role": m["role"], "content": m["content"]} for m in prompt)
        if not all(isinstance(value, str) for message in prompt for value in message.values()):
            return "whose chat messages are not text"
    elif prompt is not None and not isinstance(prompt, str):
        return "whose prompt is neither text nor chat messages"
    if not prompt or not normalised(prompt):
        return "with an empty prompt"
    if answer is None or (isinstance(answer, float) and math.isnan(answer)):
        return "without an answer"
    if isinstance(answer, float) and not answer.is_integer():
        return "whose answer is a float"
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return "whose answer is neither text nor a number"
    text = answer.strip() if isinstance(answer, str) else str(int(answer))
    if not text:
        return "without an answer"
    if len(text) > MAX_ANSWER:
        return f"whose answer is over {MAX_ANSWER} characters"
    if _SURROGATE.search(text_of(prompt) + text):
        return "with half a character (a lone surrogate)"
    return Problem(prompt=prompt, answer=text, extra={"row": row.place})


def text_of(prompt: str | Sequence[Mapping[str, str]]) -> str:
    """Returns the text of a prompt, for chat messages the contents line by line."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def normalised(prompt: str | Sequence[Mapping[str, str]]) -> str:
    """Returns the problem's text with every run of white space as one space; prompts of equal texts are copies."""
    return " ".join(bare(text_of(prompt)).split())


def bare(text: str) -> str:
    """Returns the problem without DAPO's template around it, if it is there."""
    head, tail = TEMPLATES["dapo"].split("{}")
    return text[len(head) : -len(tail)] if text.startswith(head) and text.endswith(tail) else text


def templated(problem: Problem, template: str) -> Problem:
    """Returns the problem with a template of `TEMPLATES` around its text, in a chat around the user's last message."""
    prompt = problem.prompt
    if isinstance(prompt, str):
        changed: str | tuple[dict[str, str], ...] = TEMPLATES[template].format(bare(prompt))
    else:
        last = max((at for at, message in enumerate(prompt) if message["role"] == "user"), default=len(prompt) - 1)
        content = TEMPLATES[template].format(bare(prompt[last]["content"]))
        changed = (*prompt[:last], {**prompt[last], "content": content}, *prompt[last + 1 :])
    return Problem(prompt=changed, answer=problem.answer, extra=problem.extra)
