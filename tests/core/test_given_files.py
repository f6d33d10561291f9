"""Every option that names a file: a folder, an empty file, other bytes or an unreadable one ends in
one sentence that names the file and says what to type next."""

from __future__ import annotations

import importlib
import socket
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from pools import deployment
from test_programs import HANDED_ON, PROGRAMS, called, commands

from devnet.deployed import TEST_PERIODS
from prime_chain.keystore import create_keystore
from prime_core.errors import UserError
from prime_core.gateway import Cassette
from prime_core.given import read_given
from prime_core.ids import ZERO_DIGEST
from prime_core.settlement import read_settlement
from prime_envs.definition import read_toml
from prime_node.nodes import read_consent
from prime_node.preflight import read_lease
from prime_orchestrator.cli.pool_members import read_invite, read_opinions
from prime_orchestrator.gateway.upstreams import McpTool, OpenApi, OpenApiTool, Web
from prime_trainer.difficulty import _grades_of
from prime_verify.canaries.planting import read_secret
from prime_verify.proofs.thresholds import load as load_calibration

NODE = "0x" + "11" * 20
RPC = "http://127.0.0.1:9"
CHAIN = f"--deployment DEPLOYMENT --rpc {RPC}"
BY_COMMAND = {
    "config": (
        "prime-node status --config FILE",
        "orchestrator store check --config FILE",
        "validator run --config FILE",
        "trainer run --config FILE",
    ),
    "deployment": (
        f"prime-node stake show --deployment FILE --wallet WALLET --rpc {RPC}",
        f"orchestrator pool show --pool 1 --deployment FILE --rpc {RPC}",
        f"validator status {NODE} --pool 1 --deployment FILE --rpc {RPC}",
    ),
    "wallet": (
        f"prime-node join --orchestrator {RPC} --rpc {RPC} --wallet FILE",
        "orchestrator wallet show --wallet FILE",
        f"orchestrator pool end --pool 1 {CHAIN} --wallet FILE",
    ),
    "provider_wallet": (
        f"prime-node join --orchestrator {RPC} --rpc {RPC} --wallet WALLET"
        " --password-file PASSWORD --provider-wallet FILE",
    ),
    "password_file": (
        f"prime-node join --orchestrator {RPC} --rpc {RPC} --wallet WALLET --password-file FILE",
        f"orchestrator pool end --pool 1 {CHAIN} --wallet WALLET --password-file FILE",
    ),
    "run": (
        "orchestrator run show FILE",
        f"orchestrator run revise --run FILE --from-step 1 --orchestrator {RPC} --wallet WALLET",
    ),
    "source": (
        "orchestrator run new FILE --model devnet/model --out OUT",
        "orchestrator env check FILE",
    ),
    "key": ("prime-broadcast serve devnet/model --data OUT --key FILE --once",),
}
"""Option or argument → commands that read it before they ask another machine."""
BY_FUNCTION: dict[str, Callable[[Path], object]] = {
    "settlement": read_settlement,
    "opinions": read_opinions,
    "file": read_invite,
    "file (consent)": read_consent,
    "lease": read_lease,
    "cassette": Cassette.read,
    "rollouts": lambda path: _grades_of(path, ZERO_DIGEST),
    "source (run)": read_toml,
    "planted_secret": read_secret,
    "sign": load_calibration,
    "keep": load_calibration,
}
FOLDERS = {
    "answers", "archive", "base", "data", "folder", "journal", "mirror", "model", "new", "objects",
    "old", "out", "output", "queue", "tensorboard", "provider_password_file",
}  # fmt: skip
"""Folders, and files that are written. A provider's password is read as any password is."""


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("files")
    found = {name: folder / name for name in ("folder", "empty", "garbage")}
    found["folder"].mkdir()
    found["empty"].write_bytes(b"")
    found["garbage"].write_bytes(bytes(range(128, 256)))
    for name in ("empty", "garbage"):
        found[name].chmod(0o600)
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,  # a socket's path has at most 107 bytes
        socket.socket(socket.AF_UNIX) as held,
    ):
        found["unreadable"] = Path(short) / "unreadable"
        held.bind(str(found["unreadable"]))  # no one, not even root, can open it
        yield found


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Good files for what is asked on the way."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "password").write_text("a password")
    create_keystore(folder / "wallet.json", "a password", light=True)
    deployment(TEST_PERIODS).save(folder / "deployment.json")
    return {
        "PASSWORD": str(folder / "password"),
        "WALLET": str(folder / "wallet.json"),
        "DEPLOYMENT": str(folder / "deployment.json"),
        "OUT": str(folder / "out"),
    }


@pytest.mark.slow
def test_every_option_that_names_a_file_is_tried() -> None:
    found = set()
    for program in PROGRAMS:
        top = typer.main.get_command(importlib.import_module(program.module).app)
        for path in set(commands(top)) - HANDED_ON:
            one: Any = top
            for name in path:
                _, one, _ = one.resolve_command(click.Context(one), [name])
            found |= {p.name for p in one.params if "path" in repr(p.bare_type()).lower()}
    assert found == FOLDERS | BY_COMMAND.keys() | {n for n in BY_FUNCTION if "(" not in n}


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for lines in BY_COMMAND.values() for line in lines])
def test_a_wrong_file_is_one_sentence_that_names_it(
    line: str, bad: dict[str, Path], words: dict[str, str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    name, *rest = line.split()
    program = next(one for one in PROGRAMS if one.name == name)
    for kind, path in bad.items():
        if (kind, "--config" in line) == ("empty", True):
            continue  # it holds no setting, and none is asked for
        if (kind, "env check" in line) == ("folder", True):
            continue  # an environment may be one
        given = [words.get(word, str(path) if word == "FILE" else word) for word in rest]
        code = called(program, monkeypatch, *given)
        said = capsys.readouterr().err.splitlines()
        assert code == 64, (kind, code, said)
        assert len(said) == 1, (kind, said)
        check(said[0], kind, path)


def check(said: str, kind: str, path: Path) -> None:
    assert str(path) in said, kind
    assert "; " in said, (kind, "what to type next")
    if kind == "folder":
        assert "is a folder" in said
    if kind == "unreadable":
        assert "cannot be read" in said


@pytest.mark.parametrize("name", BY_FUNCTION)
def test_a_wrong_file_is_refused_with_what_to_do(name: str, bad: dict[str, Path]) -> None:
    for kind, path in bad.items():
        with pytest.raises(UserError) as caught:
            BY_FUNCTION[name](path)
        check(f"{caught.value}; {caught.value.hint}", kind, path)
        assert caught.value.hint, kind


def test_a_small_file_takes_little_memory_and_one_byte_too_many_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert read_given(path, "file", "") == b"x" * 1000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert len(read_given(path, "file", "", limit=1000)) == 1000
    with pytest.raises(UserError, match="exceeds 999 bytes"):
        read_given(path, "file", "", limit=999)


def test_tools_of_a_gateway_refuse_a_wrong_file(bad: dict[str, Path]) -> None:
    for kind, path in bad.items():
        with pytest.raises(UserError) as caught:
            McpTool(kind="mcp", url="http://a/", tool="t", secret_file=path).headers()
        check(f"{caught.value}; {caught.value.hint}", kind, path)
        settings = OpenApiTool(kind="openapi", document=path, operation="o")
        with pytest.raises(UserError) as caught:
            OpenApi(settings, Web())
        check(f"{caught.value}; {caught.value.hint}", kind, path)
