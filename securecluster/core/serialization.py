"""Dataclass trees (of tensors, numbers, strings, lists, dicts) to bytes and back: what checkpoints
and run folders are made of.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

from securecluster.core.lazy_torch import torch
from securecluster.errors import RunFolderError

S = TypeVar("S")


def pack(tree: Any) -> bytes:
    """A dataclass tree as one safetensors file: tensors beside the JSON of everything else."""
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}

    def lift(tensor: torch.Tensor) -> dict[str, str]:
        name = f"t{len(tensors)}"
        tensors[name] = tensor.detach().cpu().contiguous().clone()
        return {"tensor": name}

    text = json.dumps(_converter().unstructure(tree), separators=(",", ":"), default=lift)
    return bytes(save(tensors, {"state": text}))


def unpack(data: bytes, kind: type[S]) -> S:
    """The inverse of `pack`; fields unknown to `kind`, or missing, are refused."""
    import cattrs
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        text = json.loads(data[8 : 8 + length])["__metadata__"]["state"]
        tree = json.loads(
            text,
            object_hook=lambda found: (
                tensors[found["tensor"]] if set(found) == {"tensor"} else found
            ),
        )
        found: S = _converter().structure(tree, kind)
        return found
    except (
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
        cattrs.BaseValidationError,
    ) as error:
        raise RunFolderError(
            f"a saved {kind.__name__} does not parse ({type(error).__name__}): start the run anew"
        ) from None


def plain(tree: Any) -> Any:
    """Return a dataclass tree without tensors as what JSON can hold."""
    return _converter().unstructure(tree)


def structured(data: Any, kind: type[S]) -> S:
    """Return the dataclass tree that `plain` was given.

    Raises:
        ValueError: the data do not fit the class.
    """
    import cattrs

    try:
        found: S = _converter().structure(data, kind)
    except cattrs.BaseValidationError as error:
        raise ValueError(str(error)) from None
    return found


@cache
def _converter() -> Any:
    """Dataclass trees to plain ones and back; their tensors pass unchanged."""
    import cattrs

    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(torch.Tensor, lambda tensor: tensor)
    converter.register_unstructure_hook(bytes, bytes.hex)
    converter.register_structure_hook(torch.Tensor, _tensor)
    converter.register_structure_hook(bytes, lambda text, _: bytes.fromhex(text))
    return converter


def _tensor(value: Any, _: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError("a tensor is missing")
    return value
