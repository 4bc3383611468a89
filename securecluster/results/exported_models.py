"""Loader of exported models: it needs torch, safetensors and the files beside it, nothing else.

`clusters.json` says what samples and outputs are, and which client has which model, unless each
client alone knows that: then load(cluster=0), or a client's own model where it was exported.

    model = load("north")             # of the cluster of the client called north
    labels = predict(model, samples)  # by name

Where the run trained a module of your own, give it: load("north", module=MyNetwork()).
"""

import json
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

FOLDER = Path(__file__).parent
# of a preparation
NUMBERS = (
    "seen", "last", "fill", "source", "mark", "low", "high", "centre", "width", "target_centre",
    "target_width",
)  # fmt: skip


class Prepared(nn.Module):
    """Network that takes samples as clients have them, and prepares them itself.

    Args:
        network: takes prepared samples, in the type of its weights.
        numbers: of the preparation, in double precision: values become (x - centre) / width, those
            beyond `low` and `high`, if there are any, being cut off before; a feature of width 0
            was constant, and counts for nothing. Before all this, where there is `fill`, it stands
            in for NaN, and each feature is the column `source`, or 1 where that has the value
            `mark`, if this is none. With `last` images have their channels last. Outputs of a
            regression are in the targets' own numbers, times `target_width` plus `target_centre`.
        dtype: of the weights.

    Attributes:
        seen: the smallest and the largest value that the client trained on in each column (2, k);
            None where they are not known. `forward` warns of rows far outside of them.
    """

    seen: torch.Tensor | None
    fill: torch.Tensor
    source: torch.Tensor
    mark: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    centre: torch.Tensor
    width: torch.Tensor
    target_centre: torch.Tensor
    target_width: torch.Tensor

    def __init__(
        self, network: nn.Module, numbers: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.network = network
        self.dtype = dtype
        self.bounded = "low" in numbers
        self.fills = "fill" in numbers
        self.turns = "last" in numbers
        self.scales = "centre" in numbers
        self.restores = "target_centre" in numbers
        for name, values in {"seen": None, **numbers}.items():
            self.register_buffer(name, values)

    def prepared(self, x: torch.Tensor) -> torch.Tensor:
        """Return samples (n, …) as the network takes them; give large numbers as doubles."""
        if self.turns:
            x = x.movedim(-1, 1)
        if not self.scales:
            return x.to(self.dtype)
        x = x.double()
        if self.fills:
            x = torch.where(x.isnan(), self.fill, x)[:, self.source.long()]
            x = torch.where(self.mark.isnan(), x, (x == self.mark).double())
        if self.bounded:
            x = x.clamp(self.low, self.high)
        constant = self.width == 0
        scaled = (x - self.centre) / self.width.masked_fill(constant, 1.0)
        # the run's clients have samples in single precision
        return scaled.masked_fill(constant, 0.0).float().to(self.dtype)

    def strangers(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return where samples (n, k) are none of a column's categories, NaN for numbers (n, k)."""
        if not self.fills:
            return None
        values = x.double()
        found = torch.full_like(values, torch.nan)
        for column in set(self.source[~self.mark.isnan()].long().tolist()):
            known = self.mark[self.source == column]
            is_known = torch.isin(values[:, column], known) | values[:, column].isnan()
            found[:, column] = (~is_known).double()
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's outputs for samples (n, …)."""
        # a graph that is being written cannot look at its samples
        if self.seen is not None and not torch.compiler.is_compiling():
            note_far(x, self.seen, self.strangers(x))
        outputs: torch.Tensor = self.network(self.prepared(x))
        if not self.restores:
            return outputs
        # a network may have more outputs than there are targets
        known = outputs[..., : len(self.target_centre)].double()
        return known * self.target_width + self.target_centre


def note_far(x: torch.Tensor, seen: torch.Tensor, strangers: torch.Tensor | None = None) -> None:
    """Warn of samples far outside of what a client trained on.

    They lie beyond its smallest or largest value by more than the distance between these two, or
    are none of a column's categories.

    Args:
        x: samples (n, k).
        seen: the smallest and the largest value of each column (2, k).
        strangers: as `Prepared.strangers` returns it.
    """
    low, high = seen
    margin = high - low + seen.abs().amax(0) * torch.finfo(torch.float32).eps
    far = (x < low - margin) | (x > high + margin)
    if strangers is not None:
        far = torch.where(strangers.isnan(), far, strangers == 1)
    columns = far.any(0).nonzero().flatten().tolist()
    if columns:
        warnings.warn(
            f"values in {int(far.any(1).sum())} of {len(x)} rows lie far outside of what the "
            f"client trained on, in columns {columns} from 0: its model has seen nothing like them",
            stacklevel=3,
        )


@cache
def content() -> dict[str, Any]:
    """Return the content of `clusters.json`."""
    text = (FOLDER / "clusters.json").read_text(encoding="utf-8")
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def network() -> nn.Module:
    """Return the network with weights at random."""
    raise TypeError("the run trained a module of your own: give load one of its class, module=…")


def load(
    client: object = None, cluster: int | None = None, module: nn.Module | None = None
) -> nn.Module:
    """Return the model of a client's cluster, or the client's own where it was exported.

    Args:
        client: its name.
        cluster: number of a cluster, in place of a client.
        module: of the run's class, where it was no network of the project; its weights are
            replaced.

    Returns:
        The module in evaluation mode. It takes samples as the run's clients have them, columns in
        the order of "features" in `clusters.json`.
    """
    exported = content()
    file = _file_of(exported, client, cluster)
    state = load_file(FOLDER / file)
    numbers = {name: state.pop(f"prepare.{name}") for name in NUMBERS if f"prepare.{name}" in state}
    if exported["own_numbers"] and "centre" not in numbers and "target_centre" not in numbers:
        raise ValueError(
            "each client of the run standardised its numbers by its own mean and deviation, which "
            "are beside its own model alone: export it with clients=[its name], and load(its name)"
        )
    # all models share frozen tensors, if there are any
    if exported["frozen"]:
        state.update(load_file(FOLDER / exported["frozen"]))
    model = network() if module is None else module
    dtype = getattr(torch, exported["dtype"])
    model = model.to(dtype)
    missing, unexpected = model.load_state_dict(state, strict=False)
    wrong = [name for name in missing if not name.endswith("_extra_state")] + unexpected
    if wrong:
        raise ValueError(f"the module has other tensors than the run's, such as {wrong[0]}")
    return (Prepared(model, numbers, dtype) if numbers else model).eval()


def _file_of(exported: dict[str, Any], client: object, cluster: int | None) -> str:
    """Return the file of a client's or a cluster's model."""
    if cluster is None and str(client) in exported["own"]:
        return str(exported["own"][str(client)])
    if cluster is None:
        if exported["clients"] is None:
            raise KeyError(
                f"{client} alone knows its cluster, so this export does not say it: "
                "load(cluster=...) takes its number"
            )
        cluster = exported["clients"][str(client)]
        if str(client) in exported["personal"]:
            raise KeyError(
                f"{client} has a model of its own, which was not exported: "
                f"load(cluster={cluster}) is its cluster's"
            )
    if str(cluster) not in exported["clusters"]:
        raise KeyError(f"cluster {cluster} has no exported model: its clients trained alone")
    return str(exported["clusters"][str(cluster)])


def predict(model: nn.Module, x: torch.Tensor) -> list[object]:
    """Return the label of each sample, or its labels 0 and 1, or its numbers of a regression.

    Args:
        model: of `load`, for such a task.
        x: samples (n, …), columns in the order of "features" in `clusters.json`.
    """
    classes = content()["classes"]
    with torch.no_grad():
        if not isinstance(model, Prepared):
            x = x.to(getattr(torch, content()["dtype"]))
        outputs = model(x)
    task = content()["objective"]
    if task == "binary":
        return [classes[is_second] for is_second in (outputs[:, 0] > 0).tolist()]
    known = outputs[:, : len(classes)]
    if task == "classification":
        return [classes[k] for k in known.argmax(-1).tolist()]
    rows: list[object] = (known.double() if task == "regression" else (known > 0).int()).tolist()
    return rows
