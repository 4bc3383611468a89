"""Endpoints of clients: their data, models, keys, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from securecluster.core.client_names import called_by_position
from securecluster.core.devices import choose_device
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.messaging.refusals import reraise
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import adds_noise, as_agreed, initial_model
from securecluster.parties.experiment import experiment_of
from securecluster.parties.method import Method
from securecluster.privacy.dp.budget import Budget
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.dp.target import Target
from securecluster.privacy.masking.identities import Identity, Roster, check_roster
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.pipeline import Pipeline
from securecluster.runtime.endpoint import Endpoint, Reservation, config_hash, least_members
from securecluster.runtime.release_accounting import ReleaseAccounting
from securecluster.runtime.release_budget import ReleaseBudget
from securecluster.runtime.release_floor import ReleaseFloor
from securecluster.runtime.release_guard import ReleaseGuard
from securecluster.runtime.release_target import ReleaseTarget
from securecluster.runtime.settings import Settings
from securecluster.training.foreign_trainer import trainer_of
from securecluster.training.local_trainer import LocalTrainer

if TYPE_CHECKING:
    from securecluster.data.federation import Federation


@dataclass(frozen=True)
class KeySource:
    """Source of the keys of an endpoint.

    Args:
        simulated: derive keys from `secrets`; a deployed node says False, and takes them from the
            operating system.
        identity: signs a deployed node's messages of the key agreement.
        roster: identities whose signatures a deployed node accepts, including its own. It comes
            from the party that enrols clients, and not from the server. Without a roster the node
            verifies nothing, and a server that poses as a client reads the mask seed.
        secrets: secret random streams of a simulated run, which server and authority share; None
            derives them from the run's seed, which protects nothing.
    """

    simulated: bool = True
    identity: Identity | None = None
    roster: Roster | None = None
    secrets: Randomness | None = None


SIMULATED = KeySource()


def build_client(  # noqa: PLR0913 (what the clients of one run are made of)
    method: Method,
    federation: Federation,
    settings: Settings,
    clients: Sequence[int] | None = None,
    key_source: KeySource = SIMULATED,
    joins: Mapping[str, Any] | None = None,
    agreed: Mapping[str, Any] | None = None,
    numbers: Sequence[int] | None = None,
    budget: Budget | None = None,
    trainer: type[LocalTrainer] | None = None,
    streams: type[NoiseStreams] = NoiseStreams,
    deployment_class: type[Deployment] = Deployment,
    least: int = 0,
    names: Sequence[str] | None = None,
    least_noise: float = 0.0,
    tells_samples: bool = True,
) -> Endpoint[Any]:
    """Return the endpoint of some clients, with their data, models, keys and release policy.

    What clients draw in public follows from the run's seed and their names.

    Args:
        method: with its hyper-parameters.
        federation: the clients and their data.
        settings: device and precision.
        clients: their positions in the federation; None is all.
        key_source: of the clients' keys: derived for a simulation, or a deployed node's own.
        joins: the configuration of a run that these clients join as newcomers; None where the run
            is their own.
        agreed: the configuration of the run, where the federation has these clients alone, as on a
            machine of their own; None where it has all.
        numbers: of the federation's clients; None counts from 0, and for newcomers from the number
            after the run's clients.
        budget: of the one client, over all runs: a request that would exceed it is refused before
            anything leaves. None for none.
        trainer: class of the clients' local training; None is that of the model.
        streams: class of their streams of noise.
        deployment_class: makes their half of the run.
        least: fewest members and survivors of a sum that the clients' owner asks for.
        names: by which the federation's clients draw; None is their names in it, or, where it does
            not have all clients of the run and calls these 0, 1, …, their numbers.
        least_noise: least noise multiplier of a release that the clients' owner allows.
        tells_samples: whether the owner tells numbers of samples outside of hidden sums.

    Raises:
        UsageError: a roster without an identity, or one that lacks clients of the run or has
            another key for these; an identity or a roster of simulated clients; or a budget for
            several clients, or of another unit.
    """
    known_config = joins if agreed is None else agreed
    if known_config is None:
        config: Mapping[str, Any] = method.config(federation, settings.dtype)
        method = as_agreed(method, config)
        flat = initial_model(method, federation)
    else:
        config = known_config
        method = as_agreed(method, config)
        flat = Deployment(method, config).initial_model()
        if numbers is None:
            first = int(config["clients"])
            numbers = range(first, first + len(federation))
        federation = _as_in_run(federation, config, numbers, names)
    deployment = deployment_class(method, config)
    pipeline = deployment.pipeline()
    keys = _keys(config, pipeline, key_source)
    run = config_hash(config)
    whole_clients = config["dp_unit"] == "client"
    noise_streams = streams(keys.noise, run, bounds_rows=whole_clients)
    # Armed before any client exists: nothing can pass it without noise.
    pipeline.arm(noise_streams)
    pipeline.private = adds_noise(method, config)
    dtypes = {"float32": torch.float32, "float64": torch.float64}
    make_trainer = trainer or trainer_of(flat)
    cohort = make_trainer(
        federation,
        flat,
        Randomness(federation.seed),
        choose_device(settings.device),
        dtypes[settings.dtype],
        clients,
        numbers,
        method.training.validation_share(method),
        noise_streams,
    )
    cohort.tells_of_zeros = pipeline.private
    cohort.access.public_counts = _keeps_counts(method, config)
    with cohort.access.during("make_client", may_read=True, may_train=True) as reads:
        client = deployment.client(cohort, pipeline)
    limits = deployment.limits(pipeline)
    # Checked here, where the clients' numbers are known.
    if key_source.roster is not None and key_source.identity is not None:
        check_roster(key_source.roster, key_source.identity, cohort.ids, int(config["clients"]))
    halves = deployment.client_halves(keys, noise_streams, least)
    smallest = least_members(config)
    endpoint = Endpoint(client, cohort.ids, run, pipeline, keys, smallest, limits, halves)
    endpoint.noise = deployment.client_noise(noise_streams)
    endpoint.guard = _release_guard(method, config, client)
    endpoint.before_pipeline = experiment_of(method).before_pipeline
    if reads.data:  # what clients keep may follow from data before the first call
        client.guard_informed[range(len(cohort.ids))] = True
    if key_source.simulated:
        # Client and server are one user here, who reads the sentence as it is.
        endpoint.on_refusal = reraise
    endpoint.tells_samples = tells_samples
    # In one process newcomers' releases come on top of a run that is over: `join` warns of them.
    target = None
    if method.privacy.holds_target and (joins is None or budget is not None):
        target = _target(method, config, endpoint, federation)
    if least_noise > 0:
        costs = _costs(method, config, endpoint)
        endpoint.reservations.append(ReleaseFloor(least_noise, costs, endpoint.least_survivors))
    endpoint.reservations += _held_to(method, config, endpoint, budget, target)
    return endpoint


def _held_to(
    method: Method,
    config: Mapping[str, Any],
    endpoint: Endpoint[Any],
    budget: Budget | None,
    target: Target | None,
) -> list[Reservation]:
    """Return what holds the clients of an endpoint to a budget and to the run's target.

    Args:
        method: with its hyper-parameters.
        config: what clients and server agreed on.
        endpoint: of the clients.
        budget: of the one client, over all runs; its file counts towards the target, too.
        target: of the clients in this run.
    """
    if budget is not None:
        return [_release_budget(method, config, endpoint, budget, target)]
    if target is None:
        return []
    costs = _costs(method, config, endpoint)
    return [ReleaseTarget(target, costs, least_survivors=endpoint.least_survivors)]


def _as_in_run(
    federation: Federation,
    config: Mapping[str, Any],
    numbers: Sequence[int],
    names: Sequence[str] | None,
) -> Federation:
    """Return a federation that does not have all clients of a run, with the seed of the run.

    Positions are no names that tell its clients from others: the data of every machine begin with a
    client 0 if they came as a list. Such clients are called by their numbers in the run.

    Args:
        federation: of some clients.
        config: of the run.
        numbers: of the clients in the run.
        names: by which they draw; None for the rule above.
    """
    if names is None:
        names = federation.names
        if called_by_position(names):
            names = list(map(str, numbers))
    return replace(federation, seed=config["seed"], classes=config["classes"], names=tuple(names))


def _release_guard(method: Method, config: Mapping[str, Any], client: Any) -> ReleaseGuard:
    """Return the guard of the calls of an endpoint.

    Args:
        method: with its hyper-parameters.
        config: what clients and server agreed on.
        client: of the endpoint.
    """
    cohort = client.cohort
    samples: dict[int, frozenset[float]] = {}
    if _keeps_counts(method, config):
        numbers = zip(cohort.ids, cohort.sizes, cohort.validation_sizes, strict=True)
        for number, training, validation in numbers:
            samples[number] = frozenset((float(training), float(validation)))
    private = method.privacy.per_example and config["noise"] > 0
    return ReleaseGuard(client, cohort.access, samples, private)


def _keeps_counts(method: Method, config: Mapping[str, Any]) -> bool:
    """Return whether the relation of neighbours keeps clients' numbers of samples.

    Args:
        method: with its hyper-parameters.
        config: what clients and server agreed on.
    """
    return adds_noise(method, config) and config["dp_unit"] == "example"


def _target(
    method: Method, config: Mapping[str, Any], endpoint: Endpoint[Any], federation: Federation
) -> Target:
    """Return the target ε of the clients of an endpoint.

    Args:
        method: with a target.
        config: what clients and server agreed on.
        endpoint: of the clients.
        federation: of all clients.
    """
    samples = samples_of(endpoint.client) if method.privacy.per_example else {}
    return target_of(method, config, samples, federation)


def target_of(
    method: Method, config: Mapping[str, Any], samples: Mapping[int, int], federation: Federation
) -> Target:
    """Return the target ε of some clients, which have released nothing yet.

    Args:
        method: with a target.
        config: what clients and server agreed on.
        samples: that each client trains on; empty where no price depends on it.
        federation: of all clients.
    """
    privacy = method.privacy
    assert privacy.target_epsilon is not None
    releases = privacy.releases(method, federation.facts, int(config["clients"]))
    plan = partial(releases.plan, float(config["noise"]))
    return Target(float(privacy.target_epsilon), float(privacy.delta), plan, samples)


def _costs(method: Method, config: Mapping[str, Any], endpoint: Endpoint[Any]) -> ReleaseAccounting:
    """Return the accounting of a run's noise, as the server has it.

    Args:
        method: with its hyper-parameters.
        config: what clients and server agreed on.
        endpoint: of some clients.
    """
    # nothing is drawn: a server's noise only has a price here
    draws = NoiseStreams(endpoint.keys.noise, config_hash(config))
    deployment = Deployment(method, config)
    return deployment.costs(deployment.pipeline(), draws)


def _release_budget(
    method: Method,
    config: Mapping[str, Any],
    endpoint: Endpoint[Any],
    budget: Budget,
    target: Target | None,
) -> ReleaseBudget:
    """Return the budget of the one client of an endpoint.

    Args:
        method: with its hyper-parameters.
        config: what clients and server agreed on.
        endpoint: of the client.
        budget: over all runs.
        target: of the client in this run; None for none.

    Raises:
        UsageError: no budget, several clients, or another unit of privacy.
    """
    if not isinstance(budget, Budget):
        raise UsageError(f"budget is {type(budget).__name__}: make it with Budget(path, epsilon)")
    if len(endpoint.ids) != 1:
        raise UsageError(
            f"a budget is of one client, and this endpoint has {len(endpoint.ids)}: build one for "
            "each, with a budget of its own"
        )
    unit = str(config["dp_unit"])
    if unit != budget.unit:
        raise UsageError(
            f"{budget.path} is a budget for the unit {budget.unit}, and this run protects the unit "
            f"{unit}: give another file, for {unit}"
        )
    run = config_hash(config)
    costs = _costs(method, config, endpoint)
    samples = endpoint.client.cohort.sizes[0] if method.privacy.per_example else None
    key = partial(endpoint.keys.noise, endpoint.ids[0])
    survivors = endpoint.least_survivors
    return ReleaseBudget(budget, run, key, costs, samples, survivors, target)


def _keys(config: Mapping[str, Any], pipeline: Pipeline, source: KeySource) -> KeyRing:
    """Return the keys of an endpoint, derived from a run's secret or a deployed node's own.

    Raises:
        UsageError: an identity or a roster of another type, a roster without an identity, or either
            of them for simulated clients.
    """
    run = config_hash(config)
    identity = source.identity
    roster = source.roster
    expected = (("identity", identity, Identity), ("roster", roster, Roster))
    for name, value, expected_class in expected:
        if value is not None and not isinstance(value, expected_class):
            raise UsageError(
                f"{name} is {type(value).__name__}: make it with {expected_class.__name__}"
            )
    # A deployed node draws its keys from the operating system.
    if not source.simulated:
        if roster is not None and identity is None:
            raise UsageError(
                "a roster needs an identity: give the one whose public key is on the other "
                "clients' rosters"
            )
        return KeyRing(run, None, pipeline.unlock, lambda client: identity, roster)
    if identity is not None or roster is not None:
        raise UsageError(
            "simulated clients derive identities and roster: give your own with simulated=False"
        )
    secrets = source.secrets or Randomness(config["seed"])
    return KeyRing(
        run, secrets, pipeline.unlock, partial(Identity.derived, secrets), Roster.derived(secrets)
    )


def samples_of(client: Any) -> dict[int, int]:
    """Return the number of samples that each client trains on, by client number.

    The cost of DP-SGD depends on it, so it is public in such a run.
    """
    return dict(zip(client.cohort.ids, client.cohort.sizes, strict=True))
