"""Sealing rows client to client: the server relays them and cannot read them, the run's other
clients can.

Every client of a run holds the seed that the key agreement shares, so one sealed row serves all of
them: the client sends it once, not once a peer. That is as much as a seal to each peer would hide,
since every peer is to read the row: what one client tells the server, the server knows. AES-SIV
(RFC 5297) is deterministic: a client that is asked again sends the same bytes, and no number may be
used only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

OVERHEAD = 16  # bytes that a sealed row is longer


class Seal:
    """AES-256-SIV under a key from the shared seed. Bound into a row: the run, the method and
    field, who sent it, and in which call.

    Args:
        run: the hash of the run's configuration.
    """

    def __init__(self, run: str) -> None:
        self._run = run.encode()
        self._siv: AESSIV | None = None

    def __repr__(self) -> str:
        return "Seal(seed hidden)"

    def unlock(self, seed: bytes) -> None:
        """Hand in the 32-byte seed that the clients agreed on."""
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV
        from cryptography.hazmat.primitives.hashes import SHA512
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        self._siv = AESSIV(
            HKDF(SHA512(), 64, salt=None, info=b"securecluster seal v2").derive(seed)
        )

    def close(
        self, rows: torch.Tensor, ids: Sequence[int], step: int, method: str, field: str
    ) -> torch.Tensor:
        """Rows (b, …) of the clients `ids`, each sealed: (b, n) uint8, where n is a row's bytes and
        OVERHEAD.

        Args:
            step: of the call. method: that it asks for. field: of the reply.
        """
        boxes = []
        for row, i in zip(rows, ids, strict=True):
            box = self._ready().encrypt(
                row.cpu().numpy().tobytes(), self._context(i, step, method, field)
            )
            boxes.append(torch.from_numpy(np.frombuffer(box, np.uint8).copy()))
        return torch.stack(boxes)

    def open(
        self,
        boxes: torch.Tensor,
        ids: Sequence[int],
        step: int,
        method: str,
        field: str,
        like: torch.Tensor,
    ) -> torch.Tensor:
        """The rows (b, …) in boxes (b, n) that the clients `ids` sealed as a field of their replies
        to a method in call `step`.

        Args:
            like: a tensor of a row's shape and type, where the rows are to lie.

        Raises:
            FrameError: a box that was altered, or is another client's, call's, field's or run's, or
                holds a row of another size.
        """
        return torch.stack(
            [
                self._row(box, i, self._context(i, step, method, field), like)
                for box, i in zip(boxes, ids, strict=True)
            ]
        )

    def _row(
        self, box: torch.Tensor, client: int, context: list[bytes], like: torch.Tensor
    ) -> torch.Tensor:
        from cryptography.exceptions import InvalidTag

        try:
            data = bytearray(self._ready().decrypt(box.cpu().numpy().tobytes(), context))
        except InvalidTag:
            raise FrameError(
                f"what client {client} sealed cannot be opened: it was altered on its way, start a "
                "new run"
            ) from None
        if len(data) != like.numel() * like.element_size():
            raise FrameError(
                f"what client {client} sealed has {len(data)} bytes: both sides must run the same "
                "configuration"
            )
        return torch.frombuffer(data, dtype=like.dtype).view(like.shape).to(like.device)

    def _ready(self) -> AESSIV:
        if self._siv is None:
            raise UsageError(
                "this client has no seed to seal with yet: it must take part in the key agreement "
                "first"
            )
        return self._siv

    def _context(self, client: int, step: int, method: str, field: str) -> list[bytes]:
        return [self._run, method.encode(), field.encode(), b"%d" % client, b"%d" % step]
