"""The protections of replies by the names that users give, and all of their messages."""

from __future__ import annotations

from collections.abc import Mapping

from securecluster.protections.encryption.messages import ENCRYPTION_METHODS
from securecluster.protections.pads.client import PAD_METHODS
from securecluster.protections.secure_sums.messages import SUM_METHODS
from securecluster.runtime.services import KEY_METHODS, MessageTypes

# (query class, reply class) of the methods that clients answer beside those of their protocol
SERVICE_METHODS: Mapping[str, MessageTypes] = {
    **KEY_METHODS,
    **SUM_METHODS,
    **PAD_METHODS,
    **ENCRYPTION_METHODS,
}
