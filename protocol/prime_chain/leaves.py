"""Where a submission lies on chain: the root that holds its leaf, the path to it, what was signed.

a batch's root     the manager posted it; the object that its event names lists the leaves
a node's own leaf  the root is the leaf; the transaction that posted it carries what was signed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from prime_chain import codec
from prime_chain.client import ChainClient
from prime_chain.events import Event, LeafPosted, RootPosted
from prime_core import encoding
from prime_core.deployment import SOLIDITY_NAMES, Deployment
from prime_core.errors import MalformedError, NotFoundError, UntrustedError
from prime_core.ids import ZERO_DIGEST, Digest, Signature
from prime_core.rollout import Receipt, SignedSubmission, Submission, decode_leaves
from prime_core.signing import Statement
from prime_core.task import Lease

S = TypeVar("S", bound=Statement)
MAX_OBJECT_BYTES = 32 << 20
GetObject = Callable[[Digest, int], bytes]
"""(SHA-256, most bytes) → the object's bytes, checked. Raises NotFoundError, UnavailableError."""


@dataclass(frozen=True)
class RootedLeaf:
    """A submission under a root on chain, and the Merkle path from one to the other."""

    root: RootPosted
    proof: tuple[Digest, ...]
    signed: SignedSubmission


@dataclass(frozen=True)
class PostedLeaf:
    """What a node put on chain for its own leaf."""

    lease: Lease
    lease_signature: Signature
    submission: Submission
    node_signature: Signature
    receipt: Receipt
    receipt_signature: Signature


def find_leaf(
    client: ChainClient,
    deployment: Deployment,
    events: Iterable[Event],
    pool: int,
    leaf: Digest,
    root: Digest | None,
    get_object: GetObject,
) -> RootedLeaf:
    """The submission whose digest is `leaf`, under the root that `root` names (any, if None).

    `events` are the work contract's. Raises NotFoundError if no root on chain holds it,
    UntrustedError if a list of leaves is not its root's, UnavailableError.
    """
    seen = [e for e in events if isinstance(e, RootPosted | LeafPosted) and e.pool == pool]
    nodes = {e.seq: e for e in seen if isinstance(e, LeafPosted)}
    for event in reversed(seen):  # most callers ask about what is new
        if not isinstance(event, RootPosted):
            continue
        if event.root == leaf and event.seq in nodes:
            posted = posted_leaf(client, deployment, nodes[event.seq])
            node = nodes[event.seq].node
            signed = SignedSubmission(
                submission=posted.submission, node=node, signature=posted.node_signature
            )
            return RootedLeaf(event, (), signed)
        if event.leaves_object == ZERO_DIGEST or root not in (None, event.root):
            continue
        leaves = decode_leaves(get_object(event.leaves_object, MAX_OBJECT_BYTES))
        named = [one.submission.digest(deployment.domain_of(one.submission)) for one in leaves]
        if encoding.merkle_root(named) != event.root:
            raise UntrustedError(f"the list of leaves of root {event.seq} is not that root's")
        if leaf in named:
            index = named.index(leaf)
            return RootedLeaf(event, tuple(encoding.merkle_proof(named, index)), leaves[index])
    raise NotFoundError(f"no root on chain holds submission {leaf} yet")


def posted_leaf(client: ChainClient, deployment: Deployment, event: LeafPosted) -> PostedLeaf:
    """What the transaction behind `event` put on chain; its submission hashes to the event's leaf.

    Raises NotFoundError if the call was wrapped by another contract, so that it cannot be read from
    the transaction itself; MalformedError if it does not decode; UnavailableError.
    """
    call = client.transaction(event.tx_hash)
    item = codec.artifact(SOLIDITY_NAMES["work"]).function("postLeaf")
    if call.to != deployment.contracts.work or call.data[:4] != item.selector:
        raise NotFoundError(
            f"leaf {event.leaf} was posted through another contract: its submission is not in the "
            "transaction itself"
        )
    lease, lease_signature, submission, node_signature, receipt, receipt_signature = codec.decode(
        item.inputs, call.data[4:]
    )
    posted = PostedLeaf(
        lease=_statement(Lease, lease),
        lease_signature=Signature(lease_signature),
        submission=_statement(Submission, submission),
        node_signature=Signature(node_signature),
        receipt=_statement(Receipt, receipt),
        receipt_signature=Signature(receipt_signature),
    )
    if posted.submission.digest(deployment.domain_of(posted.submission)) != event.leaf:
        raise UntrustedError(f"transaction {event.tx_hash} posts another leaf than its event says")
    return posted


def _statement(kind: type[S], values: tuple[object, ...]) -> S:
    try:
        return kind(**dict(zip(kind.model_fields, values, strict=True)))
    except ValueError as error:
        raise MalformedError(f"the transaction holds no {kind.__name__}") from error
