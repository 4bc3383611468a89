"""What is checked before a run begins, without any data: one call for `fit` and for commands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from securecluster.parties.derived import module_doubts
from securecluster.parties.power_check import PowerCheck, power_of
from securecluster.runtime.settings import check_settings
from securecluster.training.chance_level import ENOUGH_ROUNDS

if TYPE_CHECKING:
    from securecluster.data.federation import Federation
    from securecluster.runtime.settings import Settings


@dataclass(frozen=True)
class RunCheck:
    """A run that can begin.

    Args:
        method: with all options, those that a target ε chose among them.
        federation: the clients, of whose data public facts alone are read.
        dtype: type of the models' numbers.
    """

    method: Any
    federation: Federation
    dtype: str

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return what clients and server will agree on."""
        config: dict[str, Any] = self.method.config(self.federation, self.dtype)
        return config

    @cached_property
    def power(self) -> PowerCheck | None:
        """Return what noise leaves of the run; None of one without noise."""
        return power_of(self.method, self.federation.facts, self.config)

    @property
    def doubts(self) -> list[str]:
        """Return sentences that warn of what the run will probably not bring."""
        doubts = module_doubts(self.method, self.federation)
        # in fewer rounds nobody expects clusters, or a trained model, yet
        if self.method.rounds < ENOUGH_ROUNDS or not self.method.privacy.noisy:
            return doubts
        if self.power is not None and self.power.warning is not None:
            doubts.append(self.power.warning)
        return doubts


def checked_run(protocol: Any, federation: Federation, settings: Settings) -> RunCheck:
    """Return a run that can begin.

    Args:
        protocol: with the hyper-parameters that the user gave.
        federation: the clients.
        settings: of the run.

    Raises:
        UsageError: hyper-parameters, settings or a federation that do not go together.
    """
    protocol.check(len(federation))
    check_settings(settings, federation)
    method = protocol.privacy.settled(protocol, federation.facts)
    return RunCheck(method, federation, settings.dtype)


def power_check(protocol: Any, federation: Federation) -> PowerCheck | None:
    """Return what noise leaves of a private run, before it and without any data.

    `PowerCheck.verdict` says whether clusters, and training, carry, are doubtful or are drowned,
    and `sentences` says it in words, with the changes that would help.

    Args:
        protocol: with its hyper-parameters.
        federation: the clients, of whose data public facts alone are read.

    Returns:
        None of a run without noise, or of one whose clients release nothing with noise.

    Raises:
        UsageError: the protocol cannot run on this federation.
    """
    protocol.check(len(federation))
    method = protocol.privacy.settled(protocol, federation.facts)
    return RunCheck(method, federation, "float32").power
