"""The content of `prime-node status`: the local agent, what the pool counts for its node, and on
request the state of node and owner on chain."""

from __future__ import annotations

from collections import Counter
from typing import Any

from prime_core import ids
from prime_core.errors import NotFoundError, UnavailableError
from prime_node import policy_log
from prime_node.api import NodeApi
from prime_node.config import Settings
from prime_node.state import DataFolder
from prime_node.wallet import wallet_address

_ONLY_WHILE_IT_RUNS = {
    *("pid", "heartbeat_ms", "directive", "reason", "node_status", "tokens_per_second", "task"),
    *("swap_seconds", "idle_seconds"),
}
"""Fields of the last heartbeat that mean nothing once the agent has ended."""


def overview(settings: Settings, *, chain: bool = False) -> dict[str, Any]:
    """Returns plain values by name; with `chain`, provider, stake and seat are read from the chain.
    Services that cannot be reached are named instead."""
    data = DataFolder(settings.data)
    last = data.read_status()
    holder = data.holder()
    found: dict[str, Any] = {"agent": f"running (process {holder})" if holder else "not running"}
    if last is not None:
        found |= last.model_dump(mode="json", exclude={"pid"} if holder else _ONLY_WHILE_IT_RUNS)
        if not found.get("reason"):
            found.pop("reason", None)
        if settings.pool not in (None, last.pool):
            found["pool_differs"] = (
                f"the agent in this folder works in pool {last.pool}; what the chain says below is "
                f"of pool {settings.pool}"
            )
    fetched = policy_log.last(data.root)
    if fetched is not None:
        found["last_fetch"] = _fetch(fetched)
    if settings.wallet is not None:
        found["node"] = wallet_address(settings)
    node = found.get("node")
    if node and settings.orchestrator:
        found |= _at_the_pool(settings, node)
        if chain:
            found |= _on_chain(settings, node)
    return found


def _fetch(line: dict[str, Any]) -> dict[str, Any]:
    """Returns the policy log's last line, without the digests and with the rate."""
    kept = {name: value for name, value in line.items() if not name.endswith("digest")}
    seconds = line.get("seconds") or 0
    return kept | {"bytes_per_second": round(line["bytes"] / seconds) if seconds else None}


def fetch_sentence(fetch: dict[str, Any]) -> str:
    """Describes in one line how the newest policy was fetched. `fetch` as in `overview`."""
    rate, sources = fetch["bytes_per_second"], fetch["sources"]
    way = {"whole": "whole", "delta": "by deltas"}.get(fetch["route"], "it was there")
    parts = [
        f"policy {fetch['version']} {way}",
        f"{fetch['bytes']:,} bytes in {fetch['seconds']:g} s"
        + (f" ({rate / 1e6:.3g} MB/s)" if rate else ""),
        "from " + (", ".join(f"{url} ({count:,})" for url, count in sources.items()) or "no one"),
        f"chunks fetched again: {fetch.get('refetched', 0)}",
    ]
    faults = Counter((fault["url"], fault["kind"]) for fault in fetch.get("faults", ()))
    names = {"bad_data": "sent wrong data", "failed": "failed", "delta": "could not be applied"}
    parts += [f"{url} {names.get(kind, kind)} ({count}×)" for (url, kind), count in faults.items()]
    return "; ".join(parts)


def _on_chain(settings: Settings, node: str) -> dict[str, Any]:
    from prime_chain.amounts import prime
    from prime_core.transport.client import OrchestratorClient
    from prime_node.link import connect
    from prime_node.owner import read_standing

    settings.need_rpc()
    try:
        with OrchestratorClient(settings.need_orchestrator(), timeout=5.0) as client:
            link = connect(settings, client.pool())
    except UnavailableError as error:
        return {"orchestrator": f"unreachable: {error}"}
    try:
        address = ids.address(node)
        owner = link.contracts.registry.provider_of(address)
        if owner is None:
            return {"provider": "none: the node is not registered"}
        standing = read_standing(link, address, owner)
        return {
            "provider": owner,
            "stake": prime(standing.active),
            "member": standing.member,
        }
    except UnavailableError as error:
        return {"chain": f"unreachable: {error}"}
    finally:
        link.close()


def _at_the_pool(settings: Settings, node: str) -> dict[str, Any]:
    """Returns what the orchestrator counts for this node."""
    try:
        api = NodeApi(settings.need_orchestrator(), None, timeout=5.0)
        try:
            mine = api.node(ids.address(node))
        finally:
            api.close()
    except NotFoundError:
        return {"at_the_pool": "not admitted yet"}
    except UnavailableError as error:
        return {"orchestrator": f"unreachable: {error}"}
    found: dict[str, Any] = {"at_the_pool": mine.status}
    if mine.uncalibrated_card:
        found["card"] = mine.uncalibrated_trouble or (
            f"no limits are calibrated for {mine.uncalibrated_card}: its files are judged at the "
            "widest, and never slashed for what they measure"
        )
    if mine.status == "shadow":
        found["seat"] = "none (shadow): nothing at stake, nothing paid"
    verdicts = f"{mine.accepted} accepted, {mine.rejected} rejected, {mine.void} void"
    if mine.expired_unjudged:
        verdicts += f" ({mine.expired_unjudged} expired unjudged: the pool's fault)"
    return found | {"verdicts": verdicts, "paid_tokens": mine.units}
