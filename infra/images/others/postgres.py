"""Entry of the tests' Postgres image, with the variables of the official one: makes the database once, and
becomes the server."""

import os
import subprocess
import tempfile
from pathlib import Path

DATA = Path("/var/lib/postgresql/18/docker")  # as the official image of release 18


def main() -> None:
    user, password, database = (os.environ[f"POSTGRES_{name}"] for name in ("USER", "PASSWORD", "DB"))
    if not (DATA / "PG_VERSION").exists():
        DATA.mkdir(parents=True, mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile("w") as secret:
            secret.write(password)
            secret.flush()
            argv = ["initdb", "-D", str(DATA), "-U", user, "--pwfile", secret.name, "-A", "scram-sha-256"]
            subprocess.run([*argv, "--no-locale", "-E", "UTF8", "--no-instructions"], check=True)
        with (DATA / "pg_hba.conf").open("a") as rules:
            rules.write("host all all all scram-sha-256\n")
        alone = ["postgres", "--single", "-D", str(DATA), "template1"]
        subprocess.run(alone, input=f'CREATE DATABASE "{database}"\n', text=True, check=True)
    os.execvp("postgres", ["postgres", "-D", str(DATA), "-c", "listen_addresses=*"])


if __name__ == "__main__":
    main()
