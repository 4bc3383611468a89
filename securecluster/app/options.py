"""The command line's options, as the dataclasses they are built from."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from securecluster.data import SOURCES, Federation, LabelSwap, Scenario
from securecluster.data.datasets import default_scenario
from securecluster.data.scenarios import has_options, scenario
from securecluster.errors import SecureClusterWarning, UsageError, unknown
from securecluster.runtime.settings import Settings

PROTOCOLS = {  # module and class
    "cfl": "cfl:CFL",
    "flhc": "flhc:FLHC",
    "srfca": "srfca:SRFCA",
    "oneshot": "oneshot:OneShot",
    "nsim": "nsim:NSIM",
    "ifca": "ifca:IFCA",
    "local-kmeans": "local_kmeans:LocalKMeans",
    "random": "random_clusters:RandomClusters",
    "fedavg": "fedavg:FedAvg",
    "finetune": "finetune:FineTune",
    "local": "local:Local",
}


def protocol_class(name: str) -> Any:
    """Return the class of a protocol by its name."""
    if name not in PROTOCOLS:
        raise unknown("protocol", name, PROTOCOLS)
    module, _, kind = PROTOCOLS[name].partition(":")
    return getattr(importlib.import_module(f"securecluster.protocols.{module}"), kind)


DEFAULT_CLIENTS = 20
# by data and scenario: five, three and two (Ali & Arafa 2024)
CLIENTS = {("fashion_mnist", "tasks"): 10}
SAMPLES = {"ag_news": 300}  # all 6,220 windows a client are for a GPU
# fields of `Simulation` that are about a file of one's own, and those that deal a known data set
FILE_OPTIONS = (
    "client_column", "label_column", "truth_column", "feature_columns", "drop_columns",
)  # fmt: skip
DEALING_OPTIONS = (
    "scenario", "clients", "clusters", "samples", "labels_per_client", "alpha", "minority",
    "task_sizes", "overlap",
)  # fmt: skip


@dataclass(frozen=True)
class Simulation:
    """The clients and their data."""

    data: str = "digits"
    """digits, mnist, fashion_mnist, cifar10, cifar100 or femnist, text (ag_news, shakespeare) or
    trajectories (mobility); or your own parquet file, or a folder of them
    """
    client_column: str | None = None
    """your own file: the column that names each row's client"""
    label_column: str | None = None
    """your own file: the column to learn; the other columns are features"""
    truth_column: str | None = None
    """your own file: the column with each client's true cluster, where it is known"""
    feature_columns: tuple[str, ...] | None = None
    """your own file: the columns that are features; None is all that are left"""
    drop_columns: tuple[str, ...] | None = None
    """your own file: columns that are no features, such as row numbers"""
    scenario: str | None = None
    """how clients differ: a name from `securecluster list`, or some (rotation+dirichlet); None is
    what the protocol is made for (of several: what all of them are made for), else label-swap; for
    femnist, shakespeare and mobility natural, for ag_news topics
    """
    clients: int | None = None
    """number of clients; None is 20 (fashion_mnist in tasks: 10), or all clients of your own file
    """
    clusters: int | None = None
    """true clusters; None is the scenario's own default (label-swap, topics: 4)"""
    samples: int | None = None
    """training samples per client; None deals as many as the scenario allows (ag_news: 300)"""
    labels_per_client: int | None = None
    """pathological (2), label-split (0.7 of all): labels that a client holds"""
    alpha: float | None = None
    """dirichlet (0.5): the smaller, the fewer labels dominate a client"""
    minority: float | None = None
    """tasks (0.1): share of a client's samples that comes from other tasks"""
    task_sizes: tuple[float, ...] | None = None
    """tasks: relative samples per client, a number for each task; None is the data set's own"""
    overlap: bool = False
    """clients may hold the same samples (training and test samples stay apart)"""
    seed: int = 0
    """of every random draw, keys included"""

    def check(self) -> None:
        """Refuse unknown names, and options that do not go together, without reading data.

        Raises:
            UsageError: the first of them.
        """
        if self.own:
            self._check_own()
        else:
            self._check_named()
        if self.clients is not None and self.clients < 2:
            raise UsageError(
                "clustering needs at least two clients: one alone has nobody to be compared with"
            )

    @property
    def own(self) -> bool:
        """Return whether the data is a user's own file and not a known set."""
        if self.data in SOURCES:
            return False
        return Path(self.data).exists() or "/" in self.data or self.data.endswith(".parquet")

    def made_for(self, scenarios: Iterable[str | None]) -> Simulation:
        """Return these options with the scenario that all protocols are made for.

        The scenario and the numbers of clients and samples that go with it are filled in where the
        user leaves them open. Data that have clients or topics of their own keep these, and an
        option that the scenario does not have (--clusters, say) asks for the data set's default.
        """
        if self.own:
            return self
        named = self.scenario
        agreed = set(scenarios)
        if named is None and len(agreed) == 1 and default_scenario(self.data) == LabelSwap.name:
            (name,) = agreed
            if name and has_options(name, self._given()):
                named = name
        clients, samples = self.clients, self.samples
        if clients is None:
            clients = CLIENTS.get((self.data, named or ""))
        if samples is None:
            samples = SAMPLES.get(self.data)
        return replace(self, scenario=named, clients=clients, samples=samples)

    def located(self) -> Simulation:
        """Return these options with an absolute path, for a run that another folder resumes."""
        if not self.own:
            return self
        return replace(self, data=str(Path(self.data).resolve()))

    @classmethod
    def of(cls, federation: Federation) -> Simulation | None:
        """Return the options that make a federation again; None where no options do."""
        if federation.recipe is None:
            return None
        recipe = dict(federation.recipe)
        if "path" in recipe:
            for name in ("feature_columns", "drop_columns"):
                recipe[name] = recipe[name] and tuple(recipe[name])
            return cls(data=recipe.pop("path"), **recipe)
        kind = recipe.pop("scenario")
        try:
            options = cls(**recipe, scenario=str(kind), **_scenario_options(kind))
            same = options._scenario() == kind
        except (UsageError, TypeError):
            return None  # the command line has no name or options for this scenario
        return options if same else None

    def federation(self) -> Federation:
        """Deal the data, or read the file."""
        if self.own and self.client_column and self.label_column:
            return Federation.from_parquet(
                self.data,
                client_column=self.client_column,
                label_column=self.label_column,
                truth_column=self.truth_column,
                feature_columns=self.feature_columns,
                drop_columns=self.drop_columns or (),
                seed=self.seed,
            )
        clients = DEFAULT_CLIENTS if self.clients is None else self.clients
        return Federation.simulate(
            self.data,
            scenario=self._scenario(),
            clients=clients,
            samples=self.samples,
            seed=self.seed,
        )

    def noted_federation(self, note: Callable[[str], None] = lambda text: None) -> Federation:
        """Return `federation()`, whose warnings go to `note` as sentences that name options."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SecureClusterWarning)
            federation = self.federation()
        for each in caught:
            if issubclass(each.category, SecureClusterWarning):
                note(as_typed(str(each.message)))
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return federation

    def columns(self, federation: Federation) -> str | None:
        """Return one line on what the columns of a user's own file are.

        Return None for a known data set.
        """
        if not self.own or federation.feature_names is None:
            return None
        from securecluster.data.feature_columns import listed

        roles = {
            "client": self.client_column,
            "label": self.label_column,
            "true cluster": self.truth_column,
        }
        said = [f"{role}: {column}" for role, column in roles.items() if column is not None]
        names = federation.feature_names
        return f"features ({len(names)}): {listed(names, 12)}; {', '.join(said)}"

    def _given(self) -> dict[str, Any]:
        """Return the scenario's own options that were given, by the names of its fields."""
        sizes = None if self.task_sizes is None else tuple(self.task_sizes)
        options = {
            "clusters": self.clusters,
            "alpha": self.alpha,
            "labels": self.labels_per_client,
            "minority": self.minority,
            "sizes": sizes,
            "overlap": self.overlap or None,
        }
        return {name: value for name, value in options.items() if value is not None}

    def _scenario(self) -> Scenario | None:
        if self.scenario is None and not self._given():
            return None  # the data set's own
        return scenario(self.scenario or default_scenario(self.data), **self._given())

    def _check_named(self) -> None:
        if self.data not in SOURCES:
            raise unknown("data", self.data, SOURCES)
        for name in FILE_OPTIONS:
            if getattr(self, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{option} belongs to a parquet file of your own (--data FILE), not to "
                    f"{self.data}: leave it out"
                )
        self._scenario()

    def _check_own(self) -> None:
        if not Path(self.data).exists():
            raise UsageError(
                f"{self.data} does not exist: give a parquet file or a folder of them, or one of "
                f"{', '.join(SOURCES)}"
            )
        if self.client_column is None or self.label_column is None:
            raise UsageError(
                f"{self.data} is a file of your own: say which columns name the client and the "
                "label (--client-column, --label-column)"
            )
        default = Simulation()
        for name in DEALING_OPTIONS:
            if getattr(self, name) != getattr(default, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} deals out a known data set, and the clients of "
                    f"{self.data} are given: leave it out"
                )


def _scenario_options(kind: Scenario) -> dict[str, Any]:
    """Return what a scenario's parts have set, by the names of the options for it.

    Fields at their defaults are left out.
    """
    names = {"labels": "labels_per_client", "sizes": "task_sizes"}
    options: dict[str, Any] = {}
    for part in kind.parts:
        for each in fields(part):  # type: ignore[arg-type]
            value = getattr(part, each.name)
            if value != each.default:
                options[names.get(each.name, each.name)] = value
    return options


@dataclass(frozen=True)
class Output:
    """What is written and printed."""

    out: Path | None = None
    """run folder; None is a new one under runs/"""
    force: bool = False
    """replace a run folder that exists"""
    quiet: bool = False
    """print nothing but errors"""


def _automatic() -> Settings:
    """Return the settings that the command line begins with."""
    return Settings(transcript="auto")


def as_typed(text: str) -> str:
    """Return a sentence in which options go by their names on the command line.

    Python's sentences name fields (pre_rounds), and users of the command line know options
    (--pre-rounds). Words in quotes, in paths and before "=" without a space are left as they are.
    """
    return re.sub(r"(?<![\w'\"./=-])[a-z]+\d*(?:_[a-z\d]+)+(?![\w'\"/(=]|\.\w)", _option, text)


def _option(found: re.Match[str]) -> str:
    name = found.group()
    return f"--{name.replace('_', '-')}" if name in _option_names() else name


@cache
def _option_names() -> frozenset[str]:
    """Return the fields of all options."""
    protocols = [protocol_class(name) for name in PROTOCOLS]
    names: set[str] = set()
    for kind in (Simulation, Settings, Output, *protocols):
        names.update(each.name for each in fields(kind))
    return frozenset(names)


def options_class(protocol: type) -> type:
    """Return one flat dataclass of all options of `run PROTOCOL`."""
    return flat_class("protocol", protocol)


def flat_class(name: str, kind: type) -> type:
    """Return one flat dataclass of the options of `kind` and of those that every run takes.

    The options of `kind` are called `name`.
    """
    import tyro

    flat: Any = tyro.conf.OmitArgPrefixes
    # of each part its class, and what makes its default
    parts: dict[str, tuple[Any, Any]] = {
        name: (kind, kind),
        "simulation": (Simulation, Simulation),
        "settings": (Settings, _automatic),
        "output": (Output, Output),
    }
    options = [
        (part, flat[part_class], field(default_factory=make))
        for part, (part_class, make) in parts.items()
    ]
    return make_dataclass("Options", options)
