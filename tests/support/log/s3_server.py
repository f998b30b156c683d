"""A small S3-compatible object store on loopback, for one pair of keys: PUT, GET with a range, HEAD and list,
over HTTP.

Written from Amazon's description of the protocol. It checks each request's signature (version 4) and the hash
of its body itself, so that a client that passes has proven who it is and what it sent.
"""

import hashlib
import hmac
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8}/[\w-]+/s3/aws4_request), ?SignedHeaders=([\w;-]+), "
    r"?Signature=([0-9a-f]{64})"
)


class S3Server(ThreadingHTTPServer):
    """`objects`: bucket → key → bytes."""

    daemon_threads = True

    def __init__(self, access_key: str, secret_key: str, *buckets: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.keys = {access_key: secret_key}
        self.objects: dict[str, dict[str, bytes]] = {bucket: {} for bucket in buckets}
        self.sent_bytes = 0
        """Of objects, to clients."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def environment(self, secret_key: str) -> dict[str, str]:
        """By which a client finds it, and proves itself with this secret; nothing of this machine's user."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": next(iter(self.keys)),
            "AWS_SECRET_ACCESS_KEY": secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    @contextmanager
    def serving(self) -> Iterator["S3Server"]:
        work = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        work.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            work.join()


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3Server

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        try:
            self._prove(parts.path, parts.query, body)
            if bucket not in self.server.objects:
                raise _Refused(404, "NoSuchBucket")
            if self.command == "PUT":
                self.server.objects[bucket][key] = body
                self._answer(200, b"", {"ETag": _etag(body)})
            elif key:
                self._give(bucket, key)
            else:
                self._list(bucket, dict(parse_qsl(parts.query)))
        except _Refused as refusal:
            text = f"<Error><Code>{refusal.code}</Code><Message>{refusal.code}</Message></Error>"
            self._answer(refusal.status, text.encode(), {"Content-Type": "application/xml"})

    do_PUT = do_GET = do_HEAD = _serve  # noqa: N815 - names of the base class

    def _give(self, bucket: str, key: str) -> None:
        data = self.server.objects[bucket].get(key)
        if data is None:
            raise _Refused(404, "NoSuchKey")
        headers = {"ETag": _etag(data), "Last-Modified": formatdate(usegmt=True)}
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found is None:
            self._answer(200, data, headers)
            return
        first, last = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
        if first >= len(data):
            raise _Refused(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._answer(206, data[first : last + 1], headers)

    def _list(self, bucket: str, asked: dict[str, str]) -> None:
        prefix = asked.get("prefix", "")
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>{_etag(data)}</ETag>"
            "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            for key, data in sorted(self.server.objects[bucket].items())
            if key.startswith(prefix)
        )
        head = f"<Name>{bucket}</Name><IsTruncated>false</IsTruncated>"
        text = f"<ListBucketResult>{head}{rows}</ListBucketResult>"
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _prove(self, path: str, query: str, body: bytes) -> None:
        """Raises `_Refused`."""
        found = AUTHORIZATION.fullmatch(self.headers.get("Authorization", ""))
        if found is None:
            raise _Refused(403, "AccessDenied")
        access, scope, signed, signature = found.groups()
        secret = self.server.keys.get(access)
        if secret is None:
            raise _Refused(403, "InvalidAccessKeyId")
        digest = self.headers["x-amz-content-sha256"]
        if digest != hashlib.sha256(body).hexdigest():
            raise _Refused(400, "XAmzContentSHA256Mismatch")
        pairs = sorted((quote(name, "-_.~"), quote(value, "-_.~")) for name, value in parse_qsl(query, True))
        headers = [f"{name}:{' '.join(self.headers.get(name, '').split())}" for name in signed.split(";")]
        asked = "&".join(f"{name}={value}" for name, value in pairs)
        lines = [self.command, path, asked, *headers, "", signed, digest]
        request = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        key = f"AWS4{secret}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        to_sign = f"AWS4-HMAC-SHA256\n{self.headers['x-amz-date']}\n{scope}\n{request}"
        if not hmac.compare_digest(hmac.digest(key, to_sign.encode(), "sha256").hex(), signature):
            raise _Refused(403, "SignatureDoesNotMatch")

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.server.sent_bytes += len(body) if status < 300 else 0


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
