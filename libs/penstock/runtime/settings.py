"""Settings that every service shares, read from the environment once at the top of a process.

| variable | meaning | default |
|---|---|---|
| `PENSTOCK_LOG` | `kafka://[user:password@]host:port[,…][?ca=FILE]` or `postgresql://…` (the embedded log) |
the value of `PENSTOCK_DSN` |
| `PENSTOCK_LOG_FILE` | a file that holds `PENSTOCK_LOG`, which others cannot read: out of the environment,
where children and `ps` find it | |
| `PENSTOCK_DSN` | Postgres for projections and snapshots | required by projector and gateway; spares the
placer folding from the beginning |
| `PENSTOCK_DSN_FILE` | a file that holds `PENSTOCK_DSN`, which others cannot read | |
| `PENSTOCK_ARCHIVE` | directory of the log's oldest records (`penstock-placer archive`), which are read as
part of it | none |
| `PENSTOCK_CELL` | name of the cell that this service works for | `default` |
| `PENSTOCK_CELL_INDEX` | its partition in the cell topics, 0–999 | `0` |
| `PENSTOCK_OTLP` | OTLP/HTTP endpoint for traces, such as `http://127.0.0.1:4318` | no export |
| `PENSTOCK_TRACE_RATIO` | share of jobs that are traced, 0–1 | `1` |
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from penstock.errors import ConfigurationError
from penstock.private_files import read_private_text
from penstock.text.redaction import postgres_problem

PREFIX = "PENSTOCK_"


class EnvironmentSettings(BaseSettings):
    """Settings from `PENSTOCK_…` variables: `from_env` reads them, constructing one does not.

    The title of a field is the remedy that an error names. An empty variable counts as absent.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="ignore", populate_by_name=True, hide_input_in_errors=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Raises `ConfigurationError` with every mistake: variable, problem, remedy."""
        source = EnvSettingsSource(cls)
        source.env_vars = {name.lower(): text for name, text in env.items() if text}
        try:
            return cls(**source())
        except ValidationError as error:
            raise ConfigurationError(
                "; and ".join(cls._problem(env, found) for found in error.errors())
            ) from error

    @classmethod
    def _problem(cls, env: Mapping[str, str], found: Any) -> str:
        place = str(found["loc"][0])
        name, field = next(
            (name, field)
            for name, field in cls.model_fields.items()
            if place in (name, field.validation_alias)
        )
        variable = field.validation_alias or PREFIX + name.upper()
        match found["type"]:
            case "missing":
                problem = "not set"
            case "value_error":  # a validator's message has its own remedy
                return f"{variable}: {found['ctx']['error']}"
            case kind if kind.endswith("_parsing"):
                problem = f"{env[str(variable)]!r} is not a number"
            case _:
                problem = f"{env[str(variable)]} is out of range"
        return f"{variable}: {problem}; {field.title}"


class Settings(EnvironmentSettings):
    """The settings in the module's table."""

    log_url: str = Field(
        validation_alias="PENSTOCK_LOG",
        repr=False,  # holds a password
        title="give kafka://host:port or postgresql://…, or run `penstock up`, which sets it",
    )
    dsn: str | None = Field(None, repr=False)
    archive: str | None = None
    cell: str = "default"
    cell_index: int = Field(0, ge=0, le=999, title="give 0 to 999")
    otlp: str | None = Field(None, repr=False)
    trace_ratio: float = Field(1.0, ge=0, le=1, title="give 0.0 to 1.0")

    @field_validator("dsn")
    @classmethod
    def _well_formed(cls, dsn: str | None) -> str | None:
        problem = None if dsn is None else postgres_problem(dsn)
        if problem is not None:
            raise ValueError(problem)
        return dsn

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Reads the environment; without a log the DSN's is used."""
        dsn = env.get("PENSTOCK_DSN") or _private(env, "PENSTOCK_DSN_FILE")
        log_url = env.get("PENSTOCK_LOG") or _private(env, "PENSTOCK_LOG_FILE") or dsn
        return super().from_env({**env, "PENSTOCK_LOG": log_url, "PENSTOCK_DSN": dsn})

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
        if self.archive:
            found["PENSTOCK_ARCHIVE"] = self.archive
        if self.otlp:
            found["PENSTOCK_OTLP"] = self.otlp
        return found

    def need_dsn(self, who: str) -> str:
        """The Postgres DSN, or `ConfigurationError` with the service that needs it."""
        if not self.dsn:
            raise ConfigurationError(
                f"PENSTOCK_DSN: not set, but {who} needs Postgres; give postgresql://user@host/db"
            )
        return self.dsn


def _private(env: Mapping[str, str], variable: str) -> str:
    """Content of the file that the variable names;
    empty without the variable. Raises `ConfigurationError`."""
    path = env.get(variable)
    return read_private_text(variable, Path(path))[0].strip() if path else ""
