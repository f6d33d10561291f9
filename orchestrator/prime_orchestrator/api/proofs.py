"""Reward proofs of the newest root that the chain has confirmed, kept in memory.

Each node and owner asks for its own proof several times an epoch. The settlement's object, which
may have thousands of entries and files, is read and parsed once.
"""

from __future__ import annotations

from dataclasses import dataclass

from prime_core.encoding import MerkleTree
from prime_core.ids import Address, Digest
from prime_core.settlement import Settlement
from prime_core.storage.base import ObjectStore
from prime_orchestrator.manager.settlement import settlement_of
from prime_orchestrator.store.rewards import RewardRootRow


@dataclass(frozen=True)
class RewardProofs:
    """The entries of one settlement: node → (number, cumulative wei), and the tree over them."""

    epoch: int
    entries: dict[Address, tuple[int, int]]
    tree: MerkleTree

    @classmethod
    def of(cls, settlement: Settlement) -> RewardProofs:
        entries = {
            Address(one.node): (number, int(one.cumulative))
            for number, one in enumerate(settlement.entries)
        }
        return cls(settlement.epoch, entries, MerkleTree(settlement.leaves()))

    def proof(self, node: Address) -> tuple[int, list[Digest]]:
        """Returns a node's cumulative wei and its Merkle proof; (0, []) if it has no entry."""
        found = self.entries.get(node)
        if found is None:
            return 0, []
        number, cumulative = found
        return cumulative, self.tree.proof(number)


class KeptProofs:
    """The proofs of one root. Requests that miss it read the object on their own: one that waits
    for the object store holds up no other."""

    def __init__(self) -> None:
        self._kept: tuple[Digest, RewardProofs] | None = None

    def of(self, root: RewardRootRow, objects: ObjectStore) -> RewardProofs:
        """Returns the proofs of `root`. Raises NotFoundError or UnavailableError if its object
        cannot be read."""
        kept = self._kept
        if kept is None or kept[0] != root.object:
            kept = root.object, RewardProofs.of(settlement_of(root, objects))
            self._kept = kept
        return kept[1]
