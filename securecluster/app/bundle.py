"""A bundle of a run for handing over: pages, results and configuration, without any secret."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from securecluster.app.finished_run import FinishedRun
from securecluster.core import atomic_files
from securecluster.errors import UsageError

# entries at any depth: keys and noise of a simulation follow from the seed, by the digest a guess
# of all data can be checked, and the threads and device are of the machine
SECRET = frozenset({"seed", "data_digest", "digest"})
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same bundle has the same bytes


def write(path: Path, run: FinishedRun, pages: Mapping[str, str]) -> None:
    """Write the bundle.

    It has config.json and result.json without secrets, and the given texts. Models, keys, ledgers,
    messages and clients' files stay in the run folder.

    Args:
        path: of the ZIP file.
        run: the run.
        pages: texts by file name, without secrets.

    Raises:
        UsageError: the path is no ZIP file's.
    """
    if path.suffix.lower() != ".zip":
        raise UsageError(f"a bundle is a ZIP file: call it {path.with_suffix('.zip').name}")
    texts = {
        "config.json": _json(public(run.config)),
        "result.json": _json(public(run.result)),
        **pages,
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(texts.items()):
            archive.writestr(zipfile.ZipInfo(name, EPOCH), text, zipfile.ZIP_DEFLATED)
    atomic_files.write_atomic(path, buffer.getvalue())


def public(content: Any) -> Any:
    """Return JSON values without secrets.

    Args:
        content: of config.json or result.json.
    """
    if isinstance(content, dict):
        entries = {}
        for name, value in content.items():
            if name in SECRET:
                continue
            # a path of a user's file belongs to the machine of the run
            if name == "data" and isinstance(value, str):
                value = value.rpartition("/")[2]
            entries[name] = public(value)
        return entries
    if isinstance(content, list):
        return [public(value) for value in content]
    return content


def _json(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"
