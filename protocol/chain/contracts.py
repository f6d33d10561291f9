"""One typed wrapper a contract: reads answer in the project's words, writes are unsent Calls.

A read names the block it is made at ("latest" if not said). Amounts in wei of the token, times in
Unix seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from protocol.chain import codec
from protocol.chain.client import BlockId, Call, ChainClient
from protocol.chain.deployment import SOLIDITY_NAMES, Deployment, Periods
from protocol.core.checkpoint import PolicyStatement
from protocol.core.ids import ZERO_DIGEST, Address, Digest, Signature
from protocol.core.node import Invite, NodeConsent
from protocol.core.rollout import Submission
from protocol.core.signing import ContractName

ETHER = 10**18


def prime(amount: int) -> str:
    """An amount of wei as people write it: `12.5 PRIME`."""
    whole, part = divmod(amount, ETHER)
    fraction = f".{part:018d}".rstrip("0").rstrip(".")
    return f"{whole}{fraction} PRIME"


class Contract:
    """A deployed contract seen through its committed ABI."""

    NAME: ClassVar[ContractName]

    def __init__(self, client: ChainClient, deployment: Deployment) -> None:
        self.client = client
        self.deployment = deployment
        self.address: Address = deployment.address(self.NAME)
        self._artifact = codec.artifact(SOLIDITY_NAMES[self.NAME])

    def write(self, function: str, *values: Any, what: str) -> Call:
        """The unsent transaction `function(values)`; `what` says what it does."""
        data = codec.encode_call(self._artifact.function(function), values)
        return Call(self.address, data, 0, what)

    def read(self, function: str, *values: Any, block: BlockId = "latest") -> tuple[Any, ...]:
        """Decoded outputs of a view. Raises ChainRevertedError, UnavailableError."""
        item = self._artifact.function(function)
        what = f"reading {self._artifact.name}.{function}"
        call = Call(self.address, codec.encode_call(item, values), 0, what)
        return codec.decode(item.outputs, self.client.call(call, block=block))

    def _one(self, function: str, *values: Any, block: BlockId = "latest") -> Any:
        return self.read(function, *values, block=block)[0]


class Token(Contract):
    """PrimeToken: ERC-20 with permit and, on test networks, a faucet."""

    NAME = "token"

    def balance_of(self, account: Address, block: BlockId = "latest") -> int:
        return cast(int, self._one("balanceOf", account, block=block))

    def allowance(self, owner: Address, spender: Address, block: BlockId = "latest") -> int:
        return cast(int, self._one("allowance", owner, spender, block=block))

    def total_supply(self, block: BlockId = "latest") -> int:
        return cast(int, self._one("totalSupply", block=block))

    def faucet(self) -> Call:
        """Mints 10,000 PRIME to the sender; reverts off test networks."""
        return self.write("faucet", what="take 10000 PRIME from the test faucet")

    def approve(self, spender: Address, amount: int) -> Call:
        what = f"let {spender} take {prime(amount)}"
        return self.write("approve", spender, amount, what=what)

    def transfer(self, to: Address, amount: int) -> Call:
        return self.write("transfer", to, amount, what=f"send {prime(amount)} to {to}")


class Registry(Contract):
    """Providers and their nodes."""

    NAME = "registry"

    def provider_of(self, node: Address, block: BlockId = "latest") -> Address | None:
        """The node's owner, or None if it has none."""
        return _or_none(self._one("providerOf", node, block=block))

    def payout_of(self, provider: Address, block: BlockId = "latest") -> Address | None:
        return _or_none(self._one("payoutOf", provider, block=block))

    def is_provider(self, account: Address, block: BlockId = "latest") -> bool:
        return bool(self._one("isProvider", account, block=block))

    def revoked_before(self, node: Address, block: BlockId = "latest") -> int:
        """Sessions of `node` granted before this time do not count."""
        return cast(int, self._one("revokedBefore", node, block=block))

    def register_provider(self, payout: Address) -> Call:
        what = f"register the sender as a provider paid at {payout}"
        return self.write("registerProvider", payout, what=what)

    def set_payout(self, payout: Address) -> Call:
        return self.write("setPayout", payout, what=f"pay rewards to {payout} from now on")

    def add_node(self, consent: NodeConsent, node_signature: Signature) -> Call:
        what = f"add node {consent.node} to provider {consent.provider}"
        return self.write("addNode", consent, node_signature, what=what)

    def remove_node(self, node: Address) -> Call:
        return self.write("removeNode", node, what=f"remove node {node}")

    def set_revoked_before(self, node: Address, at: int) -> Call:
        what = f"end all sessions of {node} granted before {at}"
        return self.write("setRevokedBefore", node, at, what=what)


class Vault(Contract):
    """StakeVault: the only holder of stake."""

    NAME = "vault"

    def active(self, provider: Address, block: BlockId = "latest") -> int:
        """Stake that counts for membership."""
        return cast(int, self._one("active", provider, block=block))

    def unbonding(self, provider: Address, block: BlockId = "latest") -> int:
        """Stake on its way out, still slashable."""
        return cast(int, self._one("unbonding", provider, block=block))

    def slashable(self, provider: Address, block: BlockId = "latest") -> int:
        """Active and unbonding stake together."""
        return cast(int, self._one("slashable", provider, block=block))

    def pending_slash(self, provider: Address, block: BlockId = "latest") -> int:
        """Stake held by open slash proposals."""
        return cast(int, self._one("pendingSlash", provider, block=block))

    def deposit(self, amount: int) -> Call:
        """Needs an allowance for this contract."""
        return self.write("deposit", amount, what=f"deposit {prime(amount)} of stake")

    def deposit_with_permit(self, amount: int, deadline: int, v: int, r: Digest, s: Digest) -> Call:
        what = f"deposit {prime(amount)} of stake by permit"
        return self.write("depositWithPermit", amount, deadline, v, r, s, what=what)

    def unbond(self, amount: int) -> Call:
        return self.write("unbond", amount, what=f"start unbonding {prime(amount)}")

    def withdraw(self) -> Call:
        return self.write("withdraw", what="withdraw the stake whose unbonding has ended")


@dataclass(frozen=True)
class Pool:
    """One training run as the chain knows it. `members`: nodes in it now."""

    manager: Address
    trainer: Address
    run_digest: Digest
    stake_per_class: int
    capacity: int
    members: int
    ended: bool
    treasury: Address


class Pools(Contract):
    """Pools, their members, validators and published policies."""

    NAME = "pools"

    def pool_of(self, pool: int, block: BlockId = "latest") -> Pool:
        values = self.read("poolOf", pool, block=block)
        if len(values) == 1 and isinstance(values[0], tuple):  # returned as a struct
            values = values[0]
        return Pool(*values)

    def class_of(self, pool: int, node: Address, block: BlockId = "latest") -> int:
        """Speed class of a member; 0 for a node that is none."""
        return cast(int, self._one("classOf", pool, node, block=block))

    def is_validator(self, pool: int, account: Address, block: BlockId = "latest") -> bool:
        return bool(self._one("isValidator", pool, account, block=block))

    def policy_digest(self, pool: int, version: int, block: BlockId = "latest") -> Digest | None:
        """Digest of a published policy's manifest; None if it is not published."""
        found = cast(Digest, self._one("policyDigest", pool, version, block=block))
        return None if found == ZERO_DIGEST else found

    def create(
        self,
        trainer: Address,
        run_digest: Digest,
        stake_per_class: int,
        capacity: int,
        treasury: Address,
    ) -> Call:
        """The sender becomes the manager. The PoolCreated event carries the pool's number."""
        what = f"create a pool for run {run_digest}"
        return self.write(
            "create", trainer, run_digest, stake_per_class, capacity, treasury, what=what
        )

    def set_validator(self, pool: int, validator: Address, on: bool) -> Call:
        what = f"{'appoint' if on else 'dismiss'} validator {validator} in pool {pool}"
        return self.write("setValidator", pool, validator, on, what=what)

    def join(self, invite: Invite, manager_signature: Signature) -> Call:
        what = f"admit node {invite.node} to pool {invite.pool} in class {invite.speed_class}"
        return self.write("join", invite, manager_signature, what=what)

    def leave(self, pool: int, node: Address) -> Call:
        return self.write("leave", pool, node, what=f"take node {node} out of pool {pool}")

    def eject(self, pool: int, node: Address) -> Call:
        return self.write("eject", pool, node, what=f"eject node {node} from pool {pool}")

    def publish_policy(self, statement: PolicyStatement, trainer_signature: Signature) -> Call:
        what = f"publish policy {statement.version} of pool {statement.pool}"
        return self.write("publishPolicy", statement, trainer_signature, what=what)

    def end(self, pool: int) -> Call:
        return self.write("end", pool, what=f"end pool {pool}")


@dataclass(frozen=True)
class WorkRoot:
    """One posted root. `posted_at`: its block's time."""

    root: Digest
    posted_at: int
    count: int


class Work(Contract):
    """Merkle roots over submission digests, and rejections of single leaves."""

    NAME = "work"

    def root_of(self, pool: int, seq: int, block: BlockId = "latest") -> WorkRoot | None:
        """Root number `seq` of a pool; None if it is not posted."""
        values = self.read("rootOf", pool, seq, block=block)
        if len(values) == 1 and isinstance(values[0], tuple):
            values = values[0]
        found = WorkRoot(*values)
        return None if found.root == ZERO_DIGEST else found

    def is_rejected(self, pool: int, leaf: Digest, block: BlockId = "latest") -> bool:
        return bool(self._one("isRejected", pool, leaf, block=block))

    def leaf_in(
        self, pool: int, seq: int, leaf: Digest, proof: Sequence[Digest], block: BlockId = "latest"
    ) -> bool:
        return bool(self._one("leafIn", pool, seq, leaf, tuple(proof), block=block))

    def epoch_at(self, time: int, block: BlockId = "latest") -> int:
        return cast(int, self._one("epochAt", time, block=block))

    def periods(self, block: BlockId = "latest") -> Periods:
        values = self.read("periods", block=block)
        if len(values) == 1:
            values = values[0]
        return Periods(**dict(zip(Periods.FIELDS, values, strict=True)))

    def post_root(self, pool: int, root: Digest, count: int, leaves_object: Digest) -> Call:
        what = f"post a work root of {count} submissions in pool {pool}"
        return self.write("postRoot", pool, root, count, leaves_object, what=what)

    def reject(
        self, pool: int, seq: int, leaf: Digest, proof: Sequence[Digest], reason: int
    ) -> Call:
        what = f"reject submission {leaf} of pool {pool} (reason {reason})"
        return self.write("reject", pool, seq, leaf, tuple(proof), reason, what=what)


@dataclass(frozen=True)
class PoolFunds:
    """Money a pool holds for rewards: free, and reserved by posted roots."""

    free: int
    reserved: int


@dataclass(frozen=True)
class RewardRoot:
    """A posted reward root. Claims open at `claimable_at` unless it is disabled."""

    root: Digest
    claimable_at: int
    disabled: bool


class Rewards(Contract):
    """The pools' money and the cumulative reward roots it is claimed by."""

    NAME = "rewards"

    def funds(self, pool: int, block: BlockId = "latest") -> PoolFunds:
        return PoolFunds(*self.read("funds", pool, block=block))

    def claimed(self, pool: int, node: Address, block: BlockId = "latest") -> int:
        """What has been paid for a node so far."""
        return cast(int, self._one("claimed", pool, node, block=block))

    def reward_root(self, pool: int, epoch: int, block: BlockId = "latest") -> RewardRoot | None:
        found = RewardRoot(*self.read("rewardRoot", pool, epoch, block=block))
        return None if found.root == ZERO_DIGEST else found

    def fund(self, pool: int, amount: int) -> Call:
        """Needs an allowance for this contract."""
        return self.write("fund", pool, amount, what=f"fund pool {pool} with {prime(amount)}")

    def refund(self, pool: int) -> Call:
        return self.write("refund", pool, what=f"take back what ended pool {pool} does not owe")

    def post_reward_root(
        self, pool: int, epoch: int, root: Digest, cumulative_total: int, published: Digest
    ) -> Call:
        what = f"post the reward root of epoch {epoch} in pool {pool}"
        return self.write(
            "postRewardRoot", pool, epoch, root, cumulative_total, published, what=what
        )

    def disable(self, pool: int, epoch: int) -> Call:
        what = f"disable the reward root of epoch {epoch} in pool {pool}"
        return self.write("disable", pool, epoch, what=what)

    def claim(
        self, pool: int, epoch: int, node: Address, cumulative: int, proof: Sequence[Digest]
    ) -> Call:
        what = f"claim the rewards of node {node} in pool {pool}"
        return self.write("claim", pool, epoch, node, cumulative, tuple(proof), what=what)


class Slasher(Contract):
    """Slash proposals: proposed on evidence, executed after a window, or cancelled."""

    NAME = "slasher"

    def proposal(self, number: int, block: BlockId = "latest") -> dict[str, Any] | None:
        """A proposal's fields by name; None if there is none of that number."""
        item = self._artifact.function("proposal")
        values = self.read("proposal", number, block=block)
        outputs: Sequence[codec.Field] = item.outputs
        if len(outputs) == 1 and outputs[0]["type"] == "tuple":
            outputs, values = outputs[0]["components"], values[0]
        fields = {str(o["name"]): v for o, v in zip(outputs, values, strict=True)}
        return fields if any(v not in (0, False) for v in fields.values()) else None

    def propose(
        self,
        submission: Submission,
        node: Address,
        node_signature: Signature,
        root_seq: int,
        proof: Sequence[Digest],
        evidence: Digest,
        reason: int,
        amount: int,
    ) -> Call:
        what = f"propose to slash {prime(amount)} for a submission of node {node}"
        return self.write(
            "propose",
            submission,
            node,
            node_signature,
            root_seq,
            tuple(proof),
            evidence,
            reason,
            amount,
            what=what,
        )

    def execute(self, number: int) -> Call:
        return self.write("execute", number, what=f"execute slash proposal {number}")

    def cancel(self, number: int) -> Call:
        return self.write("cancel", number, what=f"cancel slash proposal {number}")


class Contracts:
    """All wrappers of one deployment."""

    def __init__(self, client: ChainClient, deployment: Deployment) -> None:
        self.client = client
        self.deployment = deployment
        self.token = Token(client, deployment)
        self.registry = Registry(client, deployment)
        self.vault = Vault(client, deployment)
        self.pools = Pools(client, deployment)
        self.work = Work(client, deployment)
        self.rewards = Rewards(client, deployment)
        self.slasher = Slasher(client, deployment)


def _or_none(account: Address) -> Address | None:
    return None if int(account, 16) == 0 else account
