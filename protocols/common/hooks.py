"""Hooks of a protocol: two abstract methods, and defaults that a method may override."""

from __future__ import annotations

import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from securecluster.core.option_groups import Grouped, option_groups
from securecluster.errors import UsageError
from securecluster.messaging.messages import FIRST_SEPARATE_STEP
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.disclosures import Disclosures
from securecluster.protocols.common.observer import Observer
from securecluster.protocols.common.options.pair_options import PairOptions
from securecluster.protocols.common.options.privacy_options import PrivacyOptions
from securecluster.protocols.common.options.sum_options import SumOptions
from securecluster.protocols.common.options.training_options import TrainingOptions
from securecluster.runtime.run import Run
from securecluster.training.config import FULL_GRADIENT
from securecluster.training.local_trainer import LocalTraining

if TYPE_CHECKING:
    from securecluster.data.facts import Facts
    from securecluster.runtime.server_channel import ServerChannel


FOR_USERS = ("mask", "model", "name", "rounds")
# methods of the base class that authors override or call, beside the hooks here
OF_BASE = ("check", "config", "fitted_class", "make_client", "pipeline")


class ProtocolType(ABCMeta):
    """Class of protocols, of which help and completion show what a user of one needs.

    Hooks are an author's, and shown of classes that lack one: of those to derive from.
    """

    def __dir__(cls) -> list[str]:
        """Return the names of attributes, without hooks where the class lacks none of them."""
        names = super().__dir__()
        if inspect.isabstract(cls):
            return list(names)
        return [name for name in names if not is_hook(name)]


class ProtocolHooks(Grouped, metaclass=ProtocolType):
    """The server's loop, newcomers, reports, and the observer's measurements."""

    name: ClassVar[str]
    client: ClassVar[type[TrainingClient]] = TrainingClient
    scenario: ClassVar[str | None] = None
    """Default scenario of the command line; None is the data set's."""
    other_clusters_under: ClassVar[tuple[str, ...]] = ()
    """Masks that lead to other clusters than none, since the method reads more than distances."""
    gps: ClassVar[type] = object
    """Class of the global parameter server, for hierarchical methods."""
    _length: ClassVar[str] = "rounds"
    """Option of which a larger value makes a run longer, and nothing else of it another."""
    rounds: int
    model: Any
    mask: str
    training: TrainingOptions
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

    def dry_runs(self) -> Sequence[Mapping[str, Any]]:
        """Return further hyper-parameters of runs that find how much a run may release.

        A run of stand-ins with the hyper-parameters as they are is counted in any case. Where the
        server's decisions depend on replies, it may release less than another run: then a method
        returns those with which it releases the most.
        """
        return ()

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

    def shared_facts(self, facts: Facts) -> dict[str, Any]:
        """Return what client and server must agree on besides the hyper-parameters.

        Args:
            facts: of the clients and their data.
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
        for options in option_groups(self):
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
    def total_rounds(self) -> int:
        """Return the number of rounds, each of which has a line in the history."""
        return self.rounds

    def _unlike_longer(self, longer: Any) -> str | None:
        """Return what a run of this length did otherwise than a longer one in as many rounds.

        Args:
            longer: the same with more rounds.

        Returns:
            A sentence; None for nothing, so that a run that goes on is one in one go.

        Raises:
            UsageError: so much that it cannot go on.
        """
        return self.training.unlike_longer(self)

    @property
    def vectors_per_round(self) -> int:
        """Return about how many rows of d numbers a client and the server exchange in a round."""
        return 2  # an update up and an average down

    @property
    def observer(self) -> Observer:
        """Return what the experimenter computes outside the protocol."""
        return Observer(self)


def check_phase_over(method: Any, option: str) -> None:
    """Check that a run made all rounds of a phase, so that a longer one goes on after it.

    Args:
        method: of the run, with the rounds that it had.
        option: its rounds of the phase.

    Raises:
        UsageError: it ended before the phase did.
    """
    if method.rounds < getattr(method, option):
        raise UsageError(
            f"rounds = {method.rounds} cut {option} = {getattr(method, option)} short, and a "
            "longer run does not begin like this one: start it anew"
        )


def is_hook(name: str) -> bool:
    """Return whether a public attribute of protocols is a hook, which authors override.

    Args:
        name: of the attribute.
    """
    if name.startswith("_") or name in FOR_USERS:
        return False
    return name in OF_BASE or name in vars(ProtocolHooks) or name in ProtocolHooks.__annotations__
