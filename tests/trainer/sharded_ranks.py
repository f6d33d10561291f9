"""What the ranks of test_trainer_sharded.py do: publish three versions from parts and, by the
gathered model, from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trainer_kit as kit

from prime_broadcast.publish import finalize, publish
from prime_broadcast.sharded import publish_part
from prime_core.checkpoint import SignedManifest
from prime_core.errors import ConflictError, FatalError
from prime_core.ids import Signature
from prime_trainer.config import Settings
from prime_trainer.learner import Learner
from prime_trainer.parallel import World, joined_world, published_state
from prime_trainer.publish import export, other_files, take_part


def change(learner: Learner, version: int) -> None:
    """Moves every trained weight a little, by its own rows."""
    for parameter in learner.policy.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(1 + version / 256).add_(1e-4)


def both(learner: Learner, world: World, model: Path, data: Path) -> None:
    training = Settings().training()
    for version in (1, 2, 3):
        change(learner, version)
        facts = {"pool": 7, "version": version, "step": version, "delta_from": 2}
        part = take_part(learner.policy, world, model, training)
        others = other_files(model, training)
        for _ in range(2):  # the second finds a prepared version
            made = publish_part(part, others, data / "parts", world.exchange, **facts)
        gathered = published_state(learner.policy, world)
        if world.leads:
            export(gathered, model, data / "export", training)
            expected = publish(data / "export", data / "whole", **facts)
            assert made == expected
            assert len(made.deltas) == min(version - 1, 2)
            for root in ("parts", "whole"):
                signed = SignedManifest.model_construct(
                    manifest=made, signature=Signature("0x" + "11" * 65)
                )
                finalize(data / root, signed)
        world.barrier()
        assert publish_part(part, others, data / "parts", world.exchange, **facts) == made
        changed = others | {"trainer.json": b"{}"}
        with pytest.raises(ConflictError, match="already published with other files"):
            publish_part(part, changed, data / "parts", world.exchange, **facts)


def refused(learner: Learner, world: World, model: Path) -> None:
    """A weight that is not finite, on the last rank only, is an error of every rank."""
    if world.rank == world.size - 1:
        rows = next(p for p in learner.policy.parameters() if p.requires_grad)
        rows.data.to_local()[-1:].fill_(torch.inf)  # type: ignore[attr-defined]
    with pytest.raises(FatalError, match="is not finite"):
        take_part(learner.policy, world, model, "")


def published(model: Path, data: Path, lora: int) -> None:
    """The work of a rank. `lora`: rank of the adapters; 0: all weights are trained."""
    with joined_world() as world:
        learner = kit.learner(model, data, world, lora_rank=lora)
        both(learner, world, model, data)
        refused(learner, world, model)
