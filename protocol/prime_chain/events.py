"""Events decoded purely from logs, and the way back.

An event serializes to JSON (`args`) and back (`rebuild`), so that an indexer may keep it in a
store. The classes themselves are generated: event_kinds.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prime_chain import codec
from prime_chain.client import Log, TxReceipt
from prime_chain.event import Event as Event
from prime_chain.event import snake
from prime_chain.event_kinds import *  # noqa: F403 - every kind is named here as well
from prime_core.deployment import SOLIDITY_NAMES, Deployment
from prime_core.errors import MalformedError

EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}
"""Every event class by its name."""


def decode(log: Log, block_time: int, deployment: Deployment) -> Event | None:
    """The typed event of a log of ours; None for a log of another contract or another event.

    Raises MalformedError if the log claims to be one of our events and does not decode.
    """
    contract = deployment.addresses().get(log.address)
    if contract is None or not log.topics:
        return None
    item = codec.artifact(SOLIDITY_NAMES[contract]).events.get(log.topics[0])
    kind = EVENTS.get(item.name) if item is not None else None
    if item is None or kind is None or contract != kind.CONTRACT:
        return None
    values = {snake(key): v for key, v in codec.decode_log(item, log.topics, log.data).items()}
    head = {
        "block": log.block,
        "block_hash": log.block_hash,
        "block_time": block_time,
        "log_index": log.log_index,
        "tx_hash": log.tx_hash,
    }
    return _make(kind, head, values)


def of_receipt(receipt: TxReceipt, block_time: int, deployment: Deployment) -> list[Event]:
    """Our events that one transaction emitted, in order. `block_time` is its block's."""
    found = (decode(log, block_time, deployment) for log in receipt.logs)
    return [event for event in found if event is not None]


def rebuild(name: str, head: Mapping[str, Any], args: Mapping[str, Any]) -> Event:
    """The event that `args()` and the base fields came from. Raises MalformedError if unknown."""
    if name not in EVENTS:
        raise MalformedError(f"there is no event {name!r}")
    return _make(EVENTS[name], head, args)


def _make(kind: type[Event], head: Mapping[str, Any], args: Mapping[str, Any]) -> Event:
    if set(args) != set(kind.own_fields()):
        raise MalformedError(f"{kind.__name__} has fields {kind.own_fields()}, not {tuple(args)}")
    return kind(**head, **args)
