"""What a contract's refusal means, in a sentence: for people who do not read Solidity.

This mirrors contracts/src/libraries/Errors.sol. A name that is missing here is shown as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prime_chain.amounts import prime

_AMOUNTS = frozenset(
    {"active", "needed", "available", "asked", "free", "claimed", "cumulative", "balance"}
    | {"reserved", "previous", "total", "expected", "received", "allowance"}
)
"""Fields that are amounts of the token; `WrongVersion` and `RevocationNotLater` are excepted."""
_PLAIN = frozenset(
    {"WrongVersion", "RevocationNotLater", "EpochNotNext", "NoQuorum", "TooFewJurors"}
)

SENTENCES: dict[str, str] = {
    "WrongCount": "the pool has appointed another number of accounts than {given}",
    "TooFewJurors": "{given} jurors count for this submission; the court needs {needed}",
    "StillJuror": "the juror has not left the register, or has {cases} cases that are not settled",
    "SeedNotKnown": "block {atBlock}, whose hash chooses the jurors, is not past yet",
    "OtherOpinions": "the proposal rests on other opinions, or on another law",
    "NotJuror": "{account} is not a juror of this class or case",
    "NotInCourt": "the case has not come to this, or is past it",
    "BadBallot": "the juror has voted before, or this is not what it committed to",
    "AlreadyJuror": "the account is a juror of this class, or has not withdrawn its bond",
    "AlreadyInCourt": "the court was asked for before",
    "AlreadyMember": "node {node} sits in pool {pool} already",
    "AlreadyAppealed": "the file {leaf} was appealed before: a file can be appealed once",
    "NoOpenAppeal": "no appeal for {leaf} is open: there was none, or the file is restored",
    "AlreadyPosted": "its node has put this submission on chain already",
    "AlreadyProposed": "a slash for {leaf} was proposed before: one submission is slashed once",
    "AlreadyProvider": "the account is a provider already",
    "AlreadyRejected": "the submission is rejected already",
    "AppointedLate": "validator {validator} was appointed after the submission's lease was given",
    "BadRewardProof": "the proof does not lead to the reward root",
    "BadSignature": "the signature is not {signer}'s",
    "Banned": "node {node} is banned from pool {pool}",
    "CheckOver": "the time for a public check has ended",
    "ConsentUsed": "the consent was used before: let the node sign another",
    "ERC20InsufficientAllowance": "{spender} may take {allowance} only: approve more",
    "ERC20InsufficientBalance": "{sender} holds {balance} and needs {needed}",
    "ERC2612ExpiredSignature": "the permit has expired: sign another",
    "ERC2612InvalidSigner": "the permit is not signed by {owner}, or was used before",
    "EpochNotNext": "epoch {epoch} is settled: the next can be {next}",
    "EpochStillOpen": "work of epoch {epoch} can still be rejected",
    "Expired": "its deadline has passed: ask for another",
    "InsufficientFunds": "pool {pool} has {free} free and needs {needed}: fund it",
    "InsufficientStake": "{provider} has {active} of active stake and needs {needed}",
    "InviteUsed": "the invite was used: a later one is needed",
    "LateSubmission": "the file came after its lease's deadline",
    "LeafMismatch": "submission, lease and receipt do not belong together",
    "ManagerNotSilent": "the manager of pool {pool} posts its roots itself: "
    "orchestrator pool show says from when on anyone may post a table",
    "MovedRecently": "node {node} was moved recently: wait until its old work is no longer liable",
    "NoFaucet": "the faucet exists on test networks only",
    "NoQuorum": "{given} opinions are given, {needed} must agree",
    "NodeTaken": "node {node} belongs to {provider}, who has to remove it first",
    "NotAgreed": "its owner {provider} has not agreed to pool {pool}: prime-node node allow",
    "NotAllowed": "{caller} may not do this: it is another role's",
    "NotClaimableYet": "the public check of this reward root is not over",
    "NotInRoot": "the submission is not in root {seq}",
    "NotListed": "pool {pool} lets in listed providers only, and {provider} is not listed",
    "NotMember": "node {node} has no seat in pool {pool}",
    "NotProvider": "{account} is not registered as a provider",
    "NotYourTurn": "a node posts its own leaf from an epoch after the receipt on, for one validity",
    "NothingAnnounced": "no terms are announced",
    "NothingToClaim": "all of {claimed} is paid already",
    "NothingToRefund": "pool {pool} has no unpromised funds",
    "NothingToWithdraw": "nothing has matured that no open slash holds",
    "OpinionsOutOfOrder": "opinions stand in rising order of their validators' numbers",
    "PoolFull": "all {capacity} seats of pool {pool} are taken",
    "PoolHasEnded": "pool {pool} has ended",
    "RevisionNotLater": "a revision starts after step {last}, not at step {asked}",
    "PoolIsPaused": "pool {pool} admits no node for now",
    "PoolNotEnded": "pool {pool} has not ended",
    "RefundNotYet": "the last work of pool {pool} can still be promised its pay: "
    "orchestrator pool show says from when on it can be refunded",
    "RevocationNotLater": "a revocation moves forward only: it stands at {current}",
    "RootedLate": "the root came too late: no stake is liable for the submission",
    "SlashAboveStake": "a slash of {slash} exceeds a seat's stake of {stake}",
    "SlashOpen": "a slash holds stake of {provider}: no seat moves before its end",
    "StakeBound": "the stake of {provider} answers to the pools of {manager}: leave them and wait "
    "an unbonding period (prime-node stake show), or use another provider account",
    "StakeNotFree": "only {available} is free: seats need or slashes hold the rest",
    "StillLiable": "{provider} still answers for the work of node {node}",
    "TooEarly": "the delay is not over",
    "TooManyTerms": "the terms were changed {limit} times, which is as often as they can be",
    "TooManyUnbondings": "{limit} unbondings run already: withdraw the mature ones first",
    "BadUrl": "a URL is at most 200 bytes of printable ASCII without spaces; this one has {length}",
    "TooManyValidators": "the pool appoints at most {limit} validators over its life",
    "TotalShrank": "cumulative rewards do not shrink",
    "UnknownNode": "node {node} belongs to no provider, or to another one",
    "UnknownPool": "there is no pool {pool}: check --pool and --deployment",
    "UnknownProposal": "no slash was proposed for {leaf}",
    "UnknownRewardRoot": "pool {pool} has no reward root of epoch {epoch} that stands",
    "UnknownRoot": "pool {pool} has no root {seq}",
    "ValidityOver": "the submission's validity has ended",
    "WindowClosed": "the window for {leaf} has closed",
    "WindowOpen": "the window for {leaf} is still open",
    "WrongOutcome": "opinions of outcome {outcome} do not allow this",
    "WrongState": "the slash for {leaf} is in another state",
    "WrongVersion": "policy {expected} is next, not {given}",
}


def sentence(name: str, arguments: Mapping[str, Any]) -> str:
    """The sentence for error `name` with its decoded fields; empty if there is none."""
    text = SENTENCES.get(name)
    if text is None:
        return ""
    values = {
        key: prime(value)
        if key in _AMOUNTS and isinstance(value, int) and name not in _PLAIN
        else value
        for key, value in arguments.items()
    }
    try:
        return text.format(**values)
    except KeyError:  # another contract's error of the same name
        return ""
