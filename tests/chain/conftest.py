"""Fixtures of the sender's tests: its clock, a chain mined by hand, senders over one journal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sender_kit import FakeTime, Make

from devnet.deployed import Deployed
from prime_chain.client import ChainClient
from prime_chain.sender import FeePolicy, Sender, default_policy
from prime_core.clock import Clock
from prime_core.signing import LocalSigner


@pytest.fixture
def clock() -> FakeTime:
    return FakeTime()


@pytest.fixture
def by_hand(deployed: Deployed) -> Iterator[Deployed]:
    """A chain that mines only on request."""
    deployed.anvil.rpc("evm_setAutomine", False)
    yield deployed
    deployed.anvil.rpc("anvil_dropAllTransactions")
    deployed.anvil.rpc("evm_setAutomine", True)


@pytest.fixture
def make(deployed: Deployed, tmp_path: Path, clock: FakeTime) -> Iterator[Make]:
    """Makes senders of account 3 over one journal, as a restarted process would."""
    made: list[Sender] = []

    def build(
        client: ChainClient | None = None,
        policy: FeePolicy | None = None,
        signer: LocalSigner | None = None,
        journal: str = "journal.sqlite",
    ) -> Sender:
        client = client or deployed.client
        sender = Sender(
            client,
            signer or deployed.accounts[3],
            tmp_path / journal,
            policy=policy or replace(default_policy(client), stuck_seconds=10, resend_seconds=3),
            clock=Clock(now=clock, sleep=clock.sleep),
        )
        made.append(sender)
        return sender

    yield build
    for sender in made:
        sender.close()
