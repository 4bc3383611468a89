"""A node whose keys follow from the seed, so that noise and masks are those of another run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from securecluster.nodes.node import Node
from securecluster.parties.endpoints import KeySource, build_client
from securecluster.runtime.endpoint import Endpoint


class SeededNode(Node):
    """Node with the keys of a simulated client, which needs no identity."""

    def _endpoint(self, config: Mapping[str, Any]) -> Endpoint[Any]:
        return build_client(
            self.method,
            self._data,
            self._settings,
            key_source=KeySource(),
            agreed=config,
            numbers=[self.number],
        )

    def _keep(self, config: Mapping[str, Any], joins: bool = False) -> str:
        """Agree to runs without a number, as those in one process are."""
        return super()._keep(config, joins=True)
