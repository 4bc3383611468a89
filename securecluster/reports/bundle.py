"""A bundle of a run for handing over: pages, results and configuration, without any secret.

Security rules: a bundle has what `allow_list` names, and nothing else: nothing that no ε covers,
unless its owner says so, and of attacks scores alone, since what they saw on the unprotected twin
is clients' data. It names no client, and all audits of a run are in it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from securecluster.core import atomic_files, outputs
from securecluster.errors import UsageError
from securecluster.reports import allow_list
from securecluster.reports.allow_list import LABELS, PUBLIC, UNCOVERED, Whose
from securecluster.reports.finished_run import FinishedRun

IS_BUNDLE = outputs.zip_with(("config.json", "result.json"))
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same bundle has the same bytes


def write(
    path: Path, run: FinishedRun, pages: Mapping[str, str], with_uncovered: bool = False
) -> None:
    """Write the bundle.

    It has what may leave of config.json and result.json, and the given texts. Models, keys,
    ledgers, messages and clients' files stay in the run folder.

    Args:
        path: of the ZIP file.
        run: the run.
        pages: texts by file name, without secrets.
        with_uncovered: keep what no ε covers.

    Raises:
        UsageError: the path is no ZIP file's.
        OutputError: something else than a bundle is there.
    """
    check(path)
    texts = {**contents(run, with_uncovered), **pages}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(texts.items()):
            archive.writestr(zipfile.ZipInfo(name, EPOCH), text, zipfile.ZIP_DEFLATED)
    atomic_files.write_output(path, buffer.getvalue(), IS_BUNDLE)


def check(path: Path) -> None:
    """Check that a bundle can be written: before an audit takes minutes.

    Args:
        path: of the ZIP file.

    Raises:
        UsageError: the path is no ZIP file's, or none can be written there.
        OutputError: something else than a bundle is there.
    """
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        raise UsageError(f"{path} is a folder, or lies in none: give another path of a bundle")
    if path.suffix.lower() != ".zip":
        raise UsageError(f"a bundle is a ZIP file: call it {path.stem or 'bundle'}.zip")
    atomic_files.check_output(path, IS_BUNDLE)


def contents(run: FinishedRun, with_uncovered: bool = False) -> dict[str, str]:
    """Return config.json and result.json of a run as a bundle has them, by file name.

    Args:
        run: the run.
        with_uncovered: keep what no ε covers.
    """
    whose = leaving(run, with_uncovered)
    config = allow_list.leaving(run.config, allow_list.CONFIG, whose)
    # their number, where their names stay
    config.setdefault("clients", len(run.config["clients"]))
    result = allow_list.leaving(run.result, allow_list.RESULT, whose)
    return {"config.json": _json(config), "result.json": _json(result)}


def leaving(run: FinishedRun, with_uncovered: bool = False) -> set[Whose]:
    """Return whose entries of a run may leave.

    Args:
        run: the run.
        with_uncovered: True if its owner says that what no ε covers may, too.
    """
    if with_uncovered:
        return {PUBLIC, LABELS, UNCOVERED}
    # the server computed the clusters from what was released, so ε covers them
    return {PUBLIC, LABELS} if run.protocol.observer.server_knows_labels else {PUBLIC}


def digest(run: FinishedRun) -> str:
    """Return a digest of a run that a reader of its bundle can compute, and guess nothing by.

    It is SHA-256 of config.json and then result.json, as a bundle without what no ε covers has
    them, in hexadecimal.

    Args:
        run: the run.
    """
    texts = contents(run)
    return hashlib.sha256((texts["config.json"] + texts["result.json"]).encode()).hexdigest()


def _json(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"
