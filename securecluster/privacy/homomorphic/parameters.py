"""Parameters of the encryption schemes, and the checks that refuse unsafe or imprecise ones."""

from __future__ import annotations

from dataclasses import dataclass

from securecluster.errors import UsageError

BFV = "bfv"
CKKS = "ckks"
# largest number of bits of all moduli together at 128 bits of security, by the polynomial degree
# (HomomorphicEncryption.org security standard, ternary secrets)
MOST_BITS = {2048: 54, 4096: 109, 8192: 218, 16384: 438}
# ciphertexts in one sum
MOST_MEMBERS = 4096
MEMBER_BITS = 12
# largest error of one fresh CKKS number, relative to its range
LARGEST_ERROR = 1e-7
# Bits between the data modulus and the plain modulus of BFV: half a unit of the plaintext is then
# 2^17, and the noise of 4096 ciphertexts is below 2^17 but with negligible probability (standard
# deviation about 2^14).
NOISE_BITS = 19
# bits of a limb of a wide integer, and the bits of one slot's sum of limbs or of narrow integers
LIMB_BITS = 16
SLOT_BITS = 32


@dataclass(frozen=True)
class Parameters:
    """Parameters of one encryption scheme.

    Args:
        scheme: "bfv" or "ckks".
        degree: degree of the polynomials.
        moduli: bits of the moduli; the last one is that of keys alone.
        plain_modulus: prime that BFV's sums are taken modulo; 0 for CKKS.
        scale_bits: bits of the scale of CKKS; 0 for BFV.

    Raises:
        UsageError: a scheme that is not known, or parameters that are not secure, or not precise
            enough for sums.
    """

    scheme: str
    degree: int = 4096
    moduli: tuple[int, ...] = (54, 55)
    plain_modulus: int = 0
    scale_bits: int = 0

    def __post_init__(self) -> None:
        if self.scheme not in (BFV, CKKS):
            raise UsageError(f"unknown encryption scheme {self.scheme!r}: take bfv or ckks")
        self._check_security()
        if self.scheme == BFV:
            self._check_bfv()
        else:
            self._check_ckks()

    @property
    def slots(self) -> int:
        """Return the numbers in one ciphertext."""
        if self.scheme == BFV:
            return self.degree
        return self.degree // 2

    @property
    def data_bits(self) -> int:
        """Return the bits of the moduli of ciphertexts."""
        return sum(self.moduli[:-1])

    @property
    def ciphertext_bytes(self) -> int:
        """Return an upper bound of the bytes of a serialized ciphertext: two polynomials."""
        return 2 * self.degree * 8 * (len(self.moduli) - 1) + 1024

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

    def _check_bfv(self) -> None:
        if self.scale_bits:
            raise UsageError("BFV has no scale: leave scale_bits out")
        if self.plain_modulus % (2 * self.degree) != 1 or not _is_prime(self.plain_modulus):
            raise UsageError(
                f"the plain modulus {self.plain_modulus} cannot pack numbers: take a prime that is "
                f"1 modulo {2 * self.degree}"
            )
        if self.plain_modulus <= 1 << SLOT_BITS:
            raise UsageError(
                f"the plain modulus {self.plain_modulus} does not hold a sum of {SLOT_BITS} bits: "
                "take a larger one"
            )
        if self.data_bits - self.plain_modulus.bit_length() < NOISE_BITS:
            raise UsageError(
                f"moduli of {self.data_bits} bits leave no room for the noise of {MOST_MEMBERS} "
                f"ciphertexts beside a plain modulus of {self.plain_modulus.bit_length()} bits: "
                "take larger ones"
            )

    def _check_ckks(self) -> None:
        if self.plain_modulus:
            raise UsageError("CKKS has no plain modulus: leave plain_modulus out")
        error = self.degree / 2.0**self.scale_bits
        if error > LARGEST_ERROR:
            raise UsageError(
                f"a scale of 2^{self.scale_bits} errs by about {error:.0e} of the range at degree "
                f"{self.degree}: take a scale of 2^40"
            )
        # a number of magnitude 1, and the sum of all members of a sum
        if self.scale_bits + MEMBER_BITS + 1 > self.data_bits:
            raise UsageError(
                f"moduli of {self.data_bits} bits do not hold sums of {MOST_MEMBERS} numbers at a "
                f"scale of 2^{self.scale_bits}: take larger moduli, or a smaller scale"
            )


def default_parameters(scheme: str) -> Parameters:
    """Return the parameters of sums: degree 4096, about 61 KB a ciphertext.

    Args:
        scheme: "bfv" or "ckks".
    """
    if scheme == BFV:
        return Parameters(BFV, plain_modulus=8590090241)  # the first fitting prime above 2^33
    return Parameters(scheme, scale_bits=40)


def _is_prime(number: int) -> bool:
    """Return whether a number below 2^64 is a prime (Miller-Rabin with bases that decide these)."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
    if number < 2 or number % 2 == 0:
        return number == 2
    odd = number - 1
    twos = 0
    while odd % 2 == 0:
        odd //= 2
        twos += 1
    return all(number == base or _passes(number, base, odd, twos) for base in bases)


def _passes(
    number: int,
    base: int,
    odd: int,
    twos: int,
) -> bool:
    """Return whether a base finds no proof that the number is composite."""
    power = pow(base, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False
