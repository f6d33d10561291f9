"""Verifies that a loaded vLLM model computes with exactly a policy's weights.

vLLM fuses projections; on CPUs it also packs linear weights and drops the originals. The weights of
a packed layer are read back by applying it to unit vectors: x·Wᵀ with x = 1 is exactly Wᵀ. With
tensor parallelism each process compares its part of each layer with that part of the policy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from prime_core.errors import UnavailableError

_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""A policy's projection → vLLM's fused layer and its index there."""
_UNITS = 1024
"""Unit vectors passed through a layer at once."""
READERS = 8
"""Threads that copy tensors to the device. One alone uses a fraction of the bus."""
READ_BYTES = 16 << 20
"""Bytes that a reader copies at once; on a GPU, the size of its buffer in pinned memory."""
AHEAD_BYTES = 2 << 30
"""Most bytes of tensors on the device that wait to be loaded. Less is used where less is free."""
SLICE_BYTES = 64 << 20
"""Bytes that are compared at once."""


def require_policy(model: Any, folder: Path, config: Any, dtype: str) -> int:
    """Compares every tensor of `folder`/*.safetensors with the weights that `model` computes with.

    Returns how many numbers were compared. Raises UnavailableError, naming the first tensor, if one
    differs or cannot be found.
    """
    compared = 0
    cache: dict[str, Tensor] = {}
    for path, name in _places(folder):
        tensor = _read(path, name)
        compared += _compare(model, name, tensor, folder, config, dtype, cache)
    if compared == 0:
        raise UnavailableError(f"{folder} holds no weights in safetensors files")
    return compared


def load_policy(model: Any, folder: Path, config: Any, dtype: str, device: str) -> int:
    """Loads the weights of `folder`/*.safetensors into `model`, a vLLM model on a GPU, in place:
    parameters keep their addresses, so CUDA graphs stay valid. The folder must have the tensors of
    the policy before (`tensor_names`). Each tensor is loaded and then compared on the device with
    what the model holds.

    Returns how many numbers were loaded. Raises UnavailableError as `require_policy` does, or what
    vLLM raises; the model then holds a mixture of two policies and must not be used.
    """
    compared = 0
    waiting = _on_device(folder, device)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal compared
        for name, tensor in waiting:
            yield name, tensor
            # vLLM takes the next tensor once it has loaded this one.
            compared += _compare(model, name, tensor, folder, config, dtype, {})

    try:
        with torch.inference_mode():
            model.load_weights(tensors())
    finally:
        waiting.close()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()  # of the copies made in advance
    if compared == 0:
        raise UnavailableError(f"{folder} holds no weights in safetensors files")
    return compared


def tensor_names(folder: Path) -> frozenset[str]:
    """Names of the tensors in `folder`/*.safetensors."""
    return frozenset(name for _, name in _places(folder))


def _places(folder: Path) -> list[tuple[Path, str]]:
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found += [(path, name) for name in sorted(file.keys())]
    return found


def _on_device(folder: Path, device: str) -> Generator[tuple[str, Tensor], None, None]:
    """The policy's tensors, copied to `device` in advance; those for which it has no room remain in
    main memory."""
    # A tied head comes last: vLLM skips it, and the embedding is then loaded.
    places = sorted(_places(folder), key=lambda place: (place[1] == "lm_head.weight", place[1]))
    room = _room(device)
    waiting: deque[tuple[str, Tensor, list[Future[None]]]] = deque()
    ahead = 0
    start: dict[str, Any] = {}
    if device.startswith("cuda"):
        start = {"initializer": torch.cuda.set_device, "initargs": (device,)}
        torch.cuda.synchronize(device)
    with ThreadPoolExecutor(READERS, "weights", **start) as readers:
        copy = partial(_copy, threading.local())
        for path, name in places:
            source = _read(path, name)
            size = source.nbytes if source.nbytes <= room else 0
            while waiting and ahead + size > room:
                ahead -= yield from _next(waiting)
            target = _empty(source, device) if size else None
            if target is None:
                waiting.append((name, source, []))
                continue
            pieces = zip(_pieces(source), _pieces(target), strict=True)
            waiting.append((name, target, [readers.submit(copy, *piece) for piece in pieces]))
            ahead += size
        while waiting:
            ahead -= yield from _next(waiting)


def _next(
    waiting: deque[tuple[str, Tensor, list[Future[None]]]],
) -> Generator[tuple[str, Tensor], None, int]:
    """Yields the first tensor once it is copied. Returns the bytes that it took on the device."""
    name, tensor, copies = waiting.popleft()
    for each in copies:
        each.result()
    yield name, tensor
    return tensor.nbytes if copies else 0


def _room(device: str) -> int:
    """Returns how many bytes may wait on `device`: at most a third of its free memory. The tensor
    that is being loaded and its comparison need the rest."""
    if not device.startswith("cuda"):
        return AHEAD_BYTES
    return min(AHEAD_BYTES, int(torch.cuda.mem_get_info(device)[0]) // 3)


def _empty(source: Tensor, device: str) -> Tensor | None:
    """Allocates a tensor like `source` on `device`. Returns None if the device has no memory."""
    try:
        return torch.empty_like(source, device=device)
    except torch.cuda.OutOfMemoryError:
        return None


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    pieces: Sequence[Tensor] = tensor.view(-1).view(torch.uint8).split(READ_BYTES)
    return pieces


@torch.inference_mode()
def _copy(local: threading.local, source: Tensor, target: Tensor) -> None:
    """Copies bytes of a file to the device. For a GPU they pass through this thread's pinned
    buffer, which is several times faster than copying from pageable memory."""
    if not target.is_cuda:
        target.copy_(source)
        return
    if not hasattr(local, "buffer"):
        local.buffer = torch.empty(READ_BYTES, dtype=torch.uint8, pin_memory=True)
        local.stream = torch.cuda.Stream(target.device)
    part = local.buffer[: len(source)]
    part.copy_(source)
    with torch.cuda.stream(local.stream):
        target.copy_(part, non_blocking=True)
    local.stream.synchronize()


def _compare(
    model: Any,
    name: str,
    tensor: Tensor,
    folder: Path,
    config: Any,
    dtype: str,
    cache: dict[str, Tensor],
) -> int:
    """Compares the policy's `tensor` with what `model` computes with. Returns its numbers. Raises
    UnavailableError if they differ."""
    if name == "lm_head.weight" and config.tie_word_embeddings:
        name = "model.embed_tokens.weight"
    loaded, wanted = _loaded(model, name, tensor, cache)
    if loaded.shape[0] > wanted.shape[0]:  # vocabularies are padded
        loaded = loaded[: wanted.shape[0]]
    if loaded.shape != wanted.shape or not equal_in(getattr(torch, dtype), loaded, wanted):
        raise UnavailableError(f"vLLM did not load {name} of {folder} as it is in the policy")
    return wanted.numel()


def pieces(one: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cuts two tensors of the same shape into rows of at most SLICE_BYTES of `one`."""
    rows = max(1, SLICE_BYTES // max(1, one[:1].nbytes))
    return list(zip(one.split(rows), other.split(rows), strict=True))


def equal_in(dtype: torch.dtype, loaded: Tensor, wanted: Tensor) -> bool:
    """Whether both are equal in `dtype`, compared on `loaded`'s device SLICE_BYTES at a time."""
    return all(
        torch.equal(ours.to(dtype), theirs.to(dtype).to(ours.device))
        for ours, theirs in pieces(loaded, wanted)
    )


def _read(path: Path, name: str) -> Tensor:
    """A tensor of a file, mapped into memory."""
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _loaded(
    model: Any, name: str, tensor: Tensor, cache: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The loaded tensor that corresponds to the policy's `name`, and this process's part of the
    policy's `tensor`."""
    owner, _, kind = name.rpartition(".")
    parent, _, leaf = owner.rpartition(".")
    fused = _FUSED.get(leaf)
    place = f"{parent}.{fused[0]}" if fused else owner
    try:
        layer = model.get_submodule(place)
    except AttributeError as error:
        raise UnavailableError(f"vLLM's model has no layer for {name}") from error
    key = f"{place}.{kind}"
    if key not in cache:
        cache.clear()  # one fused layer at a time
        cache[key] = _tensor(layer, kind, key)
    whole = cache[key]
    if fused is None:
        return whole, _part(layer, tensor, kind)
    sizes = list(layer.output_partition_sizes)
    start, count = sum(sizes[: fused[1]]), sizes[fused[1]]
    rank = layer.tp_rank
    if leaf in ("k_proj", "v_proj"):
        rank //= layer.num_kv_head_replicas
    return whole[start : start + count], tensor[rank * count : (rank + 1) * count]


def _part(layer: Any, tensor: Tensor, kind: str) -> Tensor:
    """This process's part of a tensor that vLLM does not fuse: rows of a vocabulary, columns of a
    projection whose inputs are divided, or all of it."""
    if hasattr(layer, "shard_indices"):
        own = layer.shard_indices
        return tensor[own.org_vocab_start_index : own.org_vocab_end_index]
    columns = getattr(layer, "input_size_per_partition", None)
    if kind == "weight" and columns is not None and columns < layer.input_size:
        return tensor[:, layer.tp_rank * columns : (layer.tp_rank + 1) * columns]
    return tensor


@torch.inference_mode()
def _tensor(layer: Any, kind: str, name: str) -> Tensor:
    """Returns `layer.kind`, read back through the layer if the original was dropped."""
    found = getattr(layer, kind, None)
    if isinstance(found, Tensor) and found.numel() > 0 and not found.is_meta:
        packed = kind == "weight" and hasattr(layer, "cpu_linear")
        if not packed:
            return found.detach()
    inputs = getattr(layer, "input_size_per_partition", None)
    if inputs is None:  # an LM head, which divides its rows only
        inputs = getattr(layer, "embedding_dim", None)
    if kind != "weight" or inputs is None:
        raise UnavailableError(f"vLLM's {name} cannot be read back")
    columns = []
    dtype = found.dtype if isinstance(found, Tensor) else layer.params_dtype
    for start in range(0, inputs, _UNITS):
        count = min(_UNITS, inputs - start)
        units = torch.zeros((count, inputs), dtype=dtype)
        units[torch.arange(count), start + torch.arange(count)] = 1
        answer = layer.quant_method.apply(layer, units, None)
        columns.append(answer.T)
    return torch.cat(columns, dim=1)
