"""Self-made certificates of a broker on loopback, and signing keys, by OpenSSL."""

from pathlib import Path

from infra.devservers.build_cache import INFRA, require
from infra.devservers.processes import run_to_end

OPENSSL_REMEDY = "Install OpenSSL 3 (Debian: apt-get install openssl)"


def make_certificates(folder: Path) -> None:
    """A self-made authority (`ca.pem`), and key and certificate of a broker on 127.0.0.1 (`broker.pem`), for
    a day."""
    program = [
        require("openssl", OPENSSL_REMEDY),
        "req",
        "-config",
        str(INFRA / "kafka" / "certificates.cnf"),
    ]
    program += ["-x509", "-nodes", "-days", "1", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    ca, ca_key, key, certificate = (
        str(folder / name) for name in ("ca.pem", "ca.key", "key.pem", "certificate.pem")
    )
    for arguments in (
        ["-extensions", "authority", "-keyout", ca_key, "-out", ca],
        ["-extensions", "broker", "-CA", ca, "-CAkey", ca_key, "-keyout", key, "-out", certificate],
    ):
        run_to_end("openssl", [*program, *arguments], log_path=folder / "openssl.log")
    both = folder / "broker.pem"
    both.touch(mode=0o600)
    both.write_text(Path(key).read_text() + Path(certificate).read_text())


def make_signing_key(key: Path) -> None:
    """A private key on P-256 in `key` (PEM, mode 0600), which signs tokens."""
    key.touch(mode=0o600)
    # in the older form (SEC 1), from which kube-apiserver takes the public key as well
    program = [require("openssl", OPENSSL_REMEDY), "ecparam", "-name", "prime256v1", "-genkey", "-noout"]
    run_to_end("openssl", [*program, "-out", str(key)], log_path=key.with_name("openssl.log"))
