"""Commitments to draws: the validators', and the manager's second secrets."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.draws import SignedDrawCommitment
from prime_core.errors import FatalError
from prime_core.ids import Address, Digest
from prime_core.messages import DrawInfo
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import insert_new

_commitments = schema.draw_commitments.c
_second = schema.second_secrets.c


def add(connection: Connection, signed: SignedDrawCommitment) -> bool:
    """Writes a commitment; returns False if its validator has one for the epoch."""
    values = {
        "validator": signed.validator,
        "epoch": signed.commitment.epoch,
        "body": signed.model_dump_json(),
        "revealed": False,
    }
    return insert_new(connection, schema.draw_commitments, values)


def get(connection: Connection, validator: Address, epoch: int) -> SignedDrawCommitment | None:
    """Returns a validator's commitment for an epoch, or None."""
    mine = (_commitments.validator == validator, _commitments.epoch == epoch)
    body = connection.execute(sa.select(_commitments.body).where(*mine)).scalar()
    return None if body is None else SignedDrawCommitment.model_validate_json(body)


def set_revealed(connection: Connection, validator: Address, epoch: int) -> None:
    """Records that a validator's secret for an epoch is published."""
    mine = (_commitments.validator == validator, _commitments.epoch == epoch)
    connection.execute(sa.update(schema.draw_commitments).where(*mine).values(revealed=True))


def uncompared(connection: Connection, limit: int) -> list[SignedDrawCommitment]:
    """Returns at most `limit` commitments, oldest first, with which no acceptance was compared and
    whose secrets are published, as is the manager's of the same epoch."""
    hidden = sa.select(_second.epoch).where(
        _second.epoch == _commitments.epoch, _second.revealed.is_(False)
    )
    waiting = (_commitments.compared.is_(None), _commitments.revealed.is_(True), ~hidden.exists())
    query = sa.select(_commitments.body).where(*waiting)
    query = query.order_by(_commitments.epoch, _commitments.validator).limit(limit)
    bodies = connection.execute(query).scalars()
    return [SignedDrawCommitment.model_validate_json(body) for body in bodies]


def set_compared(connection: Connection, validator: Address, epoch: int, mismatch: str) -> None:
    """Records the comparison of acceptances with a secret, unless one is recorded. `mismatch`: the
    first difference, or an empty text."""
    mine = (_commitments.validator == validator, _commitments.epoch == epoch)
    changed = sa.update(schema.draw_commitments).where(*mine, _commitments.compared.is_(None))
    connection.execute(changed.values(compared=mismatch))


def note_accepted(connection: Connection, drawn: Collection[tuple[Address, int]]) -> None:
    """Records that these validators accepted files of leases of these epochs."""
    for validator, epoch in sorted(drawn):
        mine = (_commitments.validator == validator, _commitments.epoch == epoch)
        changed = sa.update(schema.draw_commitments).where(*mine, _commitments.accepted.is_(False))
        connection.execute(changed.values(accepted=True))


def hidden(
    connection: Connection, before: int, *, of: Address | None = None
) -> list[tuple[Address, int, bool]]:
    """Returns (validator, epoch, whether the validator accepted files of it) of each secret of an
    epoch before `before` that is not published, oldest first; with `of`, those of one
    validator."""
    late = [
        _commitments.compared.is_(None),
        _commitments.revealed.is_(False),
        _commitments.epoch < before,
    ]
    if of is not None:
        late.append(_commitments.validator == of)
    columns = (_commitments.validator, _commitments.epoch, _commitments.accepted)
    query = sa.select(*columns).where(*late)
    found = connection.execute(query.order_by(_commitments.epoch, _commitments.validator))
    return [(Address(validator), int(epoch), accepted) for validator, epoch, accepted in found]


def mismatches(connection: Connection) -> list[tuple[Address, int, str]]:
    """Returns (validator, epoch, first difference) of each secret that is contradicted."""
    query = sa.select(_commitments.validator, _commitments.epoch, _commitments.compared)
    found = connection.execute(
        query.where(_commitments.compared != "").order_by(_commitments.epoch)
    )
    return [(Address(validator), int(epoch), why) for validator, epoch, why in found]


def of_epoch(connection: Connection, epoch: int, limit: int) -> list[SignedDrawCommitment]:
    """Returns at most `limit` commitments for an epoch."""
    query = sa.select(_commitments.body).where(_commitments.epoch == epoch)
    query = query.order_by(_commitments.validator).limit(limit)
    bodies = connection.execute(query).scalars()
    return [SignedDrawCommitment.model_validate_json(body) for body in bodies]


def listing(connection: Connection, limit: int = 256) -> list[DrawInfo]:
    """Returns the newest commitments, latest epoch first, and whether their secrets are
    published."""
    query = sa.select(_commitments.body, _commitments.revealed)
    query = query.order_by(_commitments.epoch.desc(), _commitments.validator).limit(limit)
    return [
        DrawInfo(signed=SignedDrawCommitment.model_validate_json(body), revealed=revealed)
        for body, revealed in connection.execute(query)
    ]


# ── the manager's second secrets ──


def second(connection: Connection, epoch: int, secret: Digest, commitment: Digest) -> Digest:
    """Returns the manager's commitment for an epoch; writes this one if there is none."""
    values = {"epoch": epoch, "commitment": commitment, "secret": secret, "revealed": False}
    insert_new(connection, schema.second_secrets, values)
    query = sa.select(_second.commitment).where(_second.epoch == epoch)
    return Digest(connection.execute(query).scalar_one())


def second_secret(connection: Connection, commitment: Digest) -> Digest:
    """Returns the manager's secret for a list's `second`. Raises FatalError if it is not there."""
    query = sa.select(_second.secret).where(_second.commitment == commitment)
    secret = connection.execute(query).scalar()
    if secret is None:
        raise FatalError("the store has lost the manager's second secret of a lease")
    return Digest(secret)


def unrevealed_seconds(connection: Connection) -> list[tuple[int, Digest]]:
    """Returns (epoch, secret) of the manager's secrets that are not published."""
    query = sa.select(_second.epoch, _second.secret).where(_second.revealed.is_(False))
    return [(int(epoch), Digest(secret)) for epoch, secret in connection.execute(query)]


def set_second_revealed(connection: Connection, epoch: int) -> None:
    """Records that the manager's secret for an epoch is published."""
    mine = _second.epoch == epoch
    connection.execute(sa.update(schema.second_secrets).where(mine).values(revealed=True))
