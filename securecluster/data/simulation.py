"""Options that make the clients of a simulation, as the command line and config.json have them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from securecluster.core.noted_warnings import noted
from securecluster.core.validation import PythonOnly, check_seed
from securecluster.data import Federation, LabelSwap, Scenario
from securecluster.data.datasets import default_scenario, named, source_names
from securecluster.data.scaling import AUTO, chosen_categories, chosen_scaling, scaling_options
from securecluster.data.scenarios import has_options, scenario
from securecluster.data.splits import FIFTH
from securecluster.errors import UsageError, unknown
from securecluster.models.objectives import Binary, task_name, task_of

DEFAULT_CLIENTS = 20
# by data and scenario; tasks of five, three and two clients (Ali & Arafa 2024)
CLIENTS = {("fashion_mnist", "tasks"): 10}
SAMPLES = {"ag_news": 300}  # all 6,220 windows a client are for a GPU
# fields of `Simulation` that are about a file of one's own, and those that deal a known data set
FILE_OPTIONS = (
    "client_column", "label_column", "test_column", "classes", "truth_column", "weight_column",
    "feature_columns", "drop_columns", "missing", "scaling", "bounds", "prepare", "task",
)  # fmt: skip
DEALING_OPTIONS = (
    "scenario", "clients", "clusters", "samples", "labels_per_client", "alpha", "minority",
    "task_sizes", "overlap",
)  # fmt: skip


@dataclass(frozen=True)
class Simulation:
    """The clients and their data."""

    data: str = "digits"
    """digits, mnist, fashion_mnist, cifar10, cifar100 or femnist (mnist14 and femnist14 are at half
    the side), hospitals, text (ag_news, shakespeare) or trajectories (mobility); or your own CSV,
    parquet or Excel file, or a folder of them; or module:function of one that returns a Source
    """
    client_column: str | None = None
    """your own file: the column that names each row's client; @file or @folder where each file or
    folder is one
    """
    label_column: str | None = None
    """your own file: the column to learn, or several, joined by commas; the other columns are
    features
    """
    test_column: str | None = None
    """your own file: the column that says which rows are held out (true or false, test or train);
    @file or @folder where files or folders are called so; None is a fifth of each client's rows,
    stratified by label
    """
    task: str | None = None
    """your own file: classification, binary (one output for two classes), multilabel (columns of 0
    and 1) or regression (squared error; also regression:absolute, regression:huber[:DELTA]); None
    takes many numbers that are not whole for a regression, and says so
    """
    classes: tuple[str, ...] | None = None
    """your own file: the labels that are learned, in the order of their class numbers; None is all
    that occur, which a run with noise refuses, as they tell of the clients' data
    """
    truth_column: str | None = None
    """your own file: the column with each client's true cluster, where it is known"""
    weight_column: str | None = None
    """your own file: the column with each row's weight in training, which is taken as public"""
    feature_columns: tuple[str, ...] | None = None
    """your own file: the columns that are features; None is all remaining ones"""
    drop_columns: tuple[str, ...] | None = None
    """your own file: columns that are no features, such as row numbers"""
    missing: tuple[str, ...] | None = None
    """your own file: texts that stand for missing values beside empty cells, '' for no other; None
    is ?, -, NA and their like among features
    """
    scaling: str | None = None
    """your own file: none, client (each client standardises its features by its own mean and
    deviation, and shifts between clients are lost), bounds (--bounds become -1 and 1), shared (mean
    and deviation over all clients, within --bounds, by one sum that the run protects) or
    shared-quantiles (likewise, median and interquartile range)
    """
    bounds: tuple[str, ...] | None = None
    """your own file: public bounds of the features, COLUMN=LOW:HIGH for each, or one LOW:HIGH; and
    of the targets of a regression
    """
    prepare: str | None = None
    """your own file: auto fills gaps and makes numbers of categories and dates, each client by its
    own rows unless there are bounds
    """
    scenario: str | None = None
    """how clients differ: a name from `securecluster list`, or several (rotation+dirichlet); None
    is the one that the protocol is designed for (in a comparison, if all have the same), else
    label-swap; for femnist, shakespeare and mobility natural, for ag_news topics
    """
    clients: int | None = None
    """number of clients; None is 20 (fashion_mnist in tasks: 10), or all clients of your own file
    """
    clusters: int | None = None
    """true clusters; None is the scenario's own default (label-swap, topics: 4)"""
    samples: int | None = None
    """training samples per client; None is as many as the scenario allows (ag_news: 300)"""
    labels_per_client: Annotated[int | None, PythonOnly("Pathological(labels=...)")] = None
    """pathological (2), label-split (0.7 of all): labels that a client holds"""
    alpha: float | None = None
    """dirichlet (0.5): the smaller, the fewer labels dominate a client"""
    minority: Annotated[float | None, PythonOnly("Tasks(minority=...)")] = None
    """tasks (0.1): share of a client's samples that comes from other tasks"""
    task_sizes: Annotated[tuple[float, ...] | None, PythonOnly("Tasks(sizes=...)")] = None
    """tasks: relative samples per client, a number for each task; None is the data set's own"""
    overlap: Annotated[bool, PythonOnly("IID(overlap=True) and its like")] = False
    """clients may hold the same samples (training and test samples stay apart)"""
    seed: int = 0
    """of data, models and all public draws; keys, masks and noise follow from a secret of each run
    """

    def check(self) -> None:
        """Check names, and that options go together, without reading data.

        Raises:
            UsageError: an unknown name, or options that do not go together.
        """
        check_seed(self.seed)
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
        if self.data in source_names():
            return False
        # what only looks like a path is refused as one, and not as a misspelt data set
        looks_like_path = "/" in self.data or "." in self.data
        # false for a path that no file can have
        return looks_like_path or os.path.exists(self.data)

    def made_for(self, scenarios: Iterable[str | None]) -> Simulation:
        """Return these options with the scenario that all protocols are made for.

        The scenario and the numbers of clients and samples that go with it are filled in where the
        user leaves them open.

        Args:
            scenarios: of the protocols; None for one that is made for no particular scenario.
        """
        self = replace(self, data=named(self.data))
        if self.own:
            return self
        name = self.scenario
        if name is None:
            name = self._shared_scenario(set(scenarios))
        clients = self.clients
        if clients is None:
            clients = CLIENTS.get((self.data, name or ""))
        samples = self.samples
        if samples is None:
            samples = SAMPLES.get(self.data)
        return replace(self, scenario=name, clients=clients, samples=samples)

    def _shared_scenario(self, scenarios: set[str | None]) -> str | None:
        """Return the scenario that all protocols are made for; None for the data set's default.

        Args:
            scenarios: of the protocols.
        """
        if len(scenarios) != 1:
            return None
        # data that have clients or topics of their own keep these
        if default_scenario(self.data) != LabelSwap.name:
            return None
        (name,) = scenarios
        # an option that the scenario does not have (--clusters, say) asks for the default
        if not name or not has_options(name, self._given()):
            return None
        return name

    def located(self) -> Simulation:
        """Return these options with an absolute path, so that a run resumes from any folder."""
        if not self.own:
            return self
        return replace(self, data=str(Path(self.data).resolve()))

    @classmethod
    def of(cls, federation: Federation) -> Simulation | None:
        """Return the options that make a federation again; None where no options do.

        Args:
            federation: of a run from Python.
        """
        if federation.recipe is None:
            return None  # made from arrays
        recipe = dict(federation.recipe)
        if "path" in recipe:
            for name in ("feature_columns", "drop_columns", "missing", "classes"):
                recipe[name] = recipe[name] and tuple(recipe[name])
            test = recipe.pop("test")
            recipe["test_column"] = test.column if test.given == ["rows"] else None
            if recipe["test_column"] is None and (test.given or test != FIFTH):
                return None  # a split that was given in Python
            scaling = scaling_options(recipe.pop("scaling"))
            prepare = recipe.pop("prepare")
            if prepare:  # categories that were given in Python
                return None
            recipe["prepare"] = None if prepare is None else AUTO
            return cls(data=recipe.pop("path"), **recipe, **scaling)
        dealt = recipe.pop("scenario")
        try:
            options = cls(**recipe, scenario=str(dealt), **_scenario_options(dealt))
            rebuilt = options._scenario()
        except (UsageError, TypeError):
            return None  # the command line has no name or options for this scenario
        # options may also mean another scenario of this name
        if rebuilt != dealt:
            return None
        return options

    def federation(self) -> Federation:
        """Return the clients with their data: a known set that is dealt out, or the user's file.

        Raises:
            UsageError: data that cannot be read, or dealt out like this.
        """
        if self.own and self.client_column and self.label_column:
            return Federation.from_csv(
                self.data,
                client_column=self.client_column,
                label_column=self.label_column,
                test=self.test_column,
                truth_column=self.truth_column,
                weight_column=self.weight_column,
                feature_columns=self.feature_columns,
                drop_columns=self.drop_columns or (),
                missing=self.missing,
                classes=self.classes,
                task=self.task,
                scaling=chosen_scaling(self.scaling, self.bounds),
                prepare=self.prepare,
                seed=self.seed,
            )
        self._check_data()  # which may come from the folder of a run, and names no module
        clients = self.clients
        if clients is None:
            clients = DEFAULT_CLIENTS
        return Federation.simulate(
            self.data,
            scenario=self._scenario(),
            clients=clients,
            samples=self.samples,
            seed=self.seed,
        )

    def noted_federation(self, note: Callable[[str], None] = lambda text: None) -> Federation:
        """Return `federation()`, with its warnings sent to a callback.

        Args:
            note: called with each warning of this package; without it these warnings are dropped.
                Other warnings stay warnings.
        """
        with noted(note):
            return self.federation()

    def columns(self, federation: Federation) -> str | None:
        """Return one line on the roles of a file's columns; None for a known data set.

        Args:
            federation: the clients of the user's own file.
        """
        if not self.own or federation.feature_names is None:
            return None
        from securecluster.data.feature_columns import listed

        roles = {
            "client": self.client_column,
            "label": self.label_column,
            "true cluster": self.truth_column,
        }
        phrases = []
        for role, column in roles.items():
            if column is not None:
                phrases.append(f"{role}: {column}")
        phrases.append(_learned(federation))
        names = federation.feature_names
        features = f"features ({len(names)}): {listed(names, 12)}"
        return f"{features}; {', '.join(phrases)}"

    def _given(self) -> dict[str, Any]:
        """Return the scenario's own options that were given, by the names of its fields."""
        sizes = None
        if self.task_sizes is not None:
            sizes = tuple(self.task_sizes)  # a list, where config.json was read
        options = {
            "clusters": self.clusters,
            "alpha": self.alpha,
            "labels": self.labels_per_client,
            "minority": self.minority,
            "sizes": sizes,
            "overlap": self.overlap or None,  # False is the default of every scenario
        }
        return {name: value for name, value in options.items() if value is not None}

    def _scenario(self) -> Scenario | None:
        """Return the scenario that the options name; None for the data set's own."""
        options = self._given()
        if self.scenario is None and not options:
            return None
        return scenario(self.scenario or default_scenario(self.data), **options)

    def _check_named(self) -> None:
        """Raise UsageError for an unknown data set, options of files, or a wrong scenario."""
        self._check_data()
        for name in FILE_OPTIONS:
            if getattr(self, name) is not None:
                raise UsageError(
                    f"{option_name(name)} belongs to a file of your own (--data FILE), not "
                    f"to {self.data}: leave it out"
                )
        self._scenario()  # refuses options that do not go together

    def _check_data(self) -> None:
        """Raise UsageError for an unknown data set."""
        names = source_names()
        if self.data not in names:
            raise unknown("data", self.data, names)

    def _check_own(self) -> None:
        """Raise UsageError for a missing file, missing columns, or options of known data sets."""
        if not os.path.exists(self.data):
            raise UsageError(
                f"{self.data} does not exist: give a CSV, parquet or Excel file, or a folder of "
                f"them, or one of {', '.join(source_names())}"
            )
        if self.client_column is None or self.label_column is None:
            raise UsageError(
                f"{self.data} is a file of your own: say which columns name the client and the "
                "label (--client-column, --label-column)"
            )
        chosen_scaling(self.scaling, self.bounds)  # refuses options that do not go together
        chosen_categories(self.prepare)
        task_of(self.task)
        default = Simulation()
        for name in DEALING_OPTIONS:
            if getattr(self, name) != getattr(default, name):
                raise UsageError(
                    f"{option_name(name)} deals out a known data set, and the clients of "
                    f"{self.data} are given: leave it out"
                )


def _learned(federation: Federation) -> str:
    """Return in words what is learned of a file: its rarest class, or its task."""
    trained = federation.objective
    if not trained.one_label:
        return f"task: {task_name(trained)}"
    labels = [y for shard in federation.shards for y in (shard.y, shard.y_test)]
    numbers = np.concatenate(labels).reshape(-1).astype(np.int64)
    # a binary task has one output for two
    classes = federation.classes + (trained.kind == Binary.kind)
    counts = np.bincount(numbers, minlength=classes)
    rarest = int(counts.argmin())
    name = (federation.class_names or range(classes))[rarest]
    return f"{classes} classes, the rarest {name} ({counts[rarest]} rows)"


def option_name(field_name: str) -> str:
    """Return a field's name as it is typed on the command line."""
    return f"--{field_name.replace('_', '-')}"


def _scenario_options(scenario: Scenario) -> dict[str, Any]:
    """Return the options that make a scenario, by their names on the command line.

    Fields at their defaults are left out.

    Args:
        scenario: a partitioner and transforms.
    """
    # options whose names differ from the scenarios' fields
    names = {"labels": "labels_per_client", "sizes": "task_sizes"}
    options: dict[str, Any] = {}
    for component in scenario.parts:
        for option in fields(component):  # type: ignore[arg-type]
            value = getattr(component, option.name)
            if value != option.default:
                name = names.get(option.name, option.name)
                options[name] = value
    return options
