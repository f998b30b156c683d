"""What an operator writes into the environment becomes the term's settings, or an error that names the variable."""

import pytest

from penstock.errors import ConfigurationError
from penstock.model.ledger_events import PlacerSettings
from penstock_services.placer.shell.term import placer_settings


def test_every_setting_has_a_variable() -> None:
    """An operator moves from the simulator's `--set` to the real cell: each name exists there too."""
    found = placer_settings(
        {"PENSTOCK_PROFILE": "tiresias", "PENSTOCK_QUEUE_LIMITS_GPU_S": "[57600]", "PENSTOCK_SEED": "7"}
    )
    assert found == PlacerSettings(profile="tiresias", queue_limits_gpu_s=(57_600.0,), seed=7)
    assert placer_settings({}) == PlacerSettings()


@pytest.mark.parametrize(
    ("variable", "text", "told"),
    [
        ("PENSTOCK_PROFILE", "tiresia", "'tiresia' is no profile; there are "),
        ("PENSTOCK_SEED", "-1", "greater than or equal to 0"),
        ("PENSTOCK_QUEUE_LIMITS_GPU_S", "[1,", "is no JSON list"),
        ("PENSTOCK_QUEUE_LIMITS_GPU_S", "3250", "tuple"),
        ("PENSTOCK_FREEZE_FRACTION", "half", "number"),
    ],
)
def test_a_bad_setting_is_refused_before_the_term_begins(variable: str, text: str, told: str) -> None:
    """Once recorded, a profile that nobody knows would stop every placer that reads the ledger."""
    with pytest.raises(ConfigurationError, match=variable) as refused:
        placer_settings({variable: text})
    assert told in str(refused.value)
