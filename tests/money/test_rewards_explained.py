"""Why a node got what it got, from chain and published objects alone; sums are held to roots."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from anvil_kit import needs_anvil
from chain_kit import FUNDS, World, make_world
from money_kit import RUN, TOKEN, key
from typer.testing import CliRunner
from walk_kit import Published

from prime_chain.contracts import Claim
from prime_chain.errors import ChainRevertedError
from prime_chain.explain import Explanation, _why, explain
from prime_chain.history import read_events
from prime_chain.rewards import Rebuilder
from prime_core.encoding import sha256
from prime_core.errors import MalformedError, NotFoundError
from prime_core.ids import ZERO_DIGEST, Digest, Signature
from prime_core.revisions import RunHistory
from prime_core.settlement import BURN_ADDRESS
from prime_core.storage.base import put_object
from prime_core.verdict import Law, Opinion, Reason, SignedOpinion
from prime_orchestrator.cli import rewards as rewards_cli

HONEST, LIAR, OWNER, OTHER = key(10), key(11), key(12), key(13)
EARNED = 20 * TOKEN // 1000
"""What a judged file of money_kit earns."""


pytestmark = needs_anvil


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A pool with an honest node, a liar, and policy 0."""
    made = make_world(tmp_path)
    made.join(HONEST, OWNER)
    made.join(LIAR, OTHER)
    made.mgr.publish(0)
    made.ticks(2)
    yield made
    made.close()


def rebuilder(world: World) -> Rebuilder:
    events = read_events(world.client, world.deployment)
    return Rebuilder(
        events, world.deployment, 1, RunHistory(world.mgr.context.run), Published(world)
    )


def explained(world: World, node: str) -> Explanation:
    return explain(rebuilder(world), node)  # type: ignore[arg-type]


def settle(world: World) -> None:
    """Lets the epoch's last leaf outlive its validity, and its reward root be final."""
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.ticks(4)


def test_before_the_first_reward_root_nothing_is_explained(world: World) -> None:
    with pytest.raises(NotFoundError, match="no reward root yet stands"):
        explained(world, HONEST.address)


def test_every_file_of_a_node_is_explained_and_adds_up_to_its_root(world: World) -> None:
    mgr = world.mgr
    world.start_of_an_epoch()
    first, second, broken = mgr.submit(HONEST), mgr.submit(HONEST), mgr.submit(HONEST)
    mgr.judge(first)
    mgr.judge(second)
    mgr.judge(broken, Reason.MALFORMED)
    earned, bad = mgr.submit(LIAR), mgr.submit(LIAR)
    mgr.judge(earned)
    mgr.judge(bad, Reason.WRONG_SAMPLING)
    late = mgr.submit(HONEST)  # never judged
    world.until_rooted()
    world.forward(world.deployment.periods.slash_window + 1)
    world.ticks()
    settle(world)

    found = explained(world, HONEST.address)
    assert found.problems == ()
    assert found.cumulative == 2 * EARNED == sum(file.amount for file in found.files)
    states = {file.submission_digest: file.state for file in found.files}
    assert states == {
        first.digest: "paid", second.digest: "paid", late.digest: "unjudged", broken.digest: "void",
    }  # fmt: skip
    why = {file.submission_digest: file.why for file in found.files}
    assert "20 tokens counted" in why[first.digest]
    assert "the pool's fault" in why[late.digest]
    assert why[broken.digest].startswith("MALFORMED: the file does not parse")

    liar = explained(world, LIAR.address)
    assert liar.problems == ()
    assert (liar.cumulative, liar.claimed) == (0, 0)
    why = {file.submission_digest: file.why for file in liar.files}
    assert f"slashed for {bad.digest}" in why[earned.digest]
    assert why[bad.digest].startswith("WRONG_SAMPLING: its tokens were not drawn")
    said = "\n".join(liar.lines())
    assert "1 forfeited, 1 rejected" in said
    assert "their pay is burned" in said
    assert liar.as_json()["files"][0]["amount"] == "0"

    _forfeited_pay_is_burned(world, earned.digest)
    _a_root_that_keeps_it_in_the_pool_is_reported_once(world)


def _forfeited_pay_is_burned(world: World, forfeited: Digest) -> None:
    """It is reserved, and no one can claim it."""
    books, rewards = rebuilder(world), world.contracts.rewards
    event, settlement = books.published()[-1]
    burned = explain(books, BURN_ADDRESS)
    assert (burned.problems, burned.cumulative) == ((), EARNED)
    assert [(f.submission_digest, f.amount) for f in burned.files] == [(forfeited, EARNED)]
    assert "0.02 PRIME burned" in burned.lines()[0]
    rebuilt = books.rebuild(event.epoch)
    assert (rebuilt.problems, rebuilt.as_json()["burned"]) == ((), str(EARNED))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rewards_cli, "_rebuilder", lambda *_: nullcontext(books))
        words = ("rebuild", "--rpc", "r", "--deployment", "d", "--pool", "1", "--orchestrator", "o")
        answer = CliRunner().invoke(rewards_cli.app, words)
    assert f"  {BURN_ADDRESS}  0.02 PRIME burned: forfeited by slashes\n" in answer.stdout

    funds = rewards.funds(1)
    assert (funds.free, funds.reserved) == (FUNDS - 3 * EARNED, 3 * EARNED)
    world.forward(world.deployment.periods.reward_delay + 1)
    amount, proof = settlement.proof(BURN_ADDRESS)
    claim = Claim(1, settlement.epoch, BURN_ADDRESS, amount, tuple(proof))
    with pytest.raises(ChainRevertedError, match="UnknownNode"):
        world.send(OTHER, rewards.claim(claim))
    assert rewards.funds(1) == funds


def _a_root_that_keeps_it_in_the_pool_is_reported_once(world: World) -> None:
    """As an older program posts it. The next settlement goes on from its entries."""
    events = read_events(world.client, world.deployment)
    books, runs = rebuilder(world), RunHistory(world.mgr.context.run)
    event, settlement = books.published()[-1]
    honest = tuple(entry for entry in settlement.entries if entry.node == HONEST.address)
    kept = settlement.model_copy(update={"entries": honest, "cumulative_total": str(2 * EARNED)})
    objects = Published(world)
    posted = dataclasses.replace(
        event, root=kept.root(), object=kept.digest(), cumulative_total=2 * EARNED
    )
    put_object(world.mgr.objects, kept.canonical())
    old = [posted if one == event else one for one in events]
    follows = Rebuilder(old, world.deployment, 1, runs, objects).settle(
        event.epoch + 1, lambda _: pytest.fail("there is no leaf"), event.block
    )
    assert (follows.previous, follows.entries) == (kept.digest(), honest)
    put_object(world.mgr.objects, follows.canonical())
    later = dataclasses.replace(
        posted, epoch=follows.epoch, object=follows.digest(), log_index=posted.log_index + 1
    )
    books = Rebuilder([*old, later], world.deployment, 1, runs, objects)
    (problem,) = books.rebuild(later.epoch).problems
    assert f"epoch {event.epoch}: 0.02 PRIME of forfeited pay stayed in the pool" in problem
    nothing = explain(books, BURN_ADDRESS)
    assert (nothing.cumulative, [file.amount for file in nothing.files]) == (0, [0])
    assert not any("add up" in problem for problem in nothing.problems)


def test_a_published_verdict_of_an_unknown_outcome_is_malformed() -> None:
    law = Law(**dict.fromkeys(Law.model_fields, ZERO_DIGEST))
    said = Opinion(
        pool=1, submission=ZERO_DIGEST, law=law.struct_hash(), outcome=9, reason=ZERO_DIGEST,
        table=ZERO_DIGEST, evidence=ZERO_DIGEST, judged_at=1,
    )  # fmt: skip
    signed = SignedOpinion(
        opinion=said, law=law, validator=HONEST.address, signature=Signature("0x" + "11" * 65)
    )
    published: Any = SimpleNamespace(verdict=lambda _: signed)
    file: Any = SimpleNamespace(state="void", verdict=sha256(b"its verdict"))
    with pytest.raises(MalformedError, match="unknown outcome"):
        _why(published, file, 1)


def test_claims_are_shown_next_to_earnings(world: World) -> None:
    mgr = world.mgr
    mgr.judge(mgr.submit(HONEST))
    world.until_rooted()
    settle(world)
    settlement = rebuilder(world).published()[-1][1]
    cumulative, proof = settlement.proof(HONEST.address)
    world.forward(world.deployment.periods.reward_delay + 1)
    claim = world.contracts.rewards.claim(
        Claim(1, settlement.epoch, HONEST.address, cumulative, tuple(proof))
    )
    world.send(OTHER, claim)
    found = explained(world, HONEST.address)
    assert (found.cumulative, found.claimed) == (EARNED, EARNED)
    assert "of it claimed" in found.lines()[0]
    root = settlement.root()
    assert found.lines()[-1] == f"adds up to root {root} of epoch {settlement.epoch}: match"


def test_a_settlement_whose_files_do_not_add_up_is_reported(world: World) -> None:
    """The manager credits more units than the verdict's table holds: the sum still fits here (the
    rebuild finds it), but an entry that its files do not earn is found at once."""
    mgr = world.mgr
    mgr.judge(mgr.submit(HONEST))
    world.until_rooted()
    settle(world)
    honest = rebuilder(world)
    event, settlement = honest.published()[-1]
    more = settlement.entries[0].model_copy(update={"cumulative": str(2 * EARNED)})
    greedy = settlement.model_copy(update={"entries": (more,), "cumulative_total": str(2 * EARNED)})

    class Greedy(Published):
        def get_object(self, digest: Digest, limit: int) -> bytes:
            return (
                greedy.canonical()
                if digest == greedy.digest()
                else super().get_object(digest, limit)
            )

    posted = dataclasses.replace(event, root=greedy.root(), object=greedy.digest())
    events = [e for e in read_events(world.client, world.deployment) if e != event]
    liar = Rebuilder(
        [*events, posted], world.deployment, 1, RunHistory(mgr.context.run), Greedy(world)
    )
    found = explain(liar, HONEST.address)
    assert len(found.problems) == 1
    assert "add up to 0.02 PRIME, the reward root gives it 0.04 PRIME" in found.problems[0]
    assert found.lines()[-1].startswith("  ✗ its files add up")
    rebuilt = liar.rebuild(event.epoch)
    assert not rebuilt.match
