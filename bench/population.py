"""What a day of ten thousand nodes gives: population_world.py says what is simulated, and how.

The defaults are checked by the same world with one of them changed (`VARIANTS`), in a smaller pool.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import sqlalchemy as sa

from bench.form import Row
from bench.population_world import (
    DROPPER,
    HOUR,
    PICKY,
    SEALED,
    TRAINING,
    VALIDATOR_SPEED,
    Person,
    World,
    definition,
    simulate,
)
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.settlement import LeafFact, SlashFact, settle
from prime_core.verdict import Outcome
from prime_orchestrator.api import validators
from prime_orchestrator.manager import history, standing
from prime_orchestrator.manager.standing import LEASE_SLOTS
from prime_orchestrator.store import nodes, schema

PACKAGES = ("sqlalchemy", "pydantic")
SMALL = 500
"""Nodes of the pools in which one default is changed."""
VARIANTS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "as_it_is": (),
    "no_newcomer_rule": ((history, "NEWCOMER_FILES", 0),),
    "again_1_in_64": ((validators, "AGAIN_ONE_IN", 64),),
    "no_whole_files": ((history, "FULL_EVERY", 1 << 60),),
    "rest_1": ((standing, "LONGEST", 1),),
    "rest_16": ((standing, "LONGEST", 16),),
}
"""Constants with other values. Names of the rows: NAME_of_VARIANT."""
SLOTS = {"slots_1": 1, "slots_16": 16}
"""Other numbers of leases that a node may hold open."""
BUSY = {"busy": LEASE_SLOTS, "busy_slots_1": 1, "busy_slots_16": 16}
"""The same in a pool whose batches take HUNGER times as many groups: all nodes have work."""
HUNGER = 20
RUNS: dict[str, dict[str, Any]] = {
    "replay_1_in_8": {"replay_rows_micro": 125_000},
    "replay_1_in_2": {"replay_rows_micro": 500_000},
    "staleness_4": {"max_staleness": 4},
}
"""Run definitions with other values."""
COMPARED = (
    *("trainer_busy", "staleness_mean", "expired", "caught_few", "caught_few_file_p95"),
    *("replay_cost", "pay_cheat_most", "node_busy", "batch_full", "files"),
    "first_accepted_median_s",
)


@dataclass(frozen=True)
class Paid:
    """What a settlement of every file pays. Tokens are wei: the run's price is 1."""

    amounts: dict[Address, int]
    slashed: frozenset[Address]


def pay(world: World) -> Paid:
    """Settles every judged file at once. Each has a root of its own at its arrival."""
    store, run = world.pool.backend.store, world.run
    table, slash = schema.submissions.c, schema.slashes.c
    with store.read() as connection:
        files = connection.execute(sa.select(table.digest, table.node, table.received_at)).all()
        punished = connection.execute(
            sa.select(slash.submission_digest, slash.node, slash.status, table.received_at).join(
                schema.submissions, table.digest == slash.submission_digest
            )
        ).all()
    facts = [
        SlashFact(
            Digest(row.submission_digest), Address(row.node), int(row.received_at), SEALED,
            "executed" if row.status == "executed" else "open",
        )
        for row in punished
    ]  # fmt: skip
    of: dict[Address, list[SlashFact]] = defaultdict(list)
    for fact in facts:
        of[fact.node].append(fact)
    by_node: dict[Address, list[LeafFact]] = defaultdict(list)
    for at, row in enumerate(files):
        if row.digest in world.facts:
            by_node[Address(row.node)].append(
                LeafFact(
                    Digest(row.digest), Address(row.node), at,
                    int(row.received_at) + run.validity_seconds, int(row.received_at), SEALED,
                    world.facts[Digest(row.digest)], price=run.price_per_unit,
                )
            )  # fmt: skip
    amounts: dict[Address, int] = {}
    for node, leaves in by_node.items():  # a node's pay depends on its own files and slashes alone
        amounts |= settle(
            chain_id=1, pool=1, epoch=0, as_of_block=0, previous=None,
            previous_name=ZERO_DIGEST, leaves=leaves, slashes=of[node],
        ).amounts()  # fmt: skip
    executed = frozenset(Address(row.node) for row in punished if row.status == "executed")
    return Paid(amounts, executed)


def run(quick: bool) -> list[Row]:
    """All rows; `quick`: 200 nodes for an hour."""
    since = time.process_time()
    count, hours = (200, 1.0) if quick else (10_000, 24.0)
    with tempfile.TemporaryDirectory(prefix="bench-people-") as folder:
        world = simulate(Path(folder), count, hours)
        found = _rows(world)
        world.pool.backend.store.close()
    return [
        Row("nodes", count, f"nodes, {hours:g} hours"),
        *found,
        *([] if quick else _compared()),
        Row("cpu_s", time.process_time() - since, "CPU s of all simulations"),
    ]


def _compared() -> list[Row]:
    """COMPARED rows of small pools, each with one default changed."""
    rows = []
    for name in (*VARIANTS, *RUNS, *SLOTS, *BUSY):
        with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="bench-people-") as folder:
            for module, constant, value in VARIANTS.get(name, ()):
                stack.enter_context(mock.patch.object(module, constant, value))
            run = definition(SMALL).model_copy(update=RUNS.get(name, {}))
            if name in BUSY:
                most = run.groups_per_batch * HUNGER
                run = run.model_copy(update={"groups_per_batch": most})
            slots = SLOTS.get(name, BUSY.get(name, LEASE_SLOTS))
            world = simulate(Path(folder), SMALL, 24.0, run, slots=slots)
            rows += [
                Row(f"{row.name}_of_{name}", row.value, row.unit)
                for row in _rows(world)
                if row.name in COMPARED
            ]
            world.pool.backend.store.close()
    return rows


def _rows(world: World) -> list[Row]:
    return [*_trainer(world), *_files(world), *_cheats(world), *_validators(world), *_pay(world)]


def _trainer(world: World) -> list[Row]:
    groups, steps = schema.groups.c, schema.batches.c
    with world.pool.backend.store.read() as connection:
        sealed = connection.execute(sa.select(sa.func.count(), sa.func.max(steps.staleness_max)))
        count, most = sealed.one()
        old = groups.batch_step - groups.policy_version
        mean = connection.execute(
            sa.select(sa.func.avg(old)).where(groups.batch_step >= 0)
        ).scalar()
        unused = connection.execute(
            sa.select(sa.func.count()).where(
                groups.batch_step.is_(None), groups.informative.is_(True),
                groups.policy_version < world.published[-1][1] - world.run.max_staleness,
            )
        ).scalar_one()  # fmt: skip
        informative = connection.execute(
            sa.select(sa.func.count()).where(groups.informative.is_(True))
        ).scalar_one()
    trained = TRAINING * len(world.published[1:])
    if world.training is not None:
        trained += max(0.0, TRAINING - (world.training_until - world.now))
    first = world.first_batch or world.now
    return [
        Row("trainer_busy", trained / max(1.0, world.now - first), "of the time after batch 0 was "
            "sealed", better="higher"),
        Row("first_batch_s", first, "s to the first batch"),
        Row("batches", count, f"batches of {world.run.groups_per_batch} groups sealed",
            better="higher"),
        Row("staleness_mean", float(mean or 0), "policies, of trained groups"),
        Row("staleness_max", float(most or 0), f"policies, of {world.run.max_staleness} allowed"),
        Row("groups_too_old", unused / max(1, informative), "of the informative groups: paid, not "
            "trained on"),
    ]  # fmt: skip


def _files(world: World) -> list[Row]:
    honest = [one for one in world.people if not one.kind and one.first_on is not None]
    waits = sorted(
        one.first_accepted - one.first_on
        for one in honest
        if one.first_accepted is not None and one.first_on is not None
    )
    on = sum(min(off, world.now) - at for one in honest for at, off in one.hours if at < world.now)
    accepted = sum(one.accepted for one in honest)
    missed = sum(one.expired for one in honest)
    never = [one for one in honest if one.first_lease is None]
    slow = [one for one in honest if one.expired and not one.accepted]
    return [
        Row("first_accepted_median_s", _at(waits, 0.5), "s from a node's first minute to its first "
            "accepted file"),
        Row("first_accepted_p90_s", _at(waits, 0.9), "s"),
        Row("without_lease", len(never) / len(honest), "of the honest nodes that came"),
        Row("never_in_time", len(slow) / len(honest), "of the honest nodes that came: leases "
            "expired, no file accepted"),
        Row("node_busy", sum(one.spent for one in honest) / max(1.0, on), "of honest nodes' time "
            "on", better="higher"),
        Row("batch_full", sum(one.spent for one in honest)
            / max(1.0, sum(one.engaged for one in honest)), "of honest nodes' batches, while "
            "they had leases", better="higher"),
        Row("expired", missed / max(1, missed + accepted), "of honest nodes' leases"),
        Row("files", sum(world.outcomes.values()), "files judged", better="higher"),
    ]  # fmt: skip


def _cheats(world: World) -> list[Row]:
    """Of liars that handed in at least one file."""
    found: dict[tuple[str, bool], list[Person]] = defaultdict(list)
    for one in world.people:
        if one.kind in world.kinds and one.judged:
            found[one.kind, one.few].append(one)
    rows = []
    for few, name in ((False, "caught"), (True, "caught_few")):
        slashable = [
            one
            for (kind, part), group in found.items()
            if part is few and world.kinds[kind].reason.outcome is Outcome.REJECTED
            for one in group
        ]
        caught = [one for one in slashable if one.caught_at is not None]
        late = sorted(
            one.caught_at - one.first_lease
            for one in caught
            if one.caught_at is not None and one.first_lease is not None
        )
        files = sorted(one.judged for one in caught)
        share = len(caught) / max(1, len(slashable))
        what = "that lie in a quarter of the rows" if few else "that lie in every row"
        rows += [
            Row(f"{name}", share, f"of {len(slashable)} liars {what}, by lies that devnets found",
                better="higher"),
            Row(f"{name}_file_median", _at(files, 0.5), "files until caught"),
            Row(f"{name}_file_p95", _at(files, 0.95), "files until caught"),
            Row(f"{name}_hours_median", _at(late, 0.5) / HOUR, "h from its first lease"),
            Row(f"{name}_hours_p95", _at(late, 0.95) / HOUR, "h from its first lease"),
        ]  # fmt: skip
    unseen = [
        one for (kind, _), group in found.items() if not world.kinds[kind].rate for one in group
    ]
    rows.append(
        Row("unseen", len(unseen), f"liars by lies that no single file shows, "
            f"{sum(one.caught_at is not None for one in unseen)} caught")
    )  # fmt: skip
    honest = [one for one in world.people if not one.kind]
    rows.append(
        Row("honest_caught", sum(one.caught_at is not None for one in honest), "honest nodes", 0)
    )
    return rows


def _validators(world: World) -> list[Row]:
    waits = sorted(world.waits)
    judged = sum(world.outcomes.values())
    made = sum(one.made for one in world.people)
    return [
        Row("opinions_per_file", world.opinions / max(1, judged), "opinions"),
        Row("replayed", world.replayed / max(1, made), "of the tokens handed in"),
        Row("replay_cost", world.replayed / max(1, made) / world.ratio, "of the compute of making "
            "the files"),
        Row("validators_busy", world.busy / len(world.servers) / world.now,
            f"of {len(world.servers)} validators as fast as {VALIDATOR_SPEED:g} median nodes"),
        Row("verdict_wait_p95_s", _at(waits, 0.95), "s in the queue"),
    ]  # fmt: skip


def _pay(world: World) -> list[Row]:
    paid = pay(world)
    with world.pool.backend.store.read() as connection:
        classes = {row.address: row.speed_class for row in nodes.every(connection)}
    rows = []
    for number in sorted(set(classes.values())):
        group = [one for one in world.people if not one.kind and classes[one.address] == number]
        made = sum(one.spent * one.rate for one in group)
        earned = sum(paid.amounts.get(one.address, 0) for one in group)
        rows.append(
            Row(f"pay_class{number}", earned / max(1.0, made), f"of the price, by token that the "
                f"{len(group)} honest nodes of the class made", better="higher")
        )  # fmt: skip
    honest = [one for one in world.people if not one.kind and one.first_on is not None]
    rows.append(
        Row(
            "pay_honest",
            _hourly(honest, paid, world),
            "tokens paid for an hour on, all honest nodes",
        )
    )
    hourly = {}
    for kind in (DROPPER, PICKY, *sorted(world.kinds)):
        group = [one for one in world.people if one.kind == kind and not one.few]
        if any(one.first_on is not None for one in group):
            hourly[kind] = _hourly(group, paid, world)
    found = {kind: gain for kind, gain in hourly.items() if _found(world, kind)}
    most = max(found, key=lambda kind: found[kind], default="")
    rows.append(
        Row("pay_cheat_most", found.get(most, 0.0), f"the same, less slashes, by the best paid lie "
            f"that devnets found: {most or 'none'}", bar=0 if len(world.people) > 5_000 else None)
    )  # fmt: skip
    some = [one for one in world.people if one.few and (world.kinds[one.kind].row or 0) >= 0.5]
    rows.append(
        Row("pay_cheat_few", _hourly(some, paid, world), "the same, by liars in a quarter of the "
            "rows whose rows are caught alone half of the time or more",
            bar=0 if len(world.people) > 5_000 else None)
    )  # fmt: skip
    rows += [
        Row(f"pay_{kind}", gain, "the same")
        for kind, gain in hourly.items()
        if not _found(world, kind)
    ]
    return rows


def _found(world: World, kind: str) -> bool:
    """Whether devnets found this lie."""
    return kind in world.kinds and world.kinds[kind].rate > 0


def _hourly(group: list[Person], paid: Paid, world: World) -> float:
    """Pay less slashes for an hour in which a node is on, over the group."""
    on = sum(off - at for one in group for at, off in one.hours)
    lost = sum(world.run.slash_amount for one in group if one.address in paid.slashed)
    return HOUR * (sum(paid.amounts.get(one.address, 0) for one in group) - lost) / max(1.0, on)


def _at(values: list[Any], share: float) -> float:
    return float(values[min(len(values) - 1, int(share * len(values)))]) if values else 0.0
