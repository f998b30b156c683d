"""What an operator writes into the environment becomes the term's settings, or an error that names the
variable."""

import pytest

from penstock.errors import ConfigurationError
from penstock.model.nouns.settings import PlacerSettings
from penstock.runtime.settings import Settings
from penstock_papers.settings import TiresiasSettings
from penstock_services.placer.shell.term import placer_settings
from tests.support.own_settings import with_own


def test_every_setting_has_a_variable() -> None:
    """An operator moves from the simulator's `--set` to the real cell: each name exists there too."""
    found = placer_settings(
        {"PENSTOCK_PROFILE": "tiresias", "PENSTOCK_QUEUE_LIMITS_GPU_S": "[57600]", "PENSTOCK_SEED": "7"}
    )
    assert found == with_own("tiresias", TiresiasSettings(queue_limits_gpu_s=(57_600.0,)), seed=7)
    assert placer_settings({}) == PlacerSettings(profile="penstock")


def test_a_ledger_that_names_no_profile_is_still_read_as_it_was_written() -> None:
    """A cell is upgraded: its new terms run `penstock`; what earlier terms recorded is folded with the
    default of then."""
    assert PlacerSettings().profile == "liquid"


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("PENSTOCK_PROFILE", "tiresia", "'tiresia' is not a profile; there are "),
        ("PENSTOCK_SEED", "-1", "greater than or equal to 0"),
        ("PENSTOCK_QUEUE_LIMITS_GPU_S", "[1,", "is not a JSON list or object"),
        ("PENSTOCK_CONVERGENCE", "{interval", "is not a JSON list or object"),
        ("PENSTOCK_CONVERGENCE", '{"alpha": 2}', "alpha"),
        ("PENSTOCK_QUEUE_LIMITS_GPU_S", "[3250]", "profile penstock has no setting queue_limits_gpu_s"),
        ("PENSTOCK_PROFILE_SETTINGS", '{"theta": 1}', "profile penstock has no setting theta"),
        ("PENSTOCK_PROFILE_SETTINGS", "3250", "a JSON object"),
        ("PENSTOCK_FREEZE_FRACTION", "half", "number"),
    ],
)
def test_a_bad_setting_is_refused_before_the_term_begins(variable: str, text: str, message: str) -> None:
    """Once recorded, a profile that nobody knows would stop every placer that reads the ledger."""
    with pytest.raises(ConfigurationError, match=variable) as refused:
        placer_settings({variable: text})
    assert message in str(refused.value)


def test_a_service_names_every_wrong_variable_at_once() -> None:
    """An operator writes a unit file: one start shows all its mistakes, each with what to do."""
    wrong = {"PENSTOCK_CELL_INDEX": "first", "PENSTOCK_TRACE_RATIO": "7", "PENSTOCK_LOG": ""}
    with pytest.raises(ConfigurationError) as refused:
        Settings.from_env(wrong)
    assert str(refused.value) == (
        "PENSTOCK_LOG: not set; give kafka://host:port or postgresql://…, or run `penstock up`, which sets "
        "it; and PENSTOCK_CELL_INDEX: 'first' is not a number; give 0 to 999; and PENSTOCK_TRACE_RATIO: 7 is "
        "out of range; give 0.0 to 1.0"
    )


def test_settings_travel_to_another_process_by_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """`penstock up` starts a node with its own settings, whatever the user's environment holds."""
    settings = Settings(
        log_url="kafka://h:1", dsn="postgresql://h/d", cell="blue", cell_index=3, trace_ratio=0.5
    )
    assert Settings.from_env(settings.environment()) == settings
    assert Settings.from_env({"PENSTOCK_DSN": "postgresql://h/d"}).log_url == "postgresql://h/d"
    monkeypatch.setenv("PENSTOCK_CELL", "green")
    assert Settings(log_url="x").cell == "default"
