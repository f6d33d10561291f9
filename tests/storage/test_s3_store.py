"""What only the S3 store does: presigned URLs, multipart, and what it says when S3 is not there."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import socket
import ssl
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

pytest.importorskip("boto3", reason="S3: pip install 'prime-open[s3]'")

from served import served

from devnet.ports import free_port
from devnet.s3 import S3Bucket
from prime_core.encoding import sha256
from prime_core.errors import MalformedError, NotFoundError, UnavailableError, UserError
from prime_core.ids import Digest
from prime_core.messages import UploadAnswer
from prime_core.storage.base import digest_key
from prime_core.storage.s3 import LONGEST_SECONDS, MAX_PUT_BYTES, PART_BYTES, S3Store, _client
from prime_core.storage.s3_requests import ShortRequests, Signer
from prime_core.transport.client import OrchestratorClient
from prime_core.transport.problems import to_problem

DATA = b"a rollout file"
KEYS = SimpleNamespace(access_key="key", secret_key="secret", token=None)


def opened(place: S3Bucket, prefix: str = "", **changes: str) -> S3Store:
    return S3Store(
        changes.pop("bucket", place.name),
        prefix=prefix or f"test/{secrets.token_hex(8)}",
        endpoint=changes.pop("endpoint", place.url),
        region=place.region,
        **changes,
    )


@pytest.fixture
def store(s3: S3Bucket) -> S3Store:
    return opened(s3)


def soon() -> int:
    return int(time.time()) + 60


# -- presigned URLs ------------------------------------------------------------------------------


def test_a_presigned_put_takes_exactly_the_announced_bytes(store: S3Store) -> None:
    target = store.signed_put("uploads/1", len(DATA), sha256(DATA), soon())
    other = bytes(reversed(DATA))
    with httpx.Client(trust_env=False) as http:

        def put(data: bytes, **headers: str) -> int:
            return http.put(target.url, content=data, headers=target.headers | headers).status_code

        own = store.signed_put("uploads/1", len(DATA), sha256(other), soon()).headers
        checksum = "x-amz-checksum-sha256"
        assert put(other) == 400, "other bytes of the same length"
        assert put(other, **{checksum: own[checksum]}) == 403, "with their own checksum"
        assert put(DATA + b"!", **{"Content-Length": str(len(DATA) + 1)}) == 403, "longer"
        without = {name: v for name, v in target.headers.items() if name != checksum}
        assert http.put(target.url, content=DATA, headers=without).status_code == 403
        assert http.put(target.url.replace("uploads/1", "uploads/2"), content=DATA,
                        headers=target.headers).status_code == 403  # fmt: skip
        assert http.get(target.url).status_code == 403
        assert list(store.keys()) == []
        assert put(DATA) == 200
        assert put(DATA) == 200, "again, after an answer that was lost"
        assert put(other) == 400
    assert store.get("uploads/1", 100) == DATA
    assert store.stat("uploads/1").sha256 == sha256(DATA)


def test_the_client_of_nodes_uploads_to_a_bucket_and_downloads_from_it(
    store: S3Store, tmp_path: Path
) -> None:
    """It takes no header from the party that names the URL."""
    signed = store.signed_put("uploads/1", len(DATA), sha256(DATA), soon())
    target = UploadAnswer(url=signed.url, headers={}, expiry=signed.expires_at)
    (tmp_path / "file").write_bytes(DATA)
    (tmp_path / "other").write_bytes(DATA[::-1])
    with OrchestratorClient("http://127.0.0.1:9") as client:
        with pytest.raises(MalformedError):
            client.upload(target, tmp_path / "other")
        client.upload(target, tmp_path / "file")
        found = client.download(store.signed_get("uploads/1", soon()), limit=100)
        assert found == DATA
        with pytest.raises(NotFoundError):
            client.download(store.signed_get("uploads/2", soon()), limit=100)


def test_a_presigned_get_reads_one_object_until_it_ends(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", DATA)
    url = store.signed_get("a", soon())
    assert httpx.get(url, trust_env=False).content == DATA
    assert httpx.put(url, content=b"x", trust_env=False).status_code == 403
    assert httpx.get(url.replace("Expires=", "Expires=9"), trust_env=False).status_code == 403
    earlier = datetime.fromtimestamp(time.time() - 120, UTC).strftime("%Y%m%dT%H%M%SZ")
    monkeypatch.setattr("prime_core.storage.s3_requests._moment", lambda: earlier)
    assert httpx.get(store.signed_get("a", soon()), trust_env=False).status_code == 403


def test_a_url_never_lives_longer_than_was_asked_or_s3_allows(s3: S3Bucket) -> None:
    store = S3Store(s3.name, endpoint=s3.url, now=lambda: 1000.0)
    assert "Expires=50&" in store.signed_get("a", 1050)
    assert store.signed_put("a", 1, sha256(b"x"), 1050).expires_at == 1050
    far = store.signed_put("a", 1, sha256(b"x"), 1 << 40)
    assert far.expires_at == 1000 + LONGEST_SECONDS
    assert f"Expires={LONGEST_SECONDS}&" in far.url
    with pytest.raises(MalformedError, match="at most"):
        store.signed_put("a", MAX_PUT_BYTES + 1, sha256(b"x"), 1050)


def test_urls_name_the_endpoint_that_others_reach_and_the_secret_stays_here(s3: S3Bucket) -> None:
    store, secret = (
        opened(s3, public_endpoint="https://objects.example:9000"),
        s3.environment["AWS_SECRET_ACCESS_KEY"],
    )
    signed = store.signed_put("a", 1, sha256(b"x"), soon())
    for url in (signed.url, store.signed_get("a", soon())):
        assert urlsplit(url).netloc == "objects.example:9000"
        assert secret not in url
    store.put("a", b"here")
    assert store.get("a", 9) == b"here"
    assert secret not in repr(store)


@pytest.mark.parametrize(
    "date", ["", "soon", "Sat, 01 Jan 9999999999 00:00:00 GMT", "Sat, 01 Jan 2000 00:00:00 +9900"]
)
def test_a_server_without_a_date_tells_no_time(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, date: str
) -> None:
    assert abs(store.clock_skew()) < 60
    answer = {"ResponseMetadata": {"HTTPHeaders": {"date": date}}}
    monkeypatch.setattr(store._client, "list_objects_v2", lambda **_: answer)
    with pytest.raises(UnavailableError, match="no valid date"):
        store.clock_skew()


@pytest.mark.parametrize("token", ["", "a/token+=="])
@pytest.mark.parametrize(
    "place",
    [
        {"endpoint": "http://127.0.0.1:9000"},
        {"endpoint": "http://[::1]:9000", "prefix": "1/0xAb/1"},
        {"public_endpoint": "https://Objects.example:443/sub"},
        {"region": "eu-west-1"},
    ],
)
def test_urls_are_signed_as_boto3_signs_them(
    monkeypatch: pytest.MonkeyPatch, place: dict[str, str], token: str
) -> None:
    import boto3

    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "se/cr+et")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    store, moment = S3Store("bucket", now=lambda: 0.0, **place), "20260102T030405Z"
    monkeypatch.setattr("prime_core.storage.s3_requests._moment", lambda: moment)
    monkeypatch.setattr(
        "botocore.auth.get_current_datetime", lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    )
    theirs = _client(
        boto3.Session(),
        place.get("public_endpoint") or place.get("endpoint", ""),
        place.get("region", "us-east-1"),
    )
    name, key = sha256(DATA), {"Bucket": "bucket", "Key": f"{store.prefix}uploads/1-a_b.c"}
    bound = {"ContentLength": 5, "ContentType": "application/octet-stream",
             "ChecksumSHA256": base64.b64encode(bytes.fromhex(name[2:])).decode()}  # fmt: skip
    for ours, method, parameters in (
        (store.signed_put("uploads/1-a_b.c", 5, name, 60).url, "put_object", key | bound),
        (store.signed_get("uploads/1-a_b.c", 60), "get_object", key),
    ):
        wanted = theirs.generate_presigned_url(method, Params=parameters, ExpiresIn=60)
        assert ours.partition("?")[0] == wanted.partition("?")[0]
        assert parse_qs(urlsplit(ours).query) == parse_qs(urlsplit(wanted).query)


OK = b"HTTP/1.1 200 OK\r\n"
COPIED = b"<CopyObjectResult></CopyObjectResult>"


@pytest.mark.parametrize(
    ("answer", "copied", "kept"),
    [
        (OK + b"Content-Length: 37\r\n\r\n" + COPIED, True, True),
        (OK + b"Content-Length: 37\r\nConnection: close\r\n\r\n" + COPIED, True, False),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5;a=b\r\n<Copy\r\n20\r\n" + COPIED[5:]
         + b"\r\n0\r\nTrailer: 1\r\n\r\n", True, True),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n<CopyObjectResult", False, False),
        (OK + b"Content-Length: 21\r\n\r\n<Error>slow</Error>\r\n", False, True),
        (OK + b"Content-Length: 99999999\r\n\r\n", False, False),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n<Copy\r\n", False, False),
        (OK + b"\r\n" + COPIED, True, False),
        (OK + b"A: b\r\n" * 200 + b"\r\n", False, False),
        (b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n", False, True),
        (b"SSH-2.0\r\n", False, False),
        (b"", False, False),
    ],
)  # fmt: skip
def test_a_short_request_takes_a_plain_success_and_leaves_all_else_to_boto3(
    answer: bytes, copied: bool, kept: bool
) -> None:
    """`kept`: a second request goes over the same connection."""
    seen: list[list[bytes]] = []

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                wire, _ = listener.accept()
            except OSError:
                return
            seen.append([])
            with wire, wire.makefile("rb") as file:
                while lines := list(iter(file.readline, b"\r\n")):
                    if b"" in lines:
                        break
                    seen[-1].append(lines[0])
                    wire.sendall(answer)
                    if not kept:
                        break

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,), daemon=True)
        server.start()
        place = f"http://127.0.0.1:{listener.getsockname()[1]}/bucket/"
        requests = ShortRequests(Signer(place, "us-east-1", lambda: KEYS), "bucket", None)
        assert requests.copy("a", "b", '"tag"') is copied
        assert requests.copy("a", "b", '"tag"') is copied
        listener.shutdown(socket.SHUT_RDWR)
    assert seen == ([[b"PUT /bucket/b HTTP/1.1\r\n"] * 2] if kept else [[seen[0][0]]] * 2)


def a_certificate(folder: Path) -> Path:
    """Writes a certificate for 127.0.0.1 that is its own authority, and its key, into one file."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    path.write_bytes(
        certificate.public_bytes(Encoding.PEM)
        + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    return path


@pytest.mark.parametrize("trusted", [True, False])
def test_short_requests_trust_the_certificates_of_aws_ca_bundle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trusted: bool
) -> None:
    class Object(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.send_header("ETag", '"tag"')
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    certificate = a_certificate(tmp_path)
    if trusted:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    else:
        monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with served(Object, context=context) as url:
        short = S3Store("bucket", endpoint=url)._short
        assert short is not None
        assert (short.head("a") is not None) is trusted


# -- what lies in the bucket -----------------------------------------------------------------------


def test_pools_in_one_bucket_do_not_see_one_another(s3: S3Bucket) -> None:
    folder = f"test/{secrets.token_hex(8)}"
    one, other = opened(s3, f"{folder}/1"), opened(s3, f"{folder}/11")
    one.put("a", b"1")
    other.put("b", b"11")
    assert (list(one.keys()), list(other.keys())) == (["a"], ["b"])
    assert not other.exists("a")


def test_a_large_file_goes_up_in_parts_and_appears_whole(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(PART_BYTES + 12345)
    (tmp_path / "large").write_bytes(data)
    name = sha256(data)
    with pytest.raises(MalformedError, match="digest"):
        store.put_file(digest_key(sha256(b"other")), tmp_path / "large")
    with monkeypatch.context() as patched:
        complete = store._client.complete_multipart_upload

        def seen(**arguments: object) -> object:
            assert not store.exists(digest_key(name)), "nothing is visible before the last part"
            return complete(**arguments)

        patched.setattr(store._client, "complete_multipart_upload", seen)
        store.put_file(digest_key(name), tmp_path / "large")
    assert "-" in store._head(digest_key(name)).get("ETag", ""), "it went up in parts"
    assert store.stat(digest_key(name)).sha256 == name
    assert store.get(digest_key(name), len(data)) == data
    store.copy(digest_key(name), "copy")
    assert store.size("copy") == len(data)


def test_a_damaged_object_is_never_handed_out(s3: S3Bucket) -> None:
    store = opened(s3)
    key = digest_key(sha256(b"precious"))
    store._client.put_object(Bucket=store.bucket, Key=store.prefix + key, Body=b"precious?")
    with pytest.raises(UnavailableError, match="damaged"):
        store.get(key, 100)
    store.put(key, b"precious")
    assert store.get(key, 100) == b"precious"


def test_a_digest_is_computed_where_the_server_keeps_none(store: S3Store) -> None:
    store._client.put_object(Bucket=store.bucket, Key=store.prefix + "plain", Body=DATA)
    assert "ChecksumSHA256" not in store._head("plain")
    assert store.stat("plain").sha256 == Digest("0x" + hashlib.sha256(DATA).hexdigest())


# -- lifecycle rules -------------------------------------------------------------------------------


def test_the_documented_lifecycle_rules_end_a_pools_unfinished_uploads_and_expire_no_object(
    s3: S3Bucket,
) -> None:
    """The rules of docs/storage.md, with a pool's address, as the server gives them back. What it
    does with them after a day is not waited for."""
    place = f"84532/0x{secrets.token_hex(20)}"
    page = (Path(__file__).parents[2] / "docs" / "storage.md").read_text()
    block = page.partition("### Lifecycle rules")[2].partition("```json")[2].partition("```")[0]
    wanted = json.loads(block.replace("84532/0x…", place))
    pool, other = opened(s3, f"{place}/1"), opened(s3, f"{place}/11")
    client = pool._client
    client.put_bucket_lifecycle_configuration(Bucket=s3.name, LifecycleConfiguration=wanted)
    try:
        rules = client.get_bucket_lifecycle_configuration(Bucket=s3.name)["Rules"]
    finally:
        client.delete_bucket_lifecycle(Bucket=s3.name)
    assert rules == wanted["Rules"]
    keys = [one.prefix + digest_key(sha256(DATA)) for one in (pool, other)]
    for rule in rules:
        assert rule["Status"] == "Enabled"
        assert [key for key in keys if key.startswith(rule["Filter"]["Prefix"])] == keys[:1]
        # without Expiration or Transition: `sha256/` is forever, and files of shadow nodes lie
        # under `uploads/` while a submission names them
        assert rule.keys() == {"ID", "Status", "Filter", "AbortIncompleteMultipartUpload"}
    assert len(rules) == 1


# -- errors in one sentence ------------------------------------------------------------------------


def test_a_bucket_that_serves_passes_the_check_and_nothing_is_left_in_it(store: S3Store) -> None:
    store.check()
    assert list(store.keys()) == []


@pytest.mark.slow
def test_a_missing_bucket_is_named(s3: S3Bucket) -> None:
    name = f"none-{secrets.token_hex(8)}"
    with pytest.raises(UserError, match=f"there is no bucket {name}"):
        opened(s3, bucket=name).check()


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_refused_in_one_sentence(
    s3: S3Bucket, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "wrong-one")
    store = opened(s3)
    with pytest.raises(UserError, match="refuses these credentials") as caught:
        store.check()
    assert "wrong-one" not in str(caught.value)
    with pytest.raises(UnavailableError, match=rf"cannot read a in bucket {s3.name}: .* 403"):
        store.size("a")


def test_missing_credentials_are_asked_for_and_a_file_of_them_is_taken(
    s3: S3Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    lines = [f"{name.lower()} = {value}" for name, value in s3.environment.items()]
    for name in s3.environment:
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match="no credentials") as caught:
        opened(s3).check()
    assert "AWS_SHARED_CREDENTIALS_FILE" in caught.value.hint
    file.write_text("\n".join(["[default]", *lines]))
    opened(s3).check()


def test_a_server_that_is_down_is_unavailable_to_every_call(s3: S3Bucket) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    store = opened(s3, endpoint=address)
    for call in (
        store.check,
        lambda: store.put("a", b"x"),
        lambda: store.get("a", 1),
        lambda: store.exists("a"),
        lambda: store.copy("a", "b"),
        lambda: store.delete("a"),
        lambda: list(store.keys()),
    ):
        with pytest.raises(UnavailableError, match=f"{address} does not answer") as caught:
            call()
        assert address not in str(to_problem(caught.value))
    assert store.signed_get("a", soon()), "no call is needed to sign"


@pytest.mark.parametrize(("compares", "lack"), [("", "an upload"), ("checksum", "a copied object")])
def test_a_server_that_ignores_checksums_or_tags_is_refused(
    s3: S3Bucket, compares: str, lack: str
) -> None:
    class Careless(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = b'<?xml version="1.0"?><ListBucketResult></ListBucketResult>'
            given = compares and "x-amz-checksum-sha256" in self.headers
            self.send_response(400 if given else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_DELETE = answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with served(Careless) as url, pytest.raises(UserError, match=f"does not compare {lack}"):
        opened(s3, endpoint=url).check()


# -- rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "ends"),
    [
        ({"Filter": {"Prefix": ""}}, True),
        ({"Filter": {"Prefix": "1/0xab/"}}, True),
        ({"Filter": {"Prefix": "1/0xab/2/"}}, False),
        ({"Filter": {"Prefix": ""}, "Status": "Disabled"}, False),
    ],
)
def test_a_rule_that_ends_unfinished_uploads_of_the_prefix_is_recognized(
    s3: S3Bucket, rule: dict[str, Any], ends: bool
) -> None:
    store = opened(s3, prefix="1/0xab/1")
    assert store.ends_uploads() is False
    rules = {"ID": "parts", "Status": "Enabled"} | rule
    rules["AbortIncompleteMultipartUpload"] = {"DaysAfterInitiation": 1}
    store._client.put_bucket_lifecycle_configuration(
        Bucket=store.bucket, LifecycleConfiguration={"Rules": [rules]}
    )
    try:
        assert store.ends_uploads() is ends
    finally:
        store._client.delete_bucket_lifecycle(Bucket=store.bucket)


@pytest.mark.parametrize(
    "answer",
    [
        {"Rules": [{"ID": "parts", "Status": "Enabled", "AbortIncompleteMultipartUpload": {},
                    "Filter": {"And": {"Prefix": "", "Tags": [{"Key": "a", "Value": "b"}]}}}]},
        {},
    ],
)  # fmt: skip
def test_a_rule_that_asks_for_tags_and_an_answer_without_rules_end_no_upload(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    """Servers refuse the first rule (AWS, Ceph), or answer with a list of objects (Swift)."""
    monkeypatch.setattr(store._client, "get_bucket_lifecycle_configuration", lambda **_: answer)
    assert store.ends_uploads() is False
