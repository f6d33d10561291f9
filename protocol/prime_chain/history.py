"""What happened on chain, read from its events: for audits, lists and reports.

    read_events (bounded eth_getLogs) ──> slashes (pure fold over events)

One reading from a deployment's first block; who follows the chain uses the watcher instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from prime_chain import codec
from prime_chain.amounts import prime
from prime_chain.client import Call, ChainClient, Log
from prime_chain.contracts.court import Vote
from prime_chain.contracts.vault import Vault
from prime_chain.errors import RpcError
from prime_chain.events import (
    CaseHandedOver,
    CaseOpened,
    CaseSettled,
    Event,
    FileAppealed,
    FileRestored,
    JurorsDrawn,
    SlashCancelled,
    SlashDisputed,
    SlashExecuted,
    SlashObjected,
    SlashProposed,
    ValidatorSet,
    VoteRevealed,
    decode,
    of_receipt,
)
from prime_chain.watcher import Query, named_queries, next_span, pool_queries
from prime_core.deployment import SOLIDITY_NAMES, Deployment, Periods
from prime_core.errors import UnavailableError, UserError
from prime_core.ids import Address, Digest, to_bytes
from prime_core.signing import ContractName
from prime_core.verdict import Reason, reason_of

SlashStatus = Literal["proposed", "disputed", "executed", "cancelled"]
SPAN = 5000
"""Blocks of one eth_getLogs."""
STAKE_MOVES = frozenset({"Deposited", "UnbondStarted", "Rebonded", "Withdrawn"})
"""Events of transactions by which an account moves its own stake."""
CourtStatus = Literal["", "opened", "drawn", "left to the arbiter", "settled"]


@dataclass(frozen=True)
class Slash:
    """One proposal from its events, named by `leaf`, the submission's digest. `amount` in wei:
    held, and taken once executed. `reason` is Reason.NONE if it is none that is known.

    `ended_tx` is the transaction that executed or cancelled it, None while it is open.
    """

    leaf: Digest
    pool: int
    node: Address
    provider: Address
    evidence: Digest
    reason: Reason
    amount: int
    executable_at: int
    status: SlashStatus
    proposed_at: int
    proposed_tx: Digest
    ended_tx: Digest | None = None
    held: int = 0
    """Wei that the proposal held when it was made."""
    ended_at: int | None = None
    note: str = ""
    """Why nothing was taken or is held; empty if something is."""
    court: CourtStatus = ""
    """Where its case in the court stands; empty if the arbiter judges or there is no dispute."""
    jurors: tuple[tuple[Address, str], ...] = ()
    """The drawn jurors, each with the vote that it revealed (empty before)."""
    authors: tuple[Address, ...] = ()
    """The validators whose opinions, which name the evidence, the proposal carries."""

    def court_line(self) -> str:
        """What the court did, in one line; empty if it was not asked."""
        votes = ", ".join(f"{juror} {vote or 'no vote yet'}" for juror, vote in self.jurors)
        return f"court: {self.court}" + (f" ({votes})" if votes else "") if self.court else ""

    def as_json(self) -> dict[str, Any]:
        """Returns the fields, amounts as decimal text (they exceed what JSON numbers hold)."""
        return asdict(self) | {"amount": str(self.amount), "held": str(self.held)}


def read_events(
    client: ChainClient,
    deployment: Deployment,
    *,
    contracts: Sequence[ContractName] = (
        "registry", "vault", "pools", "work", "rewards", "slasher",
    ),
    first: int | None = None,
    last: int | None = None,
    span: int = SPAN,
    pool: int | None = None,
    names: Collection[str] = (),
) -> list[Event]:  # fmt: skip
    """Events of `contracts` in blocks first … last (deployment … newest by default), in order.

    With `pool`, only events that have this pool indexed are read. With `names`, events of these
    names are read for all pools and accounts, in addition to those of `pool` if it is given. Reads
    `span` blocks at a time, fewer if the endpoint refuses. Raises UnavailableError if no endpoint
    answers.
    """
    number = deployment.block if first is None else first
    end = client.block_number() if last is None else last
    addresses = [deployment.address(name) for name in contracts]
    queries = named_queries(deployment, names)
    if pool is not None:
        queries += pool_queries(deployment, pool, contracts)
    elif not names:
        queries = [Query(addresses)]
    times = dict[int, int]()
    found: list[Event] = []
    for log in _logs(client, queries, number, end, span):
        if log.block not in times:
            times[log.block] = client.agreed_block(log.block).time
        event = decode(log, times[log.block], deployment)
        if event is not None:
            found.append(event)
    return found


def _logs(
    client: ChainClient, queries: Sequence[Query], number: int, end: int, span: int
) -> Iterator[Log]:
    """Yields the logs of all `queries` in blocks number … end, in order."""
    largest = span
    while number <= end:
        until = min(end, number + span - 1)
        try:
            logs = [
                log
                for query in queries
                for log in client.agreed_logs(number, until, query.addresses, query.topics)
            ]
        except RpcError:
            if until == number:
                raise
            span = next_span(until - number + 1, False, largest)
            continue
        span, number = next_span(span, True, largest), until + 1
        yield from sorted(logs, key=lambda log: (log.block, log.log_index))


def stake_transactions(
    client: ChainClient, pools: Address, accounts: Collection[Address], since: float
) -> list[Digest]:
    """Returns the transactions since a time (Unix seconds) that deposited, unbonded, bonded again
    or withdrew stake of one of `accounts`. `pools`: the address of the contract Pools, which names
    the vault. Raises UnavailableError if no endpoint answers."""
    if not accounts:
        return []
    item = codec.artifact(SOLIDITY_NAMES["pools"]).function("vault")
    call = Call(pools, codec.encode_call(item, ()), 0, "reading Pools.vault")
    (vault,) = client.agreed_read(call, lambda data: codec.decode(item.outputs, data))
    kinds = codec.artifact(SOLIDITY_NAMES["vault"]).events.values()
    selectors = [kind.selector for kind in kinds if kind.name in STAKE_MOVES]
    owners = [bytes(12) + to_bytes(account) for account in sorted(accounts)]
    end = client.block_number()
    first = bisect_left(range(end + 1), since, key=lambda number: client.block(number).time)
    found = _logs(client, [Query([vault], (selectors, owners))], first, end, SPAN)
    return list(dict.fromkeys(log.tx_hash for log in found))


def slashes(events: Iterable[Event]) -> list[Slash]:
    """Every proposal among `events`, oldest first, with what became of it."""
    found: dict[Digest, Slash] = {}
    for event in events:
        match event:
            case SlashProposed():
                found[event.leaf] = Slash(
                    leaf=event.leaf,
                    pool=event.pool,
                    node=event.node,
                    provider=event.provider,
                    evidence=event.evidence,
                    reason=reason_of(event.reason) or Reason.NONE,
                    amount=event.amount,
                    executable_at=event.executable_at,
                    status="proposed",
                    proposed_at=event.block_time,
                    proposed_tx=event.tx_hash,
                    held=event.amount,
                    authors=event.authors,
                )
            case SlashDisputed() | SlashObjected() if event.leaf in found:
                found[event.leaf] = replace(found[event.leaf], status="disputed")
            case SlashExecuted() if event.leaf in found:
                found[event.leaf] = replace(
                    found[event.leaf],
                    status="executed",
                    amount=event.amount,
                    ended_tx=event.tx_hash,
                    ended_at=event.block_time,
                )
            case SlashCancelled() if event.leaf in found:
                found[event.leaf] = replace(
                    found[event.leaf],
                    status="cancelled",
                    ended_tx=event.tx_hash,
                    ended_at=event.block_time,
                )
            case CaseOpened() if event.leaf in found:
                found[event.leaf] = replace(found[event.leaf], court="opened")
            case JurorsDrawn() if event.leaf in found:
                jurors = tuple((juror, "") for juror in event.jurors)
                found[event.leaf] = replace(found[event.leaf], court="drawn", jurors=jurors)
            case VoteRevealed() if event.leaf in found:
                votes = dict(found[event.leaf].jurors)
                votes[event.juror] = Vote(event.vote).name.lower()
                found[event.leaf] = replace(found[event.leaf], jurors=tuple(votes.items()))
            case CaseHandedOver() if event.leaf in found:
                found[event.leaf] = replace(found[event.leaf], court="left to the arbiter")
            case CaseSettled() if event.leaf in found:
                found[event.leaf] = replace(found[event.leaf], court="settled")
    return list(found.values())


def read_slashes(client: ChainClient, deployment: Deployment) -> list[Slash]:
    """Returns every slash proposal of the deployment, oldest first."""
    found = slashes(read_events(client, deployment, contracts=("slasher", "court")))
    if all(slash.amount for slash in found):
        return found
    cap = Vault(client, deployment).slash_cap()
    return [replace(one, note=why_nothing(one, found, cap, deployment.periods)) for one in found]


@dataclass(frozen=True)
class AppealedFile:
    """A provider's appeal for an unpaid file. `judge_by` in Unix seconds; `amount` in wei, 0 unless
    the arbiter restored the file."""

    leaf: Digest
    pool: int
    node: Address
    judge_by: int
    tx: Digest
    amount: int = 0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "amount": str(self.amount), "restored": self.amount > 0}


def read_appeals(client: ChainClient, deployment: Deployment) -> list[AppealedFile]:
    """Returns every appeal of the deployment, oldest first."""
    found: dict[Digest, AppealedFile] = {}
    for event in read_events(client, deployment, contracts=("rewards",)):
        if isinstance(event, FileAppealed):
            found[event.leaf] = AppealedFile(
                event.leaf, event.pool, event.node, event.judge_by, event.tx_hash
            )
        elif isinstance(event, FileRestored) and event.leaf in found:
            found[event.leaf] = replace(found[event.leaf], amount=event.amount)
    return list(found.values())


def why_nothing(slash: Slash, every: Iterable[Slash], cap: int, periods: Periods) -> str:
    """Returns one sentence on why `slash` took or holds nothing; empty if it took or holds stake,
    or was cancelled.

    Args: `every` is all slashes of the deployment, `cap` the most (wei) that slashes take of one
    account within a validity window (StakeVault.slashCap).
    """
    if slash.amount > 0 or slash.status == "cancelled":
        return ""
    if slash.ended_at is None:
        return "holds nothing: no stake of the provider is free; takes what is free at execution"
    window = slash.ended_at // periods.validity
    lost = sum(
        other.amount
        for other in every
        if other.provider == slash.provider
        and other.status == "executed"
        and other.ended_at is not None
        and other.ended_at // periods.validity == window
        and other.ended_at <= slash.ended_at
    )
    if slash.held > 0 or lost >= cap:
        return (
            f"took nothing: the provider had already lost {prime(cap)}, the most that slashes take "
            f"of one account within {periods.validity} s"
        )
    return (
        "took nothing: no stake of the provider was free (withdrawn, taken by earlier slashes, "
        "held by others, or answering to another manager)"
    )


def validators(client: ChainClient, deployment: Deployment, pool: int) -> list[Address]:
    """Accounts whose verdicts count in the pool now, in the order of their appointment."""
    found: dict[Address, bool] = {}
    for event in read_events(client, deployment, contracts=("pools",), pool=pool):
        if isinstance(event, ValidatorSet):
            found[event.validator] = event.on
    return [account for account, on in found.items() if on]


def transaction_events(client: ChainClient, deployment: Deployment, tx_hash: Digest) -> list[Event]:
    """Our events that a transaction emitted. Raises UserError if it is not mined or failed."""
    receipt = client.agreed_receipt(tx_hash)
    if receipt is None:
        raise UserError(
            f"the chain has no mined transaction {tx_hash}",
            hint="check the hash and that --rpc serves the chain of the deployment",
        )
    if not receipt.success:
        raise UserError(f"the transaction {tx_hash} failed: it changed nothing")
    return of_receipt(receipt, client.agreed_block(receipt.block).time, deployment)


def slash_of(client: ChainClient, deployment: Deployment, tx_hash: Digest) -> Slash:
    """The slash that a transaction proposed, executed or cancelled, as it stands now.

    Raises UserError if the transaction is about none.
    """
    for event in transaction_events(client, deployment, tx_hash):
        if isinstance(event, SlashProposed | SlashExecuted | SlashCancelled):
            for slash in read_slashes(client, deployment):
                if slash.leaf == event.leaf:
                    return slash
            raise UnavailableError("the endpoint does not show the slash's events yet: try again")
    raise UserError(
        f"the transaction {tx_hash} is about no slash",
        hint="list them with: prime-node audit list",
    )
