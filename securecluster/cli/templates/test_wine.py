"""The data set can be dealt out, and learned."""

from securecluster import FedAvg, Federation, Iid
from securecluster.cli.templates.wine import wine


def test_every_client_has_samples_of_its_own_and_learns() -> None:
    clients = Federation.simulate(wine(), scenario=Iid(), clients=6, samples=20, seed=0)
    rows = [row.tobytes() for shard in clients.shards for row in (*shard.x, *shard.x_test)]
    assert len(rows) > 6 * 20 and len(rows) == len(set(rows))
    fitted = FedAvg(model="linear", rounds=5, epochs=1).fit(clients)
    assert fitted.accuracy_.mean() > 0.8  # a third is chance
