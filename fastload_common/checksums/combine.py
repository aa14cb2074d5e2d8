"""The CRC of two pieces together, from the CRC of each. Pure.

A CRC is a remainder of polynomials over GF(2). Appending n bytes multiplies what came before by
x^(8n) modulo the CRC's polynomial; that power takes O(log n) multiplications, and is kept, since
most pieces of an object are of one size. What the CRCs do at the start and at the end (all bits
set, all inverted) cancels out.

Numbers are reflected, as in the CRCs themselves: the highest bit stands for x^0.
"""

from __future__ import annotations

from functools import lru_cache

from fastload_common.checksums.algorithms import Algorithm

__all__ = ["combine"]


def combine(algorithm: Algorithm, first: int, second: int, second_bytes: int) -> int:
    """The CRC of A + B.

    Args:
        first: CRC of A (0 for no bytes).
        second: CRC of B.
        second_bytes: length of B.
    """
    if second_bytes < 0:
        raise ValueError(f"a piece of {second_bytes} bytes")
    return _product(algorithm, _power_of_x(algorithm, second_bytes), first) ^ second


@lru_cache(maxsize=1024)
def _power_of_x(algorithm: Algorithm, size_bytes: int) -> int:
    """x^(8 * size_bytes) modulo the polynomial."""
    power = 1 << (algorithm.width_bits - 1)  # x^0
    square = 1 << (algorithm.width_bits - 9)  # x^8
    while size_bytes:
        if size_bytes & 1:
            power = _product(algorithm, power, square)
        square = _product(algorithm, square, square)
        size_bytes >>= 1
    return power


def _product(algorithm: Algorithm, a: int, b: int) -> int:
    """a * b modulo the polynomial."""
    polynomial = algorithm.polynomial
    bit = 1 << (algorithm.width_bits - 1)
    product = 0
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ polynomial if b & 1 else b >> 1
    return product
