"""The operator's command line: settings, their order, and mistakes named in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prime_core.errors import UserError
from prime_orchestrator.config import Settings, load


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prime_orchestrator.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_command_and_imports_none_of_them() -> None:
    """And what answers `orchestrator pool --help` loads neither SQL nor a client of the chain."""
    code = (
        "import importlib, sys, prime_orchestrator.cli.main\n"
        "sys.argv = ['orchestrator', '--help']\n"
        "try: prime_orchestrator.cli.main.main()\n"
        "except SystemExit: pass\n"
        "assert 'prime_orchestrator.cli.pool' not in sys.modules\n"
        "for name in ('pool', 'slash', 'terms', 'rewards', 'deployment', 'run', 'quickstart',\n"
        "             'rollouts'):\n"
        "    importlib.import_module(f'prime_orchestrator.cli.{name}')\n"
        "heavy = {'torch', 'web3', 'eth_account', 'fastapi', 'sqlalchemy', 'numpy', 'jinja2',\n"
        "         'prime_chain.client'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in ("serve", "validate", "relay", "pool", "rewards", "deployment", "store"):
        assert name in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "who"),
    [
        ("validate", "validator run"),  # a program of its own, which goes by its own name
        ("relay", "orchestrator relay"),
        ("pool", "orchestrator pool"),
        ("rewards", "orchestrator rewards"),
        ("deployment", "orchestrator deployment"),
    ],
)
def test_each_forwarded_command_answers_for_itself(command: str, who: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"Usage: {who} " in done.stdout


@pytest.mark.slow
def test_a_users_mistake_is_one_sentence_without_traceback(tmp_path: Path) -> None:
    done = run("serve", "--data", str(tmp_path), "--port", "99999")
    assert done.returncode == UserError.exit_code
    [said] = done.stderr.strip().splitlines()
    assert said.startswith("orchestrator: the setting 'port' is wrong")
    done = run("serve", "--data", str(tmp_path))
    [said] = done.stderr.strip().splitlines()
    assert "add --deployment" in said


@pytest.mark.slow
def test_store_migrate_makes_the_schema(tmp_path: Path) -> None:
    done = run("store", "migrate", "--data", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "orchestrator.sqlite").exists()


def test_flags_beat_the_environment_which_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "orchestrator.toml"
    file.write_text('port = 1\nhost = "10.0.0.1"\nrpc = ["http://a", "http://b"]\npool = 3\n')
    monkeypatch.setenv("PRIME_ORCHESTRATOR_PORT", "2")
    monkeypatch.setenv("PRIME_ORCHESTRATOR_POOL", "4")
    found = load({"pool": 5, "host": None, "rpc": ()}, file)
    assert (found.host, found.port, found.pool) == ("10.0.0.1", 2, 5)
    assert found.rpc == ("http://a", "http://b")
    monkeypatch.setenv("PRIME_ORCHESTRATOR_RPC", "http://c, http://d")
    assert load({}, file).rpc == ("http://c", "http://d")


def test_the_store_lies_under_the_data_folder_unless_named() -> None:
    found = Settings(data=Path("/somewhere"))
    assert found.database_url == "sqlite:////somewhere/orchestrator.sqlite"
    assert found.objects_folder == Path("/somewhere/objects")
    named = Settings(database="postgresql://x/y", objects=Path("/o"))
    assert (named.database_url, named.objects_folder) == ("postgresql://x/y", Path("/o"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("port = 'x'", "'port' is wrong"),
        ("prot = 1", "no setting 'prot'; did you mean port"),
        ("port =", "is not TOML"),
        (f"port = {'9' * 5000}", "is not TOML"),
        (f"port = {'[' * 5000}", "is not TOML"),
        ("public_url = 'ftp://x'", "'public_url' is wrong"),
    ],
)
def test_a_wrong_file_is_said_with_what_to_mend(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=complaint) as caught:
        load({}, file)
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no settings file"):
        load({}, tmp_path / "none.toml")


def test_a_database_password_is_not_taken_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "postgresql://me:secret@host/db"
    with pytest.raises(UserError, match="command line") as caught:
        load({"database": url})
    assert "secret" not in str(caught.value) + caught.value.hint
    monkeypatch.setenv("PRIME_ORCHESTRATOR_DATABASE", url)
    assert load({}).database_url == url


def test_a_password_in_the_url_s_query_is_refused_too() -> None:
    with pytest.raises(UserError, match="command line"):
        load({"database": "postgresql://localhost/prime?user=me&password=secret"})
