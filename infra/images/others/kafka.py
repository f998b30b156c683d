#!/usr/bin/env python3
"""Entry of the tests' Kafka image, with the variables of the official one; under another name, its check of a
broker."""

import os
import socket
import struct
import sys
from pathlib import Path

FOLDER = Path("/tmp/kafka")
JAVA = ["/opt/java/bin/java", *os.environ.get("KAFKA_HEAP_OPTS", "").split(), "-cp", "/opt/kafka/libs/*"]
PREFIX = "KAFKA_"
NO_SETTINGS = {"KAFKA_HEAP_OPTS"}
API_VERSIONS_KEY = 18
CLUSTER_ID = "penstockComposeCluster"  # 22 characters


def serve() -> None:
    """Formats an empty disk, and becomes the broker."""
    settings = {
        name.removeprefix(PREFIX).replace("_", ".").lower(): text
        for name, text in os.environ.items()
        if name.startswith(PREFIX) and name not in NO_SETTINGS
    }
    FOLDER.mkdir(exist_ok=True)
    properties = FOLDER / "server.properties"
    properties.write_text("".join(f"{name}={text}\n" for name, text in settings.items()))
    if not (Path(settings["log.dirs"]) / "meta.properties").exists():
        argv = [
            *JAVA,
            "kafka.tools.StorageTool",
            "format",
            f"--cluster-id={CLUSTER_ID}",
            "--config",
            str(properties),
        ]
        if os.spawnv(os.P_WAIT, argv[0], argv):
            sys.exit(1)
    os.execv(JAVA[0], [*JAVA, "kafka.Kafka", str(properties)])


def check() -> None:
    """Ends with 0 when the broker answers Kafka's first request."""
    host, _, port = sys.argv[sys.argv.index("--bootstrap-server") + 1].rpartition(":")
    name = b"check"
    body = struct.pack(">hhih", API_VERSIONS_KEY, 0, 1, len(name)) + name
    try:
        with socket.create_connection((host, int(port)), timeout=5.0) as connection:
            connection.sendall(struct.pack(">i", len(body)) + body)
            answer = connection.makefile("rb").read(10)
    except OSError as error:
        sys.exit(str(error))
    sys.exit(0 if len(answer) == 10 and struct.unpack(">ih", answer[4:]) == (1, 0) else "no answer")


if __name__ == "__main__":
    check() if sys.argv[0].endswith(".sh") else serve()
