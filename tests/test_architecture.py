"""The rules of the code's shape: who may import whom, what loads without torch, how long a file may be."""

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import sextet
from sextet.registry import BUILT_IN

SOURCE = Path(sextet.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
FOLDERS = {recipe.package.removeprefix("sextet.") for recipe in BUILT_IN}
LIGHT = [
    "sextet",
    "sextet.cli",
    "sextet.launch",
    "sextet.registry",
    "sextet.serve",
    "sextet.core.config",
    "sextet.core.files",
    "sextet.dapo.rewards",
    "sextet.dapo.verifier",
] + [f"{recipe.package}.config" for recipe in BUILT_IN]
HEAVY = (
    "torch",
    "numba",
    "scipy",
    "matplotlib",
    "pydantic",
    "ray",
    "gymnasium",
    "pettingzoo",
    "pandas",
    "fastapi",
    "uvicorn",
)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def code_lines(path):
    """Lines that hold code: not blank, not comment, not docstring or field help."""
    text = path.read_text()
    documentation = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documentation.update(range(node.lineno, node.end_lineno + 1))
    skipped = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documentation)


def test_the_core_imports_no_recipe_and_recipes_do_not_import_each_other():
    for path in FILES:
        home = path.relative_to(SOURCE).parts[0]
        for name in imports(path):
            target = name.removeprefix("sextet.").split(".")[0] if name.startswith("sextet.") else ""
            if target in FOLDERS:
                assert home not in {"core", "report"} | FOLDERS - {target}, f"{path} imports {name}"
            if home in FOLDERS | {"core", "report"}:
                assert target not in {"cli", "launch"}, f"{path} imports {name}"
            if home == "core":
                assert target != "report", f"{path} imports {name}"


def test_nothing_reads_pickles():
    forbidden = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    for path in FILES:
        found = {name.split(".")[0] for name in imports(path)} & forbidden
        assert not found, f"{path} imports {found}"
        assert "torch.load" not in imports(path), f"{path} hides torch.load behind another name"
        assert not re.search(r"weights_only\s*=\s*False|allow_pickle\s*=\s*True", path.read_text()), path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
                assert node.lineno in tensor_readers(path), f"{path}:{node.lineno}: torch.load may read code"


def tensor_readers(path):
    """Lines of the calls ``torch.load(..., weights_only=True, ...)``, which read tensors and refuse code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            if options.get("weights_only") == "True":
                yield node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_is_over_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize(
    "folder, budget", [("core", 2000), ("serve", 300), ("mep", 4200), ("reid", 4200), ("dapo", 4500)]
)
def test_folders_keep_their_budget_of_code_lines(folder, budget):
    sizes = {path.name: code_lines(path) for path in (SOURCE / folder).rglob("*.py")}
    assert sum(sizes.values()) <= budget, sizes


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_without_heavy_packages(module):
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


def fastest(command, attempts=5):
    """Least CPU seconds of the command: its wall time on an idle core, whatever else this machine does."""
    times = []
    for _ in range(attempts):
        before = os.times()
        subprocess.run(command, capture_output=True, check=True)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(times)


def test_importing_sextet_takes_at_most_150_milliseconds():
    bare = fastest([sys.executable, "-c", "pass"])
    assert fastest([sys.executable, "-c", "import sextet"]) - bare <= 0.15


@pytest.mark.parametrize("recipe", [recipe.name for recipe in BUILT_IN])
def test_help_answers_within_600_milliseconds(recipe):
    assert fastest([sys.executable, "-m", "sextet", "train", recipe, "--help"]) <= 0.6


@pytest.mark.parametrize("recipe", BUILT_IN, ids=lambda recipe: recipe.name)
def test_every_recipe_keeps_the_contract(recipe):
    config, train, evaluate = (recipe.module(name) for name in ("config", "train", "evaluate"))
    assert callable(train.check) and callable(train.train) and callable(evaluate.evaluate) and callable(evaluate.load)
    for name, function in recipe.presets.items():
        assert isinstance(function(), config.Config), name
        assert function.__doc__, f"preset {name} says nothing of its time and memory"
    assert (SOURCE / recipe.package.removeprefix("sextet.") / "README.md").exists()
