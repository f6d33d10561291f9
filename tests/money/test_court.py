"""The court from the owner's dispute to the jurors' pay, on a real chain, with real files replayed
from the pool's API."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from programs import keystore, typed

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from anvil_kit import needs_anvil
from chain_kit import World, make_world
from judges import arm
from judging_kit import JudgedPool, read_policy, signed_policy, small_run
from money_kit import TOKEN, key
from served import listen, serving
from walk_kit import HONEST, LIAR, OTHER, OWNER

from prime_chain.contracts import CaseStatus, ProposalState, Vote, commitment_of
from prime_chain.history import read_slashes
from prime_chain.mirror import AnySource, open_sources
from prime_chain.sender import Sender
from prime_core.deployment import DEMO_PERIODS
from prime_core.encoding import sha256
from prime_core.errors import NotFoundError, UnavailableError, UntrustedError
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.messages import SubmissionInfo
from prime_core.signing import LocalSigner
from prime_core.storage.directory import DirectoryStore
from prime_core.task import SignedLease
from prime_core.transport.client import OrchestratorClient
from prime_core.verdict import Reason
from prime_envs.registry import environment_for
from prime_node.cli import main as node_program
from prime_orchestrator.api.app import create_app
from prime_orchestrator.cli.main import main as orchestrator_program
from prime_validator.cli import main as validator_program
from prime_validator.folder import Folder, KeptVote
from prime_validator.juror import AGAIN_SECONDS, Juror, PoolReplays
from prime_validator.settings import JurorSettings
from prime_verify.audit_compare import Audit
from prime_verify.engines import FolderEngines, load_engine
from prime_verify.proofs.thresholds import newest

pytestmark = [needs_anvil, pytest.mark.slow]

PERIODS = DEMO_PERIODS.model_copy(
    update={"validity": 600, "slash_window": 3000, "dispute_window": 1000, "unbonding": 6000}
)
JURORS = [key(40 + number) for number in range(8)]
PROGRAMS = {
    "prime-node": node_program,
    "orchestrator": orchestrator_program,
    "validator": validator_program,
}


@dataclass
class Blind:
    """Replays that find no source of the pool for one submission, or hang while `held` is set."""

    seeing: PoolReplays
    blind: PoolReplays
    leaf: Digest = ZERO_DIGEST
    held: threading.Event | None = None

    def audit(self, leaf: Digest, verification_class: Digest) -> Audit:
        if self.held is not None:
            self.held.wait(300)
        replays = self.blind if leaf == self.leaf else self.seeing
        return replays.audit(leaf, verification_class)


@dataclass
class CourtHouse:
    """A pool whose validator judges real files, its API, and eight jurors."""

    world: World
    pool: JudgedPool
    url: str
    folder: Path
    jurors: dict[str, Juror]
    replays: dict[str, Blind]

    def typed(self, *words: str, who: LocalSigner | None = None) -> tuple[int, str, str]:
        """Exit status, standard output and standard error of one command."""
        flags = ["--rpc", self.world.anvil.url, "--deployment", str(self.folder / "place.json")]
        if who is not None:
            flags += ["--wallet", str(keystore(self.folder, who))]
            flags += ["--password-file", str(self.folder / "password")]
        return typed(PROGRAMS[words[0]], *words, *flags)

    def __call__(self, *words: str, who: LocalSigner | None = None) -> Any:
        """JSON of a command that must succeed."""
        status, out, said = self.typed(*words, "--json", who=who)
        assert status == 0, said
        return json.loads(out)

    def dispute(self, leaf: Digest, owner: LocalSigner) -> str:
        """Disputes by the owner's command; what it says of the judge."""
        data = str(self.folder / f"data-{owner.address}")
        flags = ("--orchestrator", self.url, "--data", data)
        status, _, said = self.typed("prime-node", "dispute", leaf, *flags, who=owner)
        assert status == 0, said
        return said

    def accused(self) -> Digest:
        """An honest file that the validator rejects all the same."""
        validator = self.pool.validator
        row = self.world.mgr.submit(HONEST, make=self.pool.honest)
        job = validator.claim()
        assert job is not None
        assert job.submission_digest == row.digest
        validator.say(job, Reason.WRONG_SAMPLING)
        return row.digest

    def drawn(self, leaf: Digest) -> tuple[str, ...]:
        case = self.world.contracts.court.case_of(leaf)
        assert case is not None
        return case.jurors

    def state(self, leaf: Digest) -> ProposalState:
        found = self.world.contracts.slasher.proposal(leaf)
        assert found is not None
        return found.state

    def tick(self) -> None:
        """Every juror looks at the chain until it has no replay left to do, and blocks go on."""
        for who, juror in self.jurors.items():
            juror.tick()
            while juror._running and self.replays[who].held is None:
                wait([one.result for one in juror._running.values()], 120)
                juror.tick()
        self.world.anvil.mine(2)

    def until_drawn(self, *leaves: Digest) -> None:
        for _ in range(6):
            if all(self.drawn(leaf) for leaf in leaves):
                return
            self.tick()
        raise AssertionError("not drawn")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CourtHouse]:
    import torch

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("court")
    named = {"calibration": newest().digest()}  # for whose class jurors register by default
    run = small_run().model_copy(update={"validity_seconds": PERIODS.validity, **named})
    world = make_world(folder, run, PERIODS)
    listener, url = listen()
    mgr, deployment = world.mgr, world.deployment
    mgr.audience, mgr.objects = url, DirectoryStore(folder / "objects", url, b"s" * 32)
    deployment.save(folder / "place.json")
    (folder / "password").write_text("secret")

    policies = signed_policy(folder / "court" / "1", deployment=deployment)
    engines = FolderEngines(policies, load_engine)
    validator = arm(mgr.bench, policies, engines, newest())
    pool = JudgedPool(mgr, environment_for(run), engines, validator, policies)
    house = CourtHouse(world, pool, url, folder, {}, {})
    try:
        with serving(create_app(mgr.backend), listener):
            for number, signer in enumerate(JURORS):
                world.sender(signer)
                world.send(signer, world.contracts.token.faucet())
                if number == 0:
                    made = house("validator", "juror", "register", who=signer)
                    assert made["bond"] == str(world.contracts.court.juror_bond())
                else:
                    court, token = world.contracts.court, world.contracts.token
                    world.send(signer, token.approve(court.address, court.juror_bond()))
                    world.send(signer, court.register(newest().digest()))
                settings = JurorSettings(
                    rpc=(world.anvil.url,), data=folder, orchestrator=(url,), threads=1
                )
                seeing, blind = (
                    PoolReplays(one, world.client, deployment, signer, load_engine, now=mgr.now)
                    for one in (settings, settings.model_copy(update={"orchestrator": ()}))
                )
                replays = Blind(seeing, blind)
                house.replays[signer.address] = replays
                house.jurors[signer.address] = Juror(
                    world.contracts,
                    world.sender(signer),
                    Folder(folder / signer.address),
                    replays,
                    lambda size: b"s" * size,
                )
            world.join(HONEST, OWNER)
            world.join(LIAR, OTHER)
            mgr.add_policy(read_policy(policies))
            world.ticks(2)
            mgr.now.time = float(world.client.block("latest").time)  # leases after the jurors came
            yield house
    finally:
        for juror in house.jurors.values():
            juror.folder.close()
        validator.close()
        world.close()


def test_jurors_clear_the_honest_confirm_the_liar_abstain_without_result_and_lapse_in_silence(
    house: CourtHouse,
) -> None:
    world, court = house.world, house.world.contracts.court
    cleared, abstained, silent, late = (house.accused() for _ in range(4))
    lied = world.mgr.submit(LIAR, make=house.pool.forged).digest
    assert house.pool.validator.judge_next() == lied
    world.until_rooted()
    for leaf in (cleared, abstained, silent, lied):
        assert house.state(leaf) is ProposalState.PROPOSED
    for leaf, owner in ((cleared, OWNER), (abstained, OWNER), (lied, OTHER)):
        assert "three jurors of the court judge" in house.dispute(leaf, owner)
        assert house.state(leaf) is ProposalState.DISPUTED
    for replays in house.replays.values():
        replays.leaf = abstained
    slow = UnavailableError("not confirmed in time")
    with patch.object(Sender, "send_and_wait", side_effect=slow) as sent:
        house.jurors[JURORS[0].address].tick()
    assert sent.call_count == 3, "one that is late stops no other case"
    house.until_drawn(cleared, abstained, lied)
    with pytest.raises(UntrustedError, match="another class"):
        house.replays[JURORS[0].address].seeing.audit(lied, sha256(b"looser"))
    blind = house.drawn(abstained)[0]
    for who, replays in house.replays.items():
        replays.leaf = abstained if who == blind else ZERO_DIGEST
    world.forward(AGAIN_SECONDS)  # those that see try again
    house.tick()
    status = ("validator", "juror", "status", house.drawn(cleared)[0])
    shown = house(*status)
    assert shown["registered"] is True
    assert {"leaf": cleared, "committed": True, "vote": "none"}.items() <= next(
        one for one in shown["cases"] if one["leaf"] == cleared
    ).items()
    assert court.ballot_of(abstained, blind).commitment == ZERO_DIGEST  # type: ignore[arg-type]
    case = court.case_of(abstained)
    assert case is not None
    held = house.replays[blind].held = threading.Event()
    world.forward(AGAIN_SECONDS)
    house.tick()  # it tries again, and hangs
    assert abstained in house.jurors[blind]._running
    assert house.jurors[blind].folder.vote(abstained) is None
    world.forward(case.reveal_from - world.client.block("latest").time - 100)
    house.tick()  # too late to wait for it: it commits to an abstention
    assert house.jurors[blind].folder.vote(abstained) is not None
    house.replays[blind].held = None
    held.set()
    world.forward(110)
    for _ in range(3):  # reveal, settle, collect
        house.tick()
    assert house.state(cleared) is ProposalState.CANCELLED
    assert house.state(abstained) is ProposalState.CANCELLED, "two of three decide"
    assert house.state(lied) is ProposalState.EXECUTED
    assert court.ballot_of(abstained, blind).vote is Vote.ABSTAIN  # type: ignore[arg-type]

    for juror in JURORS:
        account = court.juror_of(newest().digest(), juror.address)
        assert (account.seated, account.bond) == (True, court.juror_bond()), "no one is struck"
    deposit = world.contracts.slasher.dispute_deposit()
    earned = [world.contracts.token.balance_of(one) for one in house.drawn(lied)]  # type: ignore[arg-type]
    assert sum(earned) == 3 * (10_000 * TOKEN - court.juror_bond()) + deposit, "collected"
    listed = {one.leaf: one for one in read_slashes(world.client, world.deployment)}
    assert dict(listed[abstained].jurors)[blind] == "abstain"  # type: ignore[index]
    shown = house("orchestrator", "slash", "list", "--pool", "1")
    assert {one["leaf"]: one["court"] for one in shown} == {
        cleared: "settled", abstained: "drawn", lied: "settled", silent: "",
        late: "",
    }  # fmt: skip
    said = house.typed("prime-node", "audit", "list", "--pool", "1", "--data", str(house.folder))[1]
    assert "court: settled" in said
    assert " confirm" in said

    house.dispute(silent, OWNER)
    house.until_drawn(silent)
    case = court.case_of(silent)
    assert case is not None
    for juror in house.jurors.values():
        juror._open.pop(silent)  # no one's program runs
    world.forward(case.reveal_until - world.client.block("latest").time + 1)
    for juror in house.jurors.values():
        juror._next = -1  # they start again, too late
        juror.tick()
    assert house.state(silent) is ProposalState.CANCELLED
    case = court.case_of(silent)
    assert case is not None
    assert case.status is CaseStatus.SETTLED
    struck = house("validator", "juror", "status", case.jurors[0])
    assert struck["registered"] is False
    assert int(struck["bond"]) == court.juror_bond() * 9 // 10

    account = court.juror_of(newest().digest(), blind)  # type: ignore[arg-type]
    assert account.bond == court.juror_bond() * (9 if blind in case.jurors else 10) // 10
    case = court.case_of(abstained)
    assert case is not None
    assert case.status is CaseStatus.SETTLED, "once its time was over"
    case = court.case_of(silent)
    assert case is not None

    # five jurors are left: the arbiter judges
    stayed = next(one for one in JURORS if one.address not in case.jurors)
    house("validator", "juror", "leave", who=stayed)
    taken = house("validator", "juror", "withdraw", who=stayed)
    assert taken["withdrawn"] == str(court.juror_bond())
    assert "the arbiter judges, and not the court: 4 jurors count" in house.dispute(late, OWNER)
    assert house.state(late) is ProposalState.DISPUTED
    assert court.case_of(late) is None


def test_a_vote_is_kept_before_it_is_committed_and_never_replaced(tmp_path: Path) -> None:
    folder, leaf, zero = Folder(tmp_path), sha256(b"leaf"), ZERO_DIGEST
    first = folder.keep_vote(KeptVote(leaf, Vote.CONFIRM, sha256(b"one"), sha256(b"salt"), "same"))
    again = folder.keep_vote(KeptVote(leaf, Vote.OVERTURN, sha256(b"two"), sha256(b"t"), "other"))
    assert again == first
    folder.close()
    reopened = Folder(tmp_path)
    assert reopened.vote(leaf) == first
    assert reopened.vote(zero) is None
    reopened.close()


def test_the_commitment_is_the_contracts(house: CourtHouse) -> None:
    court, who = house.world.contracts.court, JURORS[0].address
    for vote in Vote:
        words = (sha256(b"leaf"), who, vote, sha256(b"digest"), sha256(b"salt"))
        (on_chain,) = court.read("commitmentOf", *words)
        assert commitment_of(*words) == on_chain


@dataclass
class Served:
    """A source that always answers the same."""

    answer: bytes | Exception

    def object(self, digest: Digest, limit: int) -> bytes:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def run(self, digest: Digest) -> bytes:
        return self.object(digest, 0)

    def lease(self, digest: Digest) -> SignedLease:
        raise NotFoundError("not asked here")

    def submission(self, digest: Digest) -> SubmissionInfo:
        raise NotFoundError("not asked here")


def test_a_source_that_lies_counts_as_one_that_does_not_answer() -> None:
    """So that no source turns a juror's vote."""
    lying, lacking = Served(UntrustedError("not that object")), Served(NotFoundError("none"))
    assert AnySource([lying, lacking, Served(b"it")]).object(ZERO_DIGEST, 9) == b"it"
    with pytest.raises(UnavailableError):
        AnySource([lying, lacking]).object(ZERO_DIGEST, 9)
    with pytest.raises(NotFoundError):
        AnySource([lacking, lacking]).object(ZERO_DIGEST, 9)
    with pytest.raises(UnavailableError, match="no source"):
        AnySource([]).object(ZERO_DIGEST, 9)


def test_a_private_address_that_was_named_on_chain_is_not_asked(house: CourtHouse) -> None:
    deployment = house.world.deployment
    with open_sources([], [house.url], deployment, 1) as found:
        assert found == []
    with open_sources([house.url], [house.url], deployment, 1) as found:
        assert [one.base_url for one in found] == [house.url]
    with open_sources([house.url], [], deployment, 2) as found:
        assert found == [], "it serves another pool"


@contextlib.contextmanager
def dripping(head: bytes) -> Iterator[tuple[str, threading.Event]]:
    """A server that answers with `head` and then 20 bytes a second, for 20 s; the event is set once
    it sent all."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended, stop = threading.Event(), threading.Event()

    def serve() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as asked:
            asked.sendall(head)
            for _ in range(400):
                asked.sendall(b"x")
                if stop.wait(0.05):
                    return
            ended.set()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", ended
    finally:
        stop.set()
        thread.join(60)
        listener.close()


def test_a_source_that_drips_its_answer_is_given_up(
    house: CourtHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    with dripping(head) as (url, ended), OrchestratorClient(url, timeout=1) as client:
        with pytest.raises(UnavailableError, match="bytes came in"):
            client.pool()
        assert not ended.is_set()
    monkeypatch.setattr("prime_chain.mirror.SOURCE_SECONDS", 2.0)
    urls, place = [house.url], house.world.deployment
    with dripping(b"HTTP/1.1 200 OK\r\nX-Endless: ") as (url, ended):  # the head has no end
        with open_sources(urls, [url], place, 1, allow_private=True) as found:
            assert [one.base_url for one in found] == urls
        assert not ended.is_set()


def test_the_jurors_program_starts_and_ends_on_a_signal(house: CourtHouse) -> None:
    signer = JURORS[1]
    house("validator", "juror", "status", signer.address)
    command = [
        *(sys.executable, "-m", "prime_validator.cli", "juror", "run", "--orchestrator", house.url),
        *("--rpc", house.world.anvil.url, "--deployment", str(house.folder / "place.json")),
        *("--wallet", str(keystore(house.folder, signer))),
        *("--password-file", str(house.folder / "password")),
        *("--data", str(house.folder / "program"), "--threads", "1"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            overdue = threading.Timer(120, program.kill)  # ends the line that is waited for
            overdue.start()
            line = program.stdout.readline()
            overdue.cancel()
            assert json.loads(line)["juror"] == signer.address
            program.send_signal(signal.SIGTERM)
            assert program.wait(120) == 0
        finally:
            program.kill()
