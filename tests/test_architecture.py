"""The rules ARCHITECTURE.md states, held by reading the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("plugin", "backends", "handlers", "model_configs")
MAX_LINES = 300

# Who may import whom. plugin.app is the one place where both sides meet.
MEETING_POINT = "plugin/app.py"
TORNADO = {"plugin/app.py", "plugin/cli.py", "plugin/server.py"}
# The two places that turn any failure into an answer, and a binding that raises Exception itself.
BROAD_EXCEPT = {"handlers/base.py", "backends/engine/loop.py", "plugin/tokenizer.py"}


def modules(*packages: str) -> list[Path]:
    return sorted(p for package in packages for p in (ROOT / package).rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether importing the file imports it) of every import that runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from _walk(tree, top=True)


def _walk(node: ast.AST, *, top: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, top) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "absolute imports only"
            yield from ((f"{child.module}.{alias.name}", top) for alias in child.names)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, top=top and not inside)


def imported(path: Path, *prefixes: str) -> list[str]:
    return [
        module
        for module, _ in imports(path)
        if any(module == p or module.startswith(p + ".") for p in prefixes)
    ]


@pytest.mark.parametrize("path", modules("handlers"), ids=name)
def test_handlers_do_not_know_backends(path: Path) -> None:
    assert not imported(path, "mindstream.backends", "mindspore", "mindformers")


@pytest.mark.parametrize("path", modules("backends"), ids=name)
def test_backends_do_not_know_http(path: Path) -> None:
    assert not imported(path, "mindstream.handlers", "tornado", "mindstream.plugin.app")


@pytest.mark.parametrize("path", modules("plugin"), ids=name)
def test_plugin_knows_neither_side(path: Path) -> None:
    assert not imported(path, "mindstream.backends", "mindspore", "mindformers")
    if name(path) != MEETING_POINT:
        assert not imported(path, "mindstream.handlers")
    if name(path) not in TORNADO:
        assert not imported(path, "tornado")


@pytest.mark.parametrize("path", modules("plugin"), ids=name)
def test_importing_plugin_needs_no_numpy(path: Path) -> None:
    heavy = {"numpy", "tokenizers", "gguf", "safetensors", "PIL", "av"}
    assert not [module for module, top in imports(path) if top and module.split(".")[0] in heavy]


@pytest.mark.parametrize("path", modules("backends"), ids=name)
def test_mindspore_is_imported_only_inside_functions_of_its_backend(path: Path) -> None:
    found = imported(path, "mindspore", "mindformers")
    if not name(path).startswith("backends/mindspore/"):
        assert not found
    at_import = [m for m, top in imports(path) if top and m in found]
    assert not at_import


@pytest.mark.parametrize("path", modules(*PACKAGES), ids=name)
def test_modules_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < MAX_LINES


@pytest.mark.parametrize("path", modules(*PACKAGES), ids=name)
def test_no_failure_is_swallowed_unseen(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = "BaseException" if node.type is None else ast.unparse(node.type)
        if caught not in ("Exception", "BaseException"):
            continue
        cleans_up = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        assert cleans_up or name(path) in BROAD_EXCEPT, f"{name(path)}:{node.lineno}"


@pytest.mark.parametrize("path", modules(*PACKAGES), ids=name)
def test_every_ignore_has_a_reason(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        for mark in ("# type: ignore", "# noqa"):
            if mark in line:
                code = line.split(mark, 1)[1]
                assert " # " in code or " - " in code, f"{name(path)}: {line.strip()}"


@pytest.mark.parametrize("path", modules(*PACKAGES), ids=name)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_tests_are_no_package() -> None:
    """importlib mode: two folders may have a test file of one name."""
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_the_code_map_lists_every_module_as_it_describes_itself() -> None:
    """`scripts/code-map --write` mends it."""
    command = [sys.executable, str(ROOT / "scripts" / "code-map")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
