"""Serialization of dataclass trees, the content of checkpoints and run folders.

A tree consists of dataclasses, tensors, numbers, strings, lists and dicts.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

from securecluster.core.lazy_torch import torch
from securecluster.errors import RunFolderError

S = TypeVar("S")


def pack(tree: Any) -> bytes:
    """Return a dataclass tree as one safetensors file.

    The file holds the tensors, and the JSON text of everything else in its metadata.

    Args:
        tree: an instance of a dataclass.
    """
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}

    def replace_tensor(tensor: torch.Tensor) -> dict[str, str]:
        name = f"t{len(tensors)}"
        # a clone, since safetensors refuses tensors that share memory
        tensors[name] = tensor.detach().cpu().contiguous().clone()
        return {"tensor": name}

    plain_tree = _converter().unstructure(tree)
    text = json.dumps(plain_tree, separators=(",", ":"), default=replace_tensor)
    return bytes(save(tensors, {"state": text}))


def unpack(data: bytes, tree_type: type[S]) -> S:
    """Return the dataclass tree that `pack` was called with.

    Args:
        data: the result of `pack`.
        tree_type: class of the tree.

    Raises:
        RunFolderError: damaged data, or fields that the class lacks or that are missing.
    """
    import cattrs
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
        plain_tree = _restore_tensors(_metadata(data), tensors)
        tree: S = _converter().structure(plain_tree, tree_type)
        return tree
    except (
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
        cattrs.BaseValidationError,
    ) as error:
        raise _damaged(tree_type, error) from None


def _metadata(data: bytes) -> str:
    """Return the text that `pack` stored in the header of a safetensors file."""
    # 8 bytes with the header's length come first, then the header in JSON
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text: str = header["__metadata__"]["state"]
    return text


def _restore_tensors(text: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a parsed tree in which each {"tensor": name} is replaced by the tensor.

    Args:
        text: the tree in JSON.
        tensors: all tensors of the tree by name.
    """

    def restore_tensor(node: dict[str, Any]) -> Any:
        if set(node) == {"tensor"}:
            return tensors[node["tensor"]]
        return node

    return json.loads(text, object_hook=restore_tensor)


def plain(tree: Any) -> Any:
    """Return a dataclass tree without tensors as a value that JSON can represent."""
    return _converter().unstructure(tree)


def structured(data: Any, tree_type: type[S]) -> S:
    """Return the dataclass tree that `plain` was called with.

    Args:
        data: the result of `plain`.
        tree_type: class of the tree.

    Raises:
        ValueError: the data do not fit the class.
    """
    import cattrs

    try:
        tree: S = _converter().structure(data, tree_type)
    except cattrs.BaseValidationError as error:
        raise ValueError(str(error)) from None
    return tree


def restored(data: Any, tree_type: type[S]) -> S:
    """Return a part of a packed tree whose class only its user knows.

    Args:
        data: as `unpack` left it, in a field of type Any.
        tree_type: class of the part.

    Raises:
        RunFolderError: the data do not fit the class.
    """
    try:
        return structured(data, tree_type)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(tree_type, error) from None


def _damaged(tree_type: type, error: Exception) -> RunFolderError:
    """Return the error for a tree that cannot be read."""
    return RunFolderError(
        f"a saved {tree_type.__name__} does not parse ({type(error).__name__}): start the run anew"
    )


def typed(content: Any, tree_type: type[S]) -> S:
    """Return a dataclass, or a list, of JSON values whose types are already those of its fields.

    Args:
        content: as JSON was read; fields that it lacks have their defaults.
        tree_type: the class.

    Raises:
        ValueError: a value of another type, or an unknown field.
    """
    tree = structured(content, tree_type)
    # a text would become a number, and a number a text
    written = json.loads(json.dumps(plain(tree)))
    if isinstance(content, dict):
        written = {name: written[name] for name in content}
    if written != content:
        raise ValueError("values of other types")
    return tree


@cache
def _converter() -> Any:
    """Return the converter between dataclass trees and plain ones; tensors pass unchanged."""
    import cattrs

    # a checkpoint of another version has other fields, and must not be read in part
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(torch.Tensor, lambda tensor: tensor)
    converter.register_unstructure_hook(bytes, bytes.hex)
    converter.register_structure_hook(torch.Tensor, _check_tensor)
    converter.register_structure_hook(bytes, lambda text, _: bytes.fromhex(text))
    return converter


def _check_tensor(value: Any, _: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError("a tensor is missing")
    return value
