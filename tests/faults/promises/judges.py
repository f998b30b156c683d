"""Random judges of the laboratory: each plays one seed and returns which rule was violated; empty: none.

None of them knows a policy, a mutant or a test.
"""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling import profiles
from tests.faults.judges import copies, extremes, handovers, leases, members, repairs, senders
from tests.faults.judges.hostile_cell import HostileCell, settings_of
from tests.faults.laboratory.options import Options
from tests.faults.laboratory.parallel import MAX_RUN_CPU_S, bounded
from tests.faults.laboratory.run import live
from tests.support.cluster.random_cell import RandomCell
from tests.support.virtual_time import Endless

NAMES = profiles.names()
MAX_CPU_S = 10.0  # of one seed of a judge without services; sound ones take one at most


def cell(seed: int, **options: Any) -> str:
    """A run of the fault laboratory."""
    if isinstance(faults := options.get("faults"), str):
        options["faults"] = tuple(faults.split(","))
    outcome = live(Options(seed, **options))
    return outcome.rule and f"{outcome.rule}: {outcome.what}"


def hostile(seed: int, profile: str | None = None, jobs: int = 60) -> str:
    """A random cell whose services, nodes and senders are hostile, under one profile after the other."""
    name = profile or NAMES[seed % len(NAMES)]
    HostileCell(seed, settings_of(seed, name), jobs, buggy=seed % 6 == 0, fresh_every=7).run()
    return ""


def random(seed: int, profile: str | None = None, jobs: int = 80) -> str:
    found = RandomCell(seed, PlacerSettings(profile=profile or NAMES[seed % len(NAMES)]), jobs, fresh_every=5)
    left = found.run()
    return f"waits: {left[:3]}" if left else ""


def _playing(play: Callable[[int], None]) -> Callable[..., str]:
    """A judge that raises."""

    def judge(seed: int) -> str:
        play(seed)
        return ""

    return judge


JUDGES: Mapping[str, Callable[..., str]] = MappingProxyType(
    {
        "cell": cell,
        "hostile": hostile,
        "random": random,
        "senders": _playing(senders.play),
        "repairs": _playing(repairs.play),
        "copies": _playing(copies.play),
        "handovers": _playing(handovers.play),
        "members": _playing(members.play),
        "leases": _playing(leases.play),
        "extremes": _playing(extremes.play),
    }
)


def asked(name: str, seed: int, options: Mapping[str, Any]) -> str:
    """What a judge finds at this seed; empty: nothing. Whatever the product raises counts as found."""
    if name != "cell":  # which looks at what services log
        logging.disable(logging.CRITICAL)
    try:
        with bounded(MAX_RUN_CPU_S if name == "cell" else MAX_CPU_S):
            return JUDGES[name](seed, **options)
    except (Exception, Endless) as error:  # noqa: BLE001 - the product raises, or the judge does
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        logging.disable(logging.NOTSET)
