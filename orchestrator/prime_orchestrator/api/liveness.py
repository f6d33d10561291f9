"""Heartbeats and their answers, and the expiry of nodes and leases."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import httpx

from prime_core.errors import UnavailableError
from prime_core.ids import Address
from prime_core.lifecycle import NodeState, step_node
from prime_core.messages import Directive, FileEnding, Heartbeat, HeartbeatAnswer
from prime_core.transport.signatures import Verified
from prime_core.verdict import Reason
from prime_orchestrator.api import auth, reach, shadow
from prime_orchestrator.api.auth import Caller
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.manager import remeasuring, revisions, speed, standing
from prime_orchestrator.manager.members import log_change
from prime_orchestrator.store import (
    Connection,
    chain,
    challenges,
    intents,
    leases,
    lock,
    measurements,
    nodes,
    on_commit,
    policies,
    row_marks,
    sessions,
    submissions,
)
from prime_orchestrator.store.leases import LeaseRow
from prime_orchestrator.store.measurements import MeasurementRow
from prime_orchestrator.store.nodes import NodeRow

log = logging.getLogger(__name__)

MAX_ENDINGS = 16
ENDING_MARGIN_SECONDS = 60
"""Margin for clock differences: a verdict's time comes from its validator. A node recognizes
endings reported twice within it."""
RECENT_SECONDS = 600
GAP_SECONDS = 10.0
"""Ticks come every second; after a gap this long, heartbeats may have been missed through our
fault."""
FORGET_SECONDS = 10.0
"""How often what is no longer needed is deleted, and nodes are drawn to be measured again."""
RELAY_SECONDS = 120
"""A relay that has not announced itself for this long is no longer named to nodes."""
SILENT = "no heartbeat: its leases no longer count"
PROBE_KEY = "probe"
PROBE_BYTES = bytes(64 << 10)
"""What `LifeTicks.probe` writes: a few bytes may find room on a full disk."""
FAILURES = 2
"""Failed probes in a row after which the public address counts as failed. A single one may be due
to a short overload."""
PROBE_PATIENCE = 5.0
"""Seconds after which a probe without an answer counts as failed."""


@dataclass(frozen=True)
class SignedBeat:
    """A heartbeat whose signature holds; its session and nonce are not yet checked."""

    proven: Verified
    beat: Heartbeat


def signed_heartbeats(
    backend: Backend, arrived: Sequence[SignedBeat]
) -> list[HeartbeatAnswer | Exception]:
    """Looks up the callers of heartbeats and answers them as `heartbeats` does, most in one
    transaction. An entry is the error of a request that is refused."""
    proven = [one.proven for one in arrived]
    with backend.store.begin() as connection:
        callers = auth.callers(connection, "node", proven, backend.now())
        said = [
            (caller.account, one.beat)
            for caller, one in zip(callers, arrived, strict=True)
            if isinstance(caller, Caller)
        ]
        answers = iter(_answer_free(connection, backend, said))
    found: list[HeartbeatAnswer | Exception] = []
    for caller, one in zip(callers, arrived, strict=True):
        if isinstance(caller, Exception):
            found.append(caller)
            continue
        try:
            found.append(next(answers) or _answer_alone(backend, caller.account, one.beat))
        except Exception as error:  # the others are answered, and their nonces used up
            found.append(error)
    return found


def heartbeats(
    backend: Backend, said: Sequence[tuple[Address, Heartbeat]]
) -> list[HeartbeatAnswer]:
    """Records that nodes are alive, and returns each one's directive.

    All are handled in one transaction that never waits for a node's row. Heartbeats of nodes that
    have no row, or whose row another transaction holds, are then handled one by one.
    """
    with backend.store.begin() as connection:
        answers = _answer_free(connection, backend, said)
    return [
        answer or _answer_alone(backend, account, beat)
        for (account, beat), answer in zip(said, answers, strict=True)
    ]


def _answer_free(
    connection: Connection, backend: Backend, said: Sequence[tuple[Address, Heartbeat]]
) -> list[HeartbeatAnswer | None]:
    """Returns the answers to heartbeats of nodes whose row is free; None for others."""
    answers: list[HeartbeatAnswer | None] = [None] * len(said)
    rows = nodes.lock_free(connection, {account for account, _ in said})
    served = [at for at, (account, _) in enumerate(said) if account in rows]
    if served:
        found = _answer_beats(connection, backend, [said[at] for at in served], rows)
        for at, one in zip(served, found, strict=True):
            answers[at] = one
    return answers


def _answer_alone(backend: Backend, account: Address, beat: Heartbeat) -> HeartbeatAnswer:
    with backend.store.begin() as connection:
        row = nodes.lock_row(connection, account)
        known = {account: row} if row is not None else {}
        (answer,) = _answer_beats(connection, backend, [(account, beat)], known)
    return answer


def _answer_beats(
    connection: Connection,
    backend: Backend,
    said: Sequence[tuple[Address, Heartbeat]],
    rows: dict[Address, NodeRow],
) -> list[HeartbeatAnswer]:
    """Returns the answers to heartbeats after writing their changes. `rows` are the nodes' previous
    rows, locked."""
    now, context = backend.now(), backend.context
    elsewhere: dict[int, str] = {}
    for at, (account, beat) in enumerate(said):
        if (row := rows.get(account)) is None:
            continue
        silent = now - row.last_heartbeat
        if beat.instance != row.instance and "" not in (beat.instance, row.instance):
            if silent < context.run.death_seconds:
                elsewhere[at] = (
                    f"another machine works with this node's key, seen {silent:.0f} s ago: make "
                    "a key for this machine (prime-node wallet new), or end the agent there and "
                    f"join {context.run.death_seconds} s later"
                )
                continue
            on_commit(connection, log.info, "node %s has moved to another machine", account)
        state, _ = step_node(
            NodeState(row.status, row.last_heartbeat),
            "heartbeat",
            now,
            death_seconds=context.run.death_seconds,
            orchestrator_up_since=now,
        )
        if state.status != row.status:
            log_change(connection, row, state.status, "heartbeat")
        rows[account] = replace(
            row,
            status=state.status,
            last_heartbeat=state.last_heartbeat,
            policy_version=beat.policy_version,
            tokens_per_second=beat.tokens_per_second,
            runtime=beat.runtime,
            instance=beat.instance or row.instance,
        )
    nodes.store_heartbeats(connection, list(rows.values()))
    pool = policies.pool_facts(connection)
    latest = pool.latest_version
    reach.note(
        connection,
        backend.arrivals,
        [
            (row.address, row.policy_version)
            for row in rows.values()
            if row.status == "active"  # shadow nodes do not count: anyone may run one
        ],
        latest,
        now=now,
    )
    ended = pool.maybe_ended and chain.pool_ended(connection, context.pool) is not None
    found = policies.relays(connection, since=now - RELAY_SECONDS, own=backend.own_accounts)
    relays = tuple(row.url for row in found)
    run = revisions.newest_run(pool.newest_run, context)
    # a proof of cards needs the whole cards, which work now
    measured = speed.want_challenges(connection, rows.values(), now) if run.cards is None else ()
    run_digest, slots = run.digest(), backend.slots(run)
    proofs = _proofs(connection, said) if run.cards is not None else {}
    endings = _endings(connection, [(account, beat.heard_at) for account, beat in said], now)
    answers = []
    for at, ((account, beat), files) in enumerate(zip(said, endings, strict=True)):
        node = rows.get(account)
        directive, reason = _directive(connection, account, node, pool_ended=ended)
        if at in elsewhere:
            directive, reason = "stop", elsewhere[at]
        prove_by = None
        if node is not None and node.status == "active" and directive == "work":
            reason = remeasuring.why_no_lease(proofs.get(account))
            prove_by = remeasuring.due_by(proofs.get(account), run)
        if beat.lied and node is not None:
            backend.relay_faults.note(account, beat.lied, relays)
        answers.append(
            HeartbeatAnswer(
                directive=directive,
                reason=reason,
                status=node.status if node is not None else "left",
                latest_version=latest,
                relays=relays,
                server_time=int(now),
                endings=files,
                measure=account in measured,
                run_digest=run_digest,
                another_machine=at in elsewhere,
                evaluates=pool.evaluates,
                lease_slots=slots.of(node) if node is not None else 1,
                prove_cards_by=prove_by,
            )
        )
    return answers


def _proofs(
    connection: Connection, said: Sequence[tuple[Address, Heartbeat]]
) -> dict[Address, MeasurementRow]:
    """Returns what is asked of the nodes, after noting which of them say that they know it."""
    found = measurements.of(connection, {account for account, _ in said})
    for account, beat in said:
        row = found.get(account)
        if beat.proves and row is not None and row.asked_at is not None and not row.knows:
            found[account] = remeasuring.note_known(connection, row)
    return found


def _endings(
    connection: Connection, said: Sequence[tuple[Address, int]], now: float
) -> list[tuple[FileEnding, ...]]:
    """Returns, for each node and the time of its last answer, its files that ended badly since,
    oldest first. Nodes with a recent answer are first checked together, because most have none."""
    recently = [(node, at) for node, at in said if at > now - RECENT_SECONDS]
    affected = frozenset(node for node, at in said if at <= now - RECENT_SECONDS)
    if recently:
        since = min(at for _, at in recently) - ENDING_MARGIN_SECONDS
        affected |= submissions.with_bad_endings(
            connection, {node for node, _ in recently}, since=since
        )
    return [_bad_files(connection, node, at) if node in affected else () for node, at in said]


def _bad_files(connection: Connection, node: Address, heard_at: int) -> tuple[FileEnding, ...]:
    found = submissions.ended_badly(
        connection, node, since=heard_at - ENDING_MARGIN_SECONDS, limit=MAX_ENDINGS
    )
    return tuple(
        FileEnding(
            submission_digest=row.digest,
            lease_digest=row.lease_digest,
            status="rejected" if row.status == "rejected" else "void",
            reason=row.reason,
            detail=Reason(row.reason).sentence,
            judged_at=int(row.judged_at or 0),
        )
        for row in reversed(found)
    )


def _directive(
    connection: Connection, account: Address, node: NodeRow | None, *, pool_ended: bool
) -> tuple[Directive, str]:
    if pool_ended:
        return "stop", "the pool has ended"
    if node is None or node.status == "left":
        return "join", "the node is not admitted: ask for a challenge"
    match node.status:
        case "ejected":
            return "stop", "the node was ejected from the pool"
        case "quarantined":
            return "wait", "a file of this node was rejected and its slash is under way"
        case "admitted":
            return joining(connection, account)
        case _:
            return "work", ""


def joining(connection: Connection, account: Address) -> tuple[Directive, str]:
    """Returns the directive for an admitted node: wait for its membership, or join again if that
    failed."""
    newest = intents.newest_join(connection, account)
    if newest is None or newest.status == "failed":
        why = newest.error if newest is not None else None
        return "join", f"joining on chain failed: {why}" if why else "the node is not admitted"
    return "wait", "the membership is not yet seen on chain"


def get_probe(client: httpx.Client, url: str) -> bytes:
    """GETs the probe's object as a node does, at most its size and a byte. Raises UnavailableError,
    whose text does not contain the signed URL."""
    plain, found = {"Accept-Encoding": "identity"}, b""
    until = time.monotonic() + PROBE_PATIENCE
    try:
        with client.stream("GET", url, headers=plain, timeout=PROBE_PATIENCE) as answer:
            if answer.status_code != httpx.codes.OK:
                raise UnavailableError(f"the object store's address answered {answer.status_code}")
            for part in answer.iter_raw():
                found += part
                if len(found) > len(PROBE_BYTES):
                    break
                if time.monotonic() > until:
                    raise UnavailableError("the object store's address is too slow")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = type(error).__name__
        raise UnavailableError(f"the object store's address does not answer: {why}") from error
    return found[: len(PROBE_BYTES) + 1]


class LifeTicks:
    """Handles silence and deadlines. A node's silence counts only from this orchestrator's start,
    and again after each gap between ticks (database down, machine suspended, loops run elsewhere),
    so that our downtime never counts against a node. Nor does an expired lease that was open while
    the object store failed, as `probe` sees it. `fetch` gets what a signed URL names, as nodes do
    (`get_probe`); without it only the store itself is tried, not its public address."""

    def __init__(self, backend: Backend, fetch: Callable[[str], bytes] | None = None) -> None:
        self._backend = backend
        self._fetch = fetch
        self._reached = False  # whether the public address has answered since the start
        self._unreached = 0  # how often in a row it has not
        self._up_since = self._ticked_at = backend.now()
        self._store_up_since = 0.0  # infinite while the object store fails
        self._address_up_since = 0.0  # infinite while its public address fails
        self._probing_since: float | None = None
        self._forget_at = self._drawn_at = self._up_since

    def probe(self) -> None:
        """Writes a small object and gets it back by a signed URL, to see whether nodes can hand in
        their files. Raises UnavailableError if the object store fails, or its public address
        FAILURES times in a row. A public address counts once it has answered: this machine may be
        one that cannot reach it. A loop of its own calls this, because a store that does not answer
        may take as long as its timeouts."""
        self._probing_since = began = self._backend.now()
        objects = self._backend.objects
        try:
            objects.put(PROBE_KEY, PROBE_BYTES)
        except UnavailableError:
            self._store_up_since = math.inf
            raise
        finally:
            self._probing_since = None
        now = self._backend.now()
        if self._store_up_since == math.inf or now - began > PROBE_PATIENCE:
            self._store_up_since = now
        if self._fetch is not None:
            self._get_back(self._fetch, objects.signed_get(PROBE_KEY, int(now) + 60))

    def _get_back(self, fetch: Callable[[str], bytes], url: str) -> None:
        try:
            if fetch(url) != PROBE_BYTES:
                raise UnavailableError("the object store's address gave other bytes")
        except UnavailableError as error:
            self._unreached += 1
            if self._reached and self._unreached >= FAILURES:
                self._address_up_since = math.inf
                raise
            log.debug("the object store's public address: %s", error)
        else:
            self._reached, self._unreached = True, 0
            if self._address_up_since == math.inf:
                self._address_up_since = self._backend.now()

    def _is_excused(self, lease: LeaseRow, now: float) -> bool:
        """Whether the lease was open while the orchestrator was away or its object store failed."""
        probing = self._probing_since
        stuck = probing is not None and now - probing > PROBE_PATIENCE
        up_since = max(self._up_since, self._store_up_since, self._address_up_since)
        return stuck or lease.created_at < up_since

    def tick(self) -> None:
        """Ends what has expired: silent nodes, overdue leases, old nonces and challenges."""
        backend, now = self._backend, self._backend.now()
        if now - self._ticked_at > GAP_SECONDS:
            self._up_since = now
        with backend.store.begin() as connection:
            lock(connection, "leases")  # issuing leases also writes rows of several nodes
            quiet = nodes.active_before(connection, now - backend.context.run.death_seconds)
            late = leases.late_nodes(connection, now)
            # A verdict locks its node, then that node's leases.
            changed = []
            for node in nodes.lock_rows(connection, late | {one.address for one in quiet}).values():
                state, _ = step_node(
                    NodeState(node.status, node.last_heartbeat),
                    "tick",
                    now,
                    death_seconds=backend.context.run.death_seconds,
                    orchestrator_up_since=self._up_since,
                )
                if state.status != node.status:
                    log_change(connection, node, state.status, SILENT)
                    changed.append(replace(node, status=state.status))
            nodes.set_statuses(connection, changed)
            for lease in leases.overdue(connection, now):
                standing.expire(
                    connection,
                    lease,
                    backend.context.run.lease_seconds,
                    excused=self._is_excused(lease, now),
                )
        if now >= self._forget_at:
            self._forget(now)
            self._measure_again(now)
            self._forget_at = now + FORGET_SECONDS
        self._ticked_at = now

    def _forget(self, now: float) -> None:
        """Deletes what is no longer needed."""
        backend = self._backend
        with backend.store.begin() as connection:
            lock(connection, "row_marks")  # a verdict deletes some, too
            sessions.forget(connection, now)
            challenges.forget(connection, now)
            row_marks.forget(connection, now)
            policies.forget_relays(connection, now - 10 * RELAY_SECONDS)
            reach.forget(connection)
        shadow.forget(backend.store, backend.objects, now)

    def _measure_again(self, now: float) -> None:
        backend = self._backend
        with backend.store.begin() as connection:
            remeasuring.tick(
                connection,
                revisions.next_run(connection, backend.context),
                backend.remeasure_seconds,
                backend.random,
                now=now,
                elapsed=now - self._drawn_at,
                up_since=self._up_since,
            )
        self._drawn_at = now
