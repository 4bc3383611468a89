"""Export of a finished run's models, a file a cluster, to be used without this package.

`securecluster.results.exported_models` is the loader file that is written beside them. Networks of
the project are written into it as the expression of torch's layers that makes them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.core import atomic_files
from securecluster.core.client_names import Client, ClientNames
from securecluster.core.lazy_torch import torch
from securecluster.data.scaling import Scaling
from securecluster.errors import UsageError
from securecluster.models.objectives import Language
from securecluster.results.export_folder import FROZEN, LOADER, publish
from securecluster.results.preparation import Numbers, of_rows, own_numbers, preparation, seen_by

if TYPE_CHECKING:
    from securecluster.results.fitted_state import Fitted

FORMATS = ("safetensors", "onnx")
# the loader's own LSTM layer: torch's, whose weights have the names of the project's
LSTM_LAYER = '''
class LSTM(nn.LSTM):
    """One LSTM layer: x (n, T, inputs) -> (n, T, cells)."""

    def __init__(self, inputs: int, cells: int) -> None:
        super().__init__(inputs, cells, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all steps."""
        return super().forward(x)[0]
'''

LABELS_LEFT_OUT = (
    "the export does not say which client is in which cluster, since each client alone knows that: "
    "load models by cluster, or export with labels=True where its readers may know it"
)
State = Mapping[str, Any]


def export(
    fitted: Fitted, folder: Path, clients: Sequence[Client], form: str, labels: bool = False
) -> dict[str, Any]:
    """Write the clusters' models, and those of some clients, to a folder.

    Args:
        fitted: the result of the run.
        folder: new or empty, or of an earlier export, which is replaced.
        clients: whose own models are written, too.
        form: "safetensors" or "onnx".
        labels: also write each client's cluster where the client alone knows it.

    Returns:
        The content of `clusters.json`.

    Raises:
        UsageError: an unknown form, packages that are missing, or a folder of something else.
    """
    if form not in FORMATS:
        raise UsageError(f"format {form!r} is unknown: choose {' or '.join(FORMATS)}")
    if form == "onnx":
        _check_onnx(fitted)
    states: dict[str, State] = {}
    content = _content(fitted, form, labels)
    config = fitted.kept_.learned.config
    numbers: dict[str, Numbers | None] = {}
    own_alone = of_rows(config)
    shared = None if own_alone else preparation(config, own_numbers(fitted.kept_, None))
    for c, state in enumerate(fitted.models_):
        # a graph cannot refuse samples that nobody prepared
        if state is not None and not (own_alone and form == "onnx"):
            content["clusters"][str(c)] = f"cluster{c}.{form}"
            states[f"cluster{c}.{form}"] = state
            numbers[f"cluster{c}.{form}"] = None if own_alone else shared
    names = ClientNames([*fitted.kept_.learned.names, *fitted._guests])
    for client in [clients] if isinstance(clients, str) else clients:
        state = fitted.model_of(client)
        position = names.position(client)
        file = f"client{position}.{form}"
        content["own"][names.names[position]] = file
        states[file] = state
        own = fitted._own(client)
        # a graph without a preparation takes samples as the network does
        of_range = {} if form == "onnx" else seen_by(own)
        numbers[file] = preparation(config, own) or of_range or None
    if not states:
        fitted.kept_.check_clients()
        reason = "no cluster shares a model"
        if own_alone:
            reason = "each client scaled its features by numbers of its own"
        raise UsageError(f"{reason}: name the clients whose own to export")
    publish(folder, content, lambda target: _write(fitted, target, content, states, numbers))
    return content


def _write(
    fitted: Fitted,
    folder: Path,
    content: dict[str, Any],
    states: Mapping[str, State],
    numbers: Mapping[str, Numbers | None],
) -> None:
    """Write the files of an export to an empty folder.

    Args:
        fitted: the result of the run.
        folder: to write to.
        content: of `clusters.json`, to which the file of shared tensors is added.
        states: `state_dict` of each model, by its file.
        numbers: of the preparation of its samples, by its file.
    """
    if content["format"] == "onnx":
        _write_onnx(fitted, folder, states, numbers)
    else:
        content["frozen"] = _write_tensors(fitted, folder, states, numbers)
        atomic_files.write_atomic(folder / LOADER, _loader(fitted).encode())


def _content(fitted: Fitted, form: str, labels: bool) -> dict[str, Any]:
    """Return what `clusters.json` says of the run, without its files.

    Args:
        fitted: the result of the run.
        form: of the files.
        labels: also each client's cluster where the client alone knows it.
    """
    learned = fitted.kept_.learned
    clients = None
    personal = None
    if labels or fitted.method.observer.server_knows_labels:
        clients = dict(zip(learned.names, fitted.labels_.tolist(), strict=True))
        personal = _personal(fitted)
    return {
        "format": form,
        "objective": fitted.network_.objective.kind,
        "dtype": learned.config["dtype"],
        "shape": learned.config["shape"],
        "features": learned.config.get("feature_names"),
        "scaling": learned.config.get("scaling"),
        "own_numbers": of_rows(learned.config),
        "classes": fitted.classes_.tolist(),
        "clients": clients,
        "clusters": {},
        "own": {},
        "personal": personal,
        "frozen": None,
    }


def _personal(fitted: Fitted) -> list[str]:
    """Return the names of clients whose own model is not that of their cluster."""
    personal = []
    names = fitted.kept_.learned.names
    index = fitted.client_models_.index or ()
    for position in range(len(index)):
        own = fitted.network_.views(fitted.client_models_.row(position).cpu())
        shared = fitted.models_[fitted.labels_[position]]
        if shared is None or not all(torch.equal(own[name], shared[name]) for name in own):
            personal.append(names[position])
    return personal


def _write_tensors(
    fitted: Fitted, folder: Path, states: Mapping[str, State], numbers: Mapping[str, Numbers | None]
) -> str | None:
    """Write what each model has trained, and the tensors that all share, once.

    Args:
        fitted: the result of the run.
        folder: to write to.
        states: `state_dict` of each model, by its file.
        numbers: of the preparation of its samples, by its file.

    Returns:
        The file of the shared tensors; None where there are none.
    """
    from safetensors.torch import save

    trained = set()
    for name, tensor in fitted.network_.module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
            trained.add(name)
    frozen: dict[str, torch.Tensor] = {}
    for file, state in states.items():
        prepares = numbers[file] or {}
        own = {f"prepare.{name}": values for name, values in prepares.items()}
        for name, value in state.items():
            # get_extra_state may return anything
            if not isinstance(value, torch.Tensor):
                continue
            target = own if name in trained else frozen
            target[name] = value.contiguous()
        atomic_files.write_atomic(folder / file, save(own))
    if not frozen:
        return None
    atomic_files.write_atomic(folder / FROZEN, save(frozen))
    return FROZEN


def _loader(fitted: Fitted) -> str:
    """Return the text of the loader file, with the network if it is one of the project's."""
    from securecluster.models.validation import named_module
    from securecluster.results import exported_models

    text = inspect.getsource(exported_models)
    if not isinstance(fitted.method.model, str):
        return text
    config = fitted.kept_.learned.config
    network = fitted.method.training.network(fitted.method)
    module = named_module(
        network, tuple(config["shape"]), config["classes"], fitted.network_.objective
    )
    # in place of the error for a module of the user's own
    refusal = re.compile(r"^    raise TypeError\(.*\)$", re.MULTILINE)
    makes_network = f"    return {_expression(module, 1)}"
    return refusal.sub(lambda line: makes_network, text) + _classes_of(module)


def _expression(module: torch.nn.Module, depth: int) -> str:
    """Return the expression that makes a module of torch's layers and the project's.

    Args:
        module: one of the project's networks, or a part of it.
        depth: of the indentation.
    """
    name = type(module).__name__
    if not _is_own(module):
        name = f"nn.{name}"
    described = module.extra_repr()
    children = [] if described else list(module.children())
    if not children:
        return f"{name}({described})"
    indent = "    " * depth
    lines = [f"{indent}    {_expression(child, depth + 1)},\n" for child in children]
    return f"{name}(\n{''.join(lines)}{indent})"


def _is_own(module: torch.nn.Module) -> bool:
    """Return whether a module is of a class of this project."""
    return type(module).__module__.startswith("securecluster.")


def _classes_of(module: torch.nn.Module) -> str:
    """Return the source of the project's classes in a network, which need torch alone."""
    from securecluster.models import sequence_architectures
    from securecluster.models.recurrent import LSTM

    parts: dict[str, str] = {}
    for layer in module.modules():
        if isinstance(layer, LSTM):
            constants = (
                f"MIDDLE = {sequence_architectures.MIDDLE}\n"
                f"SPREAD = {sequence_architectures.SPREAD}\n"
            )
            parts["LSTM"] = f"{constants}\n{LSTM_LAYER}"
        elif _is_own(layer):
            parts[type(layer).__name__] = inspect.getsource(type(layer))
    return "".join(f"\n\n{source}" for source in parts.values())


def _check_onnx(fitted: Fitted) -> None:
    """Raise UsageError unless the network is torch's, and the packages of its exporter are there.

    Args:
        fitted: the result of the run.
    """
    from importlib.util import find_spec

    if not fitted.network_.has_gradients:
        raise UsageError(
            "a ForeignModel is no graph of torch's: export safetensors, or convert its arrays_of"
        )
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"format onnx needs {' and '.join(missing)}: pip install {' '.join(missing)}, or "
            "export safetensors"
        )


def _write_onnx(
    fitted: Fitted, folder: Path, states: Mapping[str, State], numbers: Mapping[str, Numbers | None]
) -> None:
    """Write each model as an ONNX graph from samples (n, …) to outputs (n, …).

    Args:
        fitted: the result of the run.
        folder: to write to.
        states: `state_dict` of each model, by its file.
        numbers: of the preparation of its samples, by its file; graphs that prepare samples
            themselves take doubles.
    """
    from securecluster.results.predictions import module_with

    config = fitted.kept_.learned.config
    objective = fitted.network_.objective
    # two samples: exporters take an axis of one for constant
    scaling = Scaling.read(config.get("scaling"))
    shape = config["shape"] if scaling is None else scaling.given_shape(config["shape"])
    samples = torch.zeros(2, *shape, dtype=getattr(torch, config["dtype"]))
    if objective.kind == Language.kind:
        samples = samples.long()
    for file, state in states.items():
        module = module_with(fitted.method, config, objective, state, numbers[file])
        program = torch.onnx.export(
            module,
            (samples if numbers[file] is None else samples.double(),),
            input_names=["samples"],
            output_names=["outputs"],
            dynamic_shapes=({0: torch.export.Dim("n")},),
            dynamo=True,
            verbose=False,
        )
        assert program is not None  # dynamo returns one
        program.save(str(folder / file))
