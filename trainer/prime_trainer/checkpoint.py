"""Checkpoints: the complete state that a killed run needs to continue exactly.

    <data>/checkpoints/<step>/         DCP shards, one file per *global* rank, and state.json
    <data>/checkpoints/.staging-<step> the same, incomplete

`begin` returns while a thread writes the state (DCP), and `finish` makes it valid. From a GPU the
state is first copied to CPU memory, and training continues. State that is in CPU memory already is
written from there without a second copy, and the optimizer's next step waits for the write; passes
forward and backward do not change it. A folder gets its final name by one rename, after every rank
has written its part and rank 0 has synced it to disk. `<step>` is the number of the next batch.

All ranks write into the same folder and any number of ranks can read it, so ranks on several
machines need a shared disk. Without one, rank 0 does not find the other machines' shards, and
`finish` refuses the checkpoint.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from prime_core.errors import FatalError, UserError
from prime_core.folders import sync
from prime_core.ids import Digest
from prime_trainer.data import GroupKey
from prime_trainer.disk import writing
from prime_trainer.model import Policy
from prime_trainer.parallel import World

log = logging.getLogger(__name__)

STATE_NAME = "state.json"


@dataclass(frozen=True)
class TrainerState:
    """The state after the batches numbered below `step`; its weights are policy `version`.

    `trained` maps steps to their batches' groups, going back as far as staleness allows a group to
    be repeated. `metrics` is the last step's line. `ranks` wrote the checkpoint; another number of
    ranks can read it, but does not reproduce the same bits. `training` is the configuration of the
    last step, published with its policy.
    """

    run_digest: Digest
    step: int = 0
    version: int = 0
    trained: Mapping[int, tuple[GroupKey, ...]] = field(default_factory=dict)
    metrics: Mapping[str, Any] | None = None
    ranks: int = 1
    training: str = ""

    def recent_groups(self) -> set[GroupKey]:
        """All remembered groups."""
        return {key for keys in self.trained.values() for key in keys}

    def after(
        self,
        groups: tuple[GroupKey, ...],
        metrics: Mapping[str, Any],
        max_staleness: int,
        training: str = "",
    ) -> TrainerState:
        """The state after training the groups of the batch and into the version that its line
        `metrics` names, under the configuration `training`."""
        step = int(metrics["step"])
        kept = {s: keys for s, keys in self.trained.items() if s >= step - max_staleness}
        kept[step] = groups
        return replace(
            self, step=step + 1, version=int(metrics["version"]), trained=kept, metrics=metrics,
            training=training,
        )  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> TrainerState:
        """Parses a state. Raises FatalError if it is damaged."""
        try:
            raw = json.loads(text)
            trained = {
                int(step): tuple((Digest(sha256), int(number)) for sha256, number in keys)
                for step, keys in raw["trained"].items()
            }
            return TrainerState(
                Digest(raw["run_digest"]),
                int(raw["step"]),
                int(raw["version"]),
                trained,
                raw["metrics"],
                int(raw["ranks"]),
                str(raw["training"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FatalError(f"the checkpoint's {STATE_NAME} is damaged: {error}") from error


def _folder(data: Path) -> Path:
    return data / "checkpoints"


def latest(data: Path) -> Path | None:
    """The newest complete checkpoint under `data`."""
    return next(reversed(_numbered(_folder(data))), None)


def _numbered(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    whole = [p for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
    return sorted(whole, key=lambda path: int(path.name))


@dataclass(frozen=True)
class Saving:
    """A checkpoint in progress, valid only after `finish` has returned."""

    staging: Path
    final: Path
    state: TrainerState
    written: Future[Any] | None

    def finish(self, leads: bool, kept: int = 2) -> None:
        """Waits until every rank has written. Rank 0 then durably renames the folder and deletes
        all but the newest `kept` checkpoints. Raises UnavailableError on a disk error, and
        FatalError if the ranks do not share a disk, leaving earlier checkpoints intact."""
        data = self.final.parent.parent
        with writing(f"checkpoint {self.state.step}", data):
            if self.written is not None:
                self.written.result()
            if not leads:
                return
            shards = sum(path.suffix == ".distcp" for path in self.staging.iterdir())
            if shards < self.state.ranks:
                raise FatalError(
                    f"checkpoint {self.state.step} has shards of {shards} of {self.state.ranks} "
                    f"ranks in {data}: give all machines one shared disk for --data"
                )
            (self.staging / STATE_NAME).write_text(self.state.to_json())
            _make_durable(self.staging)
            self.staging.rename(self.final)
            sync(self.final.parent)
            for old in _numbered(self.final.parent)[:-kept]:
                shutil.rmtree(old)


def begin(
    data: Path,
    state: TrainerState,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    world: World,
) -> Saving:
    """Writes the state in a thread (DCP); a collective operation.

    Training may continue when it returns; on the CPU the write is waited for before weights change
    (`wait_for_write`). Only one checkpoint may be in progress: call `finish` on the previous one
    first, on every rank. Raises UnavailableError on a disk error.
    """
    final = _folder(data) / str(state.step)
    staging = _folder(data) / f".staging-{state.step}"
    with writing(f"checkpoint {state.step}", data):
        if world.leads:
            shutil.rmtree(staging, ignore_errors=True)
            shutil.rmtree(final, ignore_errors=True)
            staging.mkdir(parents=True)
        world.barrier()
        in_place = next(policy.parameters()).device.type == "cpu"
        written = state_dict_saver.async_save(
            _tensors(policy, optimizer, world),
            checkpoint_id=staging,
            process_group=world.storage,
            async_stager=_InPlace() if in_place else None,
        )
    assert isinstance(written, Future)
    if in_place:
        _wait_before_next_step(optimizer, written)
    return Saving(staging, final, replace(state, ranks=world.size), written)


class _InPlace(AsyncStager):
    """Gives DCP the live tensors instead of a copy."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        return None

    def close(self) -> None:
        return None


_written_from: WeakKeyDictionary[torch.optim.Optimizer, Future[Any]] = WeakKeyDictionary()
"""The newest write of each optimizer's live state."""


def _wait_before_next_step(optimizer: torch.optim.Optimizer, written: Future[Any]) -> None:
    """Makes the next step wait until `written` is done; its errors are for `Saving.finish`."""
    if optimizer not in _written_from:
        optimizer.register_step_pre_hook(lambda one, *_: wait_for_write(one))
    _written_from[optimizer] = written


def wait_for_write(optimizer: torch.optim.Optimizer) -> None:
    """Waits until no checkpoint is being written from the live state."""
    if written := _written_from.get(optimizer):
        wait([written])


def save(
    data: Path,
    state: TrainerState,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    world: World,
) -> None:
    """Writes checkpoint `state.step` and waits for it, on all ranks together; keeps the last two.

    Raises UnavailableError on a disk error, leaving earlier checkpoints intact.
    """
    begin(data, state, policy, optimizer, world).finish(world.leads)
    world.barrier()


def load(
    data: Path,
    run_digest: Digest,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    world: World,
) -> TrainerState | None:
    """Restores the newest checkpoint into `policy` and `optimizer`; None if there is none.

    Raises UserError if it belongs to another run, FatalError if it is damaged.
    """
    if world.leads:
        for leftover in _folder(data).glob(".staging-*"):
            shutil.rmtree(leftover)
    newest = latest(data) if world.leads else None
    name = world.broadcast(newest.name.encode() if newest else b"").decode()
    if not name:
        return None
    folder = _folder(data) / name
    state = TrainerState.from_json((folder / STATE_NAME).read_text())
    if state.run_digest != run_digest:
        raise UserError(
            f"{data} holds a checkpoint of another run ({state.run_digest})",
            hint="name another --data folder for this run",
        )
    tensors = _tensors(policy, optimizer, world)
    if state.ranks != world.size:
        log.warning(
            "the checkpoint was written by %d ranks and is read by %d: the run goes on, but not "
            "with the very bits that it would have had",
            state.ranks,
            world.size,
        )
    if world.rank >= state.ranks:
        del tensors["random"]
    try:
        state_dict_loader.load(tensors, checkpoint_id=folder)
    except CheckpointException as error:  # a BaseException, which callers do not handle
        cause = next((repr(cause) for cause, _ in error.failures.values()), "no cause given")
        raise FatalError(
            f"checkpoint {folder} cannot be read ({cause.partition(chr(10))[0]}): move it away, "
            "and the trainer goes on from the one before"
        ) from error
    set_model_state_dict(policy, tensors["policy"])
    fused = optimizer.param_groups[0].get("fused")
    for group in tensors["optimizer"]["param_groups"]:
        if "fused" in group:
            group["fused"] = fused  # older checkpoints were written without
    set_optimizer_state_dict(policy, optimizer, tensors["optimizer"])
    if world.rank < state.ranks:
        torch.set_rng_state(tensors["random"][str(world.rank)])
    return state


def _tensors(policy: Policy, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    return {
        "policy": get_model_state_dict(policy),
        "optimizer": get_optimizer_state_dict(policy, optimizer),
        "random": {str(world.rank): torch.get_rng_state()},
    }


def _make_durable(folder: Path) -> None:
    for path in folder.iterdir():
        sync(path)
    sync(folder)
