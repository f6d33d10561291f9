"""Signed URLs and short requests of an S3 bucket, without boto3's client, which takes six times the
CPU time of signing and sending them.

`Signer` is AWS Signature Version 4 for one bucket. `ShortRequests` sends the three requests that
every accepted file needs. Each of them returns nothing (None or False) if the answer is not a plain
success: boto3's client then makes the request again, with its own retries and errors.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from typing import Protocol
from urllib.parse import quote, urlsplit

import urllib3

CONNECT_SECONDS = 5
READ_SECONDS = 30
MOST_CONNECTIONS = 50
MOST_BYTES = 64 << 10
"""Longest body of an answer."""
_EMPTY = hashlib.sha256(b"").hexdigest()
_ALGORITHM = "AWS4-HMAC-SHA256"


class Credentials(Protocol):
    """An account's key, its secret and, if it is temporary, its token."""

    access_key: str
    secret_key: str
    token: str | None


class Signer:
    """Signs for the bucket at the URL `base`, which ends with a slash, in one region. `credentials`
    gives the current ones. Keys need no quoting (`check_key`)."""

    def __init__(self, base: str, region: str, credentials: Callable[[], Credentials]) -> None:
        parts = urlsplit(base)
        port = {"https": ":443", "http": ":80"}.get(parts.scheme, "")
        self.base, self.path = base, parts.path
        self.host = parts.netloc.lower().removesuffix(port)
        self._region = region
        self._credentials = credentials
        self._kept: tuple[str, str, bytes] | None = None

    def url(self, method: str, key: str, seconds: int, headers: Mapping[str, str]) -> str:
        """Returns a URL that is valid for so long, for requests with these `headers` (lower-case
        names)."""
        found, moment = self._credentials(), _moment()
        signed = {"host": self.host, **headers}
        names = ";".join(sorted(signed))
        fields = {
            "X-Amz-Algorithm": _ALGORITHM,
            "X-Amz-Credential": f"{found.access_key}/{self._scope(moment)}",
            "X-Amz-Date": moment,
            "X-Amz-Expires": str(seconds),
            **({"X-Amz-Security-Token": found.token} if found.token else {}),
            "X-Amz-SignedHeaders": names,
        }
        query = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in fields.items())
        signature = self._sign(found, moment, method, key, query, signed, "UNSIGNED-PAYLOAD")
        return f"{self.base}{key}?{query}&X-Amz-Signature={signature}"

    def headers(self, method: str, key: str, headers: Mapping[str, str]) -> dict[str, str]:
        """Returns all headers of a request without a body that has these (lower-case names)."""
        found, moment = self._credentials(), _moment()
        signed = {
            "host": self.host,
            "x-amz-content-sha256": _EMPTY,
            "x-amz-date": moment,
            **({"x-amz-security-token": found.token} if found.token else {}),
            **headers,
        }
        names = ";".join(sorted(signed))
        signature = self._sign(found, moment, method, key, "", signed, _EMPTY)
        signed["authorization"] = (
            f"{_ALGORITHM} Credential={found.access_key}/{self._scope(moment)}, "
            f"SignedHeaders={names}, Signature={signature}"
        )
        return signed

    def _scope(self, moment: str) -> str:
        return f"{moment[:8]}/{self._region}/s3/aws4_request"

    def _sign(
        self,
        credentials: Credentials,
        moment: str,
        method: str,
        key: str,
        query: str,
        headers: Mapping[str, str],
        payload: str,
    ) -> str:
        names = sorted(headers)
        lines = "".join(f"{name}:{headers[name]}\n" for name in names)
        request = f"{method}\n{self.path}{key}\n{query}\n{lines}\n{';'.join(names)}\n{payload}"
        hashed = hashlib.sha256(request.encode()).hexdigest()
        text = f"{_ALGORITHM}\n{moment}\n{self._scope(moment)}\n{hashed}"
        return _mac(self._key(credentials.secret_key, moment[:8]), text).hex()

    def _key(self, secret: str, day: str) -> bytes:
        kept = self._kept
        if kept is None or kept[:2] != (secret, day):
            key = f"AWS4{secret}".encode()
            for part in (day, self._region, "s3", "aws4_request"):
                key = _mac(key, part)
            self._kept = kept = secret, day, key
        return kept[2]


def _moment() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def _mac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")


class ShortRequests:
    """See the top of this module. A refused or broken connection is such an answer, too.
    Thread-safe."""

    def __init__(self, signer: Signer, bucket: str, certificates: str | None) -> None:
        """`certificates`: the file of those that HTTPS trusts."""
        self._signer, self._bucket = signer, bucket
        self._connections = urllib3.connection_from_url(
            signer.base,
            maxsize=MOST_CONNECTIONS,
            timeout=urllib3.Timeout(CONNECT_SECONDS, READ_SECONDS),
            **({"ca_certs": certificates} if signer.base.startswith("https:") else {}),
        )

    def head(self, key: str) -> Mapping[str, str] | None:
        """Returns the headers of an object with at least its length and tag."""
        answer = self._ask("HEAD", key, {"x-amz-checksum-mode": "ENABLED"})
        if answer is None or not all(name in answer[0] for name in ("content-length", "etag")):
            return None
        return answer[0]

    def copy(self, source: str, target: str, tag: str) -> bool:
        """Copies an object that has this tag."""
        origin = {
            "content-length": "0",
            "x-amz-copy-source": f"{self._bucket}/{source}",
            "x-amz-copy-source-if-match": tag,
        }
        answer = self._ask("PUT", target, origin)
        return answer is not None and b"<CopyObjectResult" in answer[1]  # 200 may be an error

    def delete(self, key: str) -> bool:
        """Deletes an object."""
        return self._ask("DELETE", key, {}) is not None

    def _ask(
        self, method: str, key: str, headers: Mapping[str, str]
    ) -> tuple[Mapping[str, str], bytes] | None:
        """Returns headers (their names in any case) and body of an answer 200 or 204."""
        signed = self._signer.headers(method, key, headers)
        try:
            answer = self._connections.urlopen(
                method, self._signer.path + key, headers=signed, retries=False, redirect=False,
                preload_content=False,
            )  # fmt: skip
            body = answer.read(MOST_BYTES + 1)
        except (urllib3.exceptions.HTTPError, OSError, ValueError):  # ValueError: a wrong chunk
            return None
        if len(body) > MOST_BYTES:
            answer.close()
            return None
        answer.release_conn()
        return (answer.headers, body) if answer.status in (200, 204) else None
