"""The rows of imports: who may know whom, read from the source of every file."""

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from runner.__main__ import CONF, WORDS, dispatch

ROOT = Path(__file__).resolve().parents[1]
RUNNER = ROOT / "runner"
FILES = sorted(RUNNER.rglob("*.py"))

ROW_0 = {"errors", "machine", "process", "record"}
LEAVES = {"batch", "precision", "compile", "memory", "schedule", "tasks", "models", "data", "parallel", "measure"}
LEAVES |= {"trackers", "utilisation", "signature"}
# What each module may import of the runner; a new module is placed here first.
MAY_IMPORT = {
    **{name: set() for name in ROW_0},
    **dict.fromkeys(LEAVES, ROW_0),
    "loop": ROW_0 | LEAVES,
    "builder": ROW_0 | LEAVES | {"loop"},
    "check": {"batch", "errors", "machine", "signature"},
    "explain": {"check", "errors"},
    "diagnose": {"record", "errors"},
    "compare": {"record", "errors", "diagnose"},
    "report": {"record", "errors", "diagnose", "compare"},
    "watch": {"record", "errors", "trackers"},
    "job": ROW_0 | {"check", "diagnose", "report", "trackers", "utilisation", "watch"},
    "run": ROW_0 | {"check", "explain", "job", "compare"},
    "worker": ROW_0 | {"builder", "loop", "compile"},
    "doctor": ROW_0,
    "usage": set(),
    "__main__": {"usage", "run"},
    "__init__": set(),
}
TORCH_FREE = ROW_0 | {"signature", "batch", "utilisation", "trackers"} | {"check", "explain", "run", "job", "watch"}
TORCH_FREE |= {"report", "compare", "diagnose", "doctor", "usage", "__main__", "__init__"}
KNOW_HYDRA = {"run", "job", "builder", "worker", "explain"}


def module_of(path):
    """`runner/data/idx.py` is runner.data.idx, `runner/data/__init__.py` is runner.data."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


MODULES = {module_of(path) for path in FILES}


def unit_of(module):
    """The file or folder directly below runner/ that a module is, or is part of."""
    return module.split(".")[1]


def imports_of(path):
    """Every module that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else node.module)
    return found


def named(path):
    return path.relative_to(RUNNER).as_posix()


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_file_imports_only_what_lies_below_it(path):
    unit = unit_of(module_of(path))
    assert unit in MAY_IMPORT, f"{unit} has no place in the rows yet"
    inside = {unit_of(name) for name in imports_of(path) if name.startswith("runner.")}
    assert inside - MAY_IMPORT[unit] - {unit} == set()


@pytest.mark.parametrize("path", [path for path in FILES if unit_of(module_of(path)) in TORCH_FREE], ids=named)
def test_a_file_that_runs_before_the_child_names_no_torch(path):
    assert {name for name in imports_of(path) if name.split(".")[0] in ("torch", "torchvision", "timm")} == set()


@pytest.mark.parametrize("path", FILES, ids=named)
def test_only_the_ends_of_the_runner_know_hydra(path):
    if {name.split(".")[0] for name in imports_of(path)} & {"hydra", "omegaconf"}:
        assert unit_of(module_of(path)) in KNOW_HYDRA


def test_the_record_needs_the_standard_library_only():
    outside = {name.split(".")[0] for name in imports_of(RUNNER / "record.py")} - sys.stdlib_module_names
    assert outside == set()


def test_no_file_imports_itself_by_way_of_others():
    graph = {module_of(path): {name for name in imports_of(path) if name in MODULES} for path in FILES}
    assert sum(map(len, graph.values())) > 50  # the graph was read at all
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


def test_no_file_is_called_by_a_name_that_says_nothing():
    empty = {"utils", "util", "common", "helpers", "base", "registry", "callbacks", "misc"}
    assert {part for path in FILES for part in path.relative_to(RUNNER).with_suffix("").parts} & empty == set()


def test_every_row_names_modules_that_exist():
    assert set(MAY_IMPORT) == {unit_of(module) for module in MODULES}


def test_what_the_launching_process_imports_leaves_torch_out():
    names = ["run", "job", "check", "report", "compare", "diagnose", "watch", "trackers", "doctor", "utilisation"]
    lines = ["import sys", "from importlib import import_module", f"for name in {names}:"]
    lines += ["    import_module('runner.' + name)", "    assert 'torch' not in sys.modules, name"]
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], check=False, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_lists_every_group_and_every_word(flag, capsys):
    assert dispatch([flag]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    starts = {words[0]: [word.rstrip(",") for word in words[1:]] for words in lines if words}
    for word in WORDS:
        assert word in starts
    folders = {path.parent for path in CONF.rglob("*.yaml")} - {CONF}
    assert len(folders) >= 13
    for folder in folders:
        group = folder.relative_to(CONF).as_posix()
        assert sorted(starts[group]) == sorted(path.stem for path in folder.glob("*.yaml"))


def test_every_word_has_a_module_with_a_main():
    for module, _ in WORDS.values():
        tree = ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text())
        assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, module


def test_a_mistyped_word_is_told_the_nearest_one(capsys):
    assert dispatch(["reprot"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "report" in error
