"""Clients' data: sources, scenarios that deal them, and the federation they make."""

from securecluster.data.federation import Federation, Shard
from securecluster.data.scenarios import SCENARIOS, Iid, LabelSwap, Scenario
from securecluster.data.sources import SOURCES, Source

__all__ = ["SCENARIOS", "SOURCES", "Federation", "Iid", "LabelSwap", "Scenario", "Shard", "Source"]
