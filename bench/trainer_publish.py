"""Publication of made-up weights from the parts of as many ranks as torchrun starts: FOLDER BYTES.
Run by `bench trainer`; rank 0 writes the seconds of each part to FOLDER/seconds.json."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from prime_broadcast.publish import finalize
from prime_broadcast.sharded import publish_part
from prime_core.checkpoint import SignedManifest
from prime_core.ids import Signature
from prime_trainer import snapshot
from prime_trainer.parallel import joined_world

TENSORS, COLUMNS = 32, 4096
RATE = 1e-6
"""The change of each weight, as one AdamW step makes it."""


def main() -> None:
    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    shape = (size // 2 // TENSORS // COLUMNS, COLUMNS)
    shapes = {f"weight.{number:02d}": shape for number in range(TENSORS)}
    found: dict[str, float] = {}
    with joined_world() as world:
        generator = torch.Generator().manual_seed(5)
        state = {
            name: distribute_tensor(
                torch.randn(shape, generator=generator) * 0.02, world.mesh, [Shard(0)]
            )
            for name, shape in shapes.items()
        }
        for version in (0, 1):
            for tensor in state.values():
                rows = tensor.to_local()
                rows.add_(torch.randn(rows.shape, generator=generator) * (RATE * version))
            world.barrier()
            start = time.perf_counter()
            part = snapshot.take(state, shapes, world)
            taken = time.perf_counter()
            manifest = publish_part(
                part, {"config.json": b"{}"}, folder, world.exchange,
                pool=0, version=version, step=version, delta_from=1,
            )  # fmt: skip
            world.barrier()
            ended = time.perf_counter()
            found |= {"take": taken - start, "publish": ended - taken}
            if world.leads:
                signature = Signature("0x" + "11" * 65)
                finalize(
                    folder, SignedManifest.model_construct(manifest=manifest, signature=signature)
                )
            world.barrier()
        source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        copies = []
        for _ in range(3 if world.leads else 0):
            start = time.perf_counter()
            target.copy_(source)
            copies.append(time.perf_counter() - start)
        if world.leads:
            found["memcpy"] = min(copies)
            found["delta_bytes"] = manifest.deltas[0].size
            (folder / "seconds.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
