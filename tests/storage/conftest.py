"""The bucket under test: one of a server that is already there, or one of our own SeaweedFS."""

from __future__ import annotations

import os

import pytest

from devnet.s3 import BUCKET, S3Bucket, S3Server


@pytest.fixture
def s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    """A bucket, its credentials in this process's environment: PRIME_TEST_S3_BUCKET at
    PRIME_TEST_S3_ENDPOINT with the environment's own credentials, or one in SeaweedFS."""
    if given := os.environ.get("PRIME_TEST_S3_ENDPOINT"):
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        return S3Bucket(
            url=given,
            name=os.environ.get("PRIME_TEST_S3_BUCKET", BUCKET),
            region=os.environ.get("PRIME_TEST_S3_REGION", "us-east-1"),
            environment={name: os.environ[name] for name in names if name in os.environ},
        )
    server: S3Server = request.getfixturevalue("_s3_server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return S3Bucket(server.url, BUCKET, "us-east-1", server.environment)
