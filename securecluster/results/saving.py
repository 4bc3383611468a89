"""Saving and loading of fitted protocols, without pickle."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from securecluster.core import atomic_files, manifest
from securecluster.core.lazy_torch import torch
from securecluster.core.number_format import enumerated
from securecluster.core.serialization import pack, unpack
from securecluster.errors import RunFolderError, UsageError
from securecluster.parties import newcomers
from securecluster.parties.client_state import ClientState
from securecluster.parties.method import Method
from securecluster.privacy import run_secret
from securecluster.results.fitted_state import FittedState, FittedSummary
from securecluster.results.preparation import write_guests
from securecluster.results.start_models import EARLIER, with_start

if TYPE_CHECKING:
    from securecluster.privacy.dp.ledger import Ledger
    from securecluster.results.fitted_state import Fitted

P = TypeVar("P", bound="Method")
SCHEMA = 8  # of fitted protocols
READ = (SCHEMA,)  # as `run_folder.READ`
LEARNED = "learned.safetensors"
SERVER = "server.safetensors"
CLIENTS = "clients.safetensors"
MODELS = "models.safetensors"
START = "start.safetensors"  # initial weights of a module of the user's own
ALWAYS = (LEARNED, MODELS, SERVER)
SAVED = b"a result that securecluster saved\n"  # content of the marker of such a folder
OWN = atomic_files.Own(
    (atomic_files.MARKER,),
    re.compile(
        "|".join(
            re.escape(name)
            for name in (
                *ALWAYS,
                CLIENTS,
                START,
                EARLIER,
                manifest.NAME,
                newcomers.NAME,
                newcomers.KEPT,
                run_secret.FILE,
            )
        )
    ),
)


def save(result: Fitted, folder: Path) -> None:
    """Write a fitted protocol to a folder, which may be that of its run.

    The manifest is written last: a folder that has one is complete.

    Args:
        result: of the run.
        folder: created if it does not exist.

    Raises:
        UsageError: the folder has releases of newcomers that the protocol's ledger lacks, or
            somebody else's files.
    """
    from safetensors.torch import save as encode

    fitted = result.kept_
    record = result._newcomers_record
    if record is not None and record.path.parent.resolve() == folder.resolve():
        # The ledger that is saved replaces the file of newcomers' releases.
        record.update(result.ledger_)
    _check_newcomers(result, folder)
    _claim(folder)
    atomic_files.remove_half_written(folder, OWN)
    meta = {
        "labels": json.dumps(fitted.learned.labels),
        "unshared": json.dumps(result.unshared_labels_),
        "model": json.dumps(fitted.learned.params["model"]),
    }
    header = {"securecluster": json.dumps(meta, sort_keys=True)}
    files = {MODELS: encode(_shared_tensors(result), header), SERVER: fitted.server}
    private = {} if fitted.of_server else {CLIENTS: pack(fitted.clients)}
    if not isinstance(result.method.model, str):
        start = {name: tensor.contiguous() for name, tensor in result._start.items()}
        files[START] = encode(start)
    if result.earlier is not None:
        files[EARLIER] = pack(result.earlier)
    files[LEARNED] = pack(fitted.learned)
    # all are complete, and on the disk, before anything of an earlier result goes
    with (
        atomic_files.staged(folder, private, atomic_files.OWNER, durable=True) as move_private,
        atomic_files.staged(folder, files, durable=True) as move_others,
    ):
        for name in (manifest.NAME, START, EARLIER, CLIENTS):
            atomic_files.remove(folder, name, OWN)
        run_secret.write(folder, fitted.secret)
        move_private()
        move_others()
    # the saved ledger contains the releases of newcomers
    for name in (newcomers.NAME, newcomers.KEPT):
        atomic_files.remove(folder, name, OWN)
    if result._guests:
        write_guests(folder, result._guests)
    manifest.write(folder, [*private, *files])


def _claim(folder: Path) -> None:
    """Make a folder, and mark it as one of ours.

    Raises:
        UsageError: somebody else's files have the names of those that are to be written.
    """
    atomic_files.make_folder(folder)
    with atomic_files.as_run_folder_error(folder, "use"):
        names = sorted(path.name for path in folder.iterdir())
    present = [name for name in names if OWN.has(PurePath(name))]
    is_marked = is_own = atomic_files.MARKER in names
    if manifest.NAME in names:  # versions up to 0.1 marked no folder
        with suppress(RunFolderError):
            is_own = LEARNED in manifest.read(folder)
    if present and not is_own:
        raise UsageError(
            f"{folder} holds {present[0]}, which is of no result that was saved there: give "
            "another folder"
        )
    if not is_marked:
        atomic_files.write_atomic(folder / atomic_files.MARKER, SAVED)


def _check_newcomers(result: Fitted, folder: Path) -> None:
    """Raise UsageError if saving to the folder would delete records of newcomers' releases."""
    ledger = result.ledger_
    clients = result.kept_.learned.config["clients"]
    record = newcomers.NewcomerRecord(folder, clients)
    lacking = record.lacking(ledger)
    has_manifest = (folder / manifest.NAME).is_file()
    has_result = (folder / LEARNED).is_file()
    if not lacking and has_manifest and has_result:
        try:
            saved = read_summary(folder)
        except RunFolderError as error:
            raise UsageError(
                f"{folder} holds a ledger that cannot be read, and would be lost: save to another "
                "folder"
            ) from error
        released = newcomers.newcomers_of(saved.network.ledger, saved.config["clients"])
        lacking = bool(released - newcomers.newcomers_of(ledger, clients))
    if lacking:
        raise UsageError(
            f"{folder} holds releases of newcomers that this protocol's ledger lacks: load the "
            "protocol from there before it is saved there, or save to another folder"
        )


def _shared_tensors(result: Fitted) -> dict[str, torch.Tensor]:
    """Return the tensors of all clusters' models by name.

    A cluster without a shared model has none.
    """
    tensors = {}
    for c, state in enumerate(result.models_):
        for name, value in (state or {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"cluster{c}.{name}"] = value.contiguous()
    return tensors


def read_kept(folder: Path) -> FittedState:
    """Return the state of the fitted protocol in a folder, after a check of all its files.

    Args:
        folder: one that `save` wrote, or that of a finished run.

    Raises:
        RunFolderError: the folder has no fitted protocol, or a file is missing or differs from what
            was written.
    """
    try:
        has_result = (folder / LEARNED).is_file()
        has_manifest = (folder / manifest.NAME).is_file()
    except OSError as error:
        raise RunFolderError(f"cannot read {folder} ({error.strerror}): check the path") from None
    # With one of them the folder is damaged, which is found below.
    if not has_result and not has_manifest:
        raise RunFolderError(
            f"{folder} holds no fitted protocol (no {LEARNED}): give the folder that save wrote, "
            "or a finished run's"
        )
    marks = manifest.read(folder)
    manifest.check(folder, marks, [MODELS])
    learned_data = manifest.checked(folder, LEARNED, marks)
    server_data = manifest.checked(folder, SERVER, marks)
    learned = unpack(learned_data, FittedSummary)
    if learned.schema not in READ:
        raise RunFolderError(
            f"{folder} was saved in schema {learned.schema}, this version reads "
            f"{enumerated('schema', READ)}: use the version that saved it"
        )
    clients = ClientState.none()
    if CLIENTS in marks:  # a server whose clients are nodes elsewhere has none
        clients = unpack(manifest.checked(folder, CLIENTS, marks), ClientState)
    return FittedState(learned, server_data, clients, run_secret.read(folder))


def read_ledger(folder: Path) -> Ledger:
    """Return the ledger of the fitted protocol in a folder, after a check of its file.

    Args:
        folder: one that `save` wrote, or that of a finished run.

    Raises:
        RunFolderError: the file is missing or differs from what was written.
    """
    return read_summary(folder).network.ledger


def read_summary(folder: Path) -> FittedSummary:
    """Return the summary of a fitted protocol, after a check of its file.

    Args:
        folder: one that `save` wrote, or that of a finished run.

    Raises:
        RunFolderError: the file is missing or differs from what was written.
    """
    data = manifest.checked(folder, LEARNED, manifest.read(folder))
    return unpack(data, FittedSummary)


def saved_protocol(cls: type[P], folder: Path, model: Any, objects: dict[str, Any]) -> P:
    """Return the protocol of a folder, with the hyper-parameters of its run.

    Args:
        cls: its `name` must be that of the saved protocol.
        folder: one that `save` wrote, or that of a finished run.
        model: the module, where the run trained one of the user's own.
        objects: other hyper-parameters that are objects of the user's own, whose code is not saved.

    Raises:
        UsageError: another protocol's folder, or other objects than the run used.
        RunFolderError: no fitted protocol, or one with hyper-parameters that it does not have.
    """
    learned = read_kept(folder).learned
    if learned.protocol != cls.name:
        raise UsageError(
            f"{folder} holds the protocol {learned.protocol!r}, not {cls.name!r}: load it with "
            "that protocol's class"
        )
    options: Any = cls
    # an option that came later has its default, by which the protocol is what it was before
    unknown = set(learned.params) - {f.name for f in dataclasses.fields(options)}
    if unknown:
        raise RunFolderError(
            f"{folder} was saved with {', '.join(sorted(unknown))}, which {cls.__name__} does not "
            "have: use the version that saved it"
        )
    _check_own_objects(folder, learned.params, objects)
    module = _model(folder, learned.params["model"], model)
    params = with_start(folder / LEARNED, learned.params)
    return cls(**{**params, **objects, "model": module})


def _check_own_objects(folder: Path, params: dict[str, Any], objects: dict[str, Any]) -> None:
    """Raise UsageError unless the user's own objects are those that the run used, by name.

    Args:
        folder: of the fitted protocol.
        params: its hyper-parameters as they were saved.
        objects: by name.
    """
    needed = set()
    for name, value in params.items():
        if isinstance(value, dict) and "own" in value:
            needed.add(name)
    if set(objects) == needed:
        return
    advice = "leave out all but the model"
    if needed:
        arguments = ", ".join(f"{name}=…" for name in sorted(needed))
        advice = f"load it with {arguments}"
    raise UsageError(
        f"objects of your own are not saved in {folder}, only that they were used: {advice}"
    )


def _model(folder: Path, saved: Any, module: Any) -> Any:
    """Return a network's name, or a copy of the module with the weights that the run started from.

    Args:
        folder: of the fitted protocol.
        saved: the hyper-parameter `model` as it was saved: a name, or a module's description.
        module: the user's module, or None.

    Raises:
        UsageError: a module that the run did not train, or none where it trained one.
    """
    if isinstance(saved, str):
        if module is not None:
            raise UsageError(
                f"{folder} was trained with the network {saved!r}, which needs no module: leave "
                "the model out"
            )
        return saved
    import copy

    from safetensors import SafetensorError
    from safetensors.torch import load as decode

    from securecluster.models.validation import describe

    if module is None:
        raise UsageError(
            f"{folder} was trained with a module of your own, whose code is not saved: load it "
            "with model=your module"
        )
    restored = copy.deepcopy(module)
    fits = True
    try:
        start = manifest.checked(folder, START, manifest.read(folder))
        # Not strict: the comparison below covers all tensors, extra state too.
        restored.load_state_dict(decode(start), strict=False)
    except (RuntimeError, AttributeError, SafetensorError):
        fits = False
    if not fits or describe(restored) != saved:
        raise UsageError(
            f"the given module is not the one {folder} was trained with: its layers or shapes "
            "differ"
        )
    return restored
