"""The mask can be undone, is another one in each call, and leaves models as they are."""

import torch

from securecluster import CFL, Federation
from securecluster.cli.templates.sign_flips import SignFlips


def test_it_is_undone_and_keeps_inner_products() -> None:
    mask = SignFlips()
    mask.unlock(bytes(range(32)))
    rows = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    first, second = mask.forward(rows, 1), mask.forward(rows, 2)
    assert not torch.equal(first, second)
    torch.testing.assert_close(mask.inverse(first, 1), rows)
    torch.testing.assert_close(first @ first.T, rows @ rows.T)


def test_models_are_those_of_a_run_without_it() -> None:
    clients = Federation.simulate("digits", clients=6, samples=40, seed=0)
    masked = CFL(mask="sign-flips", rounds=2, epochs=1).fit(clients)
    plain = CFL(mask="none", rounds=2, epochs=1).fit(clients)
    assert masked.labels_.tolist() == plain.labels_.tolist()
    expected = plain.client_models_.values
    torch.testing.assert_close(masked.client_models_.values, expected, rtol=0, atol=1e-6)
