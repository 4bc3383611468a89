"""Which code each table of timings measures, and whether that code has changed since.

A time belongs to the code that it was taken of. Beside a table of timings, its benchmark writes a
digest of each file of `TIMED` (`results/timed_code.json`). A page with a table that is older than
these files says so, until its benchmark has been run again (`benchmarks.evidence`).
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from securecluster.core import atomic_files

NAME = "timed_code.json"
# fields of syntax trees that change no computation, or that only some versions of Python have
LEFT_OUT = ("annotation", "returns", "type_comment", "type_params", "kind", "ctx")
TRAINING = (
    "securecluster/training/local_trainer.py",
    "securecluster/training/batches.py",
    "securecluster/models/fused_layers.py",
    "securecluster/models/deferred_steps.py",
    "securecluster/models/products.py",
)
RUNS = (
    *TRAINING,
    "securecluster/runtime/server_channel.py",
    "securecluster/runtime/endpoint.py",
    "protocols/common/client.py",
)
SECURE_SUMS = (
    "securecluster/protections/secure_sums/double_mask.py",
    "securecluster/privacy/masking/pads.py",
    "securecluster/protections/secure_sums/shamir.py",
    "securecluster/protections/secure_sums/pair_secrets.py",
    "securecluster/privacy/fixed_point.py",
    "securecluster/protections/secure_sums/messages.py",
    "securecluster/protections/secure_sums/client.py",
    "securecluster/protections/secure_sums/server.py",
)
# table -> files, relative to the top of the repository, that its times are mostly spent in
TIMED: Mapping[str, tuple[str, ...]] = {
    "privacy_rounds": SECURE_SUMS,
    "privacy_stages": SECURE_SUMS,
    "privacy_sums": SECURE_SUMS,
    "server_scale_protocols": (
        *RUNS,
        "securecluster/clustering/agglomerative.py",
        "securecluster/clustering/landmarks.py",
    ),
    "server_scale_sketches": (
        "securecluster/clustering/agglomerative.py",
        "securecluster/clustering/distances.py",
        "securecluster/clustering/landmarks.py",
        "securecluster/clustering/similarity.py",
    ),
}


def code_digest(source: str) -> str:
    """Return a digest of what a file computes.

    Comments, docstrings, annotations, layout, imports and the names of local variables are left
    out, so that code which only reads better, or has moved, has the same digest. It does not depend
    on Python's version.

    Args:
        source: content of the Python file.

    Returns:
        The first 16 hexadecimal digits of a SHA-256.
    """
    code = repr(_described(ast.parse(source), {}))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _described(node: Any, names: Mapping[str, str]) -> Any:
    """Return a syntax tree as nested tuples of its non-empty fields.

    Args:
        node: a node, a list of nodes, or the value of a field.
        names: other names of local variables, by their own.
    """
    if isinstance(node, list):
        return tuple(_described(item, names) for item in node if not _is_left_out(item))
    if not isinstance(node, ast.AST):
        return node
    if isinstance(node, ast.FunctionDef):
        names = {**names, **_numbered_locals(node)}
    fields: list[Any] = [type(node).__name__]
    for name, value in ast.iter_fields(node):
        if name in LEFT_OUT or value is None or value == []:
            continue
        described = _described(value, names)
        if isinstance(node, ast.Name) and name == "id":
            described = names.get(value, value)
        fields.append((name, described))
    return tuple(fields)


def _is_left_out(node: Any) -> bool:
    """Return whether a statement is an import, a docstring, or a text below a field."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def _numbered_locals(function: ast.FunctionDef) -> dict[str, str]:
    """Return numbers for the variables that a function assigns, in the order of their first use.

    Parameters keep their names, by which callers may pass them.

    Args:
        function: a function's definition.
    """
    shared: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Global | ast.Nonlocal):
            shared.update(node.names)
        if isinstance(node, ast.arg):
            shared.add(node.arg)
    numbered: dict[str, str] = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.Name) or node.id in shared:
            continue
        if isinstance(node.ctx, ast.Store):
            numbered.setdefault(node.id, f"{function.col_offset}.{len(numbered)}")
    return numbered


def digests(table: str, root: Path) -> dict[str, str]:
    """Return the digest of each file that a table measures.

    Args:
        table: one of `TIMED`.
        root: top of the repository.
    """
    digests = {}
    for path in TIMED[table]:
        source = (root / path).read_text(encoding="utf-8")
        digests[path] = code_digest(source)
    return digests


def record(table: str, results: Path) -> None:
    """Note that a table was measured with the present code; other tables are left alone.

    Args:
        table: name of a CSV file, without ending; nothing is noted unless it is in `TIMED`.
        results: folder of the measurements, `benchmarks/results` of the repository.
    """
    root = results.parent.parent
    # in another folder than the repository's there is no code to take digests of
    if table not in TIMED or not (root / "pyproject.toml").is_file():
        return
    recorded = _recorded(results)
    recorded[table] = digests(table, root)
    text = json.dumps(recorded, indent=1, sort_keys=True)
    atomic_files.write_atomic(results / NAME, (text + "\n").encode())


def changed(table: str, results: Path) -> list[str]:
    """Return the files that have changed since a table was measured.

    Args:
        table: name of a CSV file, without ending.
        results: folder of the measurements.

    Returns:
        Paths relative to the top of the repository. None where the folder has no digests, as
        another folder than the repository's has not.
    """
    recorded = _recorded(results)
    if table not in TIMED or not recorded:
        return []
    before = recorded.get(table, {})
    now = digests(table, results.parent.parent)
    return [path for path, digest in now.items() if before.get(path) != digest]


def _recorded(results: Path) -> dict[str, dict[str, str]]:
    """Return the digests of the measured code, by table and file."""
    path = results / NAME
    if not path.is_file():
        return {}
    recorded: dict[str, dict[str, str]] = json.loads(atomic_files.read(path))
    return recorded
