"""Settings of topics, and the file of rights: what an administrator may get wrong."""

from pathlib import Path

import pytest

from penstock.errors import ConfigurationError
from penstock.log.kafka_setup import read_rights
from penstock.log.topic_settings import suffices, topic_settings
from penstock.model.schema.topics import COMPACTED_TOPICS, GUARD_GROUPS, Topic


def test_only_what_a_service_can_write_again_is_compacted() -> None:
    """Compaction deletes what is overwritten: of the ledger that would be history."""
    compacted = {topic for topic in Topic if topic_settings(topic, 3)["cleanup.policy"] == "compact"}
    assert compacted == COMPACTED_TOPICS == {Topic.GUARD_WINDOWS}
    assert "segment.ms" not in topic_settings(Topic.LEDGER, 3)


def test_a_changelog_with_long_segments_is_slow_and_loses_nothing() -> None:
    """An administrator's own value stays; another cleanup policy does not."""
    assert suffices("segment.ms", "604800000", topic_settings(Topic.GUARD_WINDOWS, 1)["segment.ms"])
    assert not suffices("cleanup.policy", "delete", "compact")
    assert not suffices("cleanup.policy", "compact", "delete")


@pytest.mark.parametrize("group", ["penstock.", "penstock.guard-windows.0", "others"])
def test_rights_on_another_group_are_refused(tmp_path: Path, group: str) -> None:
    """A hurried edit of acls.yaml: the file names what may be given."""
    path = tmp_path / "acls.yaml"
    path.write_text(f"contention-guard:\n  join: [{GUARD_GROUPS}]\n")
    assert read_rights(path) == {"contention-guard": {"join": [GUARD_GROUPS]}}
    path.write_text(f"contention-guard:\n  join: [{group}]\n")
    with pytest.raises(ConfigurationError, match=f"join {group}: give read or write"):
        read_rights(path)
