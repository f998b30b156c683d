"""Whatever the profile, a placer that takes over goes on where the last one stopped."""

import pytest

from penstock.ledger.replica.replica import Replica
from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling import profiles
from penstock_services.placer.core.step import PlacerCore
from tests.support.cluster.driver import CellDriver, node_spec


@pytest.mark.parametrize("profile", profiles.names())
def test_a_profile_survives_its_placer(profile: str) -> None:
    """The placer is restarted: its settings now come from the ledger, not from its environment.

    A profile that could not be built from those would leave the cell without a placer until somebody notices.
    """
    driver = CellDriver(PlacerSettings(profile=profile))
    driver.join(node_spec("n1", 2))
    driver.submit("before")
    replica = Replica()
    for offset, value in enumerate(driver.values):
        replica.take(value, offset)
    driver.core = PlacerCore(replica.state)
    driver.submit("after")
    driver.at(0)
    assert {job.status for job in driver.state.jobs.values()} == {"launching"}
