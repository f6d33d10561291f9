"""Every program on a chain takes the quorum and the pause between two looks."""

from __future__ import annotations

import importlib

import pytest

from prime_chain.link import ChainSettings
from prime_core.errors import UserError
from prime_core.settings import load_settings

PROGRAMS = {
    "PRIME_ORCHESTRATOR_": "prime_orchestrator.config",
    "PRIME_VALIDATOR_": "prime_validator.settings",
    "PRIME_TRAINER_": "prime_trainer.config",
    "PRIME_NODE_": "prime_node.config",
}


@pytest.mark.parametrize("prefix", PROGRAMS)
def test_a_program_opens_the_chain_with_its_quorum_and_pause(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: type[ChainSettings] = importlib.import_module(PROGRAMS[prefix]).Settings
    urls = ["http://127.0.0.1:9/a", "http://127.0.0.1:9/b", "http://127.0.0.1:9/c"]
    monkeypatch.setenv(f"{prefix}RPC", ",".join(urls))
    monkeypatch.setenv(f"{prefix}RPC_QUORUM", "3")
    monkeypatch.setenv(f"{prefix}CHAIN_POLL_SECONDS", "7.5")
    client = load_settings(kind, {}).open_chain(31337)
    assert (client.quorum, client.poll_seconds) == (3, 7.5)
    client.close()
    monkeypatch.setenv(f"{prefix}RPC_QUORUM", "4")
    with pytest.raises(UserError, match="quorum"):
        load_settings(kind, {}).open_chain(31337)
