"""Whatever reads JSON or TOML survives lists that are nested as deep as its sender likes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("securecluster", "protocols", "attacks")
READERS = {"json.loads", "json.load", "tomllib.loads", "tomllib.load"}
CAUGHT = {"RecursionError", "RuntimeError", "Exception"}
# functions of lines and packed states, whose callers catch it
DECODERS = {
    "core/serialization.py:_metadata": "unpack",
    "core/serialization.py:restore_tensor": "unpack",
    "core/serialization.py:_restore_tensors": "unpack",
    "messaging/transcript.py:_entry": "read_lines",
    "messaging/wire.py:_text": "_read",
    "runtime/run.py:decode": "read_lines",
    "runs/replay.py:decode": "read_lines",
    "nodes/authority_node.py:request": "read_lines",
    "nodes/agreed_runs.py:read": "read_lines",
    "nodes/revoked_runs.py:revoked": "read_lines",
    "nodes/events.py:read": "read_lines",
    "reports/run_status.py:_so_far": "read_lines",
}
# programs of their own, which read what lies beside them, and what this package has just written
OWN = {
    "models/foreign_worker.py:read",
    "results/exported_models.py:content",
    "recordings/recording.py:record",
    "conformance/fresh_process.py:_replay_elsewhere",
}


def unguarded(source: str) -> Iterator[str]:
    """Yield the functions of a module in which a reader stands outside of any `try` that does."""
    yield from _in(ast.parse(source), "", guarded=False)


def _in(node: ast.AST, function: str, guarded: bool) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        function, guarded = node.name, False
    guarded_nodes = node.body if isinstance(node, ast.Try) and _catches(node) else []
    if isinstance(node, ast.Call) and ast.unparse(node.func) in READERS:
        # what was just written is as deep as what it was made of
        is_own = ast.unparse(node.args[0]).startswith("json.dumps(")
        if not (guarded or is_own):
            yield function
    for child in ast.iter_child_nodes(node):
        yield from _in(child, function, guarded or child in guarded_nodes)


def _catches(node: ast.Try) -> bool:
    """Return whether a `try` catches the errors of lists that are nested too deep."""
    names = [ast.unparse(each) for h in node.handlers if h.type for each in ast.walk(h.type)]
    return bool(CAUGHT & set(names))


@pytest.mark.always
def test_no_reader_ends_in_a_recursion_error() -> None:
    found = set()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for function in unguarded(path.read_text()):
                found.add(f"{path.parent.name}/{path.name}:{function}")
    assert found - OWN <= DECODERS.keys()


@pytest.mark.parametrize(
    ("source", "functions"),
    [
        ("def f():\n  json.loads(x)", ["f"]),
        ("def f():\n  try:\n    json.loads(x)\n  except ValueError: pass", ["f"]),
        ("def f():\n  try:\n    tomllib.loads(x)\n  except (ValueError, RecursionError): pass", []),
        ("def f():\n  try: pass\n  except RecursionError: json.loads(x)", ["f"]),
        ("def f():\n  try:\n    def g(): json.loads(x)\n  except RecursionError: pass", ["g"]),
        ("def f(): return json.loads(json.dumps(x))", []),
    ],
)
def test_a_reader_without_a_guard_is_found(source: str, functions: list[str]) -> None:
    assert list(unguarded(source)) == functions
