"""Apps of clients of `benchmarks.apps.scale`, which ships this file to SuperNodes: Flower's alone.

A SuperNode whose `node_config` has `lost` gives no vector, after keys were agreed on.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

LENGTH = 650  # numbers of a linear model of ten digits


class Client(NumPyClient):  # type: ignore[misc]
    """Client that sends a vector."""

    def fit(self, parameters: Any, config: Any) -> tuple[list[Any], int, dict[str, Any]]:
        """Return a vector."""
        return [np.random.default_rng(0).random(LENGTH, "f4")], 20, {}


def losing(message: Message, context: Context, call_next: Any) -> Message:
    """End the app of a lost client where it would send its vector."""
    if context.node_config.get("lost"):
        configs = message.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
        plain = configs.get(Key.STAGE, Stage.COLLECT_MASKED_VECTORS)
        ours = message.content.array_records.get("data", {}).get("data")
        if ours is not None and b"contribute" not in ours.numpy().tobytes():
            plain = ""
        if plain == Stage.COLLECT_MASKED_VECTORS:
            raise ConnectionError("lost")
    reply: Message = call_next(message, context)
    return reply


def client_app(way: str) -> ClientApp:
    """Return the app of a way: fedavg, secaggplus or secagg, which is ours and needs the shim."""
    if way == "secagg":
        shim = importlib.import_module(f"{__package__}.shim")  # the file beside this in a project
        app = ClientApp(mods=[losing])
        for kind in shim.KINDS:
            app.query(kind)(shim.handler(kind))
        return app
    mods = [losing, secaggplus_mod] if way == "secaggplus" else [losing]
    return ClientApp(client_fn=lambda context: Client().to_client(), mods=mods)
