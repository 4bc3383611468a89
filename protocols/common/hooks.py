"""Hooks of a protocol: two abstract methods, and defaults that a method may override."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.metrics import agreement, mean
from securecluster.core.option_groups import Grouped, groups_of
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.messaging.messages import FIRST_SEPARATE_STEP, Rows
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.disclosures import Disclosures
from securecluster.protocols.common.option_group import OptionGroup
from securecluster.protocols.common.pair_options import PairOptions
from securecluster.protocols.common.privacy_options import PrivacyOptions
from securecluster.protocols.common.sum_options import SumOptions
from securecluster.runtime.client_half import HiddenReplies
from securecluster.runtime.endpoint import PAIRS, SUM
from securecluster.runtime.run import Line, Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.training.config import FULL_GRADIENT
from securecluster.training.local_trainer import LocalTraining


class ProtocolHooks(Grouped, ABC):
    """The server's loop, newcomers, reports, and the observer's measurements."""

    name: ClassVar[str]
    client: ClassVar[type[TrainingClient]] = TrainingClient
    scenario: ClassVar[str | None] = None
    """Default scenario of the command line; None is the data set's."""
    one_model: ClassVar[bool] = True
    """True where a client trains one model in the whole run, so that momentum can persist."""
    other_clusters_under: ClassVar[tuple[str, ...]] = ()
    """Masks that lead to other clusters than none, since the method reads more than distances."""
    gps: ClassVar[type] = object
    """Class of the global parameter server, for hierarchical methods."""
    dry: ClassVar[bool] = False
    """True in a run of stand-ins for clients (`dry_run`): work of the server alone can be left out
    there, if no release depends on it."""
    rounds: int
    mask: str
    privacy: PrivacyOptions
    sums: SumOptions
    pairs: PairOptions

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Check that a server's loop declares the class of its state.

        Raises:
            UsageError: `run_server` has no return annotation.
        """
        super().__init_subclass__(**keywords)
        loop = vars(cls).get("run_server")
        if loop is None:
            return
        # Annotations are strings under `from __future__ import annotations`.
        declared = getattr(loop, "__annotations__", {}).get("return")
        if declared in (None, "None"):
            raise UsageError(
                f"{cls.__name__}.run_server does not say what it returns: annotate it with its "
                "state's class, -> State"
            )

    @abstractmethod
    def run_server(self, net: ServerChannel, run: Run) -> Any:
        """Run the server's part of the paper's algorithm.

        Args:
            net: client ids and the verbs by which the server calls clients.
            run: gives the numbers of rounds, and stores checkpoints and history.

        Returns:
            The final state, a dataclass with `labels`.
        """

    @abstractmethod
    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Return the clusters of newcomers, which are clients that were not in the run.

        Args:
            net: a channel to the newcomers.
            state: the final state of `run_server`.
            to: the newcomers' numbers.
        """

    def disclosures(self) -> Disclosures:
        """Return what each party sees beyond the values of single replies, for the report."""
        return Disclosures()

    def report_fields(self, state: Any) -> dict[str, Any]:
        """Return entries of result.json that this method adds, as JSON values.

        Replay computes them again, and they must be the same. An entry that every run has keeps its
        meaning under a name that is given here too.

        Args:
            state: the final state of `run_server`.
        """
        return {}

    def state_class(self) -> type:
        """Return the class of the final state, from the annotation of `run_server`.

        Raises:
            UsageError: the annotation names no dataclass with labels.
        """
        name = f"{type(self).__name__}.run_server"
        try:
            state_type = get_type_hints(type(self).run_server)["return"]
        except NameError as error:
            raise UsageError(
                f"{name} is annotated with a class that is not there: {error}"
            ) from None
        fields = getattr(state_type, "__dataclass_fields__", None)
        if fields is None or not ("labels" in fields or hasattr(state_type, "labels")):
            declared = getattr(state_type, "__name__", state_type)
            raise UsageError(
                f"{name} returns {declared}: it must be a dataclass with labels, each client's "
                "cluster, and an outbox"
            )
        return state_type  # type: ignore[no-any-return]

    @property
    def option_groups(self) -> list[OptionGroup]:
        """Return the groups of options, such as `privacy`."""
        return [vars(self)[name] for name in groups_of(type(self))]

    @property
    def opened_verbs(self) -> frozenset[str]:
        """Return the verbs of whose replies a key authority opens what the server computes."""
        verbs = set()
        if self.sums.by_authority:
            verbs.add(SUM)
        if self.pairs.by_authority:
            verbs.add(PAIRS)
        return frozenset(verbs)

    @property
    def hidden_replies(self) -> dict[str, HiddenReplies]:
        """Return what hides replies, by the verb that they leave through."""
        hidden: dict[str, HiddenReplies] = {}
        if self.sums.hide_replies:
            hidden[SUM] = self.sums.protection.replies()
        if self.pairs.hide_rows:
            hidden[PAIRS] = self.pairs.protection.replies(self.pairs.fields)
        return hidden

    def dry_runs(self) -> Sequence[Mapping[str, Any]]:
        """Return further hyper-parameters of runs that find how much a run may release.

        A run of stand-ins with the hyper-parameters as they are is counted in any case. Where the
        server's decisions depend on replies, it may release less than another run: then a method
        returns those with which it releases the most.
        """
        return ()

    def adds_noise(self, config: Mapping[str, Any]) -> bool:
        """Return whether anything that clients release in a run has noise.

        Then models that clients trained alone stay out of the results, since no noise covers them,
        and no error of a client may depend on its data.

        Args:
            config: what clients and server agreed on.
        """
        return any(options.adds_noise(config) for options in self.option_groups)

    def trainings(
        self, usual: LocalTraining, config: Mapping[str, Any]
    ) -> dict[str, LocalTraining]:
        """Return the kinds of training by the name that client methods use (`Release.trains`).

        Args:
            usual: the training of a round.
            config: what clients and server agreed on.
        """
        full = self.privacy.training(FULL_GRADIENT, config)
        return {"usual": usual, "full": full}

    @property
    def fields_with_own_noise(self) -> frozenset[str]:
        """Return the fields that clients add noise to before they pass the pipeline."""
        fields: set[str] = set()
        for options in self.option_groups:
            fields |= options.fields_with_own_noise(self)
        return frozenset(fields)

    @property
    def refused_methods(self) -> frozenset[str]:
        """Return the names of client methods that the clients of this run refuse to answer."""
        refused: set[str] = set()
        for options in self.option_groups:
            refused |= options.refused_methods
        return frozenset(refused)

    @property
    def unused_options(self) -> frozenset[str]:
        """Return the names of hyper-parameters that have no effect beside the others' values."""
        unused: set[str] = set()
        for options in self.option_groups:
            unused |= options.unused
        return frozenset(unused)

    @property
    def server_knows_labels(self) -> bool:
        """Return whether the final state of `run_server` has the clients' clusters."""
        return True

    def known_labels(self, client: Any, state: Any) -> list[int]:
        """Return each client's cluster as the experimenter knows it, (m,).

        These are the server's, unless clients do not tell it their clusters.

        Args:
            client: the clients' object.
            state: the server's state.
        """
        return [int(label) for label in state.labels]

    def newcomer_labels(self, client: Any, state: Any, labels: list[int]) -> list[int]:
        """Return the clusters of newcomers as the experimenter knows them.

        Args:
            client: the newcomers' object.
            state: the server's final state.
            labels: what `assign_newcomers` returned.
        """
        return labels

    def shared_facts(self, federation: Federation) -> dict[str, Any]:
        """Return what client and server must agree on besides the hyper-parameters.

        Args:
            federation: the clients and their data.
        """
        return {}

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Return the sizes that bound the contents of frames, by the names that messages declare.

        Every client and the server derive them from the configuration. A method whose messages name
        further sizes adds them.

        Args:
            config: what clients and server agreed on.
        """
        sizes: dict[str, int] = {}
        for options in self.option_groups:
            sizes |= options.frame_sizes(config)
        clients = int(config["clients"])
        rounds = int(self.total_rounds)
        # More calls than any method makes, repetitions included.
        calls = (4 * clients + 64) * (rounds + 2)
        averages = 2 * (rounds + clients) + 4
        return {
            "clients": clients,
            "dimension": int(config["dimension"]),
            "rounds": rounds + 1,  # calls after the loop belong to one more round
            "steps": FIRST_SEPARATE_STEP + calls,
            "averages": averages,
            "restarts": 0,
            **sizes,
        }

    @property
    def weighted(self) -> bool:
        """Return whether clients send their numbers of samples."""
        return False

    @property
    def validation_share(self) -> float:
        """Return the share of each client's training samples that is held out for validation."""
        return 0.0

    @property
    def total_rounds(self) -> int:
        """Return the number of rounds, each of which has a line in the history."""
        return self.rounds

    @property
    def vectors_per_round(self) -> int:
        """Return about how many rows of d numbers a client and the server exchange in a round."""
        return 2  # an update up and an average down

    def models_after_round(self, client: Any, state: Any) -> Rows:
        """Return the model each client would use after this round, (m, d).

        The observer calls it outside the network, so it changes no client.

        Args:
            client: the clients' object.
            state: the server's state after the round.
        """
        all_clients = range(len(client.cohort.ids))
        # With the averages that are still in the queue.
        models: Rows = client.advanced(all_clients, state.outbox.message_for(all_clients))
        return models

    def evaluate(self, client: Any, state: Any) -> NDArray[np.float64]:
        """Return each client's accuracy, or other metric of the objective, after a round, (m,).

        Clients without test data have NaN.

        Args:
            client: the clients' object.
            state: the server's state after the round.
        """
        models = self.models_after_round(client, state)
        scores: NDArray[np.float64] = client.cohort.scores(models)
        return scores

    def final_models(self, client: Any, state: Any) -> Rows:
        """Return the model that each client has at the end of the run, (m, d).

        Args:
            client: the clients' object.
            state: the server's final state.
        """
        models: Rows = client.models
        return models

    def shared_models(self, client: Any) -> Any:
        """Return the clusters' models, (k, d), where clients continued alone from them.

        Args:
            client: the clients' object.

        Returns:
            None where the clients' own models are the clusters'.
        """
        return None

    def observe(
        self, federation: Federation, client: Any, state: Any, scores: NDArray[np.float64]
    ) -> Line:
        """Return the observer's numbers after a round, for the history.

        Args:
            federation: the clients, with their true clusters where they are known.
            client: the clients' object.
            state: the server's state after the round.
            scores: (m,) the result of `evaluate`.
        """
        labels = self.known_labels(client, state)
        line: Line = {"clusters": len(set(labels)), federation.objective.metric: mean(scores)}
        if federation.truth is not None:
            line["ari"] = agreement(labels, federation.truth)["ari"]
        return line
