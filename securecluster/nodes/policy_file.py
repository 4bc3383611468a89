"""An owner's policy in a file, which holds from the message after it was changed."""

from __future__ import annotations

from pathlib import Path

from securecluster.errors import OwnerPolicyError, UsageError
from securecluster.nodes.policy import Policy


class PolicyFile:
    """Policy of a TOML file that its owner may change while a node serves.

    Args:
        path: of the file.

    Raises:
        UsageError: no such file, or no policy in it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._policy = Policy.load(self.path)
        self._data = self._read()

    def current(self) -> Policy:
        """Return the policy as the file has it now.

        Raises:
            OwnerPolicyError: the file is gone, or has no policy: nothing is allowed until it has.
        """
        data = self._read()
        if data is None or data != self._data:
            self._data = None
            try:
                self._policy = Policy.load(self.path)
            except UsageError as error:
                raise OwnerPolicyError(f"nothing is allowed, since {error}") from None
            self._data = data
        return self._policy

    def _read(self) -> bytes | None:
        """Return the content of the file; None where it cannot be read."""
        try:
            return self.path.read_bytes()
        except OSError:
            return None
