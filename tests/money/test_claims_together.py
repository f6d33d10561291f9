"""Claims of several validators share transactions, and those that find nothing wait for work."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
import sqlalchemy as sa
from judges import Bench, bench
from money_kit import NODE as HONEST
from money_kit import VALIDATOR, ManagerSide, key

from prime_core.errors import PolicyError, PrimeError, UnavailableError
from prime_core.ids import Address, Digest
from prime_core.storage.base import digest_key
from prime_core.storage.directory import DirectoryStore
from prime_core.validator_messages import ClaimAnswer, ClaimRequest
from prime_core.verdict import Reason
from prime_orchestrator.api import held, validators
from prime_orchestrator.api.held import HeldClaims
from prime_orchestrator.manager.draws import DrawBoard
from prime_orchestrator.store import jobs, leases

SECOND, THIRD, STRANGER = key(70), key(71), key(72)
WISH = ClaimRequest(worker="kit", most=4)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store_url(request: pytest.FixtureRequest) -> str | None:
    return request.getfixturevalue("empty_postgres") if request.param == "postgres" else None


@pytest.fixture
def crowd(mgr: ManagerSide) -> list[Bench]:
    """Three validators that asked for work."""
    others = [bench(mgr.backend, one, mgr.folder, seed=at) for at, one in ((2, SECOND), (3, THIRD))]
    found = [mgr.bench, *others]
    assert all(one.claim() is None for one in found)
    return found


def claims(mgr: ManagerSide, *asked: tuple[Address, int]) -> list[ClaimAnswer | PrimeError]:
    wishes = [(account, ClaimRequest(worker="kit", most=most)) for account, most in asked]
    return validators.claim_all(mgr.backend, wishes)


def files(answer: ClaimAnswer | PrimeError) -> list[Digest]:
    assert isinstance(answer, ClaimAnswer)
    return [Digest(job.submission_digest) for job in answer.jobs]


def holders(mgr: ManagerSide, digests: list[Digest]) -> dict[Digest, set[Address]]:
    """Who was assigned each file."""
    with mgr.store.read() as connection:
        found = jobs.assignments_among(connection, digests)
    return {digest: {row.validator for row in rows} for digest, rows in found.items()}


def test_each_validator_gets_its_own_files_and_a_stranger_none(
    mgr: ManagerSide, crowd: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validators, "AGAIN_ONE_IN", 1 << 255)
    names = [one.signer.address for one in crowd]
    known = [mgr.submit(HONEST).digest for _ in range(12)]
    asked = [(names[0], 64), (STRANGER.address, 64), (names[1], 64), (names[2], 64)]
    first, refused, *others = claims(mgr, *asked)
    assert isinstance(refused, PolicyError)
    given = {name: files(one) for name, one in zip(names, (first, *others), strict=True)}
    assert sorted(digest for some in given.values() for digest in some) == sorted(known)
    drawn = holders(mgr, known)
    for name, some in given.items():
        assert all(drawn[digest] == {name} for digest in some), "as the lot has it"
        assert some == [digest for digest in known if digest in some], "oldest first"
    assert all(files(one) == [] for one in claims(mgr, *((name, 9) for name in names)))


def test_two_workers_of_one_validator_share_its_files(mgr: ManagerSide) -> None:
    name = VALIDATOR.address
    assert mgr.bench.claim() is None
    known = [mgr.submit(HONEST).digest for _ in range(6)]
    found = [files(one) for one in claims(mgr, (name, 1), (name, 3), (name, 9))]
    assert found == [known[:1], known[1:4], known[4:]]


def test_what_is_due_is_shown_to_its_author_alone(
    mgr: ManagerSide, crowd: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validators, "AGAIN_ONE_IN", 1)
    digest = mgr.submit(HONEST).digest
    given = claims(mgr, *((one.signer.address, 1) for one in crowd))
    judging = [one for one, answer in zip(crowd, given, strict=True) if files(answer)]
    assert len(judging) == 2, "it is judged twice"
    for one, answer in zip(crowd, given, strict=True):
        assert isinstance(answer, ClaimAnswer)
        for job in answer.jobs:
            one.seal(one.opinion(job, Reason.NONE, mgr.table_rows()))
    again = claims(mgr, *((one.signer.address, 1) for one in crowd))
    for one, answer in zip(crowd, again, strict=True):
        assert isinstance(answer, ClaimAnswer)
        assert answer.reveal == ((digest,) if one in judging else ())


class Gone(DirectoryStore):
    """An object store that does not answer."""

    def size(self, key: str) -> int:
        raise UnavailableError("the store does not answer")


def test_an_outage_of_the_object_store_costs_no_claim(mgr: ManagerSide, crowd: list[Bench]) -> None:
    digest = mgr.submit(HONEST).digest
    gone = replace(mgr.backend, objects=Gone(mgr.folder / "objects", mgr.audience, b"s" * 32))
    asked = [(one.signer.address, WISH) for one in crowd]
    with pytest.raises(UnavailableError):
        validators.claim_all(gone, asked)
    mgr.now.time += validators.LOST_SECONDS
    found = [name for answer in validators.claim_all(mgr.backend, asked) for name in files(answer)]
    assert found == [digest]
    with mgr.store.read() as connection:
        (row,) = jobs.assignments(connection, digest)
    assert (row.status, row.attempts) == ("claimed", 0)


def test_a_damaged_draw_list_holds_up_only_files_whose_leases_name_it(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bad sector, then a restart. One of the files that need the list is assigned already, and
    the others are more than a claim looks at."""
    monkeypatch.setattr(validators, "AGAIN_ONE_IN", 1 << 255)
    monkeypatch.setattr(validators, "ROOM", 2)
    monkeypatch.setattr(validators, "_reach", lambda callers: 2)

    def judge(most: int) -> list[Digest]:
        (answer,) = claims(mgr, (VALIDATOR.address, most))
        assert isinstance(answer, ClaimAnswer)
        for job in answer.jobs:
            mgr.bench.say(job, Reason.NONE, mgr.table_rows())
        return files(answer)

    assert mgr.bench.claim() is None
    first, *old = [mgr.submit(HONEST) for _ in range(5)]
    assert judge(1) == [first.digest]
    bench(mgr.backend, SECOND, mgr.folder, seed=2)  # new leases name another list
    new = [mgr.submit(HONEST).digest for _ in range(2)]
    with mgr.store.read() as connection:
        promise = leases.get(connection, first.lease_digest)
    assert promise is not None
    opening = promise.signed().opening
    assert opening is not None
    place = mgr.folder / "objects" / digest_key(opening.draws)
    whole = place.read_bytes()
    place.write_bytes(whole[:-1] + b" ")
    mgr.board = DrawBoard(random.Random(6).randbytes)
    assert sorted(digest for _ in range(6) for digest in judge(9)) == sorted(new)
    (said,) = [row.message for row in caplog.records if opening.draws in row.message]
    assert said.startswith(f"draw list {opening.draws} cannot be read")
    place.write_bytes(whole)
    mgr.now.time += validators.LOST_SECONDS
    found = {digest for _ in range(6) for digest in judge(9)}
    assert found == {row.digest for row in old}


def test_a_file_that_no_live_validator_can_judge_is_written_about_only_when_something_changed(
    mgr: ManagerSide, crowd: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validators, "AGAIN_ONE_IN", 1)
    first, second, other = (one.signer.address for one in crowd)
    written: list[str] = []

    @sa.event.listens_for(mgr.store.engine, "before_cursor_execute")
    def note(_: object, __: object, statement: str, *___: object) -> None:
        if statement != "BEGIN" and not statement.startswith(("SELECT", "WITH")):
            written.append(statement)

    kept = validators.Unassigned()

    def look(*accounts: Address) -> list[list[Digest]]:
        """What each is given, with what the look wrote in `written`."""
        written.clear()
        asked = [(account, WISH) for account in accounts]
        return [files(one) for one in validators.claim_all(mgr.backend, asked, kept)]

    mgr.now.time += validators.LIVE_SECONDS + 1
    digest = mgr.submit(HONEST).digest
    assert look(first) == [[digest]], "the other that the file needs is away"
    look(first)
    for _ in range(3):
        assert look(first) == [[]]
        assert written == []
    mgr.now.time += validators.SEEN_SECONDS
    assert look(first) == [[]]
    assert written, "the poll is recorded, and the file looked at again"
    assert look(first) == [[]]
    assert written == []
    later = mgr.submit(HONEST).digest
    assert look(first) == [[later]]
    assert look(second) == [[digest, later]]
    assert look(first, second, other) == [[], [], []]


# ── claims that wait ──


async def here() -> bool:
    return False


def counted(mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of claims in each look at the store from now on."""
    looks: list[int] = []
    real = validators.claim_all

    def claim_all(
        backend: object, asked: list[tuple[Address, ClaimRequest]], unassigned: object
    ) -> object:
        looks.append(len(asked))
        return real(mgr.backend, asked)

    monkeypatch.setattr(validators, "claim_all", claim_all)
    return looks


def test_one_opinion_decides_a_file_in_the_end_in_a_busy_pool(
    mgr: ManagerSide, crowd: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validators, "AGAIN_ONE_IN", 1)
    monkeypatch.setattr(validators, "SINGLE_SECONDS", 8.0)
    one, kept = crowd[0], validators.Unassigned()

    def look() -> ClaimAnswer:
        asked = [(one.signer.address, ClaimRequest(worker="kit", most=4))]
        (answer,) = validators.claim_all(mgr.backend, asked, kept)
        assert isinstance(answer, ClaimAnswer)
        return answer

    def needed(digest: Digest) -> int | None:
        with mgr.store.read() as connection:
            found = jobs.get(connection, digest)
        assert found is not None
        return found.needed

    mgr.now.time += validators.LIVE_SECONDS + 1
    waiting = mgr.submit(HONEST).digest
    (job,) = look().jobs
    one.seal(one.opinion(job, Reason.NONE, mgr.table_rows()))
    look()
    assert needed(waiting) == 2
    monkeypatch.setattr(validators, "AGAIN_ONE_IN", 1 << 255)
    for _ in range(8):  # another file every two seconds
        mgr.now.time += 2
        mgr.submit(HONEST)
        for job in look().jobs:
            one.say(job, Reason.NONE, mgr.table_rows())
    assert needed(waiting) == 1


def test_a_claim_waits_for_a_file_and_looks_together_with_others(
    mgr: ManagerSide, crowd: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = counted(mgr, monkeypatch)

    async def walk() -> tuple[Digest, list[ClaimAnswer]]:
        waiting = HeldClaims(mgr.backend, 300)
        asked = [asyncio.create_task(waiting.ask(one.signer.address, WISH, here)) for one in crowd]
        while len(crowd) not in looks[3:]:
            await asyncio.sleep(0.01)
        assert not any(one.done() for one in asked)
        row = await asyncio.to_thread(mgr.submit, HONEST)
        done, others = await asyncio.wait(asked, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        for one in others:
            one.cancel()
        return row.digest, [one.result() for one in done]

    digest, (answer,) = asyncio.run(walk())
    assert files(answer) == [digest]


def test_a_claim_is_answered_in_time_without_a_file(mgr: ManagerSide, crowd: list[Bench]) -> None:
    answer = asyncio.run(HeldClaims(mgr.backend, 0.5).ask(VALIDATOR.address, WISH, here))
    assert (answer.jobs, answer.retry_after_ms) == ((), validators.RETRY_MS)


def test_who_has_gone_gets_no_file(mgr: ManagerSide) -> None:
    assert mgr.bench.claim() is None
    known: list[Digest] = []

    async def gone() -> bool:
        known.append((await asyncio.to_thread(mgr.submit, HONEST)).digest)
        return True

    answer = asyncio.run(HeldClaims(mgr.backend, 300).ask(VALIDATOR.address, WISH, gone))
    assert answer.jobs == ()
    job = mgr.bench.claim()
    assert job is not None
    assert known == [job.submission_digest]


def test_an_account_holds_few_claims(
    mgr: ManagerSide, crowd: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "HELD_EACH", 2)

    async def walk() -> int:
        waiting = HeldClaims(mgr.backend, 300)
        asked = [asyncio.create_task(waiting.ask(VALIDATOR.address, WISH, here)) for _ in range(5)]
        done, others = await asyncio.wait(asked, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 3:
            more, others = await asyncio.wait(
                others, timeout=60, return_when=asyncio.FIRST_COMPLETED
            )
            assert more
            done |= more
        for one in others:
            one.cancel()
        return len(others)

    assert asyncio.run(walk()) == 2


def test_a_stranger_is_refused_at_once(mgr: ManagerSide, crowd: list[Bench]) -> None:
    with pytest.raises(PolicyError, match="not appointed"):
        asyncio.run(HeldClaims(mgr.backend, 300).ask(STRANGER.address, WISH, here))
