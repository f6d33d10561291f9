"""StakeVault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from prime_chain.amounts import prime
from prime_chain.client import BlockId, Call
from prime_chain.contracts.base import Contract, or_none
from prime_chain.contracts.token import Permit
from prime_core.ids import Address
from prime_core.times import utc


@dataclass(frozen=True)
class Unbonding:
    """Stake on its way out, free from `mature_at` on unless a slash holds it."""

    amount: int
    mature_at: int


@dataclass(frozen=True)
class Binding:
    """The one manager in whose pools an account's stake is at risk, None: no one's; Unix time from
    which on another's pool can be joined, 0 as long as seats need stake (or if there is none)."""

    manager: Address | None
    until: int

    def words(self) -> str:
        """For a person: "manager 0x… until …"; empty if there is none."""
        if self.manager is None:
            return ""
        end = utc(self.until) if self.until else "an unbonding period after its last seat there"
        return f"manager {self.manager} until {end}"


@dataclass(frozen=True)
class StakeAccount:
    """An account's stake in wei: `bonded`, what open slashes hold of it included, and `held`.
    `pledges`: open proposals for which it stands as a validator."""

    bonded: int
    held: int
    pledges: int


class Vault(Contract):
    """StakeVault: the only holder of stake."""

    NAME = "vault"

    def uptime_feed(self) -> Address | None:
        """What says when the L2's sequencer was down; None: nothing does."""
        return or_none(self._one("uptimeFeed"))

    def slash_cap(self) -> int:
        """The most (wei) that slashes take of one account within one validity window."""
        return cast(int, self._one("slashCap"))

    def window_time(self, block: BlockId = "latest") -> int:
        """The time by which windows close (Unix seconds): it stands still around an outage."""
        return cast(int, self._one("windowTime", block=block))

    def active(self, provider: Address, block: BlockId = "latest") -> int:
        """Stake that counts for membership."""
        return cast(int, self._one("active", provider, block=block))

    def unbonding(self, provider: Address, block: BlockId = "latest") -> int:
        """Stake on its way out, still slashable."""
        return cast(int, self._one("unbonding", provider, block=block))

    def pending_slash(self, provider: Address, block: BlockId = "latest") -> int:
        """Stake held by open slash proposals."""
        return cast(int, self._one("pendingSlash", provider, block=block))

    def committed(self, provider: Address, block: BlockId = "latest") -> int:
        """Active stake that the provider's seats in pools need."""
        return cast(int, self._one("committed", provider, block=block))

    def bound_to(self, provider: Address, block: BlockId = "latest") -> Binding:
        """To whom the stake answers."""
        manager, until = self.read("boundTo", provider, block=block)
        return Binding(or_none(manager), int(until))

    def account_of(self, account: Address, block: BlockId = "latest") -> StakeAccount:
        """The books of an account."""
        bonded, held, _, _, pledges, *_ = self._one("accountOf", account, block=block)
        return StakeAccount(bonded, held, pledges)

    def unbondable(self, provider: Address, block: BlockId = "latest") -> int:
        """What can be unbonded now."""
        return cast(int, self._one("unbondable", provider, block=block))

    def unbondings(self, provider: Address, block: BlockId = "latest") -> tuple[Unbonding, ...]:
        """The queue, oldest first."""
        return tuple(Unbonding(*one) for one in self._one("unbondings", provider, block=block))

    def deposit(self, amount: int) -> Call:
        """Needs an allowance for this contract."""
        return self.write("deposit", amount, what=f"deposit {prime(amount)} of stake")

    def deposit_with_permit(self, amount: int, permit: Permit) -> Call:
        what = f"deposit {prime(amount)} of stake by permit"
        return self.write(
            "depositWithPermit", amount, permit.deadline, permit.v, permit.r, permit.s, what=what
        )

    def unbond(self, amount: int) -> Call:
        return self.write("unbond", amount, what=f"start unbonding {prime(amount)}")

    def rebond(self, amount: int) -> Call:
        return self.write("rebond", amount, what=f"bond {prime(amount)} again")

    def withdraw(self) -> Call:
        return self.write("withdraw", what="withdraw the stake that has finished unbonding")
