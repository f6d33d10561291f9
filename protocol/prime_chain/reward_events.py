"""What the chain's events say of one pool as of a block, to rebuild its reward roots."""

from __future__ import annotations

from collections.abc import Sequence

from prime_chain.events import (
    Event,
    LeafPosted,
    RewardRootDisabled,
    RewardRootPosted,
    RootPosted,
    SlashCancelled,
    SlashExecuted,
    SlashProposed,
)
from prime_core.errors import UntrustedError
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.settlement import SlashState


def standing(events: Sequence[Event]) -> list[RewardRootPosted]:
    """Reward roots that stand: the newest of each epoch, without disabled ones."""
    live: dict[int, RewardRootPosted] = {}
    for event in events:
        if isinstance(event, RewardRootPosted):
            live[event.epoch] = event
        elif isinstance(event, RewardRootDisabled):
            live = {n: e for n, e in live.items() if not event.epoch <= n <= event.last}
    return [live[number] for number in sorted(live)]


def roots_until(events: Sequence[Event], block: int) -> list[RootPosted]:
    """Work roots up to `block`; a root posted twice counts once."""
    first: dict[Digest, RootPosted] = {}
    for event in events:
        if isinstance(event, RootPosted) and event.block <= block:
            first.setdefault(event.root, event)
    return list(first.values())


def is_own(root: RootPosted) -> bool:
    """Whether a node posted the root for its own file, which is the root (Work.postLeaf)."""
    return root.leaves_object == ZERO_DIGEST and root.count == 1


def poster(events: Sequence[Event], root: RootPosted) -> Address:
    """The node that posted its own leaf as `root`; the contract has checked its signature. Raises
    UntrustedError if none did."""
    for event in events:
        if isinstance(event, LeafPosted) and (event.seq, event.leaf) == (root.seq, root.root):
            return event.node
    raise UntrustedError(f"root {root.seq} has no list of leaves, and no node posted it")


def slashes_until(events: Sequence[Event], block: int) -> dict[Digest, tuple[Address, SlashState]]:
    """Leaf → its node and how its slash stands as of `block`."""
    found: dict[Digest, tuple[Address, SlashState]] = {}
    for event in events:
        if event.block > block:
            continue
        if isinstance(event, SlashProposed):
            found[event.leaf] = (event.node, "open")
        elif isinstance(event, SlashExecuted) and event.leaf in found:
            found[event.leaf] = (event.node, "executed")
        elif isinstance(event, SlashCancelled) and event.leaf in found:
            found[event.leaf] = (event.node, "cancelled")
    return found
