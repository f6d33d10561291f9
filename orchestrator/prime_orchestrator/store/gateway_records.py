"""What the gateway remembers: the call that has each place, and the answer to each request.

    places   (lease, group, sample, turn) → the first call and its signature; it is final
    texts    (step, request) → the text that all rows of that step get
    voided   rows that made another call to a place that was taken

Rows older than the retention time are deleted; nothing else depends on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import sqlalchemy as sa

from prime_core.errors import ConflictError
from prime_core.gateway import GatewayAnswer, GatewayCall, Recording
from prime_core.ids import Digest, Signature
from prime_orchestrator.store.engine import Store

_METADATA = sa.MetaData()
_PLACE = ("lease", "group_no", "sample", "turn")
places = sa.Table(
    "places", _METADATA,
    sa.Column("lease", sa.Text, primary_key=True),
    sa.Column("group_no", sa.BigInteger, primary_key=True),
    sa.Column("sample", sa.BigInteger, primary_key=True),
    sa.Column("turn", sa.BigInteger, primary_key=True),
    sa.Column("prefix", sa.Text, nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("request", sa.Text, nullable=False),
    sa.Column("text", sa.Text),
    sa.Column("signature", sa.Text),
    sa.Column("at", sa.Float, nullable=False, index=True),
)  # fmt: skip
texts = sa.Table(
    "texts", _METADATA,
    sa.Column("step", sa.BigInteger, primary_key=True),
    sa.Column("request", sa.Text, primary_key=True),
    sa.Column("tool", sa.Text, nullable=False),
    sa.Column("arguments", sa.Text, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("at", sa.Float, nullable=False, index=True),
)  # fmt: skip
voided = sa.Table(
    "voided", _METADATA,
    sa.Column("lease", sa.Text, primary_key=True),
    sa.Column("group_no", sa.BigInteger, primary_key=True),
    sa.Column("sample", sa.BigInteger, primary_key=True),
    sa.Column("at", sa.Float, nullable=False, index=True),
)  # fmt: skip


class Records:
    """The tables in one store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        with store.begin() as connection:
            _METADATA.create_all(connection)

    def claim(
        self, lease: Digest, step: int, call: GatewayCall, now: float
    ) -> GatewayAnswer | None:
        """Takes the call's place for it; the answer, if the same call got one before.

        Raises ConflictError, and voids the row, if another call has the place; and for every call
        of a voided row.
        """
        row = {"lease": lease, "group_no": call.group, "sample": call.sample}
        place = {**row, "turn": call.turn}
        mine = {"prefix": call.prefix, "step": step, "request": call.request()}
        with self._store.begin() as connection:
            spoiled = connection.execute(sa.select(voided).filter_by(**row)).first() is not None
            found = connection.execute(sa.select(places).filter_by(**place)).mappings().first()
            if found is None and not spoiled:
                connection.execute(places.insert().values(**place, **mine, at=now))
            elif found is not None and not spoiled and any(found[k] != mine[k] for k in mine):
                connection.execute(voided.insert().values(**row, at=now))
                spoiled = True
        if spoiled:
            raise ConflictError("the row made two calls in one place; it gets no more answers")
        if found is None or found["signature"] is None:
            return None
        signature = Signature(found["signature"])
        return GatewayAnswer(turn=call.turn, text=found["text"], signature=signature)

    def answered(self, lease: Digest) -> int:
        """How many of a lease's calls have an answer."""
        query = sa.select(sa.func.count()).select_from(places)
        query = query.where(places.c.lease == lease, places.c.signature.is_not(None))
        with self._store.read() as connection:
            return int(connection.execute(query).scalar_one())

    def of_row(self, lease: Digest, call: GatewayCall) -> list[GatewayAnswer]:
        """The answers that the call's row has so far, by turn."""
        row = {"lease": lease, "group_no": call.group, "sample": call.sample}
        query = sa.select(places).filter_by(**row).where(places.c.signature.is_not(None))
        with self._store.read() as connection:
            return [
                GatewayAnswer(
                    turn=one["turn"], text=one["text"], signature=Signature(one["signature"])
                )
                for one in connection.execute(query.order_by(places.c.turn)).mappings()
            ]

    def text(self, step: int, request: Digest) -> str | None:
        """What the request was answered in that step."""
        query = sa.select(texts.c.text).filter_by(step=step, request=request)
        with self._store.read() as connection:
            found = connection.execute(query).scalar_one_or_none()
        return None if found is None else str(found)

    def keep_text(self, step: int, call: GatewayCall, text: str, now: float) -> None:
        """Records the answer to a request of that step."""
        arguments = json.dumps(call.arguments, ensure_ascii=False, sort_keys=True)
        with self._store.begin() as connection:
            connection.execute(
                texts.insert().values(
                    step=step, request=call.request(), tool=call.tool, arguments=arguments,
                    text=text, at=now,
                )
            )  # fmt: skip

    def keep_answer(self, lease: Digest, call: GatewayCall, answer: GatewayAnswer) -> None:
        """Records the signed answer of a claimed place."""
        update = places.update().where(
            *(
                places.c[name] == value
                for name, value in zip(_PLACE, (lease, *call.place), strict=True)
            )
        )
        with self._store.begin() as connection:
            connection.execute(update.values(text=answer.text, signature=answer.signature))

    def cassette(self) -> Iterator[Recording]:
        """Every recorded answer, by step."""
        with self._store.read() as connection:
            for row in connection.execute(sa.select(texts).order_by(texts.c.step)).mappings():
                yield Recording(
                    step=row["step"],
                    tool=row["tool"],
                    arguments=json.loads(row["arguments"]),
                    text=row["text"],
                )

    def prune(self, before: float) -> int:
        """Deletes what was recorded before that time (Unix seconds); how many rows."""
        with self._store.begin() as connection:
            return sum(
                connection.execute(table.delete().where(table.c.at < before)).rowcount
                for table in (places, texts, voided)
            )
