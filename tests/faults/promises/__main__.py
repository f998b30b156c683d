"""`python -m tests.faults.promises [PART]`: hunts the mutants whose name has this part, and prints who
noticed each.

Exit codes: 0 the shares are reached, 1 they are not.
"""

import sys

from tests.faults.promises.hunt import Hunt, hunt_all
from tests.faults.promises.mutant import MUTANTS

LEAST_BY_LABORATORY, LEAST_BY_ALL = 0.60, 0.95


def line_of(found: Hunt) -> str:
    """One row of the table."""
    if found.judge:
        who = f"laboratory, {found.judge} seed {found.seed}"
    else:
        who = found.test.rpartition("/")[2] or "SURVIVED"
    return f"{MUTANTS[found.name].point:>2}  {found.name:72} {who:76} {found.cpu_s:6.1f} s"


def main(part: str) -> int:
    names = [name for name in MUTANTS if part in name]
    found = []
    for hunt in hunt_all(names, tests=True):
        found.append(hunt)
        print(line_of(hunt), flush=True)
    laboratory, noticed = sum(bool(hunt.judge) for hunt in found), sum(hunt.noticed for hunt in found)
    cpu_s = sum(hunt.cpu_s for hunt in found)
    print(
        f"{len(found)} mutants: the laboratory alone notices {laboratory} ({laboratory / len(found):.0%}), "
        f"laboratory and tests {noticed} ({noticed / len(found):.0%}); {cpu_s:.0f} s of processor time"
    )
    reached = laboratory >= LEAST_BY_LABORATORY * len(found) and noticed >= LEAST_BY_ALL * len(found)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
