"""How often chance may fail a test: less than once in a million runs of a sound product (`tests/README.md`).

    RATE = rate(hits=41, runs=333)                      # measured once: what a single run shows, with what
    probability
    for seed in range(seeds_for(RATE)): ...             # as long as nothing was found: so many seeds at most
    assert hits >= sure_hits(RATE, runs)                # or: so many hits may be asked for

Seeds are fixed, so a run repeats. What draws anew is the next change of the product, which makes other runs
of the same seeds.
"""

from math import ceil, log, log1p

from scipy.stats import beta, binom, norm, poisson

ONCE_IN = 1e-6
"""Probability that a sound product fails one test."""
SURE = float(norm.isf(ONCE_IN / 2))
"""4.9 standard deviations: further off lies a normally distributed figure of a sound product once in a
million runs."""
DOUBT = 1e-3
"""Probability that a measured rate is lower than `rate` says."""


def rate(hits: int, runs: int) -> float:
    """Of which a run hits at least, after so many hits in so many runs (Clopper-Pearson). In [0, 1)."""
    return float(beta.ppf(DOUBT, hits, runs - hits + 1)) if hits else 0.0


def seeds_for(p_hit: float, events: int = 1) -> int:
    """Runs after which at least one has hit. `p_hit`: of a run, in (0, 1]. `events`: of which the test asks
    for each."""
    return 1 if p_hit >= 1 else ceil(log(ONCE_IN / events) / log1p(-p_hit))


def sure_hits(p_hit: float, seeds: int, events: int = 1) -> int:
    """The largest number of hits that a sound product reaches in so many runs, each of which hits or does
    not."""
    found = int(binom.ppf(ONCE_IN / events, seeds, p_hit))
    return found if binom.cdf(found - 1, seeds, p_hit) < ONCE_IN / events else found - 1


def sure_range(p_hit: float, seeds: int, events: int = 1) -> range:
    """Numbers of hits that a sound product stays within."""
    return range(sure_hits(p_hit, seeds, 2 * events), seeds - sure_hits(1 - p_hit, seeds, 2 * events) + 1)


def sure_count(mean: float, events: int = 1) -> int:
    """The same of a count of independent events (Poisson) of which `mean` are expected."""
    found = int(poisson.ppf(ONCE_IN / events, mean))
    return found if poisson.cdf(found - 1, mean) < ONCE_IN / events else found - 1
