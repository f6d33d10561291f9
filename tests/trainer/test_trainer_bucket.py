"""Policies in a bucket of a real S3 server: nodes fetch them from there, and from nowhere else."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import sqlalchemy as sa
import torch
import trainer_kit as kit
from safetensors.torch import load_file, save_file
from trainer_pool import Pool, until

from devnet.ports import free_port
from devnet.s3 import BUCKET, PUBLIC, S3Server
from devnet.wire import Wires
from prime_broadcast import layout
from prime_broadcast.client import fetch
from prime_broadcast.folder import PolicyFolder
from prime_broadcast.manifest import MANIFEST_NAME, Trust
from prime_broadcast.pool import Policies, PoolNames
from prime_broadcast.relay import Relay
from prime_broadcast.server import Serving
from prime_core.errors import FatalError, UnavailableError, UserError
from prime_core.messages import PolicyList
from prime_core.transport.client import OrchestratorClient
from prime_orchestrator.api import kept
from prime_orchestrator.relay import Loop
from prime_orchestrator.store import evaluations, schema
from prime_trainer.bucket import Bucket
from prime_trainer.feed import pool_facts
from prime_trainer.publish import Publisher
from prime_trainer.run import bucket_of, new_origin, new_publisher


@contextmanager
def publishing(
    pool: Pool, data: Path, s3: S3Server, **changes: object
) -> Iterator[tuple[Publisher, Bucket]]:
    set_ = pool.settings(data, s3_bucket=PUBLIC, s3_endpoint=s3.url, **changes)
    with OrchestratorClient(pool.url, kit.TRAINER, "trainer") as client:
        facts = pool_facts(client, None)
        bucket = bucket_of(set_, facts)
        assert bucket is not None
        yield new_publisher(set_, facts, kit.TRAINER, client, bucket), bucket


@pytest.fixture
def empty(s3: S3Server) -> S3Server:
    from prime_core.storage.s3 import S3Store

    store = S3Store(PUBLIC, endpoint=s3.url)
    for key in list(store.keys()):
        store.delete(key)
    return s3


def next_model(model: Path, folder: Path) -> Path:
    """The model with one weight changed."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    name = sorted(weights)[0]
    with torch.no_grad():
        weights[name].view(-1)[0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def blocks(folder: Path) -> set[bytes]:
    """Each 64 bytes of a policy's files, except what its signed manifest also says."""
    signed = (folder / MANIFEST_NAME).read_bytes()
    files = [file.read_bytes() for file in folder.iterdir() if file.name != MANIFEST_NAME]
    found = {data[at : at + 64] for data in files for at in range(0, len(data) - 63, 64)}
    return {block for block in found if block not in signed}


def test_policies_come_from_the_bucket_and_pass_neither_the_trainer_nor_the_orchestrator(
    pool: Pool,
    tmp_path: Path,
    empty: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # However slow this machine is, the bucket counts as answering.
    for name in ("chunks.STARVING", "chunks.TOO_SLOW", "sources.OVERDUE"):
        monkeypatch.setattr(f"prime_broadcast.{name}", 600.0)
    caplog.set_level(logging.INFO)
    data, port = tmp_path / "data", free_port()
    domain = pool.backend.context.deployment.domain("pools")
    trust = Trust(kit.TRAINER.address, domain, kit.POOL)
    pool_port = urlsplit(pool.url).port
    assert pool_port is not None
    with closing(Wires()) as wires, publishing(pool, data, empty) as (publisher, bucket):
        zero = publisher.publish(pool.model, 0)
        one = publisher.publish(next_model(pool.model, tmp_path / "next"), 1)
        origin, orchestrator = wires.add([port]), wires.add([pool_port])
        passed = wires.record(origin), wires.record(orchestrator)
        url = f"http://127.0.0.1:{origin}"
        policy = blocks(publisher.root / "policies/0") | blocks(publisher.root / "policies/1")
        assert len(policy) > 500
        with (
            new_origin(
                pool.settings(data, origin_port=port, origin_url=url),
                publisher.root, kit.TRAINER, bucket,
            ),
            OrchestratorClient(f"http://127.0.0.1:{orchestrator}", None, "node") as client,
        ):  # fmt: skip
            until(lambda: {url, bucket.url} <= set(pool.relays()), "origin and bucket are listed")
            node = Policies(PolicyFolder(tmp_path / "node", trust), PoolNames(client))
            with Relay(tmp_path / "relay", trust, Serving("127.0.0.1", 0)) as relay:
                Loop(client, relay, [], announces=False).turn()
                for signed in (zero, one):
                    node.ensure(signed.manifest.version, signed.manifest.digest())
                until(lambda: relay.complete() == [0, 1], "the relay has both")
            assert "policy 1 is here (delta" in caplog.text
            assert b"/v1/policies" in passed[1]
            for seen in passed:
                assert not [block for block in policy if block in seen]
            fetch(zero, [url], tmp_path / "other", patience=30.0)
            assert [block for block in policy if block in passed[0]], "the proxy sees it"
        served = bucket.url
    for name in (file.name for file in one.manifest.files):
        assert (tmp_path / "node/1" / name).read_bytes() == (tmp_path / "next" / name).read_bytes()
    index = httpx.get(f"{served}/policies/index.json")
    assert index.headers["cache-control"] == "no-cache"
    assert [s.manifest.version for s in layout.parse_index(index.content)] == [1, 0]
    file = httpx.head(f"{served}/policies/1/manifest.json")
    assert "immutable" in file.headers["cache-control"]


def test_an_upload_that_ended_early_goes_on_where_it_stopped(
    pool: Pool, tmp_path: Path, empty: S3Server
) -> None:
    data = tmp_path / "data"
    with publishing(pool, data, empty) as (publisher, bucket):
        signed = publisher.publish(pool.model, 0)
        publisher.publish(next_model(pool.model, tmp_path / "next"), 1)
        store = bucket._store
        name = signed.manifest.files[0].name
        before = store.stat(f"policies/1/{name}").tag
        store.delete("policies/1/manifest.json")
        store.delete("policies/0/" + name)
        store.put("policies/7/of-another-trainer", b"x")
    with publishing(pool, data, empty) as (_, bucket):
        bucket.update()
        keys = set(bucket._store.keys("policies/"))
        assert {"policies/1/manifest.json", f"policies/0/{name}"} <= keys
        assert "policies/7/of-another-trainer" in keys, "not ours to remove"
        assert bucket._store.stat(f"policies/1/{name}").tag == before
        assert bucket.versions == (0, 1)


def test_a_bucket_that_does_not_answer_delays_no_policy(
    pool: Pool, tmp_path: Path, empty: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_trainer.bucket.RETRY_SECONDS", 0.1)
    with publishing(pool, tmp_path / "data", empty) as (publisher, bucket):
        put, failed = bucket._store.put_file, threading.Event()
        back = threading.Event()

        def put_file(key: str, path: Path, *, cached: str = "") -> None:
            if not back.is_set():
                failed.set()
                raise UnavailableError("the server answered ExpiredToken")
            put(key, path, cached=cached)

        monkeypatch.setattr(bucket._store, "put_file", put_file)
        publisher.publish(pool.model, 0)
        assert failed.is_set()
        assert bucket.versions == ()
        assert publisher._client.get("/v1/policies", PolicyList).policies, "it was handed in"
        back.set()
        until(lambda: bucket.versions == (0,), "the bucket has the policy")
        assert "policies/0/manifest.json" in set(bucket._store.keys("policies/"))


def test_files_without_a_manifest_are_not_trusted_after_a_restart(
    pool: Pool, tmp_path: Path, empty: S3Server
) -> None:
    """They may be of a policy that was lost before its manifest was written, and made again."""
    with publishing(pool, tmp_path / "data", empty) as (publisher, bucket):
        bucket._store.put("policies/0/model.safetensors", b"of another try")
        odd = {"Bucket": PUBLIC, "Key": bucket._store.prefix + "policies/0/a b"}
        bucket._store._client.put_object(**odd, Body=b"")
        publisher.publish(pool.model, 0)
        size = (pool.model / "model.safetensors").stat().st_size
        assert bucket._store.size("policies/0/model.safetensors") == size
        assert "policies/0/a b" in set(bucket._store.keys("policies/")), "no name of the layout"
        bucket._store._client.delete_object(**odd)


def test_files_of_thinned_versions_leave_the_bucket(
    pool: Pool, tmp_path: Path, empty: S3Server
) -> None:
    folder = pool.model
    with publishing(pool, tmp_path / "data", empty) as (publisher, bucket):
        for version in range(3):
            signed = publisher.publish(folder, version)
            folder = next_model(folder, tmp_path / f"next-{version}")
        assert layout.thin(publisher.root, keep_whole=1, anchor_every=8) == [1]
        bucket.update()
        keys = set(bucket._store.keys("policies/1/"))
    assert keys == {"policies/1/manifest.json", "policies/1/delta-0"}
    assert signed.manifest.version == 2


def test_a_policy_costs_a_list_of_its_own_files_once_the_bucket_was_read(
    pool: Pool, tmp_path: Path, empty: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    with publishing(pool, tmp_path / "data", empty) as (publisher, bucket):
        real = bucket._store.keys

        def keys(prefix: str = "") -> Iterator[str]:
            asked.append(prefix)
            return real(prefix)

        monkeypatch.setattr(bucket._store, "keys", keys)
        folder = pool.model
        for version in range(3):
            publisher.publish(folder, version)
            folder = next_model(folder, tmp_path / f"next-{version}")
        assert asked == ["policies/", "policies/1/", "policies/2/"]
        assert bucket.versions == (0, 1, 2)


def test_old_policies_leave_bucket_and_origin_together(
    pool: Pool, tmp_path: Path, empty: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "KEEP_WHOLE", 1)
    monkeypatch.setattr(kept, "EVERY_SECONDS", 0.0)  # the status is made for each request
    deployment = pool.backend.context.deployment
    deployment.save(tmp_path / "deployment.json")
    given = {"deployment": tmp_path / "deployment.json", "delta_from": 0}
    with (
        pytest.raises(UserError, match="a file can be in dispute"),
        publishing(pool, tmp_path / "data", empty, policies_kept_days=1, **given),
    ):
        pass
    days = 1000
    old = time.time() - (days + 1) * 86_400
    last = pool.run.max_staleness + 3
    with publishing(pool, tmp_path / "data", empty, policies_kept_days=days, **given) as (
        publisher,
        bucket,
    ):
        bucket._store.put("policies/99/of-another-trainer", b"x")
        folder = pool.model
        for version in range(last):
            publisher.publish(folder, version)
            folder = next_model(folder, tmp_path / f"next-{version}")
            manifest = layout.version_folder(publisher.root, version) / "manifest.json"
            os.utime(manifest, (old, old))
        everything = tuple(range(last))
        assert bucket.versions == everything, "all can be leased, or are the base model"

        def away(key: str) -> None:
            raise UnavailableError(f"the server answered SlowDown for {key}")

        with monkeypatch.context() as patched:
            patched.setattr(bucket._store, "delete", away)
            publisher.publish(folder, last)
        assert layout.versions(publisher.root) == [*everything, last]
        with pool.store.begin() as connection:
            evaluations.start(connection, 1, 8, now=old)
        for number, ended in enumerate((None, time.time(), old), start=last + 1):
            with pool.store.begin() as connection:
                connection.execute(sa.update(schema.evaluations).values(ended_at=ended))
            folder = next_model(folder, tmp_path / f"next-{number}")
            publisher.publish(folder, number)
            known = layout.versions(publisher.root)
            assert (1 in known) == (ended != old), "an evaluation names it"
        left = [0, *range(2, last + 4)]
        assert layout.versions(publisher.root) == left == list(bucket.versions)
        keys = set(bucket._store.keys("policies/"))
    assert not [key for key in keys if key.startswith("policies/1/")]
    assert {key.split("/")[1] for key in keys} == {"index.json", "99", *map(str, left)}


def test_a_bucket_with_another_policy_of_that_version_is_refused(
    pool: Pool, tmp_path: Path, empty: S3Server
) -> None:
    with publishing(pool, tmp_path / "data", empty) as (publisher, bucket):
        publisher.publish(pool.model, 0)
        bucket._store.put("policies/0/manifest.json", b"{}")
    with (
        publishing(pool, tmp_path / "data", empty) as (_, bucket),
        pytest.raises(FatalError, match="holds another policy 0: use an empty bucket"),
    ):
        bucket.update()


def test_settings_that_do_not_fit_are_one_sentence(
    pool: Pool, tmp_path: Path, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    with OrchestratorClient(pool.url, kit.TRAINER, "trainer") as client:
        facts = pool_facts(client, None)
        for changes, sentence in (
            ({"s3_endpoint": s3.url}, "without a bucket"),
            ({"s3_bucket": "missing", "s3_endpoint": s3.url}, "there is no bucket missing"),
            ({"s3_bucket": PUBLIC}, "needs --s3-public-url"),
            ({"s3_bucket": PUBLIC, "s3_public_url": "cdn.example.org"}, "is not the URL of a"),
        ):
            with pytest.raises(UserError, match=sentence):
                bucket_of(pool.settings(tmp_path, **changes), facts)
        private = bucket_of(
            pool.settings(tmp_path / "data", s3_bucket=BUCKET, s3_endpoint=s3.url), facts
        )
        publisher = new_publisher(
            pool.settings(tmp_path / "data"), facts, kit.TRAINER, client, private
        )
        with caplog.at_level(logging.WARNING):
            publisher.publish(pool.model, 0)
    assert "nodes cannot read the bucket at" in caplog.text
