"""The contracts refuse a shadow file, no matter who signed it and who roots it."""

from __future__ import annotations

import pytest
from anvil_kit import needs_anvil
from chain_kit import World
from money_kit import MANAGER, RUN, VALIDATOR
from walk_kit import HONEST, OWNER, post_own_leaf

from devnet.deployed import opinions_on
from prime_chain.errors import ChainRevertedError
from prime_core.encoding import sha256
from prime_core.verdict import Reason

pytestmark = needs_anvil


def test_a_shadow_file_has_no_way_onto_the_chain(members: World) -> None:
    """Its node has a seat and all signatures; the manager even roots it, and a validator tries."""
    world, mgr = members, members.mgr
    row = mgr.submit(HONEST, shadow=True)
    mgr.judge(row, Reason.WRONG_SAMPLING)
    world.ticks()
    world.forward(RUN.epoch_seconds + 1)
    with pytest.raises(ChainRevertedError):
        post_own_leaf(world, row)

    pool = mgr.context.pool
    world.send(MANAGER, world.contracts.work.post_root(pool, row.digest, 1, sha256(b"a list")))
    seq = 1
    root = world.contracts.work.root_of(pool, seq)
    assert root is not None
    assert root.root == row.digest
    claim = row.signed()
    said = opinions_on(world.deployment, claim.submission, [VALIDATOR])
    slash = world.contracts.slasher.propose(claim.submission, claim.signature, seq, [], said)
    with pytest.raises(ChainRevertedError):
        world.send(VALIDATOR, slash)
    assert world.contracts.vault.pending_slash(OWNER.address) == 0
