"""A node: consent to an owner, sessions, hardware, and the invite into a pool."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from prime_core.errors import PolicyError
from prime_core.signing import (
    U32,
    U64,
    U256,
    AddressField,
    ContractName,
    DigestField,
    Statement,
    Strict,
    Text,
)


class NodeConsent(Statement):
    """The node agrees to belong to `provider`. Checked by Registry.addNode; `salt` is used once."""

    CONTRACT: ClassVar[ContractName] = "registry"
    provider: AddressField
    node: AddressField
    salt: DigestField
    deadline: U64


class SessionGrant(Statement):
    """An account authorizes an Ed25519 key to sign HTTP requests to one orchestrator until
    `expiry`.

    `scope` is "node", "trainer", "relay", "manager" or "validator"; `session_key` is the raw
    Ed25519 public key; expiry − issued_at ≤ 24 h.
    """

    CONTRACT: ClassVar[ContractName] = "registry"
    account: AddressField
    session_key: DigestField
    orchestrator: Text
    scope: Text
    issued_at: U64
    expiry: U64


class SessionRevocation(Statement):
    """Immediately ends every session of `account` that was issued before `revoked_before`."""

    CONTRACT: ClassVar[ContractName] = "registry"
    account: AddressField
    orchestrator: Text
    revoked_before: U64


class Invite(Statement):
    """The manager admits `node` to `pool`. Checked by Pools.join."""

    CONTRACT: ClassVar[ContractName] = "pools"
    pool: U256
    node: AddressField
    deadline: U64


class HardwarePassport(Statement):
    """The manager's record of a node's proof of cards: `card_gmacs` is the measured rate of each of
    `cards` cards in 10⁹ multiply-adds per second, `kind` their name in prime_core/known_cards.py.

    `claimed_memory_mb` (MiB a card) and `claimed_ms`, the node's own timer, were not checked.
    `root` is the proof's commitment, `measured_at` in Unix seconds.
    """

    CONTRACT: ClassVar[ContractName] = "pools"
    pool: U256
    node: AddressField
    kind: Text
    cards: U32
    card_gmacs: U64
    claimed_memory_mb: U64
    measured_ms: U64
    round_trip_ms: U64
    claimed_ms: U64
    root: DigestField
    measured_at: U64

    @property
    def named(self) -> str:
        """Number and name of the cards."""
        return f"{self.cards} x {self.kind}"

    @property
    def sentence(self) -> str:
        """What was proven, for people."""
        return (
            f"{self.named}, {self.card_gmacs / 1000:.2f} tera multiply-adds a second on each card"
        )


class MemoryPassport(Statement):
    """The manager's record of a node's proof of memory, made with the proof of cards of the same
    `measured_at`: each of `cards` cards was filled with `proved_memory_mb` MiB, and all of it was
    read in `measured_ms`, where the pool expects `most_ms` at most. `root` is the proof's
    commitment."""

    CONTRACT: ClassVar[ContractName] = "pools"
    pool: U256
    node: AddressField
    kind: Text
    cards: U32
    proved_memory_mb: U64
    measured_ms: U64
    most_ms: U64
    round_trip_ms: U64
    root: DigestField
    measured_at: U64


class Gpu(Strict):
    """One accelerator as reported by NVML (a hint, not a proof). `memory_mb` is in MiB."""

    model: str = Field(max_length=128)
    memory_mb: int = Field(ge=0, le=1 << 24)


class Hardware(Strict):
    """A node's own description of its machine. Memory and disk in MiB."""

    cpu_model: str = Field(max_length=128)
    cpu_count: int = Field(ge=1, le=4096)
    memory_mb: int = Field(ge=0, le=1 << 28)
    disk_mb: int = Field(ge=0, le=1 << 32)
    gpus: tuple[Gpu, ...] = Field(max_length=64)


class Requirements(Strict):
    """A pool's hardware requirements. `gpu_model` is a case-insensitive substring; "" means any."""

    gpu_count: int = Field(default=0, ge=0)
    gpu_model: str = ""
    gpu_memory_mb: int = Field(default=0, ge=0)
    cpu_count: int = Field(default=1, ge=1)
    memory_mb: int = Field(default=0, ge=0)
    disk_mb: int = Field(default=0, ge=0)

    def shortfalls(self, found: Hardware) -> list[str]:
        """Describes what a machine lacks, one entry per requirement; empty if it qualifies."""
        fitting = [
            gpu
            for gpu in found.gpus
            if self.gpu_model.lower() in gpu.model.lower() and gpu.memory_mb >= self.gpu_memory_mb
        ]
        missing = []
        if len(fitting) < self.gpu_count:
            kind = f" {self.gpu_model}" if self.gpu_model else ""
            memory = f" with {self.gpu_memory_mb} MiB" if self.gpu_memory_mb else ""
            missing.append(f"{self.gpu_count}{kind} GPU(s){memory}, found {len(fitting)}")
        for name, wanted, have in (
            ("CPUs", self.cpu_count, found.cpu_count),
            ("MiB of memory", self.memory_mb, found.memory_mb),
            ("MiB of disk", self.disk_mb, found.disk_mb),
        ):
            if have < wanted:
                missing.append(f"{wanted} {name}, found {have}")
        return missing

    def require(self, found: Hardware) -> None:
        """Raises PolicyError listing everything the machine lacks."""
        if missing := self.shortfalls(found):
            raise PolicyError(
                "this machine does not fit the pool, which asks for " + "; ".join(missing)
            )


NodeStatus = Literal["admitted", "active", "silent", "quarantined", "ejected", "left", "shadow"]
"""admitted: invited, not yet a member on chain · active: member with fresh heartbeats · silent: no
heartbeat for the death period (gets no leases, no penalty) · quarantined: a rejected file awaits
its slash · ejected: the slash or an ejection is confirmed · left: left voluntarily · shadow: works
without a seat, for verdicts only."""
