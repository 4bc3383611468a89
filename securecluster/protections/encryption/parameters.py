"""Parameters of CKKS, and the checks that refuse unsafe or imprecise ones.

CKKS sums integers exactly here. Two decryptions in full precision give the secret key by linear
equations, since they hold the ciphertexts' noise. So clients round to a grid
(`Parameters.grid_bits`) before they encrypt, and the authority releases the integer next to what it
decrypts: a function of the clients' numbers alone. The cost is half a step of each client in place
of half a step of the sum; noise of a mechanism is added before rounding.

What lies further than a quarter of a step from an integer is refused, and a client that encrypts no
integers would learn of the noise, and so of the key, from refusals. So the authority first adds
Gaussian flooding noise of 1/64 of a step to the ciphertext, whose arithmetic is exact. Half a step
is 32 of its standard deviations, so honest sums are never wrong, and the noise of m ciphertexts is
2^39 times smaller. For this CKKS has degree 8192 and Δ = 2^80, and the authority decrypts 2^20
ciphertexts in a run at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from securecluster.errors import UsageError

CKKS = "ckks"
# largest number of bits of all moduli together at 128 bits of security, by the polynomial degree
# (Bossuat et al. 2024, "Security Guidelines for Implementing Homomorphic Encryption", ePrint
# 2024/463, table 5.2: ternary secrets, classical attacks; docs/evidence/encryption.md)
MOST_BITS = {2048: 53, 4096: 106, 8192: 214, 16384: 430}
# ciphertexts in one sum
MOST_MEMBERS = 4096
MEMBER_BITS = 12
# Bits of the integers that CKKS sums exactly, of a single member: more members have fewer.
GRID_BITS = 24
# Bits between the flooding noise of CKKS and a step of the grid: a step is 64 standard deviations.
FLOOD_MARGIN_BITS = 6
# Least bits of the ratio between flooding noise and the noise of ciphertexts.
FLOOD_BITS = 39
# ciphertexts that a key authority decrypts in a run: the bound of what flooding hides is for them
MOST_DECRYPTIONS = 1 << 20
# bits of a limb of a wide integer
LIMB_BITS = 16


@dataclass(frozen=True)
class Parameters:
    """Parameters of CKKS.

    Args:
        degree: degree of the polynomials.
        moduli: bits of the moduli; the last one is that of keys alone.
        scale_bits: bits of the scale.

    Raises:
        UsageError: parameters that are not secure, or not precise enough for sums.
    """

    degree: int = 8192
    moduli: tuple[int, ...] = (47, 47, 48)
    scale_bits: int = 80

    def __post_init__(self) -> None:
        self._check_security()
        self._check_precision()

    @property
    def slots(self) -> int:
        """Return the numbers in one ciphertext."""
        return self.degree // 2

    @property
    def data_bits(self) -> int:
        """Return the bits of the moduli of ciphertexts."""
        return sum(self.moduli[:-1])

    @property
    def ciphertext_bytes(self) -> int:
        """Return an upper bound of the bytes of a serialized ciphertext: two polynomials."""
        return 2 * self.degree * 8 * (len(self.moduli) - 1) + 1024

    def grid_bits(self, members: int) -> int:
        """Return the bits of the integers that are summed exactly, of one number of each member.

        A slot holds an integer of g bits as a fraction of 2^g, so its sum is exact as long as the
        decryption errs by less than half of 2^-g. What it errs by is flooding noise, of which half
        a step has 32 standard deviations, and a quarter, beyond which nothing is released, 16: an
        honest sum is refused with probability 2^-188 a number, and never wrong before.

        Args:
            members: number of ciphertexts in the sum, m.
        """
        # Errors grow with the root of the members, so a bit is lost for each factor of four.
        lost = math.ceil(math.log2(members) / 2)
        return GRID_BITS - lost

    def error(self, members: int) -> float:
        """Return the standard deviation of the noise of a sum's slots, N √m / (6 Δ).

        Division by the last modulus at encryption leaves coefficients with errors r0 + r1·s:
        uniform r0 and r1 (variance 1/12), a ternary secret s (variance 2/3), and degree N.

        Args:
            members: number of ciphertexts in the sum, m.
        """
        return self.degree * math.sqrt(members) / (6 * 2.0**self.scale_bits)

    def flooding(self, members: int) -> float:
        """Return the standard deviation of a slot's flooding noise, 1/64 of a step.

        A decryption holds the noise of the ciphertexts, which depends on the secret key (Li and
        Micciancio 2021). Gaussian noise of σ_f on each of its N/2 slots hides that of standard
        deviation σ_e: with and without it, Q decrypted ciphertexts have a divergence (Kullback and
        Leibler) of Q (N/2) σ_e² / (2 σ_f²) at most, also where they are chosen adaptively (Li,
        Micciancio, Schultz and Sorrell 2022), and an advantage of its root over √2 (`advantage`).

        Args:
            members: number of ciphertexts in the sum, m.
        """
        return 2.0 ** -(self.grid_bits(members) + FLOOD_MARGIN_BITS)

    def advantage(self, members: int, ciphertexts: int) -> float:
        """Return a bound of what decryptions tell of the noise of ciphertexts.

        It bounds the total variation distance between decryptions with and without this noise
        (Pinsker's inequality), so the advantage of any adversary that reads them.

        Args:
            members: number of ciphertexts in each sum, m.
            ciphertexts: number of sums of ciphertexts that are decrypted, Q.
        """
        ratio = self.error(members) / self.flooding(members)
        divergence = ciphertexts * self.slots * ratio**2 / 2
        return math.sqrt(divergence / 2)

    def largest_integer(self, bits: int, members: int) -> int | None:
        """Return the largest integer of one member that a sum takes; None where any that fits.

        Args:
            bits: 32 or 64, of the integers of a field.
            members: number of members of the sum.
        """
        # integers of 64 bits are summed in limbs
        if bits == 64:
            return None
        return 1 << self.grid_bits(members)

    def _check_security(self) -> None:
        limit = MOST_BITS.get(self.degree)
        if limit is None:
            degrees = ", ".join(map(str, MOST_BITS))
            raise UsageError(f"polynomials of degree {self.degree} are not offered: take {degrees}")
        if len(self.moduli) < 2 or min(self.moduli) < 20 or max(self.moduli) > 60:
            raise UsageError(
                f"moduli of {list(self.moduli)} bits are not offered: give two or more, of 20 to "
                "60 bits, the last one for the keys"
            )
        if sum(self.moduli) > limit:
            raise UsageError(
                f"moduli of {sum(self.moduli)} bits are not secure at degree {self.degree}: it "
                f"allows {limit}"
            )

    def _check_precision(self) -> None:
        # Both lose half a bit for each factor of two, but the grid in whole bits: the least ratio
        # is that of powers of four.
        if self.flooding(1) < self.error(1) * 2**FLOOD_BITS:
            raise UsageError(
                f"a scale of 2^{self.scale_bits} at degree {self.degree} leaves no room for noise "
                "that hides the noise of ciphertexts: take a scale of 2^80 at degree 8192"
            )
        # a number of magnitude 1, and the sum of all members of a sum
        if self.scale_bits + MEMBER_BITS + 1 > self.data_bits:
            raise UsageError(
                f"moduli of {self.data_bits} bits do not hold sums of {MOST_MEMBERS} numbers at a "
                f"scale of 2^{self.scale_bits}: take larger moduli, or a smaller scale"
            )


def check_members(members: int) -> None:
    """Raise UsageError for a sum over more ciphertexts than parameters leave room for.

    Args:
        members: number of clients of the sum.
    """
    if not 1 <= members <= MOST_MEMBERS:
        raise UsageError(
            f"an encrypted sum is over 1 to {MOST_MEMBERS} clients, not {members}: ask fewer of "
            "them at once, or take relevance pads"
        )
