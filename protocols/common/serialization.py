"""What a fitted protocol keeps, and its way to a folder and back, without pickle."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from securecluster.core import atomic_files, manifest
from securecluster.core.lazy_torch import torch
from securecluster.core.serialization import pack, unpack
from securecluster.errors import RunFolderError, UsageError
from securecluster.privacy.dp.ledger import Ledger
from securecluster.protocols.common import newcomers
from securecluster.protocols.common.client import ClientState
from securecluster.runtime.run import Line
from securecluster.runtime.server_channel import ChannelState
from securecluster.runtime.settings import Settings

if TYPE_CHECKING:
    from securecluster.protocols.common.base import ClusteringProtocol

P = TypeVar("P", bound="ClusteringProtocol")
SCHEMA = 6
LEARNED, SERVER, CLIENTS = "learned.safetensors", "server.safetensors", "clients.safetensors"
MODELS, START = "models.safetensors", "start.safetensors"
# among what clients remember: the clusters' models (k, d), where no client's own is one of them
SHARED = "shared"
ALWAYS = [CLIENTS, LEARNED, MODELS, SERVER]


@dataclass
class FittedSummary:
    """What was learned and may be shown."""

    schema: int
    protocol: str
    params: dict[str, Any]
    config: dict[str, Any]  # that clients and server of the run agreed on
    settings: Settings
    names: list[str]
    labels: list[int]
    local: list[int]  # the clients whose final model was trained alone, so that no noise covers it
    history: list[Line]
    bytes: dict[str, Any]
    scores: list[float]  # of the objective, NaN where a client has no test data
    agreement: dict[str, Any] | None
    network: ChannelState
    seconds: float
    device: str


@dataclass
class FittedState:
    """All that a fitted protocol keeps."""

    learned: FittedSummary
    server: bytes  # the server's final state, packed
    clients: ClientState  # models and secrets, for the owner's eyes only


def save(protocol: ClusteringProtocol, folder: Path) -> None:
    """Write a fitted protocol; the manifest comes last and means that the folder is whole.

    Raises:
        UsageError: the folder holds releases of newcomers that the protocol's ledger lacks.
    """
    from safetensors.torch import save as encode

    kept = protocol.kept_
    _check_newcomers(protocol, folder)
    atomic_files.make_folder(folder)
    for name in (manifest.NAME, LEARNED, START):
        atomic_files.remove(folder / name)
    meta = {
        "labels": json.dumps(kept.learned.labels),
        "unshared": json.dumps(protocol.unshared_labels_),
        "model": json.dumps(kept.learned.params["model"]),
    }
    tensors = _shared_tensors(protocol)
    atomic_files.write_atomic(
        folder / MODELS, encode(tensors, {"securecluster": json.dumps(meta, sort_keys=True)})
    )
    atomic_files.write_atomic(folder / SERVER, kept.server)
    atomic_files.write_atomic(folder / CLIENTS, pack(kept.clients), 0o600)
    if not isinstance(protocol.model, str):
        atomic_files.write_atomic(
            folder / START, encode({n: t.contiguous() for n, t in protocol.start_.items()})
        )
    learned = pack(kept.learned)  # with what newcomers released, as the ledger has it
    # before the file that had it is removed
    atomic_files.write_atomic(folder / LEARNED, learned, durable=True)
    atomic_files.remove(folder / newcomers.NAME)
    written = [*ALWAYS, START] if (folder / START).exists() else ALWAYS
    manifest.write(folder, written)


def _check_newcomers(protocol: ClusteringProtocol, folder: Path) -> None:
    """Refuse a folder whose releases of newcomers would be forgotten, were its files replaced."""
    ledger, clients = protocol.ledger_, protocol.kept_.learned.config["clients"]
    advice = "load the protocol from there before it is saved there, or save to another folder"
    lacking = newcomers.NewcomerRecord(folder, clients).lacking(ledger)
    if not lacking and (folder / manifest.NAME).is_file() and (folder / LEARNED).is_file():
        try:
            there = _read_learned(folder)
        except RunFolderError as error:
            raise UsageError(
                f"{folder} holds a ledger that cannot be read, and would be lost: save to another "
                "folder"
            ) from error
        released = newcomers.newcomers_of(there.network.ledger, there.config["clients"])
        lacking = bool(released - newcomers.newcomers_of(ledger, clients))
    if lacking:
        raise UsageError(
            f"{folder} holds releases of newcomers that this protocol's ledger lacks: {advice}"
        )


def _shared_tensors(protocol: ClusteringProtocol) -> dict[str, torch.Tensor]:
    """Return the tensors of all clusters' models by name.

    A cluster without a shared model has none.
    """
    tensors = {}
    for c, state in enumerate(protocol.models_):
        for name, value in (state or {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"cluster{c}.{name}"] = value.contiguous()
    return tensors


def read_kept(folder: Path) -> FittedState:
    """Return what the fitted protocol of a folder keeps, after a check of all its files.

    Raises:
        RunFolderError: nothing to load there, or a file is missing or differs from what was
            written.
    """
    try:
        empty = not (folder / LEARNED).is_file() and not (folder / manifest.NAME).is_file()
    except OSError as error:
        raise RunFolderError(f"cannot read {folder} ({error.strerror}): check the path") from None
    if empty:
        raise RunFolderError(
            f"{folder} holds no fitted protocol (no {LEARNED}): give the folder that save wrote, "
            "or a finished run's"
        )
    marks = manifest.read(folder)
    manifest.check(folder, marks, [MODELS])
    data = {name: manifest.checked(folder, name, marks) for name in (LEARNED, SERVER, CLIENTS)}
    learned = unpack(data[LEARNED], FittedSummary)
    if learned.schema != SCHEMA:
        raise RunFolderError(
            f"{folder} was saved in schema {learned.schema}, this version reads {SCHEMA}: use the "
            "version that saved it"
        )
    return FittedState(learned, data[SERVER], unpack(data[CLIENTS], ClientState))


def read_ledger(folder: Path) -> Ledger:
    """Return the ledger of the fitted protocol of a folder, after a check of its file.

    Raises:
        RunFolderError: the file is missing or differs from what was written.
    """
    return _read_learned(folder).network.ledger


def _read_learned(folder: Path) -> FittedSummary:
    data = manifest.checked(folder, LEARNED, manifest.read(folder))
    return unpack(data, FittedSummary)


def load(kind: type[P], folder: Path, model: Any, own: dict[str, Any]) -> P:
    """Return the fitted protocol of a folder.

    `own` are hyper-parameters that are no names or numbers, whose code is not saved.
    """
    kept = read_kept(folder)
    learned = kept.learned
    if learned.protocol != kind.name:
        raise UsageError(
            f"{folder} holds the protocol {learned.protocol!r}, not {kind.name!r}: load it with "
            "that protocol's class"
        )
    names = {f.name for f in dataclasses.fields(kind)}
    if set(learned.params) != names:
        raise RunFolderError(
            f"{folder} was saved with other hyper-parameters than {kind.__name__} has: use the "
            "version that saved it"
        )
    needed = {
        name for name, value in learned.params.items() if isinstance(value, dict) and "own" in value
    }
    if set(own) != needed:
        wanted = (
            f"load it with {', '.join(f'{name}=…' for name in sorted(needed))}"
            if needed
            else "leave out all but the model"
        )
        raise UsageError(
            f"objects of your own are not saved in {folder}, only that they were used: {wanted}"
        )
    found = kind(
        **{**learned.params, **own, "model": _model(folder, learned.params["model"], model)}
    )
    found._restore_fitted(kept)
    return found


def _model(folder: Path, saved: Any, given: Any) -> Any:
    """The saved model's name, or the given module with the weights that the run started from."""
    if isinstance(saved, str):
        if given is not None:
            raise UsageError(
                f"{folder} was trained with the network {saved!r}, which needs no module: leave "
                "the model out"
            )
        return saved
    import copy

    from safetensors import SafetensorError
    from safetensors.torch import load as decode

    from securecluster.models.validation import describe

    if given is None:
        raise UsageError(
            f"{folder} was trained with a module of your own, whose code is not saved: load it "
            "with model=your module"
        )
    module = copy.deepcopy(given)
    try:
        start = manifest.checked(folder, START, manifest.read(folder))
        # `describe` compares all, extra state too
        module.load_state_dict(decode(start), strict=False)
    except (RuntimeError, AttributeError, SafetensorError):
        module = None
    if module is None or describe(module) != saved:
        raise UsageError(
            f"the given module is not the one {folder} was trained with: its layers or shapes "
            "differ"
        )
    return module
