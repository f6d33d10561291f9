"""Turns credits into cumulative reward roots, once an epoch's leaves can no longer be refused.

`prime_core.settlement` decides what each node is owed. This module reads the facts from the store,
publishes the settlement object and queues the reward root. Only one reward root is in progress at a
time: the next waits until the chain has confirmed the last, and includes all credits gathered
since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from sys import intern
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from prime_core.encoding import sha256
from prime_core.errors import MalformedError, NotFoundError, UnavailableError, UntrustedError
from prime_core.fees import MAX_FAULTS, Fault
from prime_core.ids import ZERO_DIGEST, Address, Digest, Signature
from prime_core.messages import ReceiptAnswer
from prime_core.settlement import (
    LeafFact,
    OwnVerdict,
    RestoredFact,
    SettledFile,
    Settlement,
    SlashFact,
    SlashState,
    answered_for,
    judged_fact,
    load_settlement,
    own_root,
    settle,
    standing,
)
from prime_core.storage.base import ObjectStore, put_object
from prime_core.storage.directory import DirectoryStore
from prime_core.verdict import Outcome
from prime_orchestrator.context import PoolContext, read_object
from prime_orchestrator.manager import revisions
from prime_orchestrator.store import (
    Connection,
    chain,
    opinions,
    rewards,
    roots,
    slashes,
    submissions,
)
from prime_orchestrator.store import intents as store_intents
from prime_orchestrator.store import meta as store_meta
from prime_orchestrator.store.engine import Store, lock
from prime_orchestrator.store.intents import queue_intent, requeue_failed
from prime_orchestrator.store.rewards import RewardRootRow

log = logging.getLogger(__name__)

CHAIN_LOCK = "chain"
"""Lock held by the indexer while it writes."""
CHAIN_BLOCK = "chain_block"
"""Key in `meta`: number of the newest block the indexer has processed."""
CHAIN_TIME = "chain_time"
"""Key in `meta`: that block's time in Unix seconds."""
_BATCH = 256
_READERS = 8
"""Objects read at once."""
_LOOKED = "settlement_looked_to"
"""Key in `meta`: the epochs that were checked and had nothing to post, as JSON of `_Looked`."""


class _Looked(BaseModel):
    """There was nothing to post after root `after`, up to `epoch`. `waits`: a credit there is
    held."""

    model_config = ConfigDict(extra="forbid", strict=True)

    after: int = -1
    epoch: int = -1
    waits: bool = False


@dataclass(frozen=True)
class ChainClock:
    """The newest block the indexer has processed, and the time in Unix seconds that closes windows:
    that block's time, or an earlier one around an L2 outage."""

    block: int
    time: int


def chain_clock(connection: Connection) -> ChainClock | None:
    """Returns the indexer's position, or None before its first block."""
    block, time = store_meta.get(connection, CHAIN_BLOCK), store_meta.get(connection, CHAIN_TIME)
    return None if block is None or time is None else ChainClock(int(block), int(time))


def due_epoch(chain_time: int, *, epoch_seconds: int, validity_seconds: int) -> int:
    """Returns the newest epoch whose leaves are all past their validity at `chain_time`, or −1.

    Rewards.postRewardRoot(epoch) reverts before (epoch + 1) · epoch_seconds + validity_seconds.
    """
    return (chain_time - validity_seconds) // epoch_seconds - 1


@dataclass(frozen=True)
class _Turn:
    """What to settle next: `epoch`, with the leaves of all epochs after `after`."""

    epoch: int
    after: int
    previous: Digest | None
    new_leaves: bool


def settle_epochs(
    store: Store,
    objects: ObjectStore,
    context: PoolContext,
    now: Callable[[], float],
) -> Settlement | None:
    """Posts the next reward root if one is due, and returns its settlement.

    Due is the oldest unsettled epoch with work on chain, once its leaves are past their validity.
    Without new work, it is an epoch in which a held credit was decided. The settlement object is
    written first; then one transaction writes the row and queues the intent. A reward root that
    failed (for example, for lack of funds) is queued again. Raises UnavailableError while a
    settlement that it builds on cannot be read.
    """
    with store.begin() as connection:
        turn = _next_turn(connection, context, now())
    if turn is None:
        return None
    previous = None
    if turn.previous is not None:
        previous = load(objects, turn.previous)
    held = [f for f in previous.files if f.state == "held"] if previous else []
    settlement = None
    if turn.new_leaves or held or _was_restored(store, context, previous):
        settlement = _settle(store, objects, context, turn, previous, held)
    if settlement is None or not settlement.entries:
        # Nothing is owed or nothing was decided; a later epoch takes these leaves up.
        waits = settlement is not None and any(f.state == "held" for f in settlement.files)
        looked = _Looked(after=turn.after, epoch=turn.epoch, waits=waits)
        with store.begin() as connection:
            store_meta.put(connection, _LOOKED, looked.model_dump_json())
        return None
    return settlement if _queue(store, objects, settlement, now()) else None


def _next_turn(connection: Connection, context: PoolContext, now: float) -> _Turn | None:
    run, clock = context.run, chain_clock(connection)
    last = rewards.newest_root(connection)
    if last is not None and last.claimable_at is None:
        promised = rewards.newest_root(connection, confirmed=True)
        if promised and int(last.cumulative_total) < int(promised.cumulative_total):
            # Others posted a table meanwhile that promises more: this root can never follow it.
            rewards.drop_root(connection, last.epoch)
            return None
        intent = f"reward_root:{last.epoch}:{last.object}"
        if _is_stale(connection, intent, promised.object if promised else ZERO_DIGEST):
            rewards.drop_root(connection, last.epoch)
            return None
        requeue_failed(connection, intent, now, not_before=now - run.epoch_seconds)
        return None
    if clock is None:
        return None
    due = due_epoch(
        clock.time, epoch_seconds=run.epoch_seconds, validity_seconds=run.validity_seconds
    )
    after = -1 if last is None else int(last.epoch)
    looked = _Looked.model_validate_json(store_meta.get(connection, _LOOKED) or "{}")
    if looked.after != after:  # new root, or the last one was disabled: start over
        looked = _Looked(after=after, epoch=after)
    if due <= looked.epoch:
        return None
    if submissions.any_undecided(connection, clock.time - run.validity_seconds):
        return None  # the judge decides it first, or `void_unjudged` ends it
    with_work = roots.first_epoch(connection, looked.epoch, due)
    return _Turn(
        epoch=due if with_work is None else int(with_work),
        after=after,
        previous=None if last is None else Digest(last.object),
        new_leaves=with_work is not None or looked.waits,
    )


def _is_stale(connection: Connection, intent: str, newest: Digest) -> bool:
    """Whether the reward root of an intent follows another settlement than `newest`, the one of the
    newest root on chain: that root was disabled, or a table came between. Then it is not sent any
    more. False if the sender has it already."""
    row = store_intents.get(connection, intent)
    if row is None or row.arguments().get("previous", newest) == newest:
        return False  # before it was noted, intents did not say what they follow
    return row.status == "failed" or store_intents.forget_waiting(connection, [intent]) > 0


def load(objects: ObjectStore, name: Digest) -> Settlement:
    """Returns the settlement `name` with all its files. Raises UnavailableError if an object of it
    is missing or is not a settlement, as one of a table that others posted may be."""
    try:
        return load_settlement(name, partial(read_object, objects))
    except NotFoundError as error:
        raise UnavailableError(
            f"settlement {name}, which is on chain, is not complete in the object store ({error}): "
            "get a copy from those who posted it, or from a mirror, and put it there: "
            "orchestrator rewards import FILE"
        ) from error
    except MalformedError as error:
        raise UnavailableError(
            f"no settlement can follow {name}: {error}; the arbiter must disable its reward root"
        ) from error


def import_settlement(
    store: Store, objects: ObjectStore, name: Digest, get: Callable[[Digest], bytes]
) -> RewardRootRow:
    """Puts the settlement `name` and its pages into the object store, and returns the reward root
    on chain that names it. `get` returns an object's bytes, at most MAX_OBJECT_BYTES.

    Raises NotFoundError if no reward root on chain names it, UntrustedError if an object's bytes
    are not those of its digest, MalformedError if it is no settlement. Then nothing is written.
    """
    with store.read() as connection:
        row = rewards.confirmed_root(connection, name)
    if row is None:
        raise NotFoundError(
            f"{name} is not the settlement of any reward root that serve has read from the chain"
        )
    found: list[bytes] = []

    def checked(digest: Digest) -> bytes:
        found.append(get(digest))
        if sha256(found[-1]) != digest:
            raise UntrustedError(f"the bytes given for object {digest} do not hash to it")
        return found[-1]

    load_settlement(name, checked)
    for data in reversed(found):  # the head last: what is there is complete
        put_object(objects, data)
    return row


def _settle(
    store: Store,
    objects: ObjectStore,
    context: PoolContext,
    turn: _Turn,
    previous: Settlement | None,
    held: Sequence[SettledFile],
) -> Settlement | None:
    """Returns the settlement of a turn, or None if there is no new leaf, no held file was decided
    and no file was restored."""
    names = [file.submission_digest for file in held]
    with store.begin() as connection:
        lock(connection, CHAIN_LOCK)  # reads facts and block number at one instant
        clock = chain_clock(connection)
        assert clock is not None
        unknown = roots.unknown(connection)
        for seq, epoch in unknown:
            if turn.after < epoch <= turn.epoch:
                raise UnavailableError(
                    f"work root {seq} of epoch {epoch} is on chain and not in this store, as after "
                    "the restore of an older backup: the pool's validators can post a table for "
                    "this epoch (docs/runbooks/restore.md)"
                )
        rooted = _leaves(connection, turn, held, context)
        posted_before = _posted_before(connection, rooted)
        if unknown:  # files of theirs may have been settled, and rooted again since
            posted_before = {one.digest for one in rooted}
        slash_facts = _slash_facts(connection)
        lies, faults = _planted(connection, context, turn)
        granted = _restored(connection, context)
    earlier_files = _settled_before(objects, turn.previous, posted_before - set(names))
    final = {name for name, file in earlier_files.items() if file.state != "held"}
    leaves = [one for one in rooted if one.digest not in final]
    settled_now = {leaf.digest for leaf in leaves}
    earlier = [f for f in granted if f.leaf not in settled_now and not f.is_known_to(previous)]
    granted = [fact for fact in granted if fact.leaf in settled_now]
    settlement = settle(
        chain_id=context.deployment.chain_id,
        pool=context.pool,
        epoch=turn.epoch,
        as_of_block=clock.block,
        previous=previous,
        previous_name=turn.previous or ZERO_DIGEST,
        leaves=_judged(objects, leaves),
        slashes=slash_facts,
        lies=lies,
        faults=faults,
        restored=[*granted, *_as_settled(objects, turn.previous, earlier)],
    )
    still = [file.submission_digest for file in settlement.files if file.state == "held"]
    was_held = {one.submission_digest for one in previous.restored} if previous else set()
    decided = len(leaves) > len(names) or set(still) != set(names)
    decided |= any(
        one.state != "held" or one.submission_digest not in was_held for one in settlement.restored
    )
    return settlement if decided else None


def _planted(
    connection: Connection, context: PoolContext, turn: _Turn
) -> tuple[dict[Address, int], list[Fault]]:
    """Returns how many planted lies each validator judged in the epochs of a turn, and the wrong
    opinions on them and on honest planted files. What comes after MAX_FAULTS wrong opinions, in the
    order of the files' digests, counts neither for nor against any validator."""
    length, history = context.run.epoch_seconds, revisions.history(connection, context)
    lies: dict[Address, int] = {}
    faults: list[Fault] = []
    since, until = (turn.after + 1) * length, (turn.epoch + 1) * length
    for one in opinions.on_planted(connection, since, until):
        if len(faults) == MAX_FAULTS:
            break
        said, honest = one.opinion, one.kind == opinions.HONEST
        if not honest:
            lies[said.validator] = lies.get(said.validator, 0) + 1
        if said.outcome is (Outcome.REJECTED if honest else Outcome.ACCEPTED):
            fee = str(history.at(one.step).price_per_judged_file)
            faults.append(Fault(opinion=said.signed(), fee=fee))
    return lies, faults


def _was_restored(store: Store, context: PoolContext, previous: Settlement | None) -> bool:
    """Whether the arbiter restored a file that `previous` held or did not know of."""
    if previous is not None and any(one.state == "held" for one in previous.restored):
        return True
    with store.read() as connection:
        return any(not one.is_known_to(previous) for one in _restored(connection, context))


def _restored(connection: Connection, context: PoolContext) -> list[RestoredFact]:
    """Returns all files that the arbiter had paid."""
    found, history, periods = [], revisions.history(connection, context), context.deployment.periods
    for event in chain.events(connection, "FileRestored"):
        args = event.arguments()
        amount = min(int(args["amount"]), history.most_worth(int(args["step"])))
        fact = RestoredFact(Digest(args["leaf"]), Address(args["node"]), event.block, amount)
        for root in chain.events(connection, "RootPosted", subject=fact.leaf):
            posted = root.arguments()
            if posted["leaves_object"] == ZERO_DIGEST and posted["count"] == 1:
                received, within = own_root(
                    root.block_time, epoch_seconds=periods.epoch_length, validity=periods.validity
                )
                fact = replace(
                    fact, own_epoch=posted["epoch"], received_at=received, received_within=within
                )
        found.append(fact)
    return found


def _as_settled(
    objects: ObjectStore, newest: Digest | None, facts: Sequence[RestoredFact]
) -> list[RestoredFact]:
    """Returns the facts with how the files stand in the settlement `newest` and those before it."""
    found = _settled_before(objects, newest, {fact.leaf for fact in facts})
    return [
        replace(fact, settled_as=file.state, received_at=file.received_at)
        if (file := found.get(fact.leaf))
        else fact
        for fact in facts
    ]


def _settled_before(
    objects: ObjectStore, newest: Digest | None, names: Set[Digest]
) -> dict[Digest, SettledFile]:
    """Returns the files of `names` that are in the settlement `newest` or an earlier one, each as
    the latest of them has it."""
    found: dict[Digest, SettledFile] = {}
    while newest is not None and newest != ZERO_DIGEST and names > found.keys():
        settlement = load(objects, newest)
        for settled in settlement.files:
            if settled.submission_digest in names:
                found.setdefault(Digest(settled.submission_digest), settled)
        newest = Digest(settlement.previous)
    return found


def _queue(store: Store, objects: ObjectStore, settlement: Settlement, now: float) -> bool:
    """Publishes a settlement and queues its reward root. Returns False if the newest reward root is
    no longer the one that it follows, because others posted a table or the arbiter disabled it."""
    digest = settlement.publish(partial(put_object, objects))
    root = settlement.root()
    total = settlement.cumulative_total
    with store.begin() as connection:
        lock(connection, CHAIN_LOCK)  # the indexer writes reward roots
        newest = rewards.newest_root(connection)
        if settlement.previous != (ZERO_DIGEST if newest is None else newest.object):
            log.warning(
                "the settlement of epoch %d is dropped: the newest reward root changed",
                settlement.epoch,
            )
            return False
        rewards.add_root(connection, RewardRootRow(settlement.epoch, root, total, digest, now))
        queue_intent(
            connection,
            kind="reward_root",
            key=f"{settlement.epoch}:{digest}",
            payload={
                "epoch": settlement.epoch,
                "root": root,
                "cumulative_total": total,
                "object": digest,
                "as_of_block": settlement.as_of_block,
                "previous": settlement.previous,
            },
            now=now,
        )
        unpaid = [file.submission_digest for file in settlement.files if file.state == "void"]
        rewards.drop_credits(connection, unpaid)
    log.info("reward root of epoch %d over %s wei is queued", settlement.epoch, total)
    return True


class _Received(BaseModel):
    received_at: int


class _Receipt(BaseModel):
    """What a settlement needs of a stored ReceiptAnswer, which was checked before."""

    receipt: _Received
    signature: Signature


class _Valid(BaseModel):
    valid_until: int


class _Body(BaseModel):
    """What a settlement needs of a stored SignedSubmission, which was checked before."""

    submission: _Valid


class _Rooted(NamedTuple):
    """A leaf of a confirmed root, and what the store says of its verdict (None: no verdict)."""

    fact: LeafFact
    verdict: Digest | None
    units: int
    prompt_units: int

    @property
    def digest(self) -> Digest:
        return self.fact.submission_digest


def _posted_before(connection: Connection, leaves: Sequence[_Rooted]) -> set[Digest]:
    """Returns the leaves that their nodes posted before the manager's root: a table of validators
    may have settled them by the earlier root."""
    posted = (event.arguments() for event in chain.events(connection, "LeafPosted"))
    seqs = {args["leaf"]: args["seq"] for args in posted}
    return {
        one.digest for one in leaves if seqs.get(one.digest, one.fact.root_seq) < one.fact.root_seq
    }


def _leaves(
    connection: Connection, turn: _Turn, held: Sequence[SettledFile], context: PoolContext
) -> list[_Rooted]:
    """Returns the leaves of a turn, in confirmed roots, and the `held` files, each by the root that
    it was settled by. Reads no object: the indexer waits meanwhile. Raises UnavailableError if one
    of these or its root is not known."""
    seqs = {Digest(file.submission_digest): file.root_seq for file in held}
    refused = {event.arguments()["leaf"] for event in chain.events(connection, "LeafRejected")}
    leaves, history = [], revisions.history(connection, context)
    posted = {
        seq: event.block_time
        for seq in set(seqs.values())
        for event in chain.events(connection, "RootPosted", second=seq)
    }
    missing = {*seqs}
    validity = context.run.validity_seconds
    accountable = context.deployment.periods.accountable
    late = accountable // 2  # a file rooted sooner is answered for: it is valid when received
    for row in roots.leaves(connection, turn.after, turn.epoch, list(seqs), late):
        seq, posted_at = row.root_seq, row.posted_at
        if row.digest in seqs:
            missing.discard(row.digest)
            seq = seqs[row.digest]
            posted_at = posted.get(seq)
        assert seq is not None
        if posted_at is None:
            raise UnavailableError(
                f"the settlement before holds {row.digest} by root {seq}, which is not on chain: "
                "the arbiter must disable its reward root"
            )
        receipt = _Receipt.model_validate_json(row.receipt)
        run = history.at(row.step)
        fact = LeafFact(
            submission_digest=row.digest,
            node=Address(intern(row.node)),
            root_seq=seq,
            expires=posted_at + validity,
            received_at=receipt.receipt.received_at,
            receipt=receipt.signature,
            judged=None,
            refused=row.digest in refused,
            answered=row.body is None
            or answered_for(
                rooted_at=posted_at,
                valid_until=_Body.model_validate_json(row.body).submission.valid_until,
                accountable=accountable,
            ),
            price=run.price_per_unit,
            judge_price=run.price_per_judged_file,
            prompt_price=run.price_per_prompt_token,
        )
        leaves.append(_Rooted(fact, row.verdict, row.units, row.prompt_units))
    if missing:
        raise UnavailableError(
            f"the settlement before holds {min(missing)}, which is not in this store, as after the "
            "restore of an older backup: the pool's validators can post a table "
            "(docs/runbooks/restore.md)"
        )
    return leaves


def _judged(objects: ObjectStore, leaves: Sequence[_Rooted]) -> Iterator[LeafFact]:
    """Yields the facts of the leaves with what their verdict objects say."""

    def read(leaf: _Rooted) -> LeafFact:
        if leaf.verdict is None:
            return leaf.fact
        verdict = OwnVerdict.model_validate_json(read_object(objects, leaf.verdict))
        judged = judged_fact(leaf.verdict, verdict, leaf.units, leaf.prompt_units)
        return leaf.fact._replace(judged=judged)

    if isinstance(objects, DirectoryStore):  # threads would only compete for the interpreter
        yield from map(read, leaves)
        return
    with ThreadPoolExecutor(_READERS) as pool:  # they hide a bucket's latency
        batches = (leaves[start : start + _BATCH] for start in range(0, len(leaves), _BATCH))
        for some in pool.map(lambda batch: [read(leaf) for leaf in batch], batches):
            yield from some


def _slash_facts(connection: Connection, node: Address | None = None) -> list[SlashFact]:
    facts = []
    for leaf, author, status, answer in slashes.with_receipts(connection, node):
        state: SlashState = "open" if status in slashes.OPEN else status  # type: ignore[assignment]
        receipt = ReceiptAnswer.model_validate_json(answer)
        at, signature = receipt.receipt.received_at, Signature(receipt.signature)
        facts.append(SlashFact(leaf, author, at, signature, state))
    return facts


def refresh_credits(connection: Connection, node: Address) -> None:
    """Sets each credit of `node` to earned, held or forfeited according to the node's slashes.

    The result depends only on `slashes` and `credits`, so it may run after any change to either.
    """
    facts = _slash_facts(connection, node)
    names = {"free": "earned", "held": "held", "forfeited": "forfeited"}
    affected = tuple(names.values()) if facts else ("held", "forfeited")
    for row in rewards.credits_of(connection, node, affected):
        state, _ = standing(facts, node, row.earned_at)
        if names[state] != row.status:
            rewards.set_credit_status(connection, row.submission_digest, names[state])
