"""The log's URL from a file that others cannot read."""

import os
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest

from penstock.errors import ConfigurationError, FileMissing
from penstock.private_files import read_private
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


@pytest.mark.parametrize(
    ("owner", "user", "mode", "private"),
    [
        (0, 65532, 0o440, True),  # a mounted secret, with `fsGroup`
        (0, 65532, 0o444, False),  # the same without `defaultMode`
        (0, 65532, 0o460, False),
        (0, 0, 0o440, False),
        (1000, 1000, 0o600, True),
        (1000, 1000, 0o640, False),
        (1000, 65532, 0o640, False),
    ],
)
def test_a_secret_of_kubernetes_is_private(
    owner: int, user: int, mode: int, private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod without root reads a mounted secret through its group alone, and its services refused it."""
    path = tmp_path / "secret"
    path.write_text("x")
    status = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 0, 1, 0, 0, 0))
    monkeypatch.setattr(os, "fstat", lambda _: status)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with nullcontext() if private else pytest.raises(ConfigurationError, match="others can use it"):
        assert read_private("PENSTOCK_TOKENS", path)[0] == b"x"
