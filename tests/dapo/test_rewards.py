"""The rules that judge answers: published behaviour, and what any text may do to them."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sextet.core.errors import UsageError
from sextet.dapo.rewards import RULES, last_boxed, load_rule, normalised, understood

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "dapo_answers.json").read_text())
OWN = ["exact", "after-hash", "number", "dapo", "dapo-strict-box", "robust"]


def text_of(text):
    return text.replace("%SPACES290%", " " * 290).replace("%LETTERS400%", " then" * 80)


@pytest.mark.parametrize("rule", ["dapo", "robust", "math-verify"])
def test_answers_are_judged_as_the_published_code_does(rule):
    if rule == "math-verify":
        pytest.importorskip("math_verify")
        load_rule(rule)
    for text, gold, right in GOLDEN[rule]:
        verdict = RULES[rule](text_of(text), gold, {})
        assert (verdict.right, verdict.score) == (right, 1.0 if right else -1.0), (text, gold, verdict)


def test_robust_accepts_whatever_dapo_accepts():
    for text, gold, right in GOLDEN["dapo"]:
        if right:
            assert RULES["robust"](text_of(text), gold, {}).right, text


@pytest.mark.parametrize(
    "answer, form",
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("x = 1,234,567", "1234567"),
        (r"the value is $\frac{3}{4}$ here", r"\frac{3}{4}"),
        (r"12\text{ meters}", "12"),
        (r"90^\circ", "90"),
        (r"\text{A}\text{and}\text{B}", "A,B"),
        (r"\overline{AB}", "AB"),
        ("a dog", "dog"),
    ],
)
def test_normal_form(answer, form):
    assert normalised(answer) == form


@pytest.mark.parametrize(
    "text, gold",
    [
        ("5 + 7 = 12\n#### 12", "12"),
        ("#### 1,234", "#### 1234"),
        ("#### $1,234.50", "1234.5"),
        ("it is 34%.", "34"),
        ("costs $34.", "34"),
        ("costs -$34.", "-34"),
        ("Answer: 034 apples, of 50", "34"),
        (r"\boxed{34.0} after 2 tries", "34"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        ("from 10-34", "34"),
        ("３４ 个", "34"),
        ("x = −7", "-7"),
        ("it is 3/4", "0.75"),
        ("the total is 12,345, as said", "12345"),
        ("7" * 1000, "7" * 1000),
    ],
)
def test_equal_numbers(text, gold):
    assert RULES["number"](text, gold, {}).right is True


@pytest.mark.parametrize(
    "text, gold",
    [
        ("34.01", "34"),
        ("no digits", "34"),
        ("1/0", "1"),
        (r"\boxed{\frac{1}{2}}", "1"),
        ("#### 12 or 13", "13"),
        ("34", "many"),
        ("0.30000000000000000001", "0.3"),
        ("7" * 1001, "7" * 1000),
    ],
)
def test_unequal_numbers(text, gold):
    assert RULES["number"](text, gold, {}).right is False


def test_simple_rules():
    assert RULES["exact"](" 34\n", "34", {}).right is True
    assert RULES["exact"]("34.", "34", {}).right is False
    assert RULES["after-hash"]("1 3 #6", "6", {}).right is True
    assert RULES["after-hash"]("#5#6", "5", {}).right is False
    assert RULES["dapo-strict-box"](r"so \boxed{3}, no, \boxed{\frac{1}{2}}", r"\frac{1}{2}", {}).right is True
    assert RULES["dapo-strict-box"](r"\boxed{ 34}", "34", {}).right is False
    assert RULES["dapo-strict-box"](r"\boxed{34}" + "." * 100, "34", {}).right is False


def test_boxes_may_be_nested_and_must_be_closed():
    assert last_boxed(r"\boxed{a{b}{c{d}}} and") == "a{b}{c{d}}"
    assert last_boxed(r"\boxed{1} \boxed{2") is None
    assert last_boxed("no box") is None
    assert last_boxed(r"\boxed{" * 200 + "}" * 200) == ""


FRAGMENTS = st.sampled_from(
    ["Answer:", "####", r"\boxed{", "}", "{", "$", "34", ",", ".", "/", "-", "\n", " ", "％", "３", r"\frac", r"\text{"]
)


@given(st.lists(FRAGMENTS | st.text(max_size=4), max_size=60).map("".join), st.text(max_size=20))
@settings(max_examples=300, deadline=None)
def test_any_text_gets_a_verdict(text, gold):
    for name in OWN:
        verdict = RULES[name](text, gold, {})
        assert verdict.right in (True, False)
        assert verdict.score == (1.0 if verdict.right else -1.0)
        assert verdict.failure == ""
        assert len(verdict.note) <= 200


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(
    "text",
    ["7" * 10_000_000, "{" * 1_000_000, r"\boxed{" * 200_000, "$" * 1_000_000, "1," * 500_000, "Answer:" * 200_000,
     r"\text{" * 200_000, "Answer: " + " " * 1_000_000, "#" * 1_000_000],
    ids=lambda text: text[:8] + "...",
)  # fmt: skip
def test_huge_texts_are_judged_in_bounded_time(name, text):
    start = time.process_time()
    assert RULES[name](text, "34", {}).right is False
    assert RULES[name]("34", text[:100_000], {}).right is False
    assert time.process_time() - start < 2


def test_what_a_function_may_return():
    assert understood(True) == understood(1) == understood(1.0)
    assert (understood(False).score, understood(False).right) == (-1.0, False)
    assert (understood(0.25).score, understood(0.25).right) == (0.25, False)
    assert (understood((0.25, True)).score, understood((0.25, True)).right) == (0.25, True)
    told = understood({"score": -0.5, "right": False, "note": "why"})
    assert (told.score, told.right, told.note) == (-0.5, False, "why")
    np = pytest.importorskip("numpy")
    assert understood(np.float32(2)).score == 2.0
    assert understood(np.bool_(True)).right is True
    assert [understood(bad).failure for bad in (math.nan, math.inf, (math.nan, True))] == ["nan"] * 3
    assert [understood(bad).failure for bad in ("1", None, [], {}, 1j, (1, "yes"), (1, True, 3))] == ["error"] * 7


def test_answers_are_scored_by_reasoning_gym():
    gym = pytest.importorskip("reasoning_gym")
    entry = json.loads(json.dumps(gym.create_dataset("chain_sum", size=1, seed=3)[0]))
    extra, right = {"dataset": "chain_sum", "entry": entry}, entry["answer"]
    assert RULES["gym"](f"so <answer> {right} </answer>.", right, extra).right is True
    assert RULES["gym"](f"I add.\n{right}\n", right, extra).right is True
    near = RULES["gym"](f"<answer>{right}0</answer>", right, extra)
    assert (near.right, near.score) == (False, -1.0)
    assert RULES["gym"]("", right, extra).right is False


def test_unknown_rules_name_the_nearest():
    with pytest.raises(UsageError, match='unknown reward "dappo" .did you mean "dapo".*module:function'):
        load_rule("dappo")
    with pytest.raises(UsageError, match="not a function"):
        load_rule("math:pi")
    with pytest.raises(UsageError, match="AttributeError.*no_such"):
        load_rule("math:no_such")


def test_rules_load_without_heavy_packages():
    code = (
        "import sys, sextet.dapo.verifier_host as h; print({'torch', 'numpy', 'sympy', 'pydantic'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
