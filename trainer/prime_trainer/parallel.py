"""FSDP2 over all ranks: the same code path from one plain process to torchrun on many GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from prime_core.errors import UserError
from prime_trainer.context import Context
from prime_trainer.lora import is_adapted, merged
from prime_trainer.model import Policy

COLLECTIVE_TIMEOUT = timedelta(hours=24)
"""How long ranks may wait for rank 0, which waits for the next batch."""


@dataclass(frozen=True)
class World:
    """This process's place among the ranks. `rank` and `size` are global, not local to a
    machine."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    storage: dist.ProcessGroup | None = None
    """A separate CPU group for checkpoints, so that a thread can write one while the loop
    continues."""
    context: Context | None = None
    """The ranks that share rows with this one."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which talks to the orchestrator, writes metrics and publishes."""
        return self.rank == 0

    @property
    def sharing(self) -> int:
        """Ranks that share a row; 1 without context parallelism."""
        return 1 if self.context is None else self.context.size

    @property
    def data_size(self) -> int:
        """Data-parallel ranks: groups of ranks that have different rows."""
        return self.size // self.sharing

    @property
    def data_rank(self) -> int:
        """The data-parallel rank of this process's rows."""
        return self.rank // self.sharing

    def in_groups(self, size: int) -> World:
        """The same ranks, of which each `size` consecutive ones share rows. A collective operation.
        Raises UserError if `size` does not divide the number of ranks."""
        if self.size % size:
            raise UserError(
                f"context_parallel is {size}, which does not divide the number of ranks, "
                f"{self.size}",
                hint="change --context-parallel, or the number of processes",
            )
        if size == 1:
            return self
        group, _ = dist.new_subgroups(size, timeout=COLLECTIVE_TIMEOUT)
        return replace(self, context=Context(self.rank % size, size, group))

    def broadcast(self, data: bytes | None) -> bytes:
        """Returns rank 0's bytes on every rank; other ranks pass None. Only bytes are supported,
        because torch's object broadcast unpickles what it receives."""
        if self.size == 1:
            assert data is not None
            return data
        size = torch.tensor([len(data or b"")], dtype=torch.int64, device=self.device)
        dist.broadcast(size, src=0)
        if not int(size):
            return b""
        box = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if self.leads:
            assert data is not None
            box.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(box, src=0)
        return box.cpu().numpy().tobytes()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_over_rows(self, tensor: Tensor) -> Tensor:
        """Sum over data-parallel ranks, in place, of values that the ranks of a context group have
        in common."""
        return self.sum(tensor).div_(self.sharing)

    def max(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's bytes on every rank, through CPU memory; for the thread that writes
        checkpoints and policies."""
        if self.size == 1:
            return [data]
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes, group=self.storage)
        longest = int(sizes.max())
        box = torch.zeros(longest, dtype=torch.uint8)
        box[: len(data)] = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[
            : len(data)
        ]
        boxes = [torch.empty_like(box) for _ in range(self.size)]
        if longest:
            dist.all_gather(boxes, box, group=self.storage)
        return [boxes[rank][: int(sizes[rank])].numpy().tobytes() for rank in range(self.size)]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined_world() -> Iterator[World]:
    """Joins torchrun's process group (RANK, WORLD_SIZE, LOCAL_RANK set), or creates a group of one.

    Uses NCCL on CUDA (gloo for tensors in host memory), and gloo on CPU with one thread per
    process (with two threads, two ranks under contention were 20 times slower).
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    cuda = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if launched:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        storage = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        yield World(dist.get_rank(), dist.get_world_size(), device, mesh, storage)
    finally:
        # vLLM in this process joins the group, and destroys it when it shuts down.
        if dist.is_initialized():
            dist.destroy_process_group()


def shard(
    policy: Policy,
    world: World,
    *,
    bf16: bool = False,
    recompute: bool = False,
    cpu_offload: bool = False,
) -> Policy:
    """Shards parameters, gradients and optimizer state over all ranks; each decoder layer is one
    unit, the rest another. Gradients are reduced after every micro-batch, because a rank cannot
    hold those of a whole large model. `bf16`: compute in bf16, reduce in fp32; masters stay as
    loaded. `recompute`: recompute a layer's activations in the backward pass instead of storing
    them. `cpu_offload`: keep the shards in host memory."""
    if recompute:
        policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
        policy.lm.train()  # only enables recomputation; load_policy rejects dropout
    precision = MixedPrecisionPolicy()
    if bf16:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload, policy.cpu_offload = OffloadPolicy(), cpu_offload
    if cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    layers: nn.ModuleList = policy.decoder.layers
    for layer in layers:
        fully_shard(layer, mesh=world.mesh, mp_policy=precision, offload_policy=offload)
    # A reference has no backward pass that would need embedding and head again.
    frozen = not any(parameter.requires_grad for parameter in policy.parameters())
    fully_shard(
        policy, mesh=world.mesh, mp_policy=precision, reshard_after_forward=frozen,
        offload_policy=offload,
    )  # fmt: skip
    return policy


def published_state(policy: Policy, world: World) -> dict[str, Tensor]:
    """The state that a node loads: the complete language model in bf16 on CPU, adapters merged,
    under the base model's names. A collective operation; only rank 0 keeps the result."""
    state: dict[str, Tensor] = {}
    for name, tensor in policy.lm.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world.leads:
            # Weights with adapters keep their width until merged.
            width = whole.dtype if is_adapted(name) else torch.bfloat16
            state[name] = whole.detach().to("cpu", width, copy=True)
    return {name: tensor.to(torch.bfloat16) for name, tensor in merged(state, policy.lm).items()}


def trained_parts(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """This rank's part of each of the optimizer's parameters, in its order; not copies."""
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        data = parameter.detach()
        yield data.to_local() if isinstance(data, DTensor) else data


@contextmanager
def replaced(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    values: Iterable[Tensor],
    copies_on: torch.device | None = None,
) -> Iterator[None]:
    """Gives this rank's parts of the optimizer's parameters other `values`, in place, and restores
    them when the block ends. Keeps copies of them meanwhile, on the device `copies_on` (None: where
    they are)."""
    kept = []
    try:
        _reshard(policy)
        with torch.no_grad():
            for part, value in zip(trained_parts(optimizer), values, strict=True):
                kept.append((part, part.to(copies_on or part.device, copy=True)))
                part.copy_(value)
        yield
    finally:
        _reshard(policy)
        with torch.no_grad():
            for part, own in kept:
                part.copy_(own)


def _reshard(policy: Policy) -> None:
    """Frees gathered weights, which a forward pass without a backward pass leaves."""
    if isinstance(policy, FSDPModule):
        policy.reshard()


def rounded(policy: Policy, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Rounds the optimizer's parameters to bf16 for a block."""
    values = (part.to(torch.bfloat16) for part in trained_parts(optimizer))
    return replaced(policy, optimizer, values)


def clip_gradients(policy: nn.Module, limit: float) -> float:
    """Clips the global gradient norm to `limit`; returns the norm before. It may be non-finite, in
    which case no step may be taken."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trained, limit)
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return float(whole)


def all_finite(policy: nn.Module, world: World) -> bool:
    """Whether every weight on every rank is finite."""
    bad = torch.zeros((), dtype=torch.int64, device=world.device)
    for parameter in policy.parameters():
        data = parameter.detach()
        local = data.to_local() if isinstance(data, DTensor) else data
        bad += (~torch.isfinite(local)).any().to(bad.device)
    return int(world.sum(bad)) == 0
