"""Products of float32 matrices against those in float64, by either of a CPU's libraries."""

from __future__ import annotations

import pytest
import torch

from securecluster.models import products

# below and above the smallest product that goes to oneDNN
SHAPES = ((3, 5, 2), (100, 128, 96))


def factors(m: int, p: int, n: int, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two factors of three products each, as plain matrices or as views of transposed ones."""
    generator = torch.Generator().manual_seed(m)
    if transposed:
        a = torch.randn(3, p, m, generator=generator).mT
        b = torch.randn(3, n, p, generator=generator).mT
        return a, b
    return torch.randn(3, m, p, generator=generator), torch.randn(3, p, n, generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("library", ["oneDNN", "MKL"])
def test_products_are_exact_to_the_rounding_of_float32(
    shape: tuple[int, int, int], transposed: bool, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "MKL":
        monkeypatch.setattr(products, "_linear", lambda: None)
    a, b = factors(*shape, transposed)
    found = products.products(a, b)
    one = products.product(a[0], b[0])
    exact = a.double() @ b.double()
    # p roundings of numbers below the sum of sizes, in any order (Higham 2002, eq. 3.13)
    bound = shape[1] * 2.0**-24 * (a.double().abs() @ b.double().abs())
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= bound).all()
    assert ((one - exact[0]).abs() <= bound[0]).all()


def test_other_types_stay_with_torch() -> None:
    a, b = factors(*SHAPES[1], False)
    exact = a[0].double() @ b[0].double()
    assert torch.equal(products.product(a[0].double(), b[0].double()), exact)
