"""Loader of exported models: it needs torch, safetensors and the files beside it, nothing else.

`clusters.json` says what samples and outputs are, and which client has which model, unless each
client alone knows that: then load(cluster=0), or a client's own model where it was exported.

    model = load("north")             # of the cluster of the client called north
    labels = predict(model, samples)  # by name

Where the run trained a module of your own, give it: load("north", module=MyNetwork()).
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

FOLDER = Path(__file__).parent


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
        The module in evaluation mode.
    """
    exported = content()
    file = None
    if cluster is None:
        file = exported["own"].get(str(client))
    if cluster is None and file is None:
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
    file = file or exported["clusters"].get(str(cluster))
    if file is None:
        raise KeyError(f"cluster {cluster} has no exported model: its clients trained alone")
    state = load_file(FOLDER / file)
    # all models share frozen tensors, if there are any
    if exported["frozen"]:
        state.update(load_file(FOLDER / exported["frozen"]))
    model = network() if module is None else module
    model = model.to(getattr(torch, exported["dtype"]))
    missing, unexpected = model.load_state_dict(state, strict=False)
    wrong = [name for name in missing if not name.endswith("_extra_state")] + unexpected
    if wrong:
        raise ValueError(f"the module has other tensors than the run's, such as {wrong[0]}")
    return model.eval()


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Return samples on the scale that the models take, which is "scaling" in `clusters.json`.

    Args:
        x: samples (n, …), as the run's clients have them.
    """
    scaling = content()["scaling"]
    if scaling is None:
        return x
    if scaling["kind"] == "client":
        raise ValueError(
            "each client of the run standardised its features by its own mean and deviation: do so "
            "with x, and call the model itself"
        )
    low = torch.tensor(scaling["low"], dtype=torch.float64)
    high = torch.tensor(scaling["high"], dtype=torch.float64)
    return (x.double().clamp(low, high) - (low + high) / 2) / ((high - low) / 2)


def predict(model: nn.Module, x: torch.Tensor) -> list[object]:
    """Return the label of each sample.

    Args:
        model: of `load`, for a classification.
        x: samples (n, …), columns in the order of "features" in `clusters.json`.
    """
    classes = content()["classes"]
    with torch.no_grad():
        outputs = model(scaled(x).to(getattr(torch, content()["dtype"])))
    return [classes[k] for k in outputs[:, : len(classes)].argmax(-1).tolist()]
