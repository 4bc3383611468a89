"""How a run is carried out: in memory, or in a folder that is claimed, resumed and completed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from securecluster.core.client_names import named_in_errors
from securecluster.core.devices import choose_device, cpu_threads, reproducible
from securecluster.core.lazy_torch import torch
from securecluster.data.simulation import Simulation
from securecluster.errors import UsageError
from securecluster.folders import run_folder
from securecluster.parties.method import Method
from securecluster.results.saving import save
from securecluster.runs.callbacks import Watcher
from securecluster.runs.longer import taken_up
from securecluster.runtime.run import keep_last_round
from securecluster.runtime.settings import Settings
from securecluster.statements.chance_warning import (
    FEW_ROUNDS,
    baseline_warning,
    chance_warning,
    unfound_warning,
)
from securecluster.statements.cluster_notes import cluster_note
from securecluster.training.chance_level import ENOUGH_ROUNDS

if TYPE_CHECKING:
    from securecluster.data.federation import Federation
    from securecluster.folders.schemas import Result
    from securecluster.results.fitted import FittedRun
    from securecluster.statements.result_json import Subject


def carry_out(
    method: Method,
    federation: Federation,
    settings: Settings,
    folder: Path | None,
    watcher: Watcher,
) -> FittedRun:
    """Run a method on a federation in this process, or resume the run in the folder.

    Args:
        method: with its hyper-parameters.
        federation: the clients and their data.
        settings: device, precision, dropouts and transcript.
        folder: the run folder, whose lock this process holds; None stores everything in memory.
        watcher: told of each round.
    """
    from securecluster.parties.server_half import without_clients
    from securecluster.runs.simulated_run import SimulatedRun

    if folder is not None:  # of a run that was killed
        run_folder.remove_half_written(folder)
    device = choose_device(settings.device)
    with torch.inference_mode(False), cpu_threads(settings.threads), reproducible(device):
        simulated = SimulatedRun(method, federation, settings, folder)
        run = simulated.start(watcher)
        server = simulated.server
        with named_in_errors(federation.names):
            server.find_scale()
            with without_clients(server.method):
                state = server.method.run_server(server.net, run)
            server.check(state)
            fitted_state, chance = simulated.fitted(run, state)
        fitted: FittedRun = method.fitted_class(method, fitted_state, server.transcript, folder)
        learned_nothing = None
        if chance is not None:
            learned_nothing = chance_warning(fitted, chance, federation)
        said = [] if chance is None or learned_nothing is None else chance.clients
        texts = [learned_nothing, baseline_warning(fitted, said)]
        if learned_nothing is None:
            texts.append(unfound_warning(fitted))
        # in fewer rounds nobody expects clusters yet, but a target ε buys no more of them
        few = ENOUGH_ROUNDS if method.privacy.noisy else FEW_ROUNDS
        trained = learned_nothing is None and run.length(method.rounds) >= few
        clients = simulated.clients
        texts.append(cluster_note(fitted, federation, clients.scores, clients.tuned_once, trained))
        fitted.warning_ = "; ".join(filter(None, texts)) or None
    return fitted


def complete(folder: Path, subject: Subject, fitted: FittedRun) -> Result:
    """Write all files of a run that has just ended, and return its result.json.

    Args:
        folder: of the run, whose lock this process holds.
        subject: its clients.
        fitted: its result.
    """
    from securecluster.statements.result_json import result_of

    content = result_of(subject, fitted)
    save(fitted, folder)
    # result.json is written last of the run's files, and says that they are complete
    text = json.dumps(content, indent=2) + "\n"
    run_folder.seal(folder, text.encode())
    keep_last_round(folder)
    return content


def fit_in(
    folder: Path,
    method: Method,
    federation: Federation,
    settings: Settings,
    watcher: Watcher,
    force: bool = False,
) -> FittedRun:
    """Return the result of a run in a folder, as `ClusteringProtocol.fit` does with `folder`.

    A run starts in a new or empty folder; a stopped run of the same configuration on the same data
    is resumed; the result of one that has ended is loaded; with more rounds than it has, either
    goes on. With `force` the run in the folder is
    replaced in any case.

    Args:
        folder: new, empty, or of a run of this configuration.
        method: with its hyper-parameters.
        federation: the clients and their data.
        settings: of the run.
        watcher: told of each round.
        force: replace the run in the folder.

    Raises:
        UsageError: the folder contains something else.
        RunFolderError: it contains another run, a damaged one, or one that another process writes
            to.
    """
    simulation = Simulation.of(federation)
    if run_folder.is_run(folder) and not force:
        plan = run_folder.RunPlan(method, simulation, settings)
        return _fit_again(folder, plan, federation, watcher)
    if run_folder.used(folder) and not force:
        raise UsageError(f"{folder} exists and is not empty, and holds no run: give another folder")
    plan = run_folder.RunPlan(method, simulation, resolved(settings))
    texts = {run_folder.CONFIG: plan.as_json(federation)}
    with run_folder.claimed(folder, force, "", texts):
        if method.training.start is not None:  # before the run, so that it is resumed from there
            method.training.start.write(folder)
        return _completed(folder, plan, federation, watcher)


def _completed(
    folder: Path, plan: run_folder.RunPlan, federation: Federation, watcher: Watcher
) -> FittedRun:
    """Return the result of a run that is carried out, with all its files and pictures written."""
    fitted = carry_out(plan.protocol, federation, plan.settings, folder, watcher)
    from securecluster.statements.result_json import Subject

    complete(folder, Subject.of(federation), fitted)
    return fitted


def _fit_again(
    folder: Path, plan: run_folder.RunPlan, federation: Federation, watcher: Watcher
) -> FittedRun:
    """Return the result of the run in a folder, which is resumed if it has not ended.

    Args:
        folder: of a run.
        plan: with the user's settings.
        federation: the clients and their data.
        watcher: told of each round.

    Raises:
        UsageError: the folder contains a comparison.
        RunFolderError: it contains another run, a damaged one, or one that another process writes
            to.
    """
    with run_folder.locked(folder):
        if run_folder.compared(folder) is not None:
            raise UsageError(f"{folder} holds a comparison: give another folder")
        config = run_folder.run_config(folder)
        recorded = Settings(**config["settings"])
        plan = replace(plan, settings=with_recorded(plan.settings, recorded))
        plan = taken_up(folder, plan, config, federation)
        if not run_folder.finished(folder):
            return _completed(folder, plan, federation, watcher)
        run_folder.result_of(folder)  # checks every file
        fitted: FittedRun = plan.protocol.fitted_class.of_folder(plan.protocol, folder)
        keep_last_round(folder)  # which a kill at the very end may have left
        return fitted


def resolved(settings: Settings) -> Settings:
    """Return settings with the device and the number of threads filled in.

    Args:
        settings: `auto` is a device to choose, and 0 a number of threads to choose.
    """
    # a run is resumed with the same ones, since others round sums differently
    device = choose_device(settings.device).type
    threads = settings.threads or torch.get_num_threads()
    return replace(settings, device=device, threads=threads)


def with_recorded(settings: Settings, recorded: Settings) -> Settings:
    """Return settings with the recorded device and threads, where the user leaves these open.

    Args:
        settings: the user's; `auto` and 0 leave the device and the threads open.
        recorded: those of the run that is resumed.
    """
    device = settings.device
    if device == "auto":
        device = recorded.device
    threads = settings.threads or recorded.threads
    return replace(settings, device=device, threads=threads)
