"""`trainer plan`: memory and traffic of a training step, without weights or GPUs.

Runs the trainer's own `train_step` as one rank of a simulated world: tensors have shapes but no
values (torch's FakeTensorMode), and collectives of torch's "fake" process group return at once. The
estimate counts what the step allocates, so it cannot diverge from the code. Only config.json of the
model folder is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prime_core.ids import Digest, Step
from prime_core.rollout import Rollout
from prime_core.run import RunDefinition
from prime_trainer.config import Settings
from prime_trainer.data import TrainingBatch
from prime_trainer.learner import Fill, Learner, empty_policies, filled_learner, train_step
from prime_trainer.loading import place_weights
from prime_trainer.metrics import Stopwatch
from prime_trainer.model import Policy
from prime_trainer.parallel import World

MICRO_BATCHES = 2
"""Number simulated on each rank; the second one runs with the gradients of the first in memory."""


@dataclass(frozen=True)
class StepPlan:
    """One rank of a step on `ranks` ranks; sizes in bytes."""

    ranks: int
    sample_tokens: int
    trained: int
    """Trained parameters, on all ranks together."""
    kept: int
    """Weights, reference and optimizer state, held on the device between steps."""
    peak: int
    """Maximum held on the device at once during the step."""
    host: int
    """Weights, reference, optimizer state and gradients in host memory (`cpu_offload`)."""
    gathered: int
    """Received from all-gathers in one micro-batch."""
    reduced: int
    """Passed to reduce-scatters in one micro-batch."""


def _stored(value: Any) -> Iterator[Tensor]:
    """The tensors with storage that `value` is made of: a sharded tensor's own part, the codes and
    scales of a quantized one."""
    if not isinstance(value, Tensor):
        return
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None:
        yield value
        return
    for name in flatten()[0]:
        yield from _stored(getattr(value, name))


class Allocations(TorchDispatchMode):
    """Counts the bytes of live storages and the traffic of collectives.

    If code reads a scalar from a tensor without values, it returns 1.0, or 0 for integers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.traffic: dict[str, int] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 0
        name = func.name()
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            whole = args[0] if "allgather" in name else args[1]
            sent = whole.numel() * whole.element_size()
            self.traffic[name] = self.traffic.get(name, 0) + sent
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            for part in _stored(leaf):
                self.hold(part.untyped_storage())
        return found

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage, or its new size, until it is freed."""
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._freed, key)
        size = storage.nbytes()
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """While active, also counts storages that FSDP2 empties and refills."""
        resize: Callable[..., Any] = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if storage._cdata in self._sizes:
                self.hold(storage)
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def plan_step(
    run: RunDefinition, settings: Settings, *, ranks: int, sample_tokens: int, prompt_tokens: int
) -> StepPlan:
    """Simulates a training step of rank 0 of `ranks`, with samples of `sample_tokens` tokens, of
    which `prompt_tokens` are the prompt. Raises UserError for a folder without a model."""
    with _simulated(ranks) as world:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        return counted_step(
            run, settings, world, sample_tokens, prompt_tokens, without_values, fake
        )


def counted_step(
    run: RunDefinition,
    settings: Settings,
    world: World,
    sample_tokens: int,
    prompt_tokens: int,
    fill: Fill,
    mode: AbstractContextManager[Any],
) -> StepPlan:
    """Builds a learner with weights from `fill` under `mode`, and counts the allocations of its
    second step (a small first one creates the optimizer state). Also works with real tensors."""
    settings = settings.model_copy(update={"mismatch_every": 0})  # its copies are in host memory
    run = run.model_copy(update={"samples_per_group": 2})  # exactly MICRO_BATCHES on each rank
    counted = Allocations()
    policies = empty_policies(run, settings, world)
    with mode, counted.counting():
        learner = filled_learner(*policies, run, settings, world, fill)
        _train(learner, learner.world.data_size, sample_tokens, prompt_tokens)
        kept = counted.live
        counted.peak = kept
        counted.traffic.clear()
        before_optimizer: list[int] = []
        learner.optimizer.register_step_pre_hook(lambda *_: before_optimizer.append(counted.peak))
        run_step(learner, MICRO_BATCHES, sample_tokens, prompt_tokens)
    peak, host = counted.peak, 0
    if settings.cpu_offload:  # the optimizer runs on the host
        gradients = _local_bytes(p for p in learner.policy.parameters() if p.requires_grad)
        host = _kept_bytes(learner)
        kept -= host
        host += gradients
        peak = before_optimizer[-1] - host
    return StepPlan(
        ranks=world.size,
        sample_tokens=sample_tokens,
        trained=sum(p.numel() for p in learner.policy.parameters() if p.requires_grad),
        kept=kept,
        peak=peak,
        host=host,
        gathered=counted.traffic.get("c10d::_allgather_base_", 0) // MICRO_BATCHES,
        reduced=counted.traffic.get("c10d::_reduce_scatter_base_", 0) // MICRO_BATCHES,
    )


def _kept_bytes(learner: Learner) -> int:
    """Bytes of this rank's weights, reference and optimizer state."""
    weights = [learner.policy, *([learner.reference] if learner.reference else [])]
    states = [value for state in learner.optimizer.state.values() for value in state.values()]
    return _local_bytes(p for one in weights for p in one.parameters()) + _local_bytes(states)


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the parts that this rank holds."""
    return sum(part.numel() * part.element_size() for t in tensors for part in _stored(t))


@contextmanager
def _simulated(ranks: int) -> Iterator[World]:
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        yield World(0, ranks, torch.device("cpu"), init_device_mesh("cpu", (ranks,)))
    finally:
        dist.destroy_process_group()


def without_values(policy: Policy, folder: Path, device: torch.device) -> Policy:
    """Places parameters that only have shapes; does not read `folder`."""

    def empty(names: list[str], parameter: nn.Parameter) -> Tensor:
        data = parameter.data
        local = data.to_local() if isinstance(data, DTensor) else data
        return torch.empty(local.shape, dtype=local.dtype, device=device)

    return place_weights(policy, device, empty)


def samples_of_micro_batch(settings: Settings, sample_tokens: int) -> int:
    """Number of samples of one length that packing puts into a micro-batch."""
    rows = max(1, settings.micro_tokens // max(sample_tokens, settings.row_tokens))
    return rows * max(1, settings.row_tokens // sample_tokens)


def run_step(learner: Learner, micro_batches: int, sample_tokens: int, prompt_tokens: int) -> None:
    """Runs one training step on samples of one length, enough for `micro_batches` on each rank."""
    size = learner.run.samples_per_group
    each = samples_of_micro_batch(learner.settings, sample_tokens)
    groups = -(-micro_batches * each * learner.world.data_size // size)
    _train(learner, groups, sample_tokens, prompt_tokens)


def _train(learner: Learner, groups: int, sample_tokens: int, prompt_tokens: int) -> None:
    size = learner.run.samples_per_group
    rows = [
        tuple(
            Rollout(
                problem_id="", group=group, sample=sample,
                prompt_tokens=[0] * prompt_tokens,
                output_tokens=[0] * (sample_tokens - prompt_tokens),
                logprobs=[0.0] * (sample_tokens - prompt_tokens),
                target_length=sample_tokens, finish_reason="end", policy_version=0,
                reward=float(sample % 2),
            )
            for sample in range(size)
        )
        for group in range(groups)
    ]  # fmt: skip
    batch = TrainingBatch(Step(0), Digest("0x" + "00" * 32), tuple(rows), ())
    train_step(learner, batch, Stopwatch())
