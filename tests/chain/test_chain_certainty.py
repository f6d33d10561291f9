"""How deep facts must lie: admit at latest, stake at safe, pay at finalized; on a real anvil."""

from __future__ import annotations

import pytest

from devnet.deployed import Deployed, pool_config
from prime_chain import flows
from prime_chain.amounts import ETHER, ether, parse_amount, prime
from prime_chain.certainty import block_for, counted_stake, final_reward_root, is_final, tag_for
from prime_chain.networks import BASE, NETWORKS
from prime_core.encoding import sha256
from prime_core.errors import UserError


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


def test_a_reward_root_pays_only_once_it_is_final(deployed: Deployed) -> None:
    c, manager = deployed.contracts, deployed.accounts[1]
    create = c.pools.create(pool_config(manager.address, sha256(b"run"), ETHER))
    pool = flows.created_pool(c, deployed.send(manager, create))
    periods = deployed.deployment.periods
    epoch = deployed.now() // periods.epoch_length
    deployed.anvil.forward(2 * periods.epoch_length + periods.validity)
    post = c.rewards.post_reward_root(pool, epoch, sha256(b"root"), 0, sha256(b"object"))
    posted = deployed.send(manager, post)
    assert c.rewards.reward_root(pool, epoch) is not None
    assert final_reward_root(c, pool, epoch) is None
    assert not is_final(deployed.client, posted.block)
    deployed.anvil.mine(2)
    assert is_final(deployed.client, posted.block)
    found = final_reward_root(c, pool, epoch)
    assert found is not None
    assert found.root == sha256(b"root")


def test_amounts_are_read_and_written_exactly() -> None:
    assert parse_amount(" 12.5") == 125 * ETHER // 10
    assert parse_amount(".000000000000000001") == 1
    assert prime(125 * ETHER // 10) == "12.5 PRIME"
    assert ether(21 * 10**14) == "0.0021 ETH"
    for text in ("", "x", "0", "-1", "1e3", "1,5", ".", "nan", "inf", "0.0000000000000000001"):
        with pytest.raises(UserError, match="is no amount"):
            parse_amount(text)
