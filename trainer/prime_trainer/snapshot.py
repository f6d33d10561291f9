"""Cuts a trained model into parts of the published weight file, one per rank.

FSDP2 shards every weight by rows, the published file lists whole weights by name. `take` exchanges
the bf16 rows between ranks, weight by weight, so that each rank gets one contiguous range of the
file's bytes in CPU memory. No rank ever holds the whole model; on a device, at most one weight is
held twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from prime_broadcast.manifest import choose_chunk_size
from prime_broadcast.sharded import Part, bounds
from prime_core.errors import FatalError, UserError
from prime_trainer.lora import BASE, DOWN, UP, base_name
from prime_trainer.parallel import World

WEIGHTS = "model.safetensors"


def tensor_shapes(base: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a model folder, from its files' headers. Raises UserError."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    if not shapes:
        raise UserError(f"{base} holds no safetensors weights")
    return shapes


@dataclass(frozen=True)
class FileLayout:
    """A safetensors file of bf16 weights: its first bytes, each weight's offset in the file, and
    the file's size."""

    head: bytes
    offsets: Mapping[str, int]
    size: int

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]]) -> FileLayout:
        """The layout that the safetensors library gives to bf16 weights of these shapes."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        begins = {}
        for name in sorted(shapes):
            begins[name] = position
            end = position + 2 * math.prod(shapes[name])
            entries[name] = {
                "dtype": "BF16",
                "shape": list(shapes[name]),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
        offsets = {name: len(head) + begin for name, begin in begins.items()}
        return FileLayout(head, offsets, len(head) + position)


def take(
    state: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    world: World,
    *,
    other_bytes: int = 0,
    lora_scale: float = 1.0,
) -> Part:
    """This rank's part of the file with all weights of `shapes` in bf16; a collective operation.
    The result is a copy.

    `state` holds the model's weights (DTensors sharded by rows, or whole tensors), and adapters
    with their frozen weights; they are merged as W + lora_scale · B · A in their own width. The
    policy's other files have `other_bytes` bytes, which count for the size of chunks.

    Raises FatalError, on every rank, if a weight is missing, has another shape, or is not finite in
    bf16.
    """
    layout = FileLayout.of(shapes)
    chunk_size = choose_chunk_size(layout.size + other_bytes)
    cuts = bounds(layout.size, chunk_size, world.size)
    begin, end = cuts[world.rank], cuts[world.rank + 1]
    data = torch.empty(end - begin, dtype=torch.uint8)
    if piece := layout.head[begin:end]:  # a rank may have no bytes of a small model
        data[: len(piece)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
    names = {base_name(name): name for name in state if not name.endswith((DOWN, UP))}
    bad = 0
    for number, (name, offset) in enumerate(sorted(layout.offsets.items()), start=1):
        tensor = state.get(names.get(name, name))
        if tensor is None:
            raise FatalError(f"the trained model lacks the base's weight {name}")
        if tuple(tensor.shape) != shapes[name]:
            raise FatalError(
                f"the trained {name} is {tuple(tensor.shape)}, the base's is {shapes[name]}"
            )
        rows = _rows(tensor)
        if BASE in names[name] and name.endswith("weight"):
            stem = names[name].split(BASE)[0]
            down = state[stem + DOWN]
            down = down.full_tensor() if isinstance(down, DTensor) else down
            rows = rows + lora_scale * (_rows(state[stem + UP]) @ down)
        rows = rows.to(torch.bfloat16).contiguous()
        if not bad and not bool(torch.isfinite(rows).all()):
            bad = number
        sharded = isinstance(tensor, DTensor)
        flat = rows.view(-1).view(torch.uint8)
        _hand_out(flat, offset, shapes[name], cuts, data, world, sharded=sharded)
    worst = int(world.max(torch.tensor(bad, device=world.device)))
    if worst:
        raise FatalError(f"the weight {sorted(layout.offsets)[worst - 1]} is not finite")
    return Part(WEIGHTS, layout.size, begin, data.numpy().data, chunk_size, world.rank)


def _rows(tensor: Tensor) -> Tensor:
    """The rows that this rank holds."""
    rows: Tensor = tensor.detach()
    return rows.to_local() if isinstance(rows, DTensor) else rows


def _hand_out(
    mine: Tensor,
    offset: int,
    shape: tuple[int, ...],
    cuts: list[int],
    data: Tensor,
    world: World,
    *,
    sharded: bool,
) -> None:
    """Sends the bytes of this rank's rows to the ranks in whose ranges they lie, and writes what
    arrives for this rank's range into `data`."""
    size = 2 * math.prod(shape)
    if not sharded:  # every rank has all of it
        _put(mine, offset, cuts[world.rank], data)
        return
    each = -(-shape[0] // world.size) * (size // shape[0]) if size else 0
    held = [
        (offset + min(size, rank * each), offset + min(size, (rank + 1) * each))
        for rank in range(world.size)
    ]
    ranges = list(pairwise(cuts))
    gives = [_common(held[world.rank], other) for other in ranges]
    gets = [_common(other, ranges[world.rank]) for other in held]
    arrived = mine
    if world.size > 1:
        arrived = torch.empty(sum(gets), dtype=torch.uint8, device=mine.device)
        dist.all_to_all_single(arrived, mine, gets, gives)
    if arrived.numel():
        place = max(offset, cuts[world.rank]) - cuts[world.rank]
        data[place : place + arrived.numel()].copy_(arrived)


def _common(one: tuple[int, int], two: tuple[int, int]) -> int:
    """The number of bytes that two ranges share."""
    return max(0, min(one[1], two[1]) - max(one[0], two[0]))


def _put(whole: Tensor, offset: int, begin: int, data: Tensor) -> None:
    """Writes the bytes of `whole`, at `offset` in the file, that lie in the range of `data`."""
    first, last = max(offset, begin), min(offset + whole.numel(), begin + data.numel())
    if first < last:
        data[first - begin : last - begin].copy_(whole[first - offset : last - offset])
