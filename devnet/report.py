"""`report.json` and `report.html` of a run: pictures and tables, from what was observed outside."""

from __future__ import annotations

import html
import json
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from devnet.figures import axes_of, svg_of
from devnet.findings import Finding
from devnet.network import Network
from devnet.observe import Observation
from devnet.plan import TOKEN
from prime_chain import events
from prime_core.messages import Status

STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #17803d; --bad: #b42318; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line);
         vertical-align: top; white-space: nowrap; }
td:last-child { white-space: normal; overflow-wrap: anywhere; }
.scroll, figure { overflow-x: auto; }
svg { width: 100%; min-width: 480px; max-width: 760px; height: auto; fill: currentColor; }
.yes { color: var(--good); } .no { color: var(--bad); font-weight: 600; }
figure { margin: 1rem 0; } figcaption { font-size: 13px; opacity: 0.75; }
code { font-size: 13px; }
"""


def write_report(
    network: Network,
    evaluations: Sequence[tuple[int, float]],
    seen: Observation,
    judged: Sequence[Finding],
    seconds: float,
) -> None:
    """Writes both files into the run's folder."""
    data = gather(network, evaluations, seen, judged, seconds)
    (network.root / "report.json").write_text(json.dumps(data, indent=2, default=str))
    (network.root / "report.html").write_text(page(data))


def gather(
    network: Network,
    evaluations: Sequence[tuple[int, float]],
    seen: Observation,
    judged: Sequence[Finding],
    seconds: float,
) -> dict[str, Any]:
    """The report as plain data. Amounts in whole tokens as text, times in seconds."""
    metrics = [
        json.loads(line)
        for line in (network.root / "trainer" / "metrics.jsonl").read_text().splitlines()
    ]
    status: Status = network.status()
    names = network.names()
    started = seen.chain.events[0].block_time if seen.chain.events else 0
    return {
        "ok": all(finding.ok for finding in judged),
        "seconds": round(seconds, 1),
        "machine": {"system": platform.platform(), "python": platform.python_version()},
        "findings": [{"name": f.name, "ok": f.ok, "because": f.because} for f in judged],
        "evaluations": [{"version": v, "mean_reward": m} for v, m in evaluations],
        "steps": [
            {
                "step": line["step"],
                "reward": line["reward"],
                "staleness": line["staleness"],
                "rows": line["rows"],
                "seconds": line["seconds"],
            }
            for line in metrics
        ],
        "files": dict(status.files),
        "nodes": [
            {
                "name": names.get(node.node, node.node),
                "address": node.node,
                "status": node.status,
                "speed_class": node.speed_class,
                "accepted": node.accepted,
                "rejected": node.rejected,
                "void": node.void,
                "units": node.units,
            }
            for node in status.nodes
        ],
        "targets": [share.model_dump() for share in status.targets],
        "slashes": [
            {
                "node": names.get(event.node, event.node),
                "address": event.node,
                "amount": _tokens(event.amount),
                "transaction": event.tx_hash,
                "at": event.block_time - started,
            }
            for event in seen.chain.of(events.SlashExecuted)
        ],
        "slash_transactions": [
            _of_transaction(seen, tx_hash)
            for tx_hash in dict.fromkeys(
                event.tx_hash for event in seen.chain.of(events.SlashExecuted)
            )
        ],
        "payouts": [
            {"node": p.name, "claimed": _tokens(p.claimed), "rebuilt": _tokens(p.rebuilt)}
            for p in seen.payments
        ],
        "transactions": dict(Counter(event.name for event in seen.chain.events)),
        "arrivals": {
            "deltas": sum(a.as_delta for a in seen.arrivals),
            "whole": sum(not a.as_delta for a in seen.arrivals),
        },
    }


@dataclass(frozen=True)
class _Cell:
    """Text that links to a place in the page (`to`), or is such a place (`name`)."""

    text: str
    to: str = ""
    name: str = ""

    def __str__(self) -> str:
        return self.text


def _of_transaction(seen: Observation, tx_hash: str) -> dict[str, Any]:
    """The events of one transaction, with its block."""
    found = [event for event in seen.chain.events if event.tx_hash == tx_hash]
    return {
        "hash": tx_hash,
        "block": found[0].block,
        "events": [f"{event.name} {json.dumps(event.args(), default=str)}" for event in found],
    }


def _tokens(wei: int) -> str:
    return f"{wei // TOKEN}.{wei % TOKEN:018d}".rstrip("0").rstrip(".")


def page(data: dict[str, Any]) -> str:
    """One self-contained HTML page."""
    steps = data["steps"]
    verdict = "all six findings hold" if data["ok"] else "NOT all findings hold"
    minutes = f"{data['seconds'] / 60:.1f}"
    addresses = {n["name"]: n["address"] for n in data["nodes"]}
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<title>Devnet report</title><style>{STYLE}</style>",
        f"<h1>Devnet report</h1><p>{minutes} minutes, {len(steps)} steps: {verdict}.</p>",
        "<h2>Findings</h2>",
        _table(
            ("finding", "holds", "because"),
            (
                (f["name"], "yes" if f["ok"] else "NO", f["because"])
                for f in data["findings"]
            ),
        ),
        "<h2>Reward</h2>",
        _figure(_reward_picture(data), "Mean reward of each batch; dots: held-out problems."),
        "<h2>Staleness</h2>",
        _figure(_staleness_picture(steps), "Rows of each batch by age, in policies."),
        "<h2>Where a step's time went</h2>",
        _figure(_timing_picture(steps), "Seconds of each step, by what was done or awaited."),
        "<h2>Nodes and verdicts</h2>",
        _table(
            ("node", "address", "state", "class", "accepted", "rejected", "void", "units"),
            (
                (n["name"], _Cell(n["address"], name=n["address"]), n["status"],
                 n["speed_class"], n["accepted"], n["rejected"], n["void"], n["units"])
                for n in data["nodes"]
            ),
        ),
        "<h2>Target lengths</h2>",
        _table(
            ("target", "leases asked", "accepted", "groups sealed", "groups trained recently"),
            (
                (t["target"], t["asked"], t["accepted"], t["sealed"], t["trained"])
                for t in data["targets"]
            ),
        ),
        "<h2>Slashes</h2>",
        _table(
            ("node", "amount", "transaction", "after (s)"),
            (
                (_Cell(s["node"], s["address"]), s["amount"],
                 _Cell(s["transaction"], s["transaction"]), s["at"])
                for s in data["slashes"]
            ),
        ),
        _table(
            ("transaction", "block", "events"),
            (
                (_Cell(t["hash"], name=t["hash"]), t["block"], "; ".join(t["events"]))
                for t in data["slash_transactions"]
            ),
        ),
        "<h2>Payouts</h2>",
        _table(
            ("node", "claimed on chain", "rebuilt from events and objects"),
            (
                (_Cell(p["node"], addresses.get(p["node"], "")), p["claimed"], p["rebuilt"])
                for p in data["payouts"]
            ),
        ),
        "<h2>Transactions</h2>",
        _table(("event", "times"), sorted(data["transactions"].items())),
        "</html>",
    ]  # fmt: skip
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        kind = {"yes": " class=yes", "NO": " class=no"}.get(str(value), "")
        text = html.escape(str(value))
        if isinstance(value, _Cell) and value.to:
            text = f'<a href="#{html.escape(value.to)}">{text}</a>'
        place = f' id="{html.escape(value.name)}"' if getattr(value, "name", "") else ""
        return f"<td{kind}{place}>{text}</td>"

    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(cell(v) for v in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class=scroll>{table}</div>"


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _reward_picture(data: dict[str, Any]) -> str:
    figure, axes = axes_of("step", "reward")
    axes.plot([s["step"] for s in data["steps"]], [s["reward"] for s in data["steps"]])
    axes.plot(
        [e["version"] for e in data["evaluations"]],
        [e["mean_reward"] for e in data["evaluations"]],
        "o",
    )
    axes.set_ylim(0, 1)
    return svg_of(figure)


def _staleness_picture(steps: Sequence[dict[str, Any]]) -> str:
    figure, axes = axes_of("step", "rows")
    ages = sorted({int(age) for step in steps for age in step["staleness"]})
    bottom = [0] * len(steps)
    for age in ages:
        rows = [int(step["staleness"].get(str(age), 0)) for step in steps]
        axes.bar([s["step"] for s in steps], rows, bottom=bottom, label=f"{age} old", width=1.0)
        bottom = [b + r for b, r in zip(bottom, rows, strict=True)]
    if ages:
        axes.legend(framealpha=0)
    return svg_of(figure)


def _timing_picture(steps: Sequence[dict[str, Any]]) -> str:
    figure, axes = axes_of("step", "seconds")
    names = sorted({name for step in steps for name in step["seconds"]})
    if steps and names:
        axes.stackplot(
            [s["step"] for s in steps],
            [[float(s["seconds"].get(name, 0.0)) for s in steps] for name in names],
            labels=names,
        )
        axes.legend(fontsize=8, framealpha=0)
    return svg_of(figure)
