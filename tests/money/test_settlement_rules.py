"""Settlement as a pure function: cumulative never decreases, sums agree, forfeits hold, order is
irrelevant, every leaf ends in exactly one final state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from weakref import WeakSet

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from money_kit import FAKE_DEPLOYMENT

from prime_chain.events import RewardRootPosted
from prime_chain.mirror import Mirror
from prime_chain.rewards import MAX_OBJECT_BYTES
from prime_core.encoding import canonical_json, merkle_verify, reward_leaf, sha256
from prime_core.errors import MalformedError
from prime_core.ids import ZERO_DIGEST, Address, Digest, Signature, address
from prime_core.settlement import (
    BURN_ADDRESS,
    FORFEIT_SECONDS,
    PAGE_FILES,
    JudgedFact,
    LeafFact,
    OwnVerdict,
    RestoredFact,
    SettledFile,
    Settlement,
    SettlementPage,
    SlashFact,
    SlashState,
    answered_for,
    is_full,
    judged_fact,
    load_settlement,
    parse_settlement,
    settle,
)
from prime_core.verdict import Law, Opinion, Outcome, SignedOpinion, Verdict

NODES: list[Address] = [address("0x" + f"{i + 1:040x}") for i in range(3)]
JUDGES = (address("0x" + "a1" * 20), address("0x" + "a2" * 20))
RECEIPT = Signature("0x" + "11" * 65)
DAY = FORFEIT_SECONDS


def name(index: int) -> Digest:
    return sha256(f"submission {index}".encode())


def leaf(index: int, node: int = 0, received_at: int = 1000, **changes: object) -> LeafFact:
    judged = JudgedFact(name(1000 + index), name(2000 + index), Outcome.ACCEPTED, 10, 1005)
    fact = LeafFact(name(index), NODES[node], 0, 2000, received_at, RECEIPT, judged, price=7)
    return fact._replace(**changes)  # type: ignore[arg-type]


def run(
    leaves: list[LeafFact],
    slashes: list[SlashFact] | None = None,
    previous: Settlement | None = None,
    epoch: int = 0,
    as_of_block: int = 5,
    restored: Sequence[RestoredFact] = (),
) -> Settlement:
    return settle(
        chain_id=31337,
        pool=1,
        epoch=epoch,
        as_of_block=as_of_block,
        restored=restored,
        previous=previous,
        previous_name=previous.digest() if previous else ZERO_DIGEST,
        leaves=leaves,
        slashes=slashes or [],
    )


def state_of(settlement: Settlement, index: int) -> str:
    return next(f.state for f in settlement.files if f.submission_digest == name(index))


outcomes = st.sampled_from([Outcome.ACCEPTED, Outcome.ACCEPTED, Outcome.REJECTED, Outcome.VOID])


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[list[LeafFact]], list[SlashFact]]:
    """Three epochs of leaves, and slashes over some of their nodes."""
    epochs = []
    index = 0
    for _ in range(3):
        leaves = []
        for _ in range(draw(st.integers(0, 6))):
            judged = (
                JudgedFact(
                    name(1000 + index),
                    name(2000 + index),
                    draw(outcomes),
                    draw(st.integers(0, 500)),
                    draw(st.integers(0, 4000)),
                    JUDGES[: draw(st.integers(0, 2))],
                )
                if draw(st.booleans())
                else None
            )
            received = draw(st.integers(0, 3 * DAY))
            leaves.append(
                leaf(index, draw(st.integers(0, 2)), received, judged=judged, judge_price=5)
            )
            index += 1
        epochs.append(leaves)
    slashes = [
        SlashFact(
            name(5000 + i),
            NODES[draw(st.integers(0, 2))],
            draw(st.integers(0, 3 * DAY)),
            RECEIPT,
            draw(st.sampled_from(["open", "executed", "cancelled"])),
        )
        for i in range(draw(st.integers(0, 4)))
    ]
    return epochs, slashes


@given(histories(), st.randoms())
def test_amounts_never_shrink_and_equal_what_the_paid_and_forfeited_files_earned(
    history: tuple[list[list[LeafFact]], list[SlashFact]], shuffle: random.Random
) -> None:
    """With validators' fees and restored files. What is forfeited is burned, each file once."""
    epochs, slashes = history
    previous: Settlement | None = None
    paid: dict[Address, int] = {}
    final: list[Digest] = []
    held: list[LeafFact] = []
    for epoch, fresh in enumerate(epochs):
        # what was open is decided one epoch later: executed or cancelled, by name
        now = [
            replace(s, state="executed" if int(s.bad, 16) % 2 else "cancelled")
            if s.state == "open" and epoch == 2
            else s
            for s in slashes
        ]
        leaves = [*held, *fresh]
        granted = [
            RestoredFact(x.submission_digest, x.node, 5, 9)
            for x in fresh
            if int(x.submission_digest, 16) % 3 == 0
        ]
        settlement = run(leaves, now, previous, epoch, restored=granted)
        shuffle.shuffle(leaves)
        shuffle.shuffle(now)
        again = run(leaves, now, previous, epoch, restored=granted)
        assert again.digest() == settlement.digest()

        for file in settlement.files:
            over = [
                s
                for s in now
                if s.node == file.node and 0 <= s.received_at - file.received_at <= DAY
            ]
            if file.state == "paid":
                paid[Address(file.node)] = paid.get(Address(file.node), 0) + 7 * file.units
                assert not [s for s in over if s.state != "cancelled"]
            if file.state == "forfeited":
                paid[BURN_ADDRESS] = paid.get(BURN_ADDRESS, 0) + 7 * file.units
                assert any(s.state == "executed" and s.bad == file.because for s in over)
            if file.state == "held":
                assert any(s.state == "open" and s.bad == file.because for s in over)
            for judge in file.judges:
                paid[Address(judge)] = paid.get(Address(judge), 0) + 5
        for one in settlement.restored:
            if one.state != "held":
                payee = Address(one.node) if one.state == "paid" else BURN_ADDRESS
                paid[payee] = paid.get(payee, 0) + 9
        assert settlement.amounts() == {n: a for n, a in paid.items() if a}
        assert int(settlement.cumulative_total) == sum(paid.values())
        if previous:
            before = previous.amounts()
            assert all(settlement.amounts()[n] >= amount for n, amount in before.items())
            assert settlement.previous == previous.digest()
        held = [
            fact
            for fact in leaves
            for file in settlement.files
            if file.submission_digest == fact.submission_digest and file.state == "held"
        ]
        final += [f.submission_digest for f in settlement.files if f.state != "held"]
        previous = settlement
    assert not held
    assert sorted(final) == sorted(x.submission_digest for e in epochs for x in e)


def test_an_open_slash_holds_and_its_end_pays_or_forfeits() -> None:
    open_ = SlashFact(name(9), NODES[0], 1500, RECEIPT, "open")
    first = run([leaf(1), leaf(2, 1)], [open_])
    assert state_of(first, 1) == "held"
    assert first.amounts() == {NODES[1]: 70}

    restored = run([leaf(1)], [replace(open_, state="cancelled")], first, 1)
    assert restored.amounts() == {NODES[0]: 70, NODES[1]: 70}
    burned = run([leaf(1)], [replace(open_, state="executed")], first, 1)
    assert burned.amounts() == {NODES[1]: 70, BURN_ADDRESS: 70}
    assert (burned.cumulative_total, burned.burned) == ("140", 70), "it leaves the free funds"
    assert state_of(burned, 1) == "forfeited"
    later = run([leaf(3), leaf(4, 1)], [replace(open_, state="executed")], burned, 2)
    assert later.amounts() == {NODES[1]: 140, BURN_ADDRESS: 140}


@pytest.mark.parametrize(
    ("earned", "bad", "state"),
    [
        (1000, 1000, "forfeited"),
        (1000, 1000 + DAY, "forfeited"),
        (1000, 1001 + DAY, "paid"),
        (1001, 1000, "paid"),
    ],
)
def test_a_slash_forfeits_the_day_up_to_the_bad_file_and_nothing_else(
    earned: int, bad: int, state: str
) -> None:
    slash = SlashFact(name(9), NODES[0], bad, RECEIPT, "executed")
    assert state_of(run([leaf(1, received_at=earned)], [slash]), 1) == state


def test_a_verdict_after_the_validity_is_neither_paid_nor_punished() -> None:
    late = JudgedFact(name(1001), name(2001), Outcome.ACCEPTED, 10, 2001)
    assert state_of(run([leaf(1, judged=late)]), 1) == "unjudged"
    assert run([leaf(1, judged=late)]).amounts() == {}


def test_a_leaf_refused_on_chain_is_not_paid() -> None:
    assert state_of(run([leaf(1, refused=True)]), 1) == "rejected"


def test_nothing_is_settled_twice() -> None:
    with pytest.raises(MalformedError, match="twice"):
        run([leaf(1), leaf(1)])
    with pytest.raises(MalformedError, match="twice"):
        run([leaf(1)], previous=run([leaf(1)]), epoch=1)


def test_proofs_lead_to_the_root() -> None:
    settlement = run([leaf(i, i) for i in range(3)])
    for node in NODES:
        amount, proof = settlement.proof(node)
        assert merkle_verify(settlement.root(), reward_leaf(node, amount), proof)
    assert Settlement.model_validate_json(settlement.canonical()) == settlement
    assert run([]).previous == ZERO_DIGEST


@pytest.mark.slow
def test_a_long_settlement_is_a_head_and_pages_that_fit_into_objects() -> None:
    whole = run([leaf(i, i % 3) for i in range(PAGE_FILES + 2)])
    head, pages = whole.published()
    assert [len(SettlementPage.model_validate_json(page).files) for page in pages] == [
        PAGE_FILES, 2,
    ]  # fmt: skip
    assert max(len(data) for data in (head, *pages)) < MAX_OBJECT_BYTES // 2
    objects = {sha256(data): data for data in (head, *pages)}
    assert whole.digest() == sha256(head)
    assert load_settlement(whole.digest(), objects.__getitem__) == whole

    alone = Settlement.model_validate_json(head)  # enough to sign and to claim
    assert (alone.files, alone.table()) == ((), whole.table())
    assert alone.proof(NODES[1]) == whole.proof(NODES[1])
    assert run([leaf(10**6)], previous=whole, epoch=1).previous == sha256(head)
    with pytest.raises(ValueError, match="no files"):
        Settlement.model_validate({**whole.model_dump(), "pages": alone.pages})
    objects[sha256(pages[0])] = b"{}"
    with pytest.raises(MalformedError, match="page"):
        load_settlement(whole.digest(), objects.__getitem__)


def paged(settlement: Settlement, *parts: slice) -> tuple[Digest, dict[Digest, bytes]]:
    """The settlement as a head whose pages hold `parts` of its files, and the objects."""
    pages = [
        canonical_json(SettlementPage(files=settlement.files[part]).model_dump(mode="json"))
        for part in parts
    ]
    facts = settlement.model_dump(mode="json") | {
        "schema_version": 2, "files": [], "pages": [sha256(page) for page in pages]
    }  # fmt: skip
    objects = {sha256(data): data for data in (canonical_json(facts), *pages)}
    return sha256(canonical_json(facts)), objects


@pytest.mark.parametrize(
    ("parts", "most_files", "why"),
    [
        ([slice(0, 2), slice(0, 2)], 6, "is not a settlement"),  # one page, held over and over
        ([slice(0, 2), slice(2, 3), slice(3, 5)], 6, "not full"),
        ([slice(0, 2), slice(2, 4), slice(0, 0)], 6, "not full"),
        ([slice(0, 2), slice(2, 4), slice(4, 5)], 4, "more than 4 files"),
    ],
)
def test_pages_that_no_settlement_needs_are_refused(
    monkeypatch: pytest.MonkeyPatch, parts: list[slice], most_files: int, why: str
) -> None:
    monkeypatch.setattr("prime_core.settlement.PAGE_FILES", 2)
    judged = leaf(4).judged
    assert judged is not None
    judged = judged._replace(judges=JUDGES, prompt_units=5)
    with_all = leaf(4, judged=judged, judge_price=2, prompt_price=3)
    whole = run([*(leaf(i) for i in range(4)), with_all])
    good, objects = paged(whole, slice(0, 2), slice(2, 4), slice(4, 5))
    assert good == whole.digest()
    loaded = load_settlement(good, objects.__getitem__, most_files=5)
    assert (loaded, loaded.digest()) == (whole, good)
    bad, objects = paged(whole, *parts)
    with pytest.raises(MalformedError, match=why):
        load_settlement(bad, objects.__getitem__, most_files=most_files)


def test_a_verdict_says_the_same_to_its_writer_as_to_an_auditor() -> None:
    def said(outcome: Outcome, at: int, validator: Address) -> SignedOpinion:
        law = Law(
            lease=name(1), run=name(2), verification_class=name(3), verifier=name(4), draws=name(5)
        )
        opinion = Opinion(
            pool=1, submission=name(6), law=law.struct_hash(), outcome=int(outcome),
            reason=name(7), table=name(at), evidence=ZERO_DIGEST, judged_at=at,
        )  # fmt: skip
        return SignedOpinion(opinion=opinion, law=law, validator=validator, signature=RECEIPT)

    opinions = (
        said(Outcome.VOID, 30, NODES[0]),
        said(Outcome.ACCEPTED, 10, JUDGES[1]),
        said(Outcome.ACCEPTED, 20, JUDGES[0]),
    )
    verdict = Verdict(outcome=int(Outcome.ACCEPTED), opinions=opinions)
    found = judged_fact(name(8), verdict, 9, 11)
    assert found == JudgedFact(
        name(8), name(10), Outcome.ACCEPTED, 9, 20, tuple(sorted((NODES[0], *JUDGES))), 11
    )
    own = OwnVerdict.model_validate_json(verdict.canonical())
    assert judged_fact(name(8), own, 9, 11) == found
    with pytest.raises(MalformedError, match="no opinion"):
        judged_fact(name(8), own.model_copy(update={"outcome": Outcome.REJECTED}), 9, 11)


def test_a_mirror_holds_one_page_at_a_time_and_refuses_one_that_is_not_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("prime_core.settlement.PAGE_FILES", 2)
    alive: WeakSet[SettlementPage] = WeakSet()
    most = 0

    def counted(part: SettlementPage, page: str, head: Settlement) -> bool:
        nonlocal most
        alive.add(part)
        most = max(most, len(alive))
        return is_full(part, page, head)

    monkeypatch.setattr("prime_chain.mirror.is_full", counted)
    whole = run([leaf(i, judged=None) for i in range(5)])
    root = sha256(b"root")

    def copied(*parts: slice) -> dict[str, str]:
        name, objects = paged(whole, *parts)
        source = SimpleNamespace(object=lambda digest, _: objects[digest])
        mirror = Mirror(tmp_path / name, FAKE_DEPLOYMENT, 1, source, max_bytes=10**6)  # type: ignore[arg-type]
        event = RewardRootPosted(
            block=1, block_hash=name, block_time=1, log_index=0, tx_hash=name, pool=1, epoch=0,
            root=root, cumulative_total=0, object=name, claimable_at=1,
        )  # fmt: skip
        return mirror.update([event]).missing

    assert copied(slice(0, 2), slice(2, 4), slice(4, 5)) == {}
    assert list(copied(slice(0, 1), slice(1, 3)).values()) == ["it is not a full page"]
    assert list(copied(slice(0, 2), slice(0, 2)).values()) == ["it is not a valid Settlement"]
    assert most == 1


def test_a_settlement_is_known_as_one_object_and_as_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run([leaf(i) for i in range(5)])
    single, (paged_name, _) = whole.digest(), paged(whole, slice(0, 2), slice(2, 4), slice(4, 5))
    for page_files in (2, 10_000):
        monkeypatch.setattr("prime_core.settlement.PAGE_FILES", page_files)
        assert whole.is_named(single)
        assert whole.is_named(paged_name) == (page_files == 2)
        assert not run([leaf(i) for i in range(4)]).is_named(single)


def test_work_without_a_liable_node_is_void_and_unpaid_however_good() -> None:
    settlement = run([leaf(0, answered=False), leaf(1)])
    assert (state_of(settlement, 0), state_of(settlement, 1)) == ("void", "paid")
    assert settlement.amounts() == {NODES[0]: 70}
    unjudged = run([leaf(0, answered=False, judged=None), leaf(1)])
    assert state_of(unjudged, 0) == "void", "its root came too late: no verdict would have helped"
    refused = run([leaf(0, answered=False, refused=True), leaf(1)])
    assert state_of(refused, 0) == "rejected", "what the contract struck stays struck"


@pytest.mark.parametrize(("rooted_at", "answered"), [(1140, True), (1141, False)])
def test_somebody_answers_until_slash_and_dispute_window_after_the_submissions_end(
    rooted_at: int, answered: bool
) -> None:
    """As Work._checkInTime, to the second."""
    assert answered_for(rooted_at=rooted_at, valid_until=1000, accountable=140) is answered


def test_a_timely_judge_is_paid_once_for_any_verdict() -> None:
    """Also where a held file comes up again."""
    judges = (name(7)[:42], name(8)[:42])
    accounts = tuple(sorted(address(one) for one in judges))

    def said(outcome: Outcome, at: int = 10) -> JudgedFact:
        return JudgedFact(name(1001), name(2001), outcome, 0, at, accounts)

    leaves = [
        leaf(1, judged=said(Outcome.VOID), judge_price=5),
        leaf(2, judged=said(Outcome.REJECTED), judge_price=5),
        leaf(3, judged=said(Outcome.ACCEPTED), judge_price=5),
        leaf(4, judged=said(Outcome.ACCEPTED, at=2001), judge_price=5),
        leaf(5, judge_price=5),
    ]
    open_slash = SlashFact(name(9), NODES[0], 1_000, RECEIPT, "open")
    first = settle(
        chain_id=1, pool=1, epoch=0, as_of_block=1, previous=None,
        previous_name=ZERO_DIGEST, leaves=leaves, slashes=[open_slash],
    )  # fmt: skip
    assert state_of(first, 3) == "held"
    assert {one: first.amounts()[one] for one in accounts} == dict.fromkeys(accounts, 15)
    again = settle(
        chain_id=1, pool=1, epoch=1, as_of_block=2, previous=first,
        previous_name=first.digest(), leaves=[leaves[2]], slashes=[],
    )  # fmt: skip
    assert state_of(again, 3) == "paid"
    assert {one: again.amounts()[one] for one in accounts} == dict.fromkeys(accounts, 15)
    assert [file.judges for file in again.files] == [()]


def test_a_restored_file_is_paid_once_and_as_an_accepted_one() -> None:
    """Taken up by the first settlement that knows of it and has it; held while a slash
    that concerns it is open, forfeited by an executed one; nothing for a file that earns anyway."""
    void = JudgedFact(name(1001), name(2001), Outcome.VOID, 0, 10)
    leaves = [leaf(1, judged=void), leaf(2)]

    def fact(index: int, block: int, **changes: object) -> RestoredFact:
        one = RestoredFact(name(index), NODES[0], block, amount=9)
        return replace(one, **changes)  # type: ignore[arg-type]

    same = run(leaves, restored=[fact(1, 5), fact(2, 5)])
    assert [(r.submission_digest, r.state) for r in same.restored] == [(name(1), "paid")]
    assert same.amounts() == {NODES[0]: 70 + 9}
    assert run(leaves, restored=[fact(1, 6)]).restored == (), "the event is later than its block"
    assert run([leaf(2)], restored=[fact(1, 5)]).restored == (), "not settled yet"

    own = fact(1, 5, own_epoch=3, received_at=500, received_within=600)
    assert run([leaf(2)], restored=[own], epoch=2).restored == (), "its root may be settled yet"
    (passed,) = run([leaf(2)], restored=[own], epoch=3).restored
    assert (passed.state, passed.received_at, passed.received_within) == ("paid", 500, 600)
    for late, state in ((500, "forfeited"), (1100 + DAY, "forfeited"), (1101 + DAY, "paid")):
        slash = SlashFact(name(9), NODES[0], late, RECEIPT, "executed")
        (passed,) = run([], [slash], restored=[own], epoch=3).restored
        assert passed.state == state

    first = run(leaves)
    assert type(first) is Settlement, "digests of others stay as they are"
    assert parse_settlement(same.canonical()) == same
    later = fact(1, 6, received_at=1000, settled_as="void")
    again = run([], previous=first, epoch=1, as_of_block=9, restored=[later])
    assert again.amounts() == {NODES[0]: 70 + 9}
    assert run([], previous=again, epoch=2, as_of_block=10, restored=[later]).restored == ()
    paid = replace(later, settled_as="paid")
    assert run([], previous=first, epoch=1, as_of_block=9, restored=[paid]).restored == ()

    for bad, received_at in ((name(1), 1000), (name(9), 1000 + DAY)):
        slash = SlashFact(bad, NODES[0], received_at, RECEIPT, "open")
        held = run([], [slash], previous=first, epoch=1, as_of_block=9, restored=[later])
        assert [(r.state, r.because) for r in held.restored] == [("held", bad)]
        assert [one.submission_digest for one in held.slashes] == [bad]
        assert held.amounts() == first.amounts()
        due = {"cancelled": {NODES[0]: 79}, "executed": {NODES[0]: 70, BURN_ADDRESS: 9}}
        for state, amounts in due.items():
            end = replace(slash, state=state)  # type: ignore[arg-type]
            ended = run([], [end], previous=held, epoch=2, as_of_block=10, restored=[later])
            assert ended.amounts() == amounts
            assert run([], [end], previous=ended, epoch=3, as_of_block=11).restored == ()


@example(
    own=0, listed=3, outcome=Outcome.ACCEPTED, restored_in=1, slashed="no", ends_in=0,
    steps=[(1, 1), (3, 1)],
)  # fmt: skip
@given(
    own=st.none() | st.integers(0, 4),
    listed=st.none() | st.integers(0, 4),
    outcome=st.sampled_from([Outcome.ACCEPTED, Outcome.VOID, None]),
    restored_in=st.integers(1, 10),
    slashed=st.sampled_from(["no", "open", "executed", "cancelled"]),
    ends_in=st.integers(0, 5),
    steps=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=5),
)
def test_a_file_is_paid_once_whether_it_is_settled_or_restored_or_both(
    own: int | None,
    listed: int | None,
    outcome: Outcome | None,
    restored_in: int,
    slashed: Literal["no", "open", "executed", "cancelled"],
    ends_in: int,
    steps: list[tuple[int, int]],
) -> None:
    """Its node posts it in epoch `own`; the manager lists it in epoch `listed`, before or after
    the arbiter restored it, or never."""
    judged = JudgedFact(name(1001), name(2001), outcome, 10, 1005) if outcome else None
    file, settled = leaf(1, judged=judged), dict[Digest, SettledFile]()
    previous: Settlement | None = None
    epoch, block, paid, burned = -1, 0, 0, 0
    for step, (epochs, blocks) in enumerate(steps):
        after, epoch, block = epoch, epoch + epochs, block + blocks
        slashes = []
        if slashed != "no":
            state: SlashState = "open" if step < ends_in else slashed
            slashes = [SlashFact(name(1), NODES[0], 1000, RECEIPT, state)]
        old = settled.get(name(1))
        due = listed is not None and after < listed <= epoch
        fact = RestoredFact(
            name(1), NODES[0], restored_in, 9, old.received_at if old else 500,
            old.state if old else None, own, 600,
        )  # fmt: skip
        leaves = [file] if (due and old is None) or (old and old.state == "held") else []
        previous = run(leaves, slashes, previous, epoch, block, [fact])
        settled |= {Digest(one.submission_digest): one for one in previous.files}
        now = previous.amounts().get(NODES[0], 0)
        assert now in ({paid} if paid else {0, 9, 70})
        assert previous.burned in ({burned} if burned else {0, 9, 70})
        paid, burned = now, previous.burned
        assert not (paid and burned)
    assert previous is not None
    if slashed in ("open", "executed"):
        assert paid == 0
    posted = own is not None and own <= epoch
    if slashed == "no" and posted and restored_in <= block:
        assert paid > 0
