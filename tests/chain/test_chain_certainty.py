"""How deep facts must lie: admit at latest, stake at safe, pay at finalized; on a real anvil."""

from __future__ import annotations

import pytest

from devnet.deployed import Deployed
from prime_chain import flows
from prime_chain.amounts import ETHER, ether, parse_amount, parse_price, prime
from prime_chain.networks import BASE, NETWORKS
from prime_core.errors import UserError
from prime_orchestrator.manager.depth import (
    block_for,
    counted_stake,
    tag_for,
)


def test_every_network_admits_at_latest_counts_stake_at_safe_and_pays_at_finalized() -> None:
    for network in NETWORKS:
        found = tuple(tag_for(network, purpose) for purpose in ("admit", "stake", "payout"))
        assert found == ("latest", "safe", "finalized")
    assert BASE.min_agreeing == 2


def test_the_local_chain_keeps_safe_one_block_and_finalized_two_blocks_behind(
    deployed: Deployed,
) -> None:
    deployed.anvil.mine(3)
    head = deployed.client.block_number()
    found = [block_for(deployed.client, one).number for one in ("admit", "stake", "payout")]
    assert found == [head, head - 1, head - 2]


def test_a_deposit_counts_as_stake_only_once_it_is_safe(deployed: Deployed) -> None:
    c, owner = deployed.contracts, deployed.accounts[3]
    deployed.send(owner, c.token.faucet())
    for step in flows.register_and_stake(c, owner.address, owner.address, 5 * ETHER):
        deployed.send(owner, step)
    assert c.vault.active(owner.address) == 5 * ETHER
    assert counted_stake(c, owner.address) == 0, "its block may still leave the chain"
    deployed.anvil.mine(1)
    assert counted_stake(c, owner.address) == 5 * ETHER


def test_amounts_are_read_and_written_exactly() -> None:
    assert parse_amount(" 12.5") == 125 * ETHER // 10
    assert parse_amount(".000000000000000001") == 1
    assert parse_amount("12.5 PRIME") == parse_price("12.5 PRIME") == 125 * ETHER // 10
    assert parse_price("400") == parse_price(" 400 wei") == 400
    assert parse_price("0") == 0
    assert prime(125 * ETHER // 10) == "12.5 PRIME"
    assert ether(21 * 10**14) == "0.0021 ETH"
    for text in ("", "x", "0", "-1", "1e3", "1,5", ".", "nan", "inf", "0.0000000000000000001", "٣",
                 "9" * 40, "7 wei", "1 ETH"):  # fmt: skip
        with pytest.raises(UserError, match="is not an amount"):
            parse_amount(text)
    for text in ("", "0.5", "-1", "1e3", "٣", "9" * 49, "1 ETH", "wei"):
        with pytest.raises(UserError, match="is not a price"):
            parse_price(text)
