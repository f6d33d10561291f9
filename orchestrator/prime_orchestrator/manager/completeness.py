"""Finds events that the endpoints left out, by what the contracts say at the block last read.

    each time        reward roots, work roots, seats taken, policies, validators, the pool's end
    a few in turn    nodes, validators, open slashes, open appeals

If the events of the pool say something else, they are read again from another endpoint, since the
last comparison that found no difference. Events of other accounts are stored as current state only
(`chain_state`): there the contract's answer replaces what is stored. Both count as gaps.

The contracts keep no list of rejected leaves, proposals or appeals. The validators' open pledges
show that a proposal is missing. Nothing shows a missing rejection or appeal.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice

from prime_chain.contracts import Contracts
from prime_chain.contracts.slasher import ProposalState
from prime_chain.events import Event
from prime_chain.watcher import Watcher
from prime_core.errors import UnavailableError
from prime_core.ids import Address, Digest
from prime_core.node import NodeStatus
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.depth import has_state
from prime_orchestrator.manager.indexer import CURSOR, count_gap, read_again
from prime_orchestrator.manager.members import MEMBERSHIP_EVENTS, membership
from prime_orchestrator.manager.settlement import CHAIN_LOCK
from prime_orchestrator.store import Connection, chain, checks, nodes, rewards, slashes
from prime_orchestrator.store.engine import Store, lock

log = logging.getLogger(__name__)

CHECK_SECONDS, RETRY_SECONDS = 300.0, 60.0
"""Least time between two comparisons, and after one that found a difference that stays."""
IN_TURN = 4
"""Subjects of each kind that are compared at a time."""
MOST_VALIDATORS = 255
"""Validators over a pool's life (Pools.setValidator)."""
MOST_NAMED = 6
"""Most differences in one message."""
_SEATED: tuple[NodeStatus, ...] = ("admitted", "active", "silent", "quarantined")


@dataclass(frozen=True)
class _Check:
    """`differs` returns what the contracts say and the stored events do not, empty if they agree.
    Missing events are of blocks above `since`. Without `certain` nothing need be missing."""

    since: int
    differs: Callable[[], str]
    certain: bool = True


def check_events(
    store: Store,
    context: PoolContext,
    watcher: Watcher,
    contracts: Contracts,
    now: Callable[[], float],
) -> list[Event]:
    """Compares the stored events with the contracts every CHECK_SECONDS; see the module's
    docstring. Costs about ten reads, and at most ten for each of IN_TURN. Returns the events found.

    Raises UnavailableError if no endpoint shows what is missing, until a comparison finds it.
    """
    moment = now()
    with store.read() as connection:
        cursor = chain.cursor(connection, CURSOR)
        progress = checks.load(connection)
    pause = RETRY_SECONDS if progress.unexplained else CHECK_SECONDS
    if cursor is not None and 0 <= moment - progress.at < pause and progress.unexplained:
        raise UnavailableError(progress.unexplained)
    if cursor is None or 0 <= moment - progress.at < pause:
        return []
    block = cursor[0]
    if not has_state(contracts.client, block):
        return []  # still catching up
    compared = _Compared(store, context, contracts, block, progress)
    due = [*compared.of_pool(), *compared.in_turn()]
    wrong = [(why, check) for check in due if (why := check.differs())]
    taken: list[Event] = []
    if wrong:
        first = max(min(check.since for _, check in wrong), watcher.start.number) + 1
        certain = [why for why, check in wrong if check.certain]
        why = f"pool {context.pool}: " + "; ".join(
            (certain or [why for why, _ in wrong])[:MOST_NAMED]
        )
        log.log(
            logging.ERROR if certain else logging.INFO,
            *("%s; blocks %d to %d are read again", why, first, block),
        )
        if certain:
            count_gap(store)
        taken = read_again(store, context, watcher, (first, block), why, now)
        if taken and not certain:
            log.error("%d events were missing", len(taken))
            count_gap(store)
        if any(check.differs() for _, check in wrong if check.certain):
            said = f"{why}; no endpoint shows the missing events"
            _keep_unexplained(store, moment, said)
            raise UnavailableError(said)
    compared.keep_elsewhere()
    compared.correct_states(watcher)
    progress.at, progress.block, progress.unexplained = moment, block, ""
    with store.begin() as connection:
        checks.save(connection, progress)
    return taken


def _keep_unexplained(store: Store, moment: float, said: str) -> None:
    """Notes a comparison that ended without the missing events: the chain loop reports it until one
    finds them, and the events are not read again at once."""
    with store.begin() as connection:
        progress = checks.load(connection)
        progress.at, progress.unexplained = moment, said
        checks.save(connection, progress)


class _Compared:
    """The contracts at `block` against the stored events."""

    def __init__(
        self,
        store: Store,
        context: PoolContext,
        contracts: Contracts,
        block: int,
        progress: checks.Progress,
    ) -> None:
        self._store = store
        self._pool = context.pool
        self._contracts = contracts
        self._block = block
        self._progress = progress
        self._states: list[tuple[str, Address, Callable[[], str | None]]] = []
        """Kind, account and contract's value of states that are due."""

    def of_pool(self) -> Iterator[_Check]:
        """What is compared each time."""
        pools, pool, block = self._contracts.pools, self._pool, self._block
        found = pools.pool_of(pool, block)
        facts: list[tuple[str, object, Callable[[Connection], object]]] = [
            ("seats taken", found.members, lambda c: len(_members(c))),
            ("its end", found.ended, lambda c: chain.pool_ended(c, pool) is not None),
            ("policies", pools.next_version(pool, block), _policies),
            (
                "work roots",
                self._contracts.work.root_count(pool, block),
                lambda c: chain.newest_root(c)[0],
            ),
            (
                "reward roots, as their total and the next epoch",
                self._contracts.rewards.progress(pool, block),
                _reward_progress,
            ),
        ]
        for name, said, known in facts:
            yield self._check(name, said, known)
        with self._store.read() as connection:
            number = len(_validators(connection)) + 1
        if number <= MOST_VALIDATORS:
            yield self._check(
                f"the account appointed as number {number}",
                pools.validator_at(pool, number, block),
                lambda c: _validator_at(c, number),
            )

    def _check(
        self,
        name: str,
        said: object,
        known: Callable[[Connection], object],
        since: int | None = None,
    ) -> _Check:
        def differs() -> str:
            with self._store.read() as connection:
                stored = known(connection)
            if stored == said:
                return ""
            return f"{name}: {said} by the contract, {stored} by the events"

        return _Check(self._progress.block if since is None else since, differs)

    def in_turn(self) -> Iterator[_Check]:
        """What is compared a few at a time."""
        with self._store.read() as connection:
            names: dict[str, set[str]] = {
                "node": {*_members(connection)}
                | {one.address for one in nodes.every(connection, _SEATED)},
                "validator": {*_validators(connection)},
                "slash": {*_open_slashes(connection)}
                | {one[0] for one in slashes.queued(connection)},
                "appeal": _open_appeals(connection),
            }
        for kind, found in names.items():
            turn = self._progress.turns.setdefault(kind, checks.Turn())
            for name in self._next(sorted(found), turn):
                yield from getattr(self, f"_of_{kind}")(name, turn.before)

    def _next(self, names: Sequence[str], turn: checks.Turn) -> list[str]:
        """Returns the next IN_TURN names, and moves the turn on."""
        some = list(islice((name for name in names if name > turn.after), IN_TURN))
        if not some:
            turn.before, turn.began = turn.began, self._block
            some = list(names[:IN_TURN])
        turn.after = some[-1] if some else ""
        return some

    def _of_node(self, node: Address, since: int) -> Iterator[_Check]:
        c, block = self._contracts, self._block
        yield self._check(
            f"seat of {node}",
            c.pools.is_member(self._pool, node, block),
            lambda connection: membership(connection, node)[0] == "member",
            since,
        )
        provider = c.registry.provider_of(node, block)
        self._states += [
            ("provider", node, lambda: provider),
            ("revoked", node, lambda: _unless_zero(c.registry.revoked_before(node, block))),
        ]
        if provider is not None:
            self._states.append(("stake", provider, partial(self._stake, provider)))

    def _stake(self, provider: Address) -> str:
        account = self._contracts.vault.account_of(provider, self._block)
        return f"{account.bonded} {account.held}"

    def _of_validator(self, validator: Address, since: int) -> Iterator[_Check]:
        found = self._contracts.pools.validator_of(self._pool, validator, self._block)
        yield self._check(
            f"appointment of {validator}",
            found is not None and found.on,
            lambda connection: validator in chain.appointed(connection, self._pool),
            since,
        )
        pledges = self._pledges[validator] = self._contracts.vault.account_of(
            validator, self._block
        ).pledges

        def differs() -> str:
            with self._store.read() as connection:
                known = _pledged(connection)[validator]
            if 0 <= pledges - known <= self._progress.elsewhere.get(validator, 0):
                return ""
            return f"{validator} stands for {pledges} open proposals, by the events for {known}"

        with self._store.read() as connection:
            fewer = pledges < _pledged(connection)[validator]
        # More may be of other pools of the manager.
        yield _Check(since, differs, certain=fewer)

    @cached_property
    def _pledges(self) -> dict[Address, int]:
        return {}

    def keep_elsewhere(self) -> None:
        """Notes how many open proposals of the validators compared are not the pool's."""
        with self._store.read() as connection:
            known = _pledged(connection)
        for validator, pledges in self._pledges.items():
            self._progress.elsewhere[validator] = pledges - known[validator]

    def _of_slash(self, leaf: Digest, since: int) -> Iterator[_Check]:
        found = self._contracts.slasher.proposal(leaf, self._block)
        said = ProposalState.NONE if found is None else found.state
        yield self._check(
            f"slash for {leaf}", said.name, lambda c: _state_of_slash(c, leaf).name, since
        )

    def _of_appeal(self, leaf: Digest, since: int) -> Iterator[_Check]:
        found = self._contracts.rewards.appeal_of(leaf, self._block)
        yield self._check(
            f"whether {leaf} is restored",
            found is not None and found.restored,
            lambda c: bool(chain.events(c, "FileRestored", subject=leaf)),
            since,
        )

    def correct_states(self, watcher: Watcher) -> None:
        """Replaces states that differ from the contracts'."""
        for kind, account, read in self._states:
            said = read()
            with self._store.read() as connection:
                stored = chain.state(connection, kind, account)
            if stored == said or (kind == "stake" and stored is None and said == "0 0"):
                continue
            why = f"{kind} of {account}: {said} by the contract, {stored} by the events"
            log.error("%s; it is corrected", why)
            count_gap(self._store)
            watcher.distrust(why)
            with self._store.begin() as connection:
                lock(connection, CHAIN_LOCK)
                chain.correct(connection, kind, account, said, self._block)


def _unless_zero(value: int) -> str | None:
    return str(value) if value else None


def _members(connection: Connection) -> set[str]:
    """Returns the nodes with a seat."""
    found = [event for name in MEMBERSHIP_EVENTS for event in chain.events(connection, name)]
    last = {
        str(event.subject): event.name
        for event in sorted(found, key=lambda event: (event.block, event.log_index))
    }
    return {node for node, name in last.items() if name == "NodeJoined"}


def _policies(connection: Connection) -> int:
    """Returns the version after the newest published policy."""
    found = chain.events(connection, "PolicyPublished")
    return max((int(str(event.subject)) + 1 for event in found), default=0)


def _validators(connection: Connection) -> list[str]:
    """Returns the validators that were ever appointed, in the order of their first appointment."""
    found = chain.events(connection, "ValidatorSet")
    return list(dict.fromkeys(str(event.subject) for event in found))


def _validator_at(connection: Connection, number: int) -> str | None:
    found = _validators(connection)
    return found[number - 1] if len(found) >= number else None


def _reward_progress(connection: Connection) -> tuple[int, int]:
    """Returns what `Rewards.progress` should be; zeros before the first root."""
    newest = rewards.newest_root(connection, confirmed=True)
    return (0, 0) if newest is None else (int(newest.cumulative_total), newest.epoch + 1)


def _open_slashes(connection: Connection) -> dict[str, list[str]]:
    """Returns the proposals that did not end, each with its authors."""
    ended = {
        event.subject
        for name in ("SlashExecuted", "SlashCancelled")
        for event in chain.events(connection, name)
    }
    return {
        str(event.subject): event.arguments()["authors"]
        for event in chain.events(connection, "SlashProposed")
        if event.subject not in ended
    }


def _pledged(connection: Connection) -> Counter[str]:
    """Returns for how many open proposals each validator stands."""
    return Counter(author for some in _open_slashes(connection).values() for author in some)


def _state_of_slash(connection: Connection, leaf: Digest) -> ProposalState:
    states = {
        "SlashExecuted": ProposalState.EXECUTED,
        "SlashCancelled": ProposalState.CANCELLED,
        "SlashDisputed": ProposalState.DISPUTED,
        "SlashObjected": ProposalState.OBJECTED,
        "SlashProposed": ProposalState.PROPOSED,
    }
    found = (
        state for name, state in states.items() if chain.events(connection, name, subject=leaf)
    )
    return next(found, ProposalState.NONE)


def _open_appeals(connection: Connection) -> set[str]:
    """Returns the appealed files that are not restored."""
    restored = {event.subject for event in chain.events(connection, "FileRestored")}
    asked = {event.arguments()["leaf"] for event in chain.events(connection, "FileAppealed")}
    return asked - restored
