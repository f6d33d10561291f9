"""An owner's disputes of slashes and appeals for unpaid files: who judges, and what has to be sent.

proposal ─► opinions and law from the orchestrator or a mirror ─► Court.open ─► Slasher.dispute
                   └ too few jurors count, or the owner says so: the arbiter judges
unpaid file ─► its root and proof, from chain and leaves object ─► Rewards.appeal ─► the arbiter
"""

from __future__ import annotations

from collections.abc import Sequence

from prime_chain.client import Call
from prime_chain.contracts import Proposal
from prime_chain.errors import ChainRevertedError
from prime_chain.history import read_events, read_slashes
from prime_chain.leaves import find_leaf
from prime_chain.mirror import (
    MAX_OBJECT_BYTES,
    AnySource,
    HttpSource,
    announced,
    open_sources,
)
from prime_core.errors import (
    MalformedError,
    NotFoundError,
    PolicyError,
    UnavailableError,
    UntrustedError,
    UserError,
)
from prime_core.ids import Address, Digest
from prime_core.rollout import Submission
from prime_core.times import utc
from prime_core.verdict import Evidence, Outcome, SignedOpinion, Verdict
from prime_node.link import Link

JURORS_NEEDED = 7
"""Court.LEAST."""


class TooFewJurorsError(PolicyError):
    """The court cannot judge: fewer jurors count than it needs."""


def dispute_calls(
    link: Link,
    account: Address,
    leaf: Digest,
    *,
    urls: Sequence[str] = (),
    allow_private: bool = False,
    not_served: bool = False,
    arbiter: bool = False,
) -> tuple[list[Call], str]:
    """Returns the calls that dispute the slash for submission `leaf`, and who will judge it, in one
    sentence: the request for the court if it can judge, an allowance for the deposit if it is
    missing, and the dispute. `not_served`: objects instead that the evidence is not served, which
    needs no deposit.

    Args: `urls` are orchestrators or mirrors that serve the opinions; `allow_private` as for
    OrchestratorClient; `arbiter`: the owner wants the arbiter, and not the court, to judge. Raises
    UserError if there is no such proposal, it concerns another provider, it is not open, or the
    court cannot be asked for another reason than too few jurors: who serves the opinions must not
    choose the judge.
    """
    c = link.contracts
    found = c.slasher.proposal(leaf)
    hint = "list them with: prime-node audit list"
    if found is None:
        raise UserError(f"no slash was proposed for {leaf}", hint=hint)
    if found.provider != account:
        raise UserError(
            f"the slash for {leaf} is about a node of {found.provider}, not of {account}",
            hint="only that account may dispute it: give its --wallet, or --calldata --provider",
        )
    now = link.client.agreed_block("latest").time
    if found.state.name != "PROPOSED" or now >= found.deadline:
        state = found.state.name.lower() if found.state.name != "PROPOSED" else "past its window"
        raise UserError(f"the slash for {leaf} cannot be disputed: it is {state}", hint=hint)
    if not_served:
        return [c.slasher.object(leaf)], "the arbiter judges whether the evidence is served"
    deposit = c.slasher.dispute_deposit()
    allowed = c.token.allowance(account, c.slasher.address)
    approve = [c.token.approve(c.slasher.address, deposit)] if allowed < deposit else []
    dispute = [*approve, c.slasher.dispute(leaf)]
    case = c.court.case_of(leaf)
    if case is None and arbiter:
        return dispute, "the arbiter judges, as you asked"
    try:
        if case is None:
            mirrors = announced(link.client, link.deployment, found.pool).values()
            with open_sources(
                urls, mirrors, link.deployment, found.pool, allow_private=allow_private
            ) as clients:
                source = AnySource([HttpSource(client) for client in clients])
                dispute = [open_court(link, found, leaf, source), *dispute]
    except TooFewJurorsError as error:
        return dispute, f"the arbiter judges, and not the court: {error}"
    except (NotFoundError, UnavailableError, UntrustedError, MalformedError, PolicyError) as error:
        raise UserError(
            f"the court cannot be asked to judge the slash for {leaf}: {error}",
            hint="try again, name a mirror with --orchestrator, or add --arbiter: it judges then",
            exit_code=error.exit_code,
        ) from error
    return dispute, "three jurors of the court judge; they are drawn once the dispute is on chain"


def appeal_calls(
    link: Link, leaf: Digest, *, urls: Sequence[str] = (), allow_private: bool = False
) -> list[Call]:
    """Returns the call that asks the arbiter to have the file `leaf` of this pool paid.

    Args: `urls` are orchestrators or mirrors that serve the lists of leaves; `allow_private` as for
    OrchestratorClient. Raises UserError if the file was appealed before or no root on chain holds
    it, UnavailableError if its list of leaves is not served.
    """
    c = link.contracts
    if (earlier := c.rewards.appeal_of(leaf)) is not None:
        until = utc(earlier.judge_by)
        state = "it is restored" if earlier.restored else f"the arbiter can grant it until {until}"
        raise UserError(f"the file {leaf} was appealed before: {state}")
    events = read_events(link.client, link.deployment, contracts=("work",), pool=link.pool)
    mirrors = announced(link.client, link.deployment, link.pool).values()
    with open_sources(
        urls, mirrors, link.deployment, link.pool, allow_private=allow_private
    ) as clients:
        source = AnySource([HttpSource(client) for client in clients])
        try:
            found = find_leaf(
                link.client, link.deployment, events, link.pool, leaf, None, source.object
            )
        except NotFoundError as error:
            hint = "check --pool; a file that is in no root yet: prime-node work list"
            raise UserError(str(error), hint=hint) from error
    return [c.rewards.appeal(found.signed.submission, found.root.seq, found.proof)]


def open_court(link: Link, proposal: Proposal, leaf: Digest, source: AnySource) -> Call:
    """Returns the call that asks for the court. Raises TooFewJurorsError, PolicyError if the court
    would refuse it for another reason, NotFoundError, UnavailableError, UntrustedError or
    MalformedError if the opinions that the proposal rests on are not served."""
    c = link.contracts
    listed = read_slashes(link.client, link.deployment)
    slash = next((one for one in listed if one.leaf == leaf), None)
    if slash is None:
        raise NotFoundError(f"the chain's events show no slash for {leaf}")
    try:
        evidence = Evidence.model_validate_json(source.object(slash.evidence, MAX_OBJECT_BYTES))
        named = source.submission(leaf).verdict
        if named is None:
            raise NotFoundError("the orchestrator names no verdict on the submission")
        verdict = Verdict.model_validate_json(source.object(named, MAX_OBJECT_BYTES))
    except ValueError as error:
        raise MalformedError("what is served on the slash does not parse") from error
    submission, said = evidence.submission.submission, []
    if submission.digest(link.deployment.domain_of(submission)) != leaf:
        raise UntrustedError("the evidence on chain is about another submission")
    rejecting = {s.validator: s for s in verdict.opinions if s.outcome is Outcome.REJECTED}
    for author in proposal.authors:
        if author not in rejecting:
            raise NotFoundError(f"the opinion of {author} is not served")
        rejecting[author].check(link.deployment.domain_of(rejecting[author].opinion))
        said.append(rejecting[author])
    if len({one.opinion.law for one in said}) > 1:
        raise UntrustedError("the opinions served are not those that the proposal rests on")
    call = c.court.open(
        submission, said, said[0].law, *_jurors(link, proposal, submission, said[0])
    )
    try:
        link.client.estimate_gas(call, proposal.provider)
    except ChainRevertedError as error:
        raise PolicyError(f"the court refuses the case: {error.reason}") from error
    return call


def _jurors(
    link: Link, proposal: Proposal, submission: Submission, said: SignedOpinion
) -> tuple[list[int], int]:
    """Returns the seats of seven jurors that count, and how many accounts the pool has ever
    appointed. Raises TooFewJurorsError if fewer count."""
    c = link.contracts
    latest = submission.valid_until - c.pools.judgement_of(proposal.pool).lease_seconds
    validators = 0
    while validators < 255 and c.pools.validator_at(proposal.pool, validators + 1) is not None:
        validators += 1
    parties = (proposal.provider, c.pools.pool_of(proposal.pool).manager)
    seats: list[int] = []
    for number, seat in enumerate(c.court.seats_of(said.law.verification_class)):
        if seat.account is None or seat.since > latest or seat.account in parties:
            continue
        if c.pools.validator_of(proposal.pool, seat.account) is None:
            seats.append(number)
        if len(seats) == JURORS_NEEDED:
            break
    if len(seats) < JURORS_NEEDED:
        raise TooFewJurorsError(
            f"{len(seats)} jurors count for this submission, {JURORS_NEEDED} are needed"
        )
    return seats, validators
