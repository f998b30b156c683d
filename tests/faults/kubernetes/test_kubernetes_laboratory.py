"""Random faults of a cell on Kubernetes: nothing runs twice, nothing is lost, everything ends.

More seeds: `SEEDS=1000 pytest tests/faults/kubernetes`.
"""

import os

import pytest

from tests.faults.kubernetes.laboratory import Laboratory

SEEDS = int(os.environ.get("SEEDS", "25"))


@pytest.mark.parametrize("fenced", [True, False], ids=["fence", "no-fence"])
def test_no_double_no_loss(fenced: bool) -> None:
    """Without the door's policy, uids and names must be enough alone."""
    for seed in range(SEEDS):
        laboratory = Laboratory(seed, fenced=fenced)
        assert laboratory.run() == [], f"seed {seed}:\n" + "\n".join(laboratory.world.story[-80:])
