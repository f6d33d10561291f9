"""Packing: samples into rows, rows onto ranks, rows into micro-batches. Pure; nothing is lost.

Every sample lands in exactly one row of exactly one rank (a property test holds this; a published
ancestor duplicated a micro-batch here, with its loss). All ranks get the same number of
micro-batches, because a collective waits for every rank; a rank without work gets empty ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

ATTENTION_COST = 1 / 2048
"""Cost of one pair of attended tokens, against one token's linear layers (hidden size ~ 2K)."""


@dataclass(frozen=True)
class Plan:
    """`ranks[r][m][k]` = the sample numbers in row k of micro-batch m of rank r, in row order."""

    ranks: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    row_tokens: int


def cost(length: int) -> float:
    """Work of one sample: linear layers plus its own (causal) attention."""
    return length + ATTENTION_COST * length * length / 2


def pack_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: sample numbers in rows of at most `row_tokens` tokens.

    A sample longer than a row gets a row of its own. Deterministic: ties go to the earlier row.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows: list[list[int]] = []
    open_by_room: dict[int, list[int]] = {}  # room left → heap of row numbers
    for sample in order:
        length = lengths[sample]
        if length < 1:
            raise ValueError(f"sample {sample} has no tokens")
        room = next((r for r in range(length, row_tokens + 1) if open_by_room.get(r)), None)
        if room is None:
            row, left = len(rows), row_tokens - length
            rows.append([sample])
        else:
            row, left = heapq.heappop(open_by_room[room]), room - length
            rows[row].append(sample)
        if left > 0:
            heapq.heappush(open_by_room.setdefault(left, []), row)
    return rows


def plan(lengths: Sequence[int], *, ranks: int, row_tokens: int, micro_tokens: int) -> Plan:
    """Which sample goes where. `lengths` in tokens; the same on every rank.

    Rows go to the least loaded rank, heaviest first (LPT: within 4/3 of the best makespan, Graham
    1969). A micro-batch holds rows worth at most `micro_tokens` padded tokens, at least one row.
    """
    rows = pack_rows(lengths, row_tokens)
    work = [sum(cost(lengths[i]) for i in row) for row in rows]
    loads = [(0.0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for row in sorted(range(len(rows)), key=lambda k: (-work[k], k)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(row)
        heapq.heappush(loads, (load + work[row], rank))
    micro: list[list[tuple[tuple[int, ...], ...]]] = []
    for share in shares:
        batches: list[list[int]] = []
        widest = 0
        # By width, so that a micro-batch pads little.
        for row in sorted(share, key=lambda k: (-sum(lengths[i] for i in rows[k]), k)):
            width = sum(lengths[i] for i in rows[row])
            if batches and max(widest, width) * (len(batches[-1]) + 1) <= micro_tokens:
                batches[-1].append(row)
            else:
                batches.append([row])
                widest = width
        micro.append([tuple(tuple(rows[k]) for k in batch) for batch in batches])
    most = max(len(batches) for batches in micro)
    return Plan(
        ranks=tuple(tuple(b + [()] * (most - len(b))) for b in micro), row_tokens=row_tokens
    )
