"""The arithmetic of a mean over ranks: sums that cannot overflow on the way, and the rule for integers.

A partial sum of k ranks is kept times ``partial_scale(k)`` = 2**-ceil(log2 k). A power of two costs no rounding (save
for subnormals), and the scaled sum never exceeds the largest input, so a mean that fits the dtype never overflows on
the way; dividing each input by n before the sum instead would lose small values, and dividing after it would overflow.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def partial_scale(dtype: torch.dtype, ranks: int) -> float:
    """The factor at which a partial sum over `ranks` ranks is kept while a mean is formed; 1 for integers."""
    return 0.5 ** (ranks - 1).bit_length() if dtype.is_floating_point else 1.0


def finish_mean(total: Tensor, ranks: int) -> Tensor:
    """Turn a sum over `ranks` ranks, kept at `partial_scale`, into their mean, in place.

    Integers: the exact sum in int64, divided and rounded to the nearest integer, halves to the even one (1 and 2 -> 2,
    2 and 3 -> 2). Only int64 leaves can have a sum that int64 does not hold; it wraps.
    """
    if total.dtype.is_floating_point:
        divisor = ranks * partial_scale(total.dtype, ranks)  # exact: ranks / a power of two
        return total if divisor == 1 else total.div_(divisor)
    quotient = total.div(ranks, rounding_mode="floor")
    twice_rest = (total - quotient * ranks) * 2
    round_up = (twice_rest > ranks) | ((twice_rest == ranks) & (quotient % 2 == 1))
    return total.copy_(quotient).add_(round_up)


def split_evenly(numel: int, parts: int) -> list[tuple[int, int]]:
    """`parts` bounds (start, stop) that cover `numel` elements in order, sizes differing by one at most."""
    size, longer = divmod(numel, parts)
    starts = [i * size + min(i, longer) for i in range(parts + 1)]
    return list(itertools.pairwise(starts))
