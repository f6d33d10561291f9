"""deploy/: each command parses, each setting exists, units pass systemd's own checks, and the first
start of deploy/compose gives two orchestrators that serve."""

from __future__ import annotations

import importlib
import json
import os
import py_compile
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest
import sqlalchemy as sa
import typer
import yaml
from compose_file import COMPOSE, OURS, compose
from programs import load_script

from devnet.chain import Anvil, find_anvil
from devnet.ports import free_port
from devnet.s3 import S3Server
from prime_core.errors import UserError
from prime_core.settings import BaseSettings, load_settings, variable_of
from prime_core.storage.s3 import S3Store
from prime_orchestrator.serve import holder_of
from prime_orchestrator.store import open_store, schema

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
APPS = {
    "orchestrator": "prime_orchestrator.cli.main",
    "validator": "prime_validator.cli",
    "trainer": "prime_trainer.cli",
    "prime-node": "prime_node.cli",
}
SETTINGS = {
    "orchestrator serve": "prime_orchestrator.config",
    "validator run": "prime_validator.settings",
    "trainer run": "prime_trainer.config",
    "prime-node join": "prime_node.config",
}
"""The module of `Settings` by command. `orchestrator relay` takes variables by its options."""
EVERYWHERE = {"PRIME_LOG_FORMAT"}
FOREIGN = {"HOME", "PGPASSFILE", "AWS_SHARED_CREDENTIALS_FILE", "OMP_NUM_THREADS",
           "TOKENIZERS_PARALLELISM"}  # fmt: skip


def check_command(
    words: list[str], environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails unless the program's command line parses with this environment, and each variable is a
    setting whose value is valid."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    program, *rest = words
    command: Any = typer.main.get_command(importlib.import_module(APPS[program]).app)
    context, name = None, program
    while True:
        context = command.make_context(name, rest, parent=context)
        if not hasattr(command, "resolve_command"):
            break
        left = [*getattr(context, "_protected_args", []), *context.args]
        name, command, rest = command.resolve_command(context, left)
    path = " ".join(words[:2])
    known = {one for option in command.params for one in [option.envvar] if isinstance(one, str)}
    if path in SETTINGS:
        kind: type[BaseSettings] = importlib.import_module(SETTINGS[path]).Settings
        load_settings(kind, {})
        known |= {variable_of(kind, field) for field in kind.model_fields}
    assert environment.keys() <= known | EVERYWHERE | FOREIGN


def ours() -> list[str]:
    """Names of the services that run our image."""
    return [name for name, one in compose()["services"].items() if one["image"] == OURS]


def test_compose_names_only_what_exists() -> None:
    whole = compose()
    services, volumes = whole["services"], whole["volumes"]
    assert {"postgres", "s3", "caddy", "prometheus", "grafana", "loki"} < services.keys()
    assert {"orchestrator-1", "orchestrator-2", "validator", "relay", "trainer"} < set(ours())
    used = set()
    for name, service in services.items():
        assert service["image"] == OURS or re.search(r":v?\d[\w.]*$", service["image"]), name
        needs = service.get("depends_on", {})
        assert set(needs) <= services.keys(), name
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE / source).exists(), mount
            elif not source.startswith("/"):
                used.add(source)
        for variable, value in service.get("environment", {}).items():
            assert isinstance(value, str), f"{name}: {variable}"
            assert not re.search("SECRET|PASSWORD$", variable), "secrets are files"
    assert used == volumes.keys()
    hosts = {re.sub(r"^\S+//", "", url) for url in re.findall(r"\S+//[\w-]+(?=:\d)", str(services))}
    assert hosts <= services.keys() | {"localhost"}
    targets = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    for job in targets["scrape_configs"]:
        for target in job["static_configs"][0]["targets"]:
            host, port = target.split(":")
            assert port in str(services[host]["environment"]), target
    proxied = re.findall(r"([\w-]+):8700", (COMPOSE / "Caddyfile").read_text())
    assert {"orchestrator-1", "orchestrator-2"} <= set(proxied)


@pytest.mark.parametrize("service", [name for name in ours() if name not in ("keys", "pool")])
def test_a_service_s_command_and_settings(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = compose()["services"][service]
    check_command(one["command"], one["environment"], monkeypatch)


def lines(unit: Path, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", unit.read_text(), re.MULTILINE)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_s_command_settings_and_secrets(unit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [command] = lines(unit, "ExecStart")
    loaded = {one.split(":")[0] for one in lines(unit, "LoadCredential")}
    assert set(re.findall(r"%d/(\w+)", command)) == loaded == {"wallet", "password"}
    words = shlex.split(command.replace("%d/", "/run/credentials/").replace("%S/", "/var/lib/"))
    assert words[0].startswith("/opt/prime/bin/")
    given = dict(one.split("=") for line in lines(unit, "Environment") for one in line.split())
    if lines(unit, "EnvironmentFile"):
        names = re.findall(r"PRIME_\w+", unit.read_text().splitlines()[0])
        given |= {name: "8480" if name.endswith("PORT") else "http://pool" for name in names}
    check_command([Path(words[0]).name, *words[1:]], given, monkeypatch)


def test_units_pass_systemd_s_checks(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze (Debian: apt-get install systemd)")
    here = []
    for unit in UNITS:
        text = unit.read_text().replace("/opt/prime/bin/", f"{Path(sys.executable).parent}/")
        here.append(tmp_path / unit.name)
        here[-1].write_text(text)
    for words in (
        ["verify", "--recursive-errors=no", *map(str, here)],
        *(["security", "--offline=true", "--threshold=30", str(unit)] for unit in here),
    ):
        done = subprocess.run(
            [analyze, *words], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert words[0] == "security" or not done.stderr, done.stderr


def test_an_image_has_the_byte_code_of_its_packages() -> None:
    builder = load_script(ROOT / "deploy/build_image.py")
    code = Path(py_compile.compile(pydantic.__file__, doraise=True))
    place = builder.PACKAGES / "pydantic"
    files = dict(builder.package_files("worker"))
    assert files[place / "__init__.py"] == Path(pydantic.__file__)
    assert dict(builder.bytecode_files(files))[place / "__pycache__" / code.name] == code


FLEET_OWNER = "0x000000000000000000000000000000000000dEaD"


def user_data(*more: str) -> subprocess.CompletedProcess[str]:
    words = ["bash", str(ROOT / "deploy/cloud-init/node.sh"), "https://pool.example", "https://rpc"]
    return subprocess.run([*words, *more], capture_output=True, text=True, check=False)


def test_the_user_data_of_a_node_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    text = user_data(FLEET_OWNER).stdout
    assert text.startswith("#cloud-config\n")
    data = yaml.safe_load(text)
    files = {one["path"]: one["content"] for one in data["write_files"]}
    assert (
        files.pop("/etc/systemd/system/prime-node.service")
        == (ROOT / "deploy/systemd/prime-node.service").read_text()
    )
    settings = tomllib.loads(files.pop("/etc/prime/node.toml"))
    load_settings(importlib.import_module(SETTINGS["prime-node join"]).Settings, settings)
    assert settings["provider"] == FLEET_OWNER
    assert not files
    for command in data["runcmd"]:
        assert all(isinstance(word, str) for word in command)
        if command[0] == "sh":
            subprocess.run(["sh", "-n", "-c", command[2]], check=True)
    [made_key] = [one[2] for one in data["runcmd"] if "wallet" in one[-1]]
    check_command(["prime-node", *made_key.split("/prime-node ")[1].split()], {}, monkeypatch)
    assert user_data('0x"\nrun', FLEET_OWNER).returncode == 64
    assert user_data("someone").returncode == 64


def test_the_user_data_of_a_node_fleet_fits_cloud_inits_schema(tmp_path: Path) -> None:
    program = shutil.which("cloud-init")
    if program is None:
        pytest.skip("needs cloud-init (Debian: apt-get install cloud-init)")
    file = tmp_path / "user-data.yaml"

    def checked() -> subprocess.CompletedProcess[str]:
        words = [program, "schema", "--config-file", str(file)]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    text = user_data(FLEET_OWNER).stdout
    file.write_text(text)
    done = checked()
    assert done.returncode == 0, done.stdout + done.stderr
    file.write_text(text.replace("runcmd:", "runcmd: 1\nleft:"))
    assert checked().returncode == 1


def test_setup_gives_up_a_step_that_keeps_failing(tmp_path: Path) -> None:
    environment = os.environ | {"PRIME_KEYS": str(tmp_path), "PRIME_SETUP_TRIES": "2"}
    words = ["bash", COMPOSE / "setup.sh", "retry", "false"]
    done = subprocess.run(words, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "setup.sh: false failed 2 times; its last error is above\n"


@pytest.mark.soak
@pytest.mark.forge
@pytest.mark.postgres
def test_the_first_start_gives_two_orchestrators_of_which_one_takes_over(
    s3: S3Server, empty_postgres: str, tmp_path: Path
) -> None:
    try:
        find_anvil()
    except UserError as error:
        pytest.skip(f"needs anvil: {error}; {error.hint}")
    children: list[subprocess.Popen[bytes]] = []
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("AWS_")
    } | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with Anvil() as chain:
        places = {
            "PRIME_KEYS": tmp_path, "PRIME_S3_KEYS": tmp_path, "PRIME_EXAMPLES": ROOT,
            "PRIME_RPC": chain.url, "PRIME_S3": s3.url,
        }  # fmt: skip
        setup = environment | {name: str(value) for name, value in places.items()}

        def run_setup(part: str) -> str:
            done = subprocess.run(
                ["bash", COMPOSE / "setup.sh", part], env=setup, timeout=200, text=True,
                capture_output=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        run_setup("keys")
        identities = json.loads((tmp_path / "s3.json").read_text())["identities"]
        assert identities.pop() == {"name": "anonymous", "actions": ["Read:policies"]}
        tested = "".join(f"{name.lower()} = {value}\n" for name, value in s3.environment.items())
        for one in identities:
            file = tmp_path / f"aws-{one['name']}"
            assert one["credentials"][0]["secretKey"] in file.read_text()
            assert file.stat().st_mode & 0o777 == 0o600
            file.write_text("[default]\n" + tested)
        assert "pool 1 has 5000 PRIME" in run_setup("pool")
        S3Store("policies", endpoint=s3.url).check()
        (tmp_path / "ready").unlink()  # as if it had been killed before its end
        again = run_setup("pool")
        assert "pool 1 is created" in again, "another pool"
        assert "PRIME free" not in again, "funded again"
        moved = {
            "http://chain:8545": chain.url, "http://s3:8333": s3.url, "/keys/": f"{tmp_path}/",
            "postgresql://prime@postgres/prime": empty_postgres, "0.0.0.0": "127.0.0.1",
        }  # fmt: skip
        urls = []
        try:
            for name in ("orchestrator-1", "orchestrator-2"):
                service, port = compose()["services"][name], free_port()
                own = {"PRIME_ORCHESTRATOR_PORT": str(port), "PRIME_ORCHESTRATOR_DATA": name}
                for key, value in service["environment"].items():
                    text = value
                    for old, new in moved.items():
                        text = text.replace(old, new)
                    own.setdefault(key, text)
                own["PRIME_ORCHESTRATOR_DATA"] = str(tmp_path / name)
                own["PRIME_ORCHESTRATOR_ALSO_KNOWN_AS"] = f"http://127.0.0.1:{port}"
                urls.append(f"http://127.0.0.1:{port}")
                log = (tmp_path / f"{name}.log").open("wb")
                command = [word.replace("/keys/", f"{tmp_path}/") for word in service["command"]]
                children.append(
                    subprocess.Popen(command, env=environment | own, stdout=log,
                                     stderr=log)
                )  # fmt: skip
                log.close()

            def ready() -> bool:
                for child, file in zip(children, sorted(tmp_path.glob("*.log")), strict=True):
                    assert child.poll() is None, file.read_text()
                try:
                    return all(httpx.get(f"{url}/healthz").status_code == 200 for url in urls)
                except httpx.TransportError:
                    return False

            deadline = time.monotonic() + 90
            while not ready():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            pools = [httpx.get(f"{url}/v1/status").json()["pool"] for url in urls]
            assert pools == [1, 1]
            names = [holder_of(tmp_path / name) for name in ("orchestrator-1", "orchestrator-2")]

            def leader() -> int:
                with opened.read() as connection:
                    holder = connection.execute(sa.select(schema.loop_leases.c.holder))
                    return names.index(holder.scalar_one())

            with closing(open_store(empty_postgres)) as opened:
                killed = leader()
                children[killed].kill()
                deadline = time.monotonic() + 60
                while leader() == killed:
                    assert time.monotonic() < deadline, "the other one has not taken over"
                    time.sleep(0.1)
            other = children[1 - killed]
            assert httpx.get(f"{urls[1 - killed]}/readyz").status_code == 200
            other.send_signal(signal.SIGTERM)
            assert other.wait(60) == 0
        finally:
            for child in children:
                child.kill()
                child.wait(60)
