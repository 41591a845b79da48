"""Rules that judge answers.

Each rule is ``rule(text, answer, extra)``: the answer's text, the right answer and the problem's other values. Except
for math-verify and reasoning-gym, whose time only the pool of `verifier` bounds, every rule reads a bounded tail of the
text in time that grows with its length.
"""

from __future__ import annotations

import importlib
import logging
import math
import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from sextet.core.errors import UsageError, missing_extra, unknown

LONGEST = 4000
"""Characters of an answer, from its end, that rules read; DAPO's own read 300."""
MOST_DIGITS = 1000
"""Longer numbers are never equal to any other."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found of an answer."""

    score: float
    right: bool | None
    """None where there is no verdict, see ``failure``."""
    note: str = ""
    """What was compared, for people."""
    failure: str = ""
    """Why there is no verdict: timeout, memory, error, died, nan; else empty."""


Rule = Callable[[str, str, Mapping[str, Any]], Verdict]

INVALID, NO_NUMBER, NO_EXPRESSION = "[INVALID]", "no number", "no expression"
UNREADABLE = (INVALID, NO_NUMBER, NO_EXPRESSION)
"""Notes of verdicts on texts in which no answer was found."""
ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
LOOSE_ANSWER_LINE = re.compile(r"answer[*_]*\s*:\s*([^\n]+)", re.IGNORECASE)
STOP_TOKENS = re.compile(r"<\|[\w ]{1,40}\|>|</s>|<eos>|<end_of_turn>")
NUMBER = re.compile(r"(?:(?<![\w).])[-+]\$?|\$-?)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:/\d+)?")
LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
INTEGER = re.compile(r"-?\d{1,1000}")
# Full-width forms and the minus sign, as models of Chinese texts write them.
WIDE = {0xFF01 + offset: 0x21 + offset for offset in range(94)} | {0x2212: "-", 0x3000: " "}

# What DAPO's rule replaces and deletes, in this order (math_dapo of verl, after Minerva's appendix).
REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
DELETED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3",
    "\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
UNWRAPPED = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"(.*?)\$(.*?)\$(.*)", r"$\2$"),
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
    )
)


def last_boxed(text: str) -> str | None:
    r"""Returns what the last ``\boxed{...}`` holds; None without one, or where its brace is not closed."""
    start = text.rfind(r"\boxed{")
    depth = 0
    for place in range(start, len(text)) if start >= 0 else ():
        depth += (text[place] == "{") - (text[place] == "}")
        if text[place] == "}" and depth == 0:
            return text[start + len(r"\boxed{") : place]
    return None


@lru_cache(maxsize=4096)
def normalised(answer: str) -> str:
    """Returns the form in which DAPO's rule compares answers (Minerva's normalisation, as in verl's math_dapo).

    Its time grows with the square of the length, so callers bound it.
    """
    answer = answer.split("=")[-1]
    for before, after in REPLACED:
        answer = answer.replace(before, after)
    for word in DELETED:
        answer = answer.replace(word, "")
    for pattern, by in UNWRAPPED:
        answer = pattern.sub(by, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def value(number: str) -> Fraction | None:
    """Returns the exact value of a number as `NUMBER` finds it; None if it has none or too many digits."""
    if not number or len(number) > MOST_DIGITS:
        return None
    try:
        return Fraction(number.replace(",", "").replace("$", ""))
    except (ValueError, ZeroDivisionError):
        return None


def _found(right: bool, note: str) -> Verdict:
    return Verdict(score=1.0 if right else -1.0, right=right, note=note[:200])


def exact(text: str, answer: str, extra: Mapping[str, Any]) -> Verdict:
    """Right if the text is the answer; space around both is ignored."""
    return _found(text.strip() == answer.strip(), text[-200:])


def after_hash(text: str, answer: str, extra: Mapping[str, Any]) -> Verdict:
    """Right if what follows the last ``#`` is the answer."""
    said = text.rpartition("#")[2]
    return _found(said.strip() == answer.strip(), said[-200:])


def number(text: str, answer: str, extra: Mapping[str, Any]) -> Verdict:
    r"""Right if the numbers are equal, as in GSM8K.

    The number is the first after the last ``####``, else after the last ``Answer:``, else in the last ``\boxed{}``,
    else the last one of the text. Commas, $, %, leading zeros, a trailing period, 34.0, full-width digits and
    fractions are understood; values are exact. A right answer that holds ``####`` is read the same way.
    """
    said, wanted = _number(text), _number(answer)
    want = value(wanted)
    return _found(want is not None and value(said) == want, said or NO_NUMBER)


def _number(text: str) -> str:
    text = LATEX_FRACTION.sub(r"\1/\2", text[-LONGEST:].translate(WIDE))
    line = ANSWER_LINE.findall(text)
    for candidate in (text.rpartition("####")[2] if "####" in text else None, line[-1] if line else None,
                      last_boxed(text)):  # fmt: skip
        first = NUMBER.search(candidate) if candidate is not None else None
        if first:
            return first[0]
    found = NUMBER.findall(text)
    return found[-1] if found else ""


def dapo(text: str, answer: str, extra: Mapping[str, Any]) -> Verdict:
    r"""DAPO's own rule, exactly: the last ``Answer:`` line in the last 300 characters, normalised, as a string.

    Without such a line, the last ``\boxed{}`` of the last 100 characters, as it stands. Equal to
    ``math_dapo.compute_score`` of verl at 1dda039b (a later revision normalises the box too), whose oddities it keeps:
    ``34.``, ``34.0``, ``034`` and ``**Answer: 34**`` are wrong where 34 is right; see `robust`.
    """
    if len(answer) > LONGEST:
        return _found(False, f"the right answer is over {LONGEST} characters long")
    window = text[-300:]
    lines = ANSWER_LINE.findall(window)
    said, wanted = normalised(lines[-1]) if lines else INVALID, normalised(answer)
    boxed = last_boxed(window[-100:]) if said == INVALID else None
    if boxed is not None:
        return _found(boxed == answer, boxed)
    return _found(said == wanted, said)


def strict_box(text: str, answer: str, extra: Mapping[str, Any]) -> Verdict:
    r"""DAPO's strict variant: the last ``\boxed{}`` of the last 100 characters is exactly the answer."""
    said = last_boxed(text[-100:])
    return _found(said == answer, INVALID if said is None else said)


def robust(text: str, answer: str, extra: Mapping[str, Any]) -> Verdict:
    r"""DAPO's rule without its traps, for integer answers.

    Unlike `dapo`, it accepts a trailing period, markdown around the answer or the word (``**Answer:** 34``), stop
    tokens left in the text (``<|im_end|>``), full-width digits, and numbers of the same value: 34.0, 034, 34.
    """
    if len(answer) > LONGEST:
        return _found(False, f"the right answer is over {LONGEST} characters long")
    window = STOP_TOKENS.sub("", text[-LONGEST:]).translate(WIDE)[-300:]
    lines = LOOSE_ANSWER_LINE.findall(window)
    candidate = lines[-1].strip("*_` \t\r") if lines else last_boxed(window[-100:])
    said = INVALID if candidate is None else normalised(candidate.rstrip(".*_` \t\r"))
    wanted = normalised(answer.translate(WIDE).strip())
    same = said == wanted
    if not same and NUMBER.fullmatch(said) and NUMBER.fullmatch(wanted):
        same = value(said) is not None and value(said) == value(wanted)
    return _found(same, said)


def math_verify(text: str, answer: str, extra: Mapping[str, Any]) -> Verdict:
    r"""Right if math-verify finds the expressions equal.

    Where both the answer and the last (and only) ``\boxed{}``, ``Answer:`` line or whole text are integers, they are
    compared at once. math-verify's own time limits are off: they use SIGALRM, and the pool kills from outside.
    """
    text = text[-LONGEST:]
    boxes, lines = text.count(r"\boxed{"), ANSWER_LINE.findall(text)
    said = last_boxed(text) if boxes == 1 else lines[-1] if lines and not boxes else text if not boxes else None
    said, wanted = (said or "").strip(), answer.strip()
    if INTEGER.fullmatch(said) and INTEGER.fullmatch(wanted):
        return _found(int(said) == int(wanted), said)
    package = _import("math_verify", "math-verify", "the reward math-verify")
    wrapped = answer if "$" in answer or r"\boxed" in answer else f"${answer}$"
    gold = package.parse(wrapped, parsing_timeout=None, raise_on_error=True)
    if not gold:
        return Verdict(score=-1.0, right=None, note=f"cannot read the right answer {answer[:100]}", failure="error")
    found = package.parse(text, parsing_timeout=None, raise_on_error=True)
    right = package.verify(gold, found, timeout_seconds=None, raise_on_error=True)
    read = [part for part in found if isinstance(part, str)]  # an expression may take forever to print
    return _found(right, read[-1] if read else NO_EXPRESSION)


def gym(text: str, answer: str, extra: Mapping[str, Any]) -> Verdict:
    """Right if reasoning-gym scores the answer 1; ``extra`` holds its "dataset" and "entry".

    The answer is in the last ``<answer>`` tags, else the last line. Partial scores are kept in the note.
    """
    text = text[-5 * LONGEST :]
    said = _import("reasoning_gym.utils", "reasoning-gym", "the reward gym").extract_answer(text)
    said = said if said is not None else text.strip().rpartition("\n")[2].strip()
    score = float(_gym_score(extra["dataset"])(said, dict(extra["entry"])))
    return _found(score >= 1 - 1e-6, f"{said[:150]} (score {score:.3g})")


@lru_cache(maxsize=64)
def _gym_score(name: str) -> Any:
    return importlib.import_module("reasoning_gym").get_score_answer_fn(name)


RULES: dict[str, Rule] = {
    "exact": exact,
    "after-hash": after_hash,
    "number": number,
    "dapo": dapo,
    "dapo-strict-box": strict_box,
    "robust": robust,
    "math-verify": math_verify,
    "gym": gym,
}


def check_name(reward: str) -> None:
    """Raises UsageError if there is no rule of this name and it is no ``module:function``."""
    if reward not in RULES and not re.fullmatch(r"[\w.]+:\w+", reward):
        raise UsageError(unknown("reward", reward, RULES) + ", or your own module:function")


def load_rule(reward: str) -> Rule:
    """Returns the rule of this name, with what it needs imported.

    Raises:
        UsageError: There is none, a package is missing, or the user's module does not import.
    """
    check_name(reward)
    if reward in RULES:
        if reward == "math-verify":
            logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
            math_verify("$x+1$", "x+1", {})  # its parser is built at the first call
        if reward == "gym":
            _import("reasoning_gym", "reasoning-gym", "the reward gym")
        return RULES[reward]
    name, _, function = reward.partition(":")
    try:
        found = getattr(importlib.import_module(name), function)
    except (Exception, SystemExit) as error:
        raise UsageError(f'cannot load the reward "{reward}": {type(error).__name__}: {error}') from error
    if not callable(found):
        raise UsageError(f'the reward "{reward}" is a {type(found).__name__}, not a function(text, answer, extra)')
    return lambda text, answer, extra: understood(found(text, answer, extra))


def understood(result: Any) -> Verdict:
    """Returns the verdict in what a user's function returned.

    Args:
        result: True or False (+1 or -1), a score, a pair (score, right), or a dict with score, right and note. Where
            ``right`` is not given, a score of 1 or more is right.
    """
    note: str = ""
    right: Any = None
    if isinstance(result, Mapping):
        note, right, result = str(result.get("note", "")), result.get("right"), result.get("score")
    elif isinstance(result, tuple) and len(result) == 2:
        result, right = result
    result, right = (part.item() if hasattr(part, "item") else part for part in (result, right))
    if isinstance(result, bool):
        result, right = (1.0 if result else -1.0), result if right is None else right
    if not isinstance(result, numbers.Real) or not (right is None or isinstance(right, bool)):
        what = f"{type(result).__name__}, {type(right).__name__}"
        return Verdict(score=-1.0, right=None, note=f"returned neither a number nor (number, bool): {what}",
                       failure="error")  # fmt: skip
    score = float(result)
    if not math.isfinite(score):
        return Verdict(score=-1.0, right=None, note=f"returned {score}", failure="nan")
    return Verdict(score=score, right=score >= 1 if right is None else right, note=note[:200])


def _import(module: str, package: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(package, "gym" if package == "reasoning-gym" else "llm", purpose) from error
