"""Object store in a bucket of an S3-compatible server (AWS, Cloudflare R2, MinIO, SeaweedFS).

Nodes PUT to presigned URLs, and validators and the trainer GET from them, so the pool's server does
not carry those bytes. A presigned PUT signs the length and the SHA-256 of the body: the bucket
rejects any other bytes. `check` tests this, because some servers ignore the checksum (Ceph 16).

Credentials come from boto3's own chain: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the file that
AWS_SHARED_CREDENTIALS_FILE names, or the machine's role. They are never settings of ours.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from prime_core import ids
from prime_core.encoding import sha256 as sha256_digest
from prime_core.errors import MalformedError, NotFoundError, UnavailableError, UserError
from prime_core.ids import Digest
from prime_core.storage.base import (
    CHECKSUM_HEADER,
    CHUNK_BYTES,
    ObjectStat,
    SignedUrl,
    check_key,
    check_prefix,
    named_digest,
)
from prime_core.storage.s3_requests import (
    CONNECT_SECONDS,
    MOST_CONNECTIONS,
    READ_SECONDS,
    ShortRequests,
    Signer,
)

try:
    import boto3
    import botocore.session
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        HTTPClientError,
        NoCredentialsError,
        PartialCredentialsError,
    )
    from botocore.exceptions import (
        ConnectionError as NoConnectionError,
    )
    from botocore.httpsession import get_cert_path
    from botocore.utils import get_environ_proxies
except ImportError as missing:
    raise UserError(
        "an S3 object store needs boto3, which is not installed",
        hint="pip install 'prime-open[s3]'",
    ) from missing

PART_BYTES = 16 << 20
"""Larger files are uploaded in parts of this size (multipart upload)."""
MAX_PUT_BYTES = 5 << 30
"""S3's limit on the size of an object written by one PUT or one copy."""
LONGEST_SECONDS = 7 * 86_400
"""S3's limit on the lifetime of a presigned URL."""
_TYPE = "application/octet-stream"
_MISSING = ("404", "NoSuchKey", "NotFound")
_REFUSED = ("400", "401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch",
            "ExpiredToken", "InvalidToken", "AuthorizationHeaderMalformed",
            "RequestTimeTooSkewed")  # fmt: skip


class S3Store:
    """ObjectStore over one folder (`prefix`) of a bucket.

    `endpoint` is the server's URL, "" for AWS. `public_endpoint` is the URL by which nodes,
    validators and the trainer reach the same server, if different. Raises UserError if boto3
    rejects these settings.
    """

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "",
        endpoint: str = "",
        public_endpoint: str = "",
        region: str = "us-east-1",
        now: Callable[[], float] = time.time,
    ) -> None:
        self.bucket = bucket
        self.prefix = check_key(prefix.rstrip("/")) + "/" if prefix else ""
        self.endpoint = endpoint
        self._now = now
        # A new one: boto3's default one caches the first credentials.
        core = botocore.session.get_session()
        session = boto3.Session(botocore_session=core)
        self._client = _client(session, endpoint, region)
        public = _client(session, public_endpoint, region) if public_endpoint else self._client
        self._signer = _signer(session, public, bucket, region)
        own = self._signer
        if public is not self._client:
            own = _signer(session, self._client, bucket, region)
        self._short: ShortRequests | None = None
        if own is not None and not get_environ_proxies(own.base):  # only boto3 speaks with proxies
            trusted = core.get_config_variable("ca_bundle") or True  # as boto3's client
            self._short = ShortRequests(own, bucket, get_cert_path(trusted))

    def __repr__(self) -> str:
        return f"S3Store({self.bucket}/{self.prefix} at {self.endpoint or 'AWS'})"

    def check(self) -> None:
        """Tests the bucket operations that the pool needs.

        Raises UserError if the bucket is missing, the credentials are missing or refused, or the
        server accepts bytes that do not have the announced SHA-256 or copies an object that does
        not have the tag asked for; UnavailableError if the server does not answer.
        """
        probe = self._at(f"probe-{secrets.token_hex(8)}")  # others may run this concurrently
        other = {**probe, "Key": probe["Key"] + "-copy"}
        wrong, tag = _base64(sha256_digest(b"other")), f'"{"0" * 32}"'
        try:
            self._client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=1)
            self._client.put_object(**probe, Body=b"probe")
            self._client.get_object(**probe)["Body"].close()
            with _refusal(400) as checksums:
                self._client.put_object(**probe, Body=b"probe", ChecksumSHA256=wrong)
            with _refusal(412) as tags:
                self._client.copy_object(**other, CopySource=probe, CopySourceIfMatch=tag)
            for place in (probe, other):
                self._client.delete_object(**place)
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise UserError(
                "there are no credentials for the S3 object store",
                hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a file by "
                "AWS_SHARED_CREDENTIALS_FILE",
            ) from error
        except ClientError as error:
            code = _code(error)
            if code == "NoSuchBucket":
                raise UserError(
                    f"there is no bucket {self.bucket} at {self.endpoint or 'AWS'}",
                    hint="create it first, or correct --s3-bucket",
                ) from error
            if code in _REFUSED:
                raise UserError(
                    f"the S3 object store refuses these credentials for bucket {self.bucket} "
                    f"({code})",
                    hint="check the key, its rights to list, read, write and delete, --s3-region, "
                    "and the machine's clock",
                ) from error
            raise self._trouble("check", error) from error
        except BotoCoreError as error:
            raise self._trouble("check", error) from error
        for kept, lack, header in (
            (checksums, "compare an upload with its SHA-256, so a node could store other bytes "
             "than it announced", CHECKSUM_HEADER),
            (tags, "compare a copied object with the tag that was asked for, so other bytes than "
             "the checked ones could be kept", "x-amz-copy-source-if-match"),
        ):  # fmt: skip
            if not kept:
                raise UserError(
                    f"the S3 server at {self.endpoint or 'AWS'} does not {lack}",
                    hint="use AWS, R2, MinIO, SeaweedFS 4 or newer, or another server that checks "
                    f"{header}",
                )

    def clock_skew(self) -> float:
        """Returns by how many seconds the server's clock is ahead of this machine's, by the date
        of one answer. Raises UnavailableError if there is no answer, or no valid date in it."""
        before = self._now()
        with self._errors("list", ""):
            answer = self._client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=1)
        after, date = self._now(), answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        try:
            server = parsedate_to_datetime(date).timestamp()
        except (ValueError, OverflowError) as error:
            raise UnavailableError("the S3 server's answer has no valid date") from error
        return server + 0.5 - (before + after) / 2  # it is cut to whole seconds

    def ends_uploads(self) -> bool | None:
        """Returns whether a lifecycle rule of the bucket aborts unfinished multipart uploads to the
        whole prefix, or None if these credentials may not read the rules. Raises UnavailableError
        if the server does not answer."""
        try:
            found = self._client.get_bucket_lifecycle_configuration(Bucket=self.bucket)
        except ClientError as error:
            if _code(error) == "NoSuchLifecycleConfiguration":
                return False
            if _code(error) in (*_REFUSED, "NotImplemented", "501"):
                return None
            raise self._trouble("read the lifecycle rules", error) from error
        except BotoCoreError as error:
            raise self._trouble("read the lifecycle rules", error) from error
        return any(
            rule["Status"] == "Enabled"
            and "AbortIncompleteMultipartUpload" in rule
            and self.prefix.startswith(_prefix_of(rule))
            for rule in found.get("Rules", ())  # absent where a server knows no such rules (Swift)
        )

    # -- writing -------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, cached: str = "") -> None:
        """`cached`: the object's Cache-Control, for readers that are given no signed URL."""
        place, name = self._at(key), sha256_digest(data)
        _promised(key, name)
        with self._errors("write", key):
            self._client.put_object(
                **place, Body=data, ChecksumSHA256=_base64(name), **_headers(cached)
            )

    def put_file(self, key: str, path: Path, *, cached: str = "") -> None:
        """See `put`."""
        place = self._at(key)
        with path.open("rb") as file:
            name = Digest("0x" + hashlib.file_digest(file, "sha256").hexdigest())
            _promised(key, name)
            size = file.tell()
            file.seek(0)
            with self._errors("write", key):
                if size <= PART_BYTES:
                    self._client.put_object(
                        **place, Body=file, ChecksumSHA256=_base64(name), **_headers(cached)
                    )
                else:  # each part carries its own SHA-256; the object appears with the last one
                    self._client.upload_fileobj(
                        file,
                        place["Bucket"],
                        place["Key"],
                        ExtraArgs={"ChecksumAlgorithm": "SHA256", **_headers(cached)},
                        Config=TransferConfig(
                            multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES
                        ),
                    )

    def copy(self, source: str, target: str, seen: ObjectStat | None = None) -> None:
        place = self._at(target)
        if seen is None:
            head = self._head(source)
            tag = head["ETag"]
            if named_digest(target) is not None:
                _promised(target, self._stat(source, head).sha256)
        else:
            tag = seen.tag
            _promised(target, seen.sha256)
        origin = self._at(source)
        with self._errors("copy", source):  # the ETag pins the bytes that were checked
            if self._short and self._short.copy(origin["Key"], place["Key"], tag):
                return
            self._client.copy_object(**place, CopySource=origin, CopySourceIfMatch=tag)

    def delete(self, key: str) -> None:
        place = self._at(key)
        with self._errors("delete", key):
            if not (self._short and self._short.delete(place["Key"])):
                self._client.delete_object(**place)

    # -- reading -------------------------------------------------------------------------------

    def get(self, key: str, limit: int) -> bytes:
        place = self._at(key)
        with self._errors("read", key):
            answer = self._client.get_object(**place)
            with closing(answer["Body"]) as body:
                fits = answer["ContentLength"] <= limit
                data: bytes = body.read() if fits else b""
        if not fits:
            raise MalformedError(f"object {key} is larger than {limit} bytes")
        name = named_digest(key)
        if name is not None and sha256_digest(data) != name:
            raise UnavailableError(f"object {key} is damaged: its bytes have another digest")
        return data

    def chunks(self, key: str) -> Iterator[bytes]:
        place = self._at(key)
        with self._errors("read", key):
            body = self._client.get_object(**place)["Body"]
        return self._blocks(key, body)

    def exists(self, key: str) -> bool:
        try:
            self._head(key)
        except NotFoundError:
            return False
        return True

    def size(self, key: str) -> int:
        return int(self._head(key)["ContentLength"])

    def stat(self, key: str) -> ObjectStat:
        return self._stat(key, self._head(key))

    def keys(self, prefix: str = "") -> Iterator[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.prefix + check_prefix(prefix)
        )
        with self._errors("list", prefix):
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield entry["Key"][len(self.prefix) :]

    # -- signed URLs ---------------------------------------------------------------------------

    def signed_put(self, key: str, size: int, sha256: Digest, expires_at: int) -> SignedUrl:
        if size > MAX_PUT_BYTES:
            raise MalformedError(f"one upload has at most {MAX_PUT_BYTES} bytes")
        seconds = self._seconds(expires_at)
        headers = {
            "Content-Type": _TYPE,
            "Content-Length": str(size),
            CHECKSUM_HEADER: _base64(sha256),
        }
        url = self._presigned("PUT", key, seconds, headers)
        return SignedUrl(url=url, expires_at=int(self._now()) + seconds, headers=headers)

    def signed_get(self, key: str, expires_at: int) -> str:
        return self._presigned("GET", key, self._seconds(expires_at), {})

    # -- below ---------------------------------------------------------------------------------

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.prefix + check_key(key)}

    def _head(self, key: str) -> dict[str, Any]:
        place = self._at(key)
        with self._errors("read", key):
            found = self._short.head(place["Key"]) if self._short else None
            if found is None:
                answer: dict[str, Any] = self._client.head_object(**place, ChecksumMode="ENABLED")
                return answer
        head = {"ContentLength": found["content-length"], "ETag": found["etag"]}
        checksum = found.get(CHECKSUM_HEADER)
        return head if checksum is None else head | {"ChecksumSHA256": checksum}

    def _stat(self, key: str, head: dict[str, Any]) -> ObjectStat:
        size, kept = int(head["ContentLength"]), head.get("ChecksumSHA256", "")
        if kept and "-" not in kept:  # with a dash it is a checksum of the parts' checksums
            return ObjectStat(size, ids.digest(base64.b64decode(kept)), head["ETag"])
        running = hashlib.sha256()
        for block in self.chunks(key):
            running.update(block)
        return ObjectStat(size, ids.digest(running.digest()), head["ETag"])

    def _blocks(self, key: str, body: Any) -> Iterator[bytes]:
        with self._errors("read", key), closing(body):
            yield from body.iter_chunks(CHUNK_BYTES)

    def _seconds(self, expires_at: int) -> int:
        """Lifetime of a URL that should expire at `expires_at`: at least one second, at most what
        S3 allows."""
        return max(1, min(expires_at - int(self._now()), LONGEST_SECONDS))

    def _presigned(self, method: str, key: str, seconds: int, headers: Mapping[str, str]) -> str:
        bound = {name.lower(): value for name, value in headers.items()}
        name = self._at(key)["Key"]
        with self._errors("sign a URL for", key):
            if self._signer is None:
                raise NoCredentialsError
            return self._signer.url(method, name, seconds, bound)

    @contextmanager
    def _errors(self, what: str, key: str) -> Iterator[None]:
        """Turns boto3's errors into ours."""
        try:
            yield
        except ClientError as error:
            if _code(error) in _MISSING:
                raise NotFoundError(f"there is no object {key}") from error
            raise self._trouble(f"{what} {key}", error) from error
        except BotoCoreError as error:
            raise self._trouble(f"{what} {key}", error) from error

    def _trouble(self, what: str, error: Exception) -> UnavailableError:
        """Builds an error sentence without boto3's text, which may quote a signed URL."""
        if isinstance(error, ClientError):
            why = f"the server answered {_code(error)}"
        elif isinstance(error, NoConnectionError | HTTPClientError):
            why = f"{self.endpoint or 'AWS'} does not answer"
        else:
            why = type(error).__name__
        said = f"cannot {what} in bucket {self.bucket}: {why}"
        return UnavailableError(said, public=f"cannot {what} now")


@contextmanager
def _refusal(status: int) -> Iterator[list[ClientError]]:
    """Takes the error of a request that the server refuses with this HTTP status, and lists it."""
    seen: list[ClientError] = []
    try:
        yield seen
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != status:
            raise
        seen.append(error)


def _prefix_of(rule: Mapping[str, Any]) -> str:
    """The prefix to which a lifecycle rule applies; one that no key has if it also asks for tags or
    sizes, which unfinished uploads lack."""
    of = rule.get("Filter", {})
    if of.keys() - {"Prefix"}:
        return "\0"
    return str(of.get("Prefix", rule.get("Prefix", "")))


def _signer(session: Any, client: Any, bucket: str, region: str) -> Signer | None:
    """Returns one for the bucket's URL as boto3's `client` makes it; None without credentials,
    which `check` asks for."""
    try:
        url: str = client.generate_presigned_url(
            "get_object", Params={"Bucket": bucket, "Key": "x"}
        )
    except BotoCoreError:
        return None
    found = session.get_credentials()  # they renew themselves
    return Signer(url.partition("?")[0].removesuffix("x"), region, found.get_frozen_credentials)


def _client(session: Any, endpoint: str, region: str) -> Any:
    config = Config(
        signature_version="s3v4",
        # Virtual-hosted bucket names need DNS, which only AWS is sure to provide.
        s3={"addressing_style": "path" if endpoint else "auto"},
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"total_max_attempts": 3, "mode": "standard"},
        max_pool_connections=MOST_CONNECTIONS,
        # SHA-256 is sent where needed; other servers do not support the newer CRC trailers.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        return session.client(
            "s3", endpoint_url=endpoint or None, region_name=region, config=config
        )
    except (BotoCoreError, ValueError) as error:
        raise UserError(
            f"the S3 object store cannot be opened: {error}",
            hint="check --s3-endpoint and --s3-region",
        ) from error


def _headers(cached: str) -> dict[str, str]:
    return {"ContentType": _TYPE, **({"CacheControl": cached} if cached else {})}


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "an error"))


def _base64(name: Digest) -> str:
    return base64.b64encode(bytes.fromhex(name[2:])).decode()


def _promised(key: str, name: Digest) -> None:
    """Raises MalformedError if `key` names another digest than `name`."""
    if named_digest(key) not in (None, name):
        raise MalformedError("the bytes do not have the digest that their key names")
