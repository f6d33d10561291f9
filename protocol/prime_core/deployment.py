"""The deployment file: the addresses of the contracts on one chain, and their periods."""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

from pydantic import Field, ValidationError

from prime_core.errors import UserError
from prime_core.given import read_given
from prime_core.ids import Address
from prime_core.messages import ContractAddresses
from prime_core.run import RunDefinition
from prime_core.signing import (
    CONTRACT_NAMES,
    AddressField,
    ContractName,
    DigestField,
    Domain,
    Statement,
    Strict,
)

_MAX_BYTES = 1 << 20

SOLIDITY_NAMES: dict[ContractName, str] = {
    "token": "PrimeToken",
    "registry": "Registry",
    "vault": "StakeVault",
    "pools": "Pools",
    "work": "Work",
    "rewards": "Rewards",
    "slasher": "Slasher",
    "court": "Court",
}
"""The Solidity contract for each name; also the name of its file in `abi/`."""


class Periods(Strict):
    """In seconds, fixed at deployment. Unbonding exceeds validity + slash window + dispute
    window."""

    FIELDS: ClassVar[tuple[str, ...]] = (
        "epoch_length", "validity", "slash_window", "dispute_window", "reward_delay", "unbonding",
    )  # fmt: skip

    epoch_length: int = Field(default=3600, ge=1)
    validity: int = Field(default=86_400, ge=1)
    slash_window: int = Field(default=3 * 86_400, ge=1)
    dispute_window: int = Field(default=7 * 86_400, ge=1)
    reward_delay: int = Field(default=86_400, ge=1)
    unbonding: int = Field(default=14 * 86_400, ge=1)

    def as_tuple(self) -> tuple[int, ...]:
        """In the order of the contracts' `Periods` struct."""
        return tuple(getattr(self, name) for name in self.FIELDS)

    @property
    def accountable(self) -> int:
        """How long after a submission's `validUntil` it can be rooted and still be slashed."""
        return self.slash_window + self.dispute_window

    @property
    def dispute_days(self) -> int:
        """Number of days after which a file can neither be rooted late, accused, disputed nor
        judged any more."""
        return math.ceil((2 * self.unbonding + self.dispute_window) / 86_400)

    def problem(self) -> str:
        """Why the contracts would reject these periods; empty if they would accept them."""
        liability = self.validity + self.slash_window + self.dispute_window
        if self.unbonding <= liability:
            return (
                f"unbonding of {self.unbonding} s must exceed validity + slash window + dispute "
                f"window = {liability} s"
            )
        return ""

    def trap(self) -> str:
        """Why these periods are unsafe although the contracts accept them; empty if they are
        safe."""
        if self.accountable <= self.epoch_length:
            return (
                f"slash window + dispute window = {self.accountable} s must exceed the epoch of "
                f"{self.epoch_length} s: a node may root its own work an epoch after the receipt "
                "(Work.postLeaf), and no stake would be liable for that work any more"
            )
        return ""

    @property
    def self_help(self) -> int:
        """Minimum time in seconds during which a node can root work that its manager did not."""
        return max(0, min(self.validity, self.accountable - self.epoch_length))


DEMO_PERIODS = Periods(
    epoch_length=20, validity=60, slash_window=15, dispute_window=15, reward_delay=10, unbonding=150
)
"""Periods of the local demo."""


class Roles(Strict):
    """Privileged accounts, apart from the pools' own keys. `governor` zero: the slasher's terms are
    immutable. `holder` received the token's initial supply. `treasury` receives slashed tokens
    (zero: they are burned)."""

    arbiter: AddressField
    governor: AddressField
    holder: AddressField
    treasury: AddressField


class Deployment(Strict):
    """One deployment. `block` is the first block that can contain one of its events. By contract:
    `blocks` of creation; `abi`, the SHA-256 of the committed artifact it was deployed from; `code`,
    the keccak256 of its code on chain (EXTCODEHASH); `arguments` of its constructor as text, and
    `encoded_arguments` as required by an explorer's verification. `commit` identifies the sources,
    `source_input` (SHA-256) the standard-JSON compiler input stored next to this file."""

    chain_id: int
    contracts: ContractAddresses
    block: int = Field(ge=0)
    periods: Periods
    deployer: str = ""
    roles: Roles | None = None
    commit: str = ""
    source_input: str = ""
    blocks: dict[str, int] = Field(default_factory=dict)
    arguments: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    encoded_arguments: dict[str, str] = Field(default_factory=dict)
    transactions: dict[str, str] = Field(default_factory=dict)
    abi: dict[str, DigestField] = Field(default_factory=dict)
    code: dict[str, DigestField] = Field(default_factory=dict)

    def address(self, name: ContractName) -> Address:
        """The contract's address."""
        found: Address = getattr(self.contracts, name)
        return found

    def addresses(self) -> dict[Address, ContractName]:
        """Contract names by address."""
        return {self.address(name): name for name in CONTRACT_NAMES}

    def domain(self, name: ContractName) -> Domain:
        """The EIP-712 domain of statements checked by contract `name`."""
        return Domain(chain_id=self.chain_id, contract=self.address(name))

    def domain_of(self, statement: Statement | type[Statement]) -> Domain:
        """The domain under which a statement is signed."""
        return self.domain(statement.CONTRACT)

    def check_run(self, run: RunDefinition) -> None:
        """Raises UserError if a run definition's periods differ from these contracts'."""
        for name, its, ours in (
            ("epoch_seconds", run.epoch_seconds, self.periods.epoch_length),
            ("validity_seconds", run.validity_seconds, self.periods.validity),
        ):
            if its != ours:
                raise UserError(
                    f"the run definition's {name} is {its}, the contracts' is {ours}",
                    hint="make a run definition for this deployment: it is fixed for good once "
                    "the pool exists",
                )

    @classmethod
    def load(cls, path: Path) -> Deployment:
        """Reads a deployment file. Raises UserError if it is missing or malformed."""
        hint = (
            "give --deployment FILE; the operator publishes it, or make one with: orchestrator "
            "deployment deploy"
        )
        raw = read_given(path, "deployment file", hint, limit=_MAX_BYTES)
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            why = f"{where}: {first['msg']}" if where else "it is not JSON"
            if first["type"] != "json_invalid" and not where:
                why = first["msg"]
            raise UserError(f"{path} is not a deployment file: {why}", hint=hint) from error

    def save(self, path: Path) -> None:
        """Writes the file atomically, replacing an older one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(self.model_dump_json(indent=2) + "\n")
        temporary.replace(path)
