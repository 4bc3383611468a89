"""Runs that go on for more rounds than they were begun with.

A longer run goes on from the state at the end of its last round, whether the run has ended or was
stopped. What followed that round, the delivery of the last averages, is the end of the shorter run:
its frames are removed and its releases stay in the ledger. `config.json` stays as clients and
server agreed on it, so that frames, masks and noise go on under its hash; `longer.json` says how
long the run is now.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.errors import RunFolderError, SecureClusterWarning, UsageError
from securecluster.folders import run_folder
from securecluster.parties import newcomers
from securecluster.parties.derived import goes_on
from securecluster.runtime.run import reopen

if TYPE_CHECKING:
    from securecluster.data.federation import Federation
    from securecluster.folders.run_folder import RunPlan
    from securecluster.folders.schemas import RunConfig
    from securecluster.parties.method import Method


def asks_for_more(method: Method, config: RunConfig) -> bool:
    """Return whether a method is a run's with more rounds than it has.

    Args:
        method: with its hyper-parameters.
        config: content of the run's config.json.
    """
    recorded = config["protocol"].get(method._length)
    more = type(recorded) is int and getattr(method, method._length) > recorded
    return more and config["protocol"].get("name") == method.name


def taken_up(folder: Path, plan: RunPlan, config: RunConfig, federation: Federation) -> RunPlan:
    """Return the plan of the run in a folder, which is made longer where the plan is.

    Args:
        folder: of the run, whose lock this process holds.
        plan: with the settings of the run.
        config: content of its config.json.
        federation: the clients and their data.

    Raises:
        RunFolderError: another run, or one without the state of its last round.
        UsageError: a run that cannot be made longer.
    """
    method = plan.protocol
    if not asks_for_more(method, config):
        plan = replace(plan, protocol=_as_begun(method, config))
        run_folder.check_same(folder, config, plan.content(federation))
        return plan
    length = {method._length: getattr(method, method._length)}
    _check_longer(folder, method, config)
    plan = replace(plan, protocol=_as_begun(method, config))
    longer: Any = {**config, "protocol": {**config["protocol"], **length}}
    run_folder.check_same(folder, longer, plan.content(federation))
    reopen(folder)
    run_folder.make_longer(folder, length)
    return plan


def check_goes_on(folder: Path) -> None:
    """Raise RunFolderError for a run of 0.2 whose checkpoints have clients in blocks on Ray.

    Args:
        folder: of a run.
    """
    # a run that was begun by its parts has none
    if not (folder / run_folder.CONFIG).is_file():
        return
    if run_folder.config_of(folder)["settings"].get("engine") == "ray":
        raise RunFolderError(
            f"{folder} holds a run in blocks on Ray, which has left securecluster, and does not go "
            "on without it: start another run, or go on with the version that began this one"
        )


def _as_begun(method: Method, config: RunConfig) -> Method:
    """Return a method that goes on under the configuration with which its run began."""
    if method._length not in config["network"] or method.name != config["protocol"].get("name"):
        return method  # of another run, as the check of the configuration says
    return goes_on(method, config["network"])


def _check_longer(folder: Path, method: Method, config: RunConfig) -> None:
    """Refuse a run that cannot be made longer, and warn of what it did as a shorter one.

    Raises:
        RunFolderError: a run in blocks on Ray.
        UsageError: releases that were planned for the rounds that the run has, newcomers, or a
            method whose beginning depends on the number of rounds.
    """
    check_goes_on(folder)
    recorded = config["protocol"][method._length]
    was = f"{method._length} = {recorded}"
    if method.privacy.target_epsilon is not None:
        raise UsageError(
            f"the noise of the run in {folder} was found for target_epsilon = "
            f"{method.privacy.target_epsilon:g} in all of its releases ({was}), and more of them "
            "cost more: start another run, with a target of its own, from this one (start=...)"
        )
    if (folder / newcomers.NAME).is_file():
        raise UsageError(
            f"clients have joined the run in {folder}, by clusters that more rounds may change: "
            "start another run from it (start=...)"
        )
    shorter: Any = type(method)(**{**method.get_params(), method._length: recorded})
    doubt = shorter._unlike_longer(method)
    if doubt is not None:
        text = f"the run in {folder} began with {was}, and one in one go is another: {doubt}"
        warnings.warn(text, SecureClusterWarning, stacklevel=2)
