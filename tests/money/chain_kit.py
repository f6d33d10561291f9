"""The pool of money_kit on a real local chain: contracts, stakes, members, the manager's ticks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

from money_kit import MANAGER, RUN, TOKEN, TRAINER, VALIDATOR, ManagerSide, key, open_manager

from devnet.chain import Anvil
from devnet.deployed import pool_config
from prime_chain.client import Call, ChainClient
from prime_chain.contracts import Contracts
from prime_chain.deployer import Options, deploy
from prime_chain.events import Event
from prime_chain.sender import Sender
from prime_chain.transaction_queue import TransactionQueue
from prime_chain.watcher import Watcher
from prime_core.deployment import DEMO_PERIODS, Deployment, Periods
from prime_core.ids import Address
from prime_core.node import Invite, NodeConsent
from prime_core.run import RunDefinition
from prime_core.signing import LocalSigner
from prime_orchestrator.manager.indexer import run_indexer_tick
from prime_orchestrator.manager.loops import ManagerLoops
from prime_orchestrator.store.chain import STATE_EVENTS
from prime_orchestrator.store.intents import StoreQueue, queue_intent

DEPLOYER, ARBITER, TREASURY = key(20), key(21), key(22)
FUNDS = 1000 * TOKEN
STAKE = 200 * TOKEN


@dataclass
class World:
    """One chain, one pool, one orchestrator's money side."""

    anvil: Anvil
    client: ChainClient
    deployment: Deployment
    contracts: Contracts
    folder: Path
    mgr: ManagerSide
    loops: ManagerLoops
    senders: dict[Address, Sender] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def sender(self, signer: LocalSigner) -> Sender:
        """The sender of an account, which gets ether at first use."""
        if signer.address not in self.senders:
            self.anvil.fund(signer.address)
            queue: Path | TransactionQueue = self.folder / "senders" / f"{signer.address}.sqlite"
            if signer.address == MANAGER.address:
                queue = StoreQueue(self.mgr.store, MANAGER.address, self.client.chain_id)
            self.senders[signer.address] = Sender(self.client, signer, queue)
        return self.senders[signer.address]

    def send(self, signer: LocalSigner, call: Call) -> None:
        """Sends at once and waits."""
        self.sender(signer).send_and_wait(f"test/{next(self._ids)}", call, 30)

    def forward(self, seconds: int) -> None:
        """Moves the chain's clock and ours."""
        self.anvil.forward(seconds)
        self.mgr.now.time += seconds

    def ticks(self, times: int = 3) -> list[Event]:
        """Lets the manager and the validator work: money, outboxes, indexer."""
        seen: list[Event] = []
        for _ in range(times):
            self.loops.batch_tick()
            self.loops.money_tick()
            seen += self.loops.chain_tick()
            self.anvil.mine(2)  # what this tick did is final for the next
            seen += run_indexer_tick(
                self.mgr.store, self.mgr.context, self.loops.watcher, self.mgr.now
            )
        return seen

    def start_of_an_epoch(self) -> None:
        """So that what follows within half a minute falls into one."""
        self.forward(RUN.epoch_seconds - self.client.block("latest").time % RUN.epoch_seconds)

    def until_rooted(self) -> None:
        """Lets waiting submissions come of age and their root be confirmed."""
        self.forward(RUN.root_seconds)
        self.ticks()

    def until_settled(self, ticks: int = 3) -> None:
        """Lets them be rooted, and the epoch that they then are settled in end."""
        self.until_rooted()
        self.forward(RUN.validity_seconds + RUN.epoch_seconds)
        self.ticks(ticks)

    def join(self, node: LocalSigner, provider: LocalSigner) -> None:
        """Stake, registration, consent, invite and membership of one node; in store and chain."""
        c = self.contracts
        self.send(provider, c.token.faucet())
        self.send(provider, c.token.approve(c.vault.address, STAKE))
        self.send(provider, c.registry.register_provider(provider.address))
        self.send(provider, c.vault.deposit(STAKE))
        chain_time = self.client.block("latest").time
        consent = NodeConsent(
            provider=provider.address,
            node=node.address,
            salt="0x" + "01" * 32,  # type: ignore[arg-type]
            deadline=chain_time + 600,
        )
        signature = node.sign(consent, self.deployment.domain_of(consent))
        self.send(provider, c.registry.add_node(consent, signature))
        self.send(provider, c.pools.allow(self.mgr.context.pool, True))
        self.mgr.admit(node, "admitted")
        invite = Invite(
            pool=self.mgr.context.pool,
            node=node.address,
            deadline=chain_time + 600,
        )
        with self.mgr.store.begin() as connection:
            queue_intent(
                connection,
                kind="join",
                key=f"{node.address}:{invite.deadline}",
                payload={
                    "invite": invite.model_dump(mode="json"),
                    "signature": MANAGER.sign(invite, self.deployment.domain_of(invite)),
                },
                now=self.mgr.now(),
            )

    def close(self) -> None:
        for sender in self.senders.values():
            sender.close()
        self.mgr.store.close()
        self.client.close()
        self.anvil.stop()


_deployed: dict[Periods, tuple[bytes, Deployment]] = {}
"""Chains of this process just after the deployment, by the contracts' periods."""


def _deployed_chain(folder: Path, periods: Periods) -> tuple[Anvil, Deployment]:
    """A chain with our contracts. They are deployed once; later chains load that state."""
    state = folder / "chain.json"
    if periods not in _deployed:
        with Anvil(state=state) as anvil:
            client = ChainClient([anvil.url], 31337)
            anvil.fund(DEPLOYER.address)
            options = Options(
                periods=periods,
                testnet=True,
                holder=DEPLOYER.address,
                supply=10 * FUNDS,
                arbiter=ARBITER.address,
                treasury=TREASURY.address,
            )
            deployment = deploy(client, DEPLOYER, options, journal=folder / "deploy.sqlite")
            client.close()
        _deployed[periods] = state.read_bytes(), deployment
    saved, deployment = _deployed[periods]
    state.write_bytes(saved)
    return Anvil(state=state).start(), deployment


def make_world(folder: Path, run: RunDefinition = RUN, periods: Periods = DEMO_PERIODS) -> World:
    """Creates and funds a pool, appoints the validator, and builds the ticks."""
    anvil, deployment = _deployed_chain(folder, periods)
    client = ChainClient([anvil.url], 31337)
    contracts = Contracts(client, deployment)
    mgr = open_manager(folder, deployment, run=run)
    world = World(
        anvil,
        client,
        deployment,
        contracts,
        folder,
        mgr,
        loops=None,  # type: ignore[arg-type]
    )
    world.loops = ManagerLoops(
        store=mgr.store,
        objects=mgr.objects,
        context=mgr.context,
        contracts=contracts,
        watcher=Watcher(client, deployment, pool=mgr.context.pool, of_all=STATE_EVENTS),
        sender=world.sender(MANAGER),
        signer=MANAGER,
        now=mgr.now,
        board=mgr.board,
    )
    create = contracts.pools.create(
        pool_config(
            TRAINER.address, run.digest(), run.stake_per_seat, slash=run.slash_amount,
            capacity=100, lease_seconds=run.lease_seconds,
        )
    )  # fmt: skip
    world.send(MANAGER, create)
    assert contracts.pools.pool_of(mgr.context.pool).manager == MANAGER.address
    world.send(MANAGER, contracts.pools.set_validator(1, VALIDATOR.address, True))
    world.send(DEPLOYER, contracts.token.approve(contracts.rewards.address, FUNDS))
    world.send(DEPLOYER, contracts.rewards.fund(1, FUNDS))
    mgr.now.time = float(client.block("latest").time)
    return world
