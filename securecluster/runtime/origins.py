"""What the rows of a sum follow from: the public numbers that a server has sent their clients.

A server that sends other models to other members of one secure sum reads single updates of it
(Pasquini, Francati & Ateniese 2022). So pads, and the tags of ciphertexts, also follow from a
digest of what each member was sent: where two members were sent different numbers, nothing adds up.

Honest clients have equal digests, to the bit and on every machine, since only bytes that a server
sent are digested, and never what a processor computed from them: the fields of a query that are the
same for all its recipients by their kind, and what a client method binds (`CallContext.bind`), such
as the chain of all averages behind a model. Which of these a client was sent in which message does
not matter: who missed rounds has the same chain once it has caught up.

The server knows what it has sent, so it may see a digest. It stops different models, and not one
bad model for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Batched, Shared
from securecluster.privacy.masking.pads import encoded, transcript

SIZE = 32  # bytes of a digest


def digest(values: torch.Tensor) -> bytes:
    """Return a digest of a tensor's type, shape and bits, 32 bytes.

    Zeros of two signs differ, and so do two kinds of NaN: so may what follows from them.

    Args:
        values: any tensor.
    """
    array = values.detach().cpu().contiguous().numpy()
    about = transcript("securecluster tensor v1", array.dtype.str, *array.shape)
    hasher = hashlib.sha256(about)
    hasher.update(array.data)  # without a copy: averages may be large
    return hasher.digest()


def chained(earlier: bytes, *components: bytes | str | int) -> bytes:
    """Return the digest of an earlier digest and what came next, 32 bytes.

    Args:
        earlier: the digest so far; empty at the beginning.
        components: what came next.
    """
    return hashlib.sha256(transcript("securecluster origin v1", earlier, *components)).digest()


def origins_of(query: Any, clients: Sequence[int], bound: Mapping[int, bytes]) -> list[bytes]:
    """Return the digest of what each client's reply follows from, 32 bytes each.

    Args:
        query: with a frame for each client.
        clients: their numbers.
        bound: what the client method has bound, by client.
    """
    common = _of_all(query)
    # clients of one sum have the same, as a rule
    digest_of: dict[bytes, bytes] = {}
    for origin in {bound.get(client, b"") for client in clients}:
        digest_of[origin] = chained(common, origin)
    return [digest_of[bound.get(client, b"")] for client in clients]


def _of_all(query: Any) -> bytes:
    """Return a digest of the fields of a query that are the same in all its frames."""
    text = encoded(type(query).__name__)
    for name, value in vars(query).items():
        if isinstance(value, Batched):
            continue
        content = repr(value).encode()
        if isinstance(value, Shared):
            content = digest(value.value)
        text += encoded(name) + encoded(content)
    return hashlib.sha256(text).digest()
