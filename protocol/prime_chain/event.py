"""What every event of the contracts carries; see prime_chain/events.py."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, dataclass_transform

from prime_core.ids import Digest
from prime_core.signing import ContractName


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Event:
    """What every event carries. Its key is (block_hash, log_index). `block_time`: Unix seconds.

    A subclass is a frozen dataclass as well; `contract` is the contract that emits it."""

    CONTRACT: ClassVar[ContractName]

    block: int
    block_hash: Digest
    block_time: int
    log_index: int
    tx_hash: Digest

    def __init_subclass__(cls, contract: ContractName) -> None:
        cls.CONTRACT = contract
        dataclass(frozen=True)(cls)

    @property
    def name(self) -> str:
        return type(self).__name__

    @classmethod
    @cache
    def own_fields(cls) -> tuple[str, ...]:
        """Names of the event's own fields, in Solidity's order."""
        return tuple(item.name for item in fields(cls) if item.name not in _BASE)

    def args(self) -> dict[str, Any]:
        """The event's own fields, ready for JSON."""
        return {name: getattr(self, name) for name in self.own_fields()}


_BASE = frozenset(item.name for item in fields(Event))
_KEYWORDS = {"from": "origin", "class": "verification_class"}


@cache
def snake(name: str) -> str:
    """A Solidity parameter's name as a Python field's."""
    plain = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name.strip("_")).lower()
    return _KEYWORDS.get(plain, plain)
