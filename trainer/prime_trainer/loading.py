"""Loads a Hugging Face model folder into a policy, one shard per rank.

`empty_policy` builds the model with its parameters on the meta device, which takes no memory.
`fill_weights` sets every parameter from the safetensors files and reads only the rows that this
rank holds. No rank or device ever holds the whole model.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from prime_core.errors import UserError
from prime_trainer import attention
from prime_trainer.lora import DOWN, SEED, UP, base_name
from prime_trainer.model import Policy

COMPUTED = {"full_attention", "sliding_attention"}
"""The kinds of layers that `attention.packed_attention` computes."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in configurations of mixtures of experts."""


def require_model_folder(folder: Path, *, weights: bool = True) -> None:
    """Raises UserError naming what a model folder lacks: configuration, tokenizer or weights. With
    `weights` False, a configuration is enough."""
    needs = {
        "config.json": [folder / "config.json"],
        "tokenizer": [folder / "tokenizer.json", folder / "tokenizer.model", folder / "vocab.json"],
        "safetensors weights": list(folder.glob("*.safetensors")),
    }
    for what, paths in needs.items():
        if (weights or what == "config.json") and not any(path.is_file() for path in paths):
            raise UserError(
                f"{folder} is not a model folder: it has no {what}",
                hint="name a Hugging Face folder with config.json, tokenizer and safetensors",
            )


def empty_policy(folder: Path, temperature: float, dtype: torch.dtype = torch.float32) -> Policy:
    """Builds the model of `folder` with parameters of `dtype` on the meta device.

    Reads only local files. Raises UserError if the folder holds no model, or one that cannot be
    trained here.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    require_model_folder(folder, weights=False)
    attention.register()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with init_empty_weights(include_buffers=False):
            lm = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention.NAME
            )
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"the model in {folder} cannot be loaded: {first}",
            hint="name a Hugging Face folder of a causal language model",
        ) from error
    lm.tie_weights()
    if any((getattr(lm.config, name, 0) or 0) > 1 for name in EXPERTS):
        # transformers fuses the experts' weights, so no parameter has a name of the folder's.
        raise UserError(
            f"the model in {folder} is a mixture of experts ({lm.config.model_type}), which the "
            "trainer does not train",
            hint="take a Qwen2, Qwen3 or Llama model",
        )
    if getattr(lm.config, "final_logit_softcapping", None):
        raise UserError(
            f"the model in {folder} caps its logits, which the trainer does not compute",
            hint="take a Qwen2, Qwen3 or Llama model",
        )
    others = set(getattr(lm.config, "layer_types", None) or ()) - COMPUTED
    if others:
        raise UserError(
            f"the model in {folder} has {min(others)} layers, which the trainer does not compute "
            "for rows of several samples",
            hint="take a Qwen2, Qwen3 or Llama model",
        )
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop"):
        if getattr(lm.config, name, 0):
            raise UserError(
                f"the model in {folder} has {name} in its configuration, but policies must be "
                "deterministic",
                hint=f"set {name} to 0 in config.json",
            )
    lm.config.use_cache = False
    return Policy(lm, temperature)


def require_fixed_positions(policy: Policy, folder: Path) -> None:
    """Raises UserError if the model scales its positions by the longest sample of a micro-batch,
    which ranks that share rows do not all see."""
    given = getattr(policy.lm.config, "rope_parameters", None) or {}
    kinds = {str(one.get("rope_type")) for one in (given, *given.values()) if isinstance(one, dict)}
    if found := kinds & {"dynamic", "longrope"}:
        raise UserError(
            f"the model in {folder} has {min(found)} positions, which depend on the longest "
            "sample, so ranks cannot share its rows",
            hint="leave out --context-parallel",
        )


def fill_weights(policy: Policy, folder: Path, device: torch.device) -> Policy:
    """Sets every parameter on the meta device from `folder`; returns `policy`.

    Of parameters sharded by FSDP2, only this rank's rows are read; adapters get their initial
    values (Hu et al., arXiv 2106.09685). Raises UserError if a weight is missing or has another
    shape.
    """
    require_model_folder(folder)
    with _weight_files(folder) as stored:
        return place_weights(policy, device, partial(_values, stored=stored, folder=folder))


def place_weights(
    policy: Policy, device: torch.device, values: Callable[[list[str], nn.Parameter], Tensor]
) -> Policy:
    """Replaces every parameter on the meta device by `values(its names, parameter)`, this rank's
    rows of it, on `device`, or in host memory if the policy is offloaded; returns `policy`. Tied
    names share one parameter."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            names.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
    filled: dict[str, nn.Parameter] = {}
    for key, parameter in parameters.items():
        local = values(names[key], parameter).to(device=device, dtype=parameter.dtype)
        sharded = parameter.data
        if isinstance(sharded, DTensor):
            local = DTensor.from_local(
                local, sharded.device_mesh, sharded.placements, run_check=False,
                shape=sharded.shape, stride=sharded.stride(),
            )  # fmt: skip
        if policy.cpu_offload:
            local = local.cpu()
        new = nn.Parameter(local, requires_grad=parameter.requires_grad)
        filled |= dict.fromkeys(names[key], new)
    policy.load_state_dict(filled, strict=False, assign=True)
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return policy


def load_policy(folder: Path, temperature: float, dtype: torch.dtype = torch.float32) -> Policy:
    """Loads the whole model of `folder` into one process's CPU memory. Raises UserError."""
    policy = empty_policy(folder, temperature, dtype)
    return fill_weights(policy, folder, torch.device("cpu"))


@contextmanager
def _weight_files(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The folder's weights: name → open file. Raises UserError if a file is damaged."""
    with ExitStack() as stack:
        stored: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"the model in {folder} cannot be loaded: {path.name}: {error}",
                    hint="copy the model folder again",
                ) from error
            stored |= dict.fromkeys(file.keys(), file)
        yield stored


def _values(
    names: list[str], parameter: nn.Parameter, stored: Mapping[str, Any], folder: Path
) -> Tensor:
    """This rank's rows of the parameter with these `names`."""
    if names[0].endswith((DOWN, UP)):
        return _rows(_adapter(names[0], parameter), parameter)
    plain = [base_name(name.removeprefix("lm.")) for name in names]
    found = next((name for name in plain if name in stored), None)
    if found is None:
        raise UserError(
            f"the model in {folder} has no weight {plain[0]}",
            hint="name the folder of a whole model; of its kind, transformers and the trainer "
            "must use the same weight names",
        )
    tensor = stored[found].get_slice(found)
    if tuple(tensor.get_shape()) != tuple(parameter.shape):
        raise UserError(
            f"the model in {folder} has {found} of shape {tuple(tensor.get_shape())}, but its "
            f"config.json asks for {tuple(parameter.shape)}",
            hint="take config.json and weights from the same model",
        )
    values: Tensor = _rows(tensor, parameter)
    return values


def _rows(whole: Any, parameter: nn.Parameter) -> Tensor:
    """The part of `whole` (a tensor or a slice of a file) that this rank holds of `parameter`."""
    data = parameter.data
    if not isinstance(data, DTensor):
        everything: Tensor = whole[:] if parameter.dim() else whole[...]
        return everything
    (placement,) = data.placements
    if not isinstance(placement, Shard) or placement.dim != 0:
        raise AssertionError(f"FSDP2 shards rows, not {placement}")
    each = math.ceil(parameter.shape[0] / data.device_mesh.size())
    start = min(data.device_mesh.get_local_rank() * each, parameter.shape[0])
    rows: Tensor = whole[start : start + data.to_local().shape[0]]
    return rows


def _adapter(name: str, parameter: nn.Parameter) -> Tensor:
    """An adapter's initial values, the same on every rank: A is random, seeded by its name; B is
    zero."""
    if name.endswith(UP):
        return torch.zeros(parameter.shape)
    generator = torch.Generator().manual_seed(SEED ^ zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(parameter.shape[1])
    return (torch.rand(parameter.shape, generator=generator) * 2 - 1) * bound
