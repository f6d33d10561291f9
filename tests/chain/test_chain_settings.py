"""Every program on a chain takes the quorum, the pause between two looks, and the deployment file
that ships for its chain."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from prime_chain import shipped
from prime_chain.link import ChainSettings, deployment_for
from prime_core.deployment import CONTRACT_NAMES, ContractAddresses, Deployment, Periods
from prime_core.errors import UntrustedError, UserError
from prime_core.ids import ZERO_DIGEST, address
from prime_core.messages import PoolInfo
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


def deployment(chain_id: int, first: int) -> Deployment:
    """Addresses that nothing is at."""
    named = {name: address(f"0x{first + i:040x}") for i, name in enumerate(CONTRACT_NAMES)}
    return Deployment(
        chain_id=chain_id, contracts=ContractAddresses(**named), block=0, periods=Periods()
    )


def pool_info(place: Deployment) -> PoolInfo:
    return PoolInfo(
        chain_id=place.chain_id, contracts=place.contracts, pool=1,
        manager=address("0x" + "1" * 40), trainer=address("0x" + "2" * 40), run_digest=ZERO_DIGEST,
        name="", orchestrator="", latest_version=None, stake_per_seat="0",
    )  # fmt: skip


def test_the_shipped_file_of_the_pools_chain_is_used_and_help_says_what_is_shipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    place, others = deployment(8453, 1), deployment(8453, 100)
    assert "(shipped: none)" in shipped.help_text()
    with pytest.raises(UserError, match=r"chain 8453 is shipped \(shipped: none\)") as caught:
        deployment_for(pool_info(place), ())
    assert "--deployment FILE" in caught.value.hint

    place.save(tmp_path / "8453.json")
    (tmp_path / "8453.input.json").write_text("{}")
    assert "(shipped: 8453)" in shipped.help_text()
    assert deployment_for(pool_info(place), ()) == place
    others.save(tmp_path / "named.json")
    assert deployment_for(pool_info(others), (), tmp_path / "named.json") == others
    with pytest.raises(UntrustedError, match="other contracts"):
        deployment_for(pool_info(others), ())


def test_what_ships_is_readable_and_belongs_to_a_public_chain() -> None:
    for file in shipped.FOLDER.glob("*.json"):
        assert file.stem == str(Deployment.load(file).chain_id) != "31337"
