"""The method keeps what every method must, and finds clusters of rotated digits."""

from securecluster import Federation, Rotation
from securecluster.cli.templates.mean_clusters import MeanClusters
from securecluster.protocols import conformance


def test_it_passes_every_check() -> None:
    conformance.check(MeanClusters).require()


def test_it_finds_the_clusters() -> None:
    upright_or_not = Rotation(clusters=2)
    clients = Federation.simulate("digits", scenario=upright_or_not, clients=8, samples=40, seed=0)
    fitted = MeanClusters(k=2, rounds=1).fit(clients)
    assert fitted.agreement_ is not None and fitted.agreement_["exact"]
