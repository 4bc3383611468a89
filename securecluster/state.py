"""Dataclass trees (of tensors, numbers, strings, lists, dicts) to bytes and back: what checkpoints and run folders are made of."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from securecluster.backend import torch
from securecluster.errors import RunFolderError

S = TypeVar("S")


def pack(tree: Any) -> bytes:
    """A dataclass tree as one safetensors file: tensors beside the JSON of everything else."""
    import cattrs
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}

    def lift(tensor: torch.Tensor) -> dict[str, str]:
        name = f"t{len(tensors)}"
        tensors[name] = tensor.detach().cpu().contiguous().clone()
        return {"tensor": name}

    converter = cattrs.Converter()
    converter.register_unstructure_hook(torch.Tensor, lift)
    converter.register_unstructure_hook(bytes, bytes.hex)
    text = json.dumps(converter.unstructure(tree), separators=(",", ":"))
    return bytes(save(tensors, {"state": text}))


def unpack(data: bytes, kind: type[S]) -> S:
    """The inverse of `pack`; fields unknown to `kind`, or missing, are refused."""
    import cattrs
    from safetensors import SafetensorError
    from safetensors.torch import load

    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(bytes, lambda text, _: bytes.fromhex(text))
    try:
        tensors = load(data)
        converter.register_structure_hook(torch.Tensor, lambda ref, _: tensors[ref["tensor"]])
        converter.register_structure_hook_func(lambda t: t is Any, lambda tree, _: _settle(tree, tensors))
        length = int.from_bytes(data[:8], "little")
        return converter.structure(json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["state"]), kind)
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, cattrs.BaseValidationError) as error:
        raise RunFolderError(f"a saved {kind.__name__} does not parse ({type(error).__name__}): start the run anew") from None


def _settle(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """An untyped tree with its tensors put back."""
    if isinstance(tree, dict):
        if set(tree) == {"tensor"}:
            return tensors[tree["tensor"]]
        return {k: _settle(v, tensors) for k, v in tree.items()}
    return [_settle(v, tensors) for v in tree] if isinstance(tree, list) else tree
