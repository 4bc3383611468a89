"""A bundle of a run for handing over: pages, results and configuration, without any secret.

Security rules: a bundle has nothing that no ε covers, unless its owner says so, and of attacks
scores alone, since what they saw on the unprotected twin is clients' data. It takes the entries of
`result.json` from a list of those that follow from releases, so an entry that a protocol adds stays
out. It names no client, and all audits of a run are in it.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from securecluster.app import outputs
from securecluster.app.finished_run import FinishedRun
from securecluster.core import atomic_files
from securecluster.errors import UsageError

# entries at any depth: with the seed a simulation's data can be made again, and by the digest a
# guess of all data can be checked
SECRET = frozenset({"seed", "data_digest", "digest"})
# entries of result.json that say nothing of clients beyond what the protocol released; the others,
# a protocol's own fields among them, are the observer's, or may be
RELEASED = (
    "schema", "protocol", "data", "scenario", "model", "device", "version", "clients", "rounds",
    "metric", "unit", "target", "observer", "bytes", "privacy", "seconds",
)  # fmt: skip
# and of a run whose server knows them, so that ε covers them
KNOWN_TO_SERVER = ("clusters", "labels")
# entries of the configuration that have clients' numbers of samples
SIZES = frozenset({"sizes", "signature_sizes"})
IS_BUNDLE = outputs.zip_with(("config.json", "result.json"))
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same bundle has the same bytes


def write(
    path: Path, run: FinishedRun, pages: Mapping[str, str], with_uncovered: bool = False
) -> None:
    """Write the bundle.

    It has config.json and result.json without secrets, and without what no ε covers, and the given
    texts. Models, keys, ledgers, messages and clients' files stay in the run folder.

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
        UsageError: the path is no ZIP file's.
        OutputError: something else than a bundle is there.
    """
    if path.suffix.lower() != ".zip":
        raise UsageError(f"a bundle is a ZIP file: call it {path.with_suffix('.zip').name}")
    atomic_files.check_output(path, IS_BUNDLE)


def contents(run: FinishedRun, with_uncovered: bool = False) -> dict[str, str]:
    """Return config.json and result.json of a run as a bundle has them, by file name.

    Args:
        run: the run.
        with_uncovered: keep what no ε covers.
    """
    config: Any = run.config
    result: Any = run.result
    if not with_uncovered:
        config = covered_config(config)
        result = covered_result(result, run.protocol.observer.server_knows_labels)
    return {"config.json": _json(public(config)), "result.json": _json(public(result))}


def digest(run: FinishedRun) -> str:
    """Return a digest of a run that a reader of its bundle can compute, and guess nothing by.

    It is SHA-256 of config.json and then result.json, as a bundle without what no ε covers has
    them, in hexadecimal.

    Args:
        run: the run.
    """
    texts = contents(run)
    return hashlib.sha256((texts["config.json"] + texts["result.json"]).encode()).hexdigest()


def covered_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without names and numbers of samples of clients.

    Args:
        config: its content.
    """
    network = {name: value for name, value in config["network"].items() if name not in SIZES}
    return {**config, "clients": len(config["clients"]), "network": network}


def covered_result(result: Mapping[str, Any], server_knows_labels: bool) -> dict[str, Any]:
    """Return result.json without names, metrics, true clusters, and what only clients know.

    Args:
        result: its content.
        server_knows_labels: True if the server computed the clusters from what was released.
    """
    names: tuple[str, ...] = RELEASED
    if server_knows_labels:
        names += KNOWN_TO_SERVER
    covered = {name: result[name] for name in names if name in result}
    privacy = dict(result["privacy"])
    privacy.pop("unshared_models", None)  # clusters in which clients trained alone
    return {**covered, "privacy": privacy}


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
