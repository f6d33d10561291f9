"""What an operator mistypes at a first start: one sentence and the right exit code, for each
program; and who has run before waits for a chain that is away."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from operator_kit import Operator

from prime_orchestrator.cli.main import main

SILENT = "http://127.0.0.1:9"


@contextmanager
def signals_kept() -> Iterator[None]:
    """Puts back the handlers that a program sets for itself."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


@pytest.fixture
def typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """`orchestrator …` as an operator types it; exit code and the one line on stderr."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["orchestrator", *words])
        with signals_kept(), pytest.raises(SystemExit) as ended:
            main()
        said = [x for x in capsys.readouterr().err.splitlines() if x.startswith("orchestrator: ")]
        assert len(said) == 1, said
        assert isinstance(ended.value.code, int)
        return ended.value.code, said[0]

    return run


def validate(operator: Operator, url: str, **changes: str) -> list[str]:
    """The words after `orchestrator` that start a validator."""
    flags = {
        "orchestrator": url,
        "wallet": str(operator.folder / "manager.json"),
        "password-file": str(operator.folder / "password"),
        "rpc": SILENT,
        "data": str(operator.folder / "validator"),
        "first-answer-seconds": "0",
    } | changes
    return ["validate", *(word for name, value in flags.items() for word in (f"--{name}", value))]


@pytest.mark.slow
def test_a_validator_whose_rpc_never_answered_ends_and_says_what_to_check(
    operator: Operator,
) -> None:
    operator.serve()
    command = [
        sys.executable,
        "-m",
        "prime_orchestrator.cli.main",
        *validate(operator, operator.url),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 69
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("validator: ")]
    assert f"no RPC endpoint answers: {SILENT}" in said
    assert "check the address (--orchestrator, --rpc)" in said
    assert not (operator.folder / "validator" / "pool.json").exists(), "the next start is a first"


def test_a_silent_rpc_is_one_sentence_and_69(
    operator: Operator, typed: Callable[..., tuple[int, str]]
) -> None:
    place, pool = str(operator.deployed.path), str(operator.pool)
    keys = ("--wallet", str(operator.folder / "manager.json"), "--password-file")
    password = str(operator.folder / "password")
    chain = ("--deployment", place, "--rpc", SILENT)
    for words in (
        ("pool", "show", "--pool", pool, *chain),
        ("slash", "list", *chain),
        ("deployment", "check", *chain),
        ("pool", "fund", "--pool", pool, "--amount", "1", *chain, *keys, password),
        tuple(operator.arguments(rpc=SILENT)[3:]),
    ):
        code, said = typed(*words)
        assert code == 69, words
        assert f"no RPC endpoint answers: {SILENT}" in said, words


def test_a_wrong_password_is_one_sentence_and_64(
    operator: Operator, typed: Callable[..., tuple[int, str]]
) -> None:
    wrong = operator.folder / "wrong"
    wrong.write_text("another")
    place, keystore = str(operator.deployed.path), str(operator.folder / "manager.json")
    keys = ("--wallet", keystore, "--password-file", str(wrong), "--rpc", SILENT)
    chain = ("--deployment", place, *keys)
    for words in (
        ("pool", "fund", "--pool", "1", "--amount", "1", *chain),
        ("deployment", "deploy", "--network", "local", *keys),
        ("relay", "--orchestrator", SILENT, "--data", str(operator.folder / "r"), *keys[:4]),
    ):
        code, said = typed(*words)
        assert code == 64, words
        assert f"the password does not open {keystore}" in said, words
