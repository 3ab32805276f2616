"""Rates and what they are worth: pass@k, pass^k, Wilson's interval, McNemar's exact test."""

from collections.abc import Iterable
from math import comb, sqrt

Z95 = 1.959963984540054  # two-sided 95 % point of the normal distribution


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Probability that at least one of ``k`` trials drawn from ``n``, of which ``c`` passed, passed.

    ``1 - C(n-c, k) / C(n, k)``: unbiased (Chen et al. 2021). None where ``n < k``: undefined.
    """
    if n < k:
        return None
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float | None:
    """Probability that all of ``k`` trials drawn from ``n``, of which ``c`` passed, passed.

    ``C(c, k) / C(n, k)``: unbiased (tau-bench). None where ``n < k``: undefined.
    """
    if n < k:
        return None
    return comb(c, k) / comb(n, k)


def plug_in(p: float, k: int) -> tuple[float, float]:
    """``1 - (1 - p)^k`` and ``p^k`` for a rate ``p``."""
    return 1.0 - (1.0 - p) ** k, p**k


def macro_mean(values: Iterable[float | None]) -> float | None:
    """Mean over the tasks where the figure is defined; None where it is for none."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


def wilson(passed: int, total: int, z: float = Z95) -> tuple[float, float] | None:
    """Wilson's score interval of a rate, 95 % by default; None without trials."""
    if total == 0:
        return None
    rate, spread = passed / total, z * z / total
    middle = rate + spread / 2
    half = z * sqrt(rate * (1 - rate) / total + spread / (4 * total))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def mcnemar(broken: int, fixed: int) -> float:
    """Exact two-sided p of McNemar's test, from the pairs that flipped one way and the other."""
    flips = broken + fixed
    tail = sum(comb(flips, i) for i in range(min(broken, fixed) + 1))
    return min(1.0, 2 * tail / 2**flips)
