"""Estimate the security of the encryption's parameters: the primal attack on Ring-LWE.

python -m benchmarks.leaks.lattice

The lattice estimator (Albrecht, Player and Scott 2015, github.com/malb/lattice-estimator) needs
Sage. This computes anew, in a few lines, what it computes for the attack that is cheapest on
ternary secrets of these sizes: the primal attack by a unique shortest vector (Alkim, Ducas,
Pöppelmann and Schwabe 2016), with the geometric series assumption, the secret scaled to the error
(Bai and Galbraith 2014), and the estimator's default costs of lattice reduction, classical (MATZOV
2022). The last lines are the degrees and moduli of the guidelines of 2024 (Bossuat et al., ePrint
2024/463, table 5.2) and of the standard of 2018, to compare with.
"""

from __future__ import annotations

import math
from typing import Any

from benchmarks.table import write
from securecluster.protections.encryption.parameters import (
    CKKS,
    MOST_DECRYPTIONS,
    MOST_MEMBERS,
    Parameters,
)

# standard deviations of SEAL's errors, and of uniform ternary secrets
ERROR = 3.19
SECRET = math.sqrt(2 / 3)
# cost of a nearest-neighbour search in dimension β, 2^(aβ + b) (MATZOV 2022, list decoding)
SLOPE = 0.29613500308205365
OFFSET = 20.387885985467914
# (degree, bits of the modulus) of the tables for 128 bits, classical attacks, ternary secrets
GUIDELINES = {"2024": {4096: 106, 8192: 214}, "2018": {4096: 109, 8192: 218}}


def root_hermite(block: int) -> float:
    """Return δ, by which BKZ of a block size shortens vectors (Chen 2013).

    Args:
        block: β.
    """
    root = (math.pi * block) ** (1 / block)
    volume = root * block / (2 * math.pi * math.e)
    exponent = 1 / (2 * (block - 1))
    return float(volume**exponent)


def reduction_bits(block: int, dimension: int) -> float:
    """Return the binary logarithm of the operations of BKZ, as MATZOV 2022 counts them.

    Args:
        block: β.
        dimension: of the lattice, d.
    """
    # dimensions for free (Ducas 2018), and the overhead of sieves that grow
    growth = math.log(block / (2 * math.pi * math.e))
    free = block * math.log(4 / 3) / growth
    searched = block - max(free, 0)
    overhead = 1 / (1 - 2**-SLOPE)
    calls = overhead * max(dimension - block, 1)
    searches = math.log2(calls) + math.log2(overhead)
    return searches + SLOPE * searched + OFFSET


def finds_the_secret(block: int, samples: int, degree: int, bits: float) -> bool:
    """Return whether BKZ finds the secret: √β σ ≤ δ^(2β − d − 1) Vol^(1/d).

    Args:
        block: β.
        samples: m, equations that the attack uses.
        degree: N, coefficients of the secret.
        bits: of the modulus.
    """
    dimension = degree + samples + 1
    # binary logarithms of all lengths
    scaled = degree * math.log2(ERROR / SECRET)
    volume = samples * bits + scaled + math.log2(ERROR)
    exponent = 2 * block - dimension - 1
    reduced = exponent * math.log2(root_hermite(block)) + volume / dimension
    projected = 0.5 * math.log2(block) + math.log2(ERROR)
    return projected <= reduced


def primal(degree: int, bits: float) -> tuple[int, float]:
    """Return the least block size of a primal attack, and the bits of its cost.

    Args:
        degree: N.
        bits: of the modulus.
    """
    best: tuple[int, float] = (degree, math.inf)
    for samples in range(degree // 2, 2 * degree, degree // 64):
        low = 50
        high = degree
        while low < high:
            middle = (low + high) // 2
            if finds_the_secret(middle, samples, degree, bits):
                high = middle
            else:
                low = middle + 1
        cost = reduction_bits(low, degree + samples + 1)
        if cost < best[1]:
            best = (low, cost)
    return best


def lines() -> list[dict[str, Any]]:
    """Return a line for each set of parameters."""
    parameters = Parameters()
    parameter_sets = [(CKKS, parameters.degree, sum(parameters.moduli))]
    for year, limits in GUIDELINES.items():
        parameter_sets += [(f"limit of {year}", degree, bits) for degree, bits in limits.items()]
    rows = []
    for name, degree, bits in parameter_sets:
        block, cost = primal(degree, bits)
        limit = GUIDELINES["2024"][degree]
        rows.append(
            {
                "parameters": name,
                "degree": degree,
                "modulus_bits": bits,
                "limit": limit,
                "block": block,
                "security": round(cost, 1),
            }
        )
    return rows


def flooding_lines() -> list[dict[str, Any]]:
    """Return a line for each number of members: what flooding hides of CKKS."""
    parameters = Parameters()
    rows = []
    for members in (1, 10, 100, 1000, MOST_MEMBERS):
        error = parameters.error(members)
        flooding = parameters.flooding(members)
        rows.append(
            {
                "members": members,
                "grid_bits": parameters.grid_bits(members),
                "error": round(math.log2(error), 2),
                "flooding": round(math.log2(flooding), 2),
                "one": round(math.log2(parameters.advantage(members, 1)), 2),
                "run": round(math.log2(parameters.advantage(members, MOST_DECRYPTIONS)), 2),
            }
        )
    return rows


def main() -> None:
    """Write and print the lines."""
    write("lattice", lines())
    write("flooding", flooding_lines())
    for row in [*lines(), *flooding_lines()]:
        print(row)


if __name__ == "__main__":
    main()
