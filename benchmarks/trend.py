"""What a series of samples says about growth: the slope of memory with its uncertainty, first level and last."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median

BLOCKS = 20
STUDENT = {1: 12.7, 2: 4.3, 3: 3.2, 4: 2.8, 5: 2.6, 6: 2.4, 7: 2.4, 8: 2.3, 9: 2.3, 10: 2.2, 11: 2.2, 12: 2.2}
"""97.5 % quantiles by degrees of freedom; 2.1 to 2.2 above."""


def slope(seconds: Sequence[float], memory: Sequence[float]) -> dict[str, float]:
    """MB/hour over the last two thirds of the samples, with a 95 % interval.

    A line by least squares through the means of up to 20 blocks: neighbouring samples are alike, so that each of them
    alone would promise too much. The interval is Student's, from the scatter of the means about the line.
    """
    begin = len(seconds) // 3
    x, y = list(seconds[begin:]), [value / 1e6 for value in memory[begin:]]
    blocks = max(3, min(BLOCKS, len(x) // 5))
    bounds = [len(x) * i // blocks for i in range(blocks + 1)]
    means = [(sum(x[a:b]) / (b - a), sum(y[a:b]) / (b - a)) for a, b in itertools.pairwise(bounds) if b > a]
    n = len(means)
    mean_x, mean_y = sum(a for a, _ in means) / n, sum(b for _, b in means) / n
    spread = sum((a - mean_x) ** 2 for a, _ in means)
    if n < 3 or spread == 0:
        return {"mb_per_hour": math.nan, "low": math.nan, "high": math.nan}
    rise = sum((a - mean_x) * (b - mean_y) for a, b in means) / spread
    rest = sum((b - mean_y - rise * (a - mean_x)) ** 2 for a, b in means)
    half = STUDENT.get(n - 2, 2.1) * math.sqrt(rest / (n - 2) / spread)
    return {"mb_per_hour": rise * 3600, "low": (rise - half) * 3600, "high": (rise + half) * 3600}


def growth(ranks: Sequence[Sequence[float]]) -> dict[str, float]:
    """The medians of the second tenth and the last tenth, on the rank where it grew most."""
    found = []
    for values in ranks:
        tenth = max(1, len(values) // 10)
        found.append((median(values[tenth : 2 * tenth] or values), median(values[-tenth:])))
    first, last = max(found, key=lambda pair: pair[1] - pair[0])
    return {"first": first, "last": last}
