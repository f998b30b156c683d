"""The log's URL from a file that others cannot read."""

from pathlib import Path

import pytest

from penstock.errors import ConfigurationError, FileMissing
from penstock.runtime.settings import Settings


def test_the_logs_url_comes_from_a_private_file(tmp_path: Path) -> None:
    """A password in the environment is read by all who may look at /proc; in a file that others can read,
    too."""
    path = tmp_path / "log-url"
    path.touch(0o600)
    path.write_text("postgresql://penstock:secret@127.0.0.1/log\n")
    env = {"PENSTOCK_LOG_FILE": str(path), "PENSTOCK_DSN": "postgresql://elsewhere/"}
    assert Settings.from_env(env).log_url == "postgresql://penstock:secret@127.0.0.1/log"
    assert (
        Settings.from_env({**env, "PENSTOCK_LOG": "kafka://127.0.0.1:9092"}).log_url
        == "kafka://127.0.0.1:9092"
    )
    assert Settings.from_env({"PENSTOCK_DSN_FILE": str(path)}).dsn == path.read_text().strip()
    assert Settings.from_env({"PENSTOCK_DSN_FILE": str(path)}).log_url == path.read_text().strip()
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match=r"others can use it; run chmod 600"):
        Settings.from_env(env)
    path.unlink()
    with pytest.raises(FileMissing, match=r"log-url is missing; `python -m penstock"):
        Settings.from_env(env)
