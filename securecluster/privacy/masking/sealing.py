"""Sealing of rows client to client: the server relays them and cannot read them.

Every client of a run has the seed that the key agreement shares, so one sealed row serves all of
them: the client sends it once, not once for each peer. A seal to each peer would not hide more,
since every peer is to read the row: a row that one client reveals to the server is known to it.
AES-SIV (RFC 5297) is deterministic: a client that is asked again sends the same bytes, and there is
no nonce that may be used only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

# bytes by which a sealed row is longer
OVERHEAD = 16


class Seal:
    """AES-256-SIV under a key from the shared seed.

    Bound into each row are the run, the method and field, the sender and the call.

    Args:
        run: hash of the run's configuration.
    """

    def __init__(self, run: str) -> None:
        self._run = run.encode()
        self._siv: AESSIV | None = None

    def __repr__(self) -> str:
        return "Seal(seed hidden)"

    def unlock(self, seed: bytes) -> None:
        """Set the seed that the clients agreed on.

        Args:
            seed: 32 secret bytes.
        """
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV
        from cryptography.hazmat.primitives.hashes import SHA512
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        # The seed is also the key of the masks: the label keeps the two apart.
        derivation = HKDF(SHA512(), 64, salt=None, info=b"securecluster seal v2")
        self._siv = AESSIV(derivation.derive(seed))

    def close(
        self, rows: torch.Tensor, ids: Sequence[int], step: int, method: str, field: str
    ) -> torch.Tensor:
        """Return sealed rows (b, n) uint8, where n is a row's bytes and OVERHEAD.

        Args:
            rows: rows (b, …).
            ids: clients of the rows (b,).
            step: number of the call.
            method: client method that is called.
            field: field of the reply.
        """
        boxes = []
        for row, client in zip(rows, ids, strict=True):
            plain = row.cpu().numpy().tobytes()
            context = self._context(client, step, method, field)
            box = self._cipher().encrypt(plain, context)
            # a copy, since tensors need writable memory
            data = np.frombuffer(box, np.uint8).copy()
            boxes.append(torch.from_numpy(data))
        return torch.stack(boxes)

    def open(
        self,
        boxes: torch.Tensor,
        ids: Sequence[int],
        step: int,
        method: str,
        field: str,
        template: torch.Tensor,
    ) -> torch.Tensor:
        """Return the rows (b, …) in sealed ones.

        Args:
            boxes: sealed rows (b, n) uint8.
            ids: clients that sealed them (b,).
            step: number of the call that they were sealed in.
            method: client method that was called.
            field: field of the reply.
            template: tensor of a row's shape, type and device.

        Raises:
            FrameError: a box that was altered, or that belongs to another client, call, field or
                run, or that contains a row of another size.
        """
        rows = []
        for box, client in zip(boxes, ids, strict=True):
            context = self._context(client, step, method, field)
            rows.append(self._row(box, client, context, template))
        return torch.stack(rows)

    def _row(
        self, box: torch.Tensor, client: int, context: list[bytes], template: torch.Tensor
    ) -> torch.Tensor:
        from cryptography.exceptions import InvalidTag

        sealed = box.cpu().numpy().tobytes()
        try:
            # a bytearray, since tensors need writable memory
            plain = bytearray(self._cipher().decrypt(sealed, context))
        except InvalidTag:
            raise FrameError(
                f"what client {client} sealed cannot be opened: it was altered on its way, start a "
                "new run"
            ) from None
        size = template.numel() * template.element_size()
        if len(plain) != size:
            raise FrameError(
                f"what client {client} sealed has {len(plain)} bytes: both sides must run the same "
                "configuration"
            )
        row = torch.frombuffer(plain, dtype=template.dtype).view(template.shape)
        return row.to(template.device)

    def _cipher(self) -> AESSIV:
        if self._siv is None:
            raise UsageError(
                "this client has no seed to seal with yet: it must take part in the key agreement "
                "first"
            )
        return self._siv

    def _context(self, client: int, step: int, method: str, field: str) -> list[bytes]:
        """Return the associated data of a row.

        A server can neither replay a row in another run or call, nor move it to another field or
        client: it would not open.

        Args:
            client: client that sealed the row.
            step: number of the call.
            method: client method that was called.
            field: field of the reply.
        """
        return [self._run, method.encode(), field.encode(), b"%d" % client, b"%d" % step]
