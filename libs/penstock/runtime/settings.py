"""Settings that every service shares, read from the environment once at the top of a process.

| variable | meaning | default |
|---|---|---|
| `PENSTOCK_LOG` | `kafka://[user:password@]host:port[,…]` or `postgresql://…` (the embedded log) | the value of `PENSTOCK_DSN` |
| `PENSTOCK_DSN` | Postgres for projections and snapshots | required by projector and gateway; spares the placer folding from the beginning |
| `PENSTOCK_CELL` | name of the cell that this service works for | `default` |
| `PENSTOCK_CELL_INDEX` | its partition in the cell topics, 0–999 | `0` |
| `PENSTOCK_OTLP` | OTLP/HTTP endpoint for traces, such as `http://127.0.0.1:4318` | no export |
| `PENSTOCK_TRACE_RATIO` | share of jobs that are traced, 0–1 | `1` |
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Settings:
    """See the module's table. Raises `ConfigurationError` through `from_env`."""

    log_url: str
    dsn: str | None = None
    cell: str = "default"
    cell_index: int = 0
    otlp: str | None = None
    trace_ratio: float = 1.0

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Settings":
        dsn = env.get("PENSTOCK_DSN") or None
        log_url = env.get("PENSTOCK_LOG") or dsn
        if not log_url:
            raise ConfigurationError(
                "PENSTOCK_LOG: not set; give kafka://host:port or postgresql://…, or run `penstock up`, which sets it"
            )
        return cls(
            log_url=log_url,
            dsn=dsn,
            cell=env.get("PENSTOCK_CELL", "default"),
            cell_index=_number(env, "PENSTOCK_CELL_INDEX", "0", 0, 999, int),
            otlp=env.get("PENSTOCK_OTLP") or None,
            trace_ratio=_number(env, "PENSTOCK_TRACE_RATIO", "1", 0.0, 1.0, float),
        )

    def environment(self) -> dict[str, str]:
        """The variables that give another process these same settings."""
        found = {
            "PENSTOCK_LOG": self.log_url,
            "PENSTOCK_CELL": self.cell,
            "PENSTOCK_CELL_INDEX": str(self.cell_index),
            "PENSTOCK_TRACE_RATIO": str(self.trace_ratio),
        }
        if self.dsn:
            found["PENSTOCK_DSN"] = self.dsn
        if self.otlp:
            found["PENSTOCK_OTLP"] = self.otlp
        return found

    def need_dsn(self, who: str) -> str:
        """The Postgres DSN, or `ConfigurationError` that says who needs it."""
        if not self.dsn:
            raise ConfigurationError(
                f"PENSTOCK_DSN: not set, but {who} needs Postgres; give postgresql://user@host/db"
            )
        return self.dsn


Number = TypeVar("Number", int, float)


def _number(
    env: Mapping[str, str], name: str, default: str, low: Number, high: Number, kind: type[Number]
) -> Number:
    text = env.get(name, default)
    try:
        value = kind(text)
    except ValueError:
        raise ConfigurationError(f"{name}: {text!r} is no number; give {low} to {high}") from None
    if not low <= value <= high:
        raise ConfigurationError(f"{name}: {text} is out of range; give {low} to {high}")
    return value
