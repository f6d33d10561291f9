"""A model whose weights are held once, on one device or several, and computed in any dtype.

    tokens ─► embedding ─► layer 0 ─► … ─► layer N−1 ─► final norm ─► states
              device 0 ────────────── … ────────────── last device

A prefill runs all tokens through one layer before the next. So it holds the keys and values of one
layer, the states of all tokens, and in addition at most one layer in another dtype. Each device has
consecutive layers, and computes what one device would: the same operations on the same shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from prime_core.errors import UnavailableError
from prime_core.memory import collect_as_usual
from prime_engine.faults import naming_faults
from prime_engine.folder import ARCHITECTURES, not_run
from prime_engine.linears import multiply_wide, native_bfloat16, widen
from prime_engine.policy_weights import equal_in, pieces
from prime_engine.sizing import placed

Compute = Callable[..., Tensor]
_EXACT_IN_FLOAT32 = frozenset({torch.float32, torch.bfloat16, torch.float16})


class HeldModel:
    """The causal language model in `folder`, loaded to `devices`.

    `dtype`: in which the weights are held; None: as they are in the files. `prepare` may modify the
    loaded module. Raises UnavailableError if the folder holds no model of ARCHITECTURES or its
    weights' names or shapes are not those of the model; errors of torch, transformers, safetensors.
    MemoryError, here and in each method, says that a device or this machine has no memory left.
    """

    @naming_faults
    def __init__(
        self,
        folder: Path,
        devices: Sequence[torch.device],
        dtype: torch.dtype | None,
        prepare: Callable[[torch.nn.Module], None] | None = None,
    ) -> None:
        self.config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        if self.config.model_type not in ARCHITECTURES:
            raise UnavailableError(not_run("plain", self.config.model_type))
        self.devices = tuple(devices)
        self.prepared = prepare is not None
        tensors = _tensors(folder)
        self._forms = _forms(tensors)
        self.model, stored = _load(folder, tensors, self.config, self.devices, dtype)
        self.model.eval().requires_grad_(False)
        if prepare is not None:
            prepare(self.model)
        self._wide = self.devices[0].type == "cpu" and not native_bfloat16()
        if self._wide:
            widen(self.model)
        self.dtype = dtype or (next(iter(stored)) if len(stored) == 1 else None)
        """The dtype of all weights; None if they have several."""
        self.lossless = stored == {self.dtype} or (
            self.dtype in (torch.float32, None) and stored <= _EXACT_IN_FLOAT32
        )
        """Whether the weights in any dtype follow from those that are held."""
        self.decoder: Any = self.model.get_decoder()
        self._head: Any = self.model.get_output_embeddings()

    @property
    def vocabulary(self) -> int:
        return int(self._head.weight.shape[0])

    def serves(self, dtype: torch.dtype) -> bool:
        """Whether `prefill` and `head` may be asked for `dtype`."""
        return dtype is self.dtype or (self.lossless and not self.prepared)

    @naming_faults
    @torch.inference_mode()
    def prefill(
        self, ids: Tensor, dtype: torch.dtype, chunk: int, *, cached: bool = True
    ) -> list[Tensor]:
        """Returns the final norm's outputs in `dtype` for tokens `ids` int64 [n, L], in chunks of
        [n, ≤ `chunk`, H]. Rows are padded on the right, where no token sees the padding. Not
        `cached`: without a cache, for one chunk only."""
        tokens = ids.to(self.devices[0]).split(chunk, dim=1)
        states = [self.decoder.embed_tokens(part).to(dtype) for part in tokens]
        given = self._arguments(states, cached=cached)
        layers = self._layers()
        moved: dict[int, Tensor] = {}
        at = self.devices[0]
        for number, layer in enumerate(layers):
            device = _device_of(layer)
            if device != at:
                at, moved = device, {}
            compute = self._part(layer, dtype)
            cache = DynamicCache(config=self.config) if cached else None
            for i, part in enumerate(states):
                arguments = _moved(given[i][number], device, moved)
                states[i] = compute(part.to(device), past_key_values=cache, **arguments)
            del compute  # and the converted layer, before the next one is converted
        norm = self._part(self.decoder.norm, dtype)
        device = _device_of(self.decoder.norm)
        return [norm(part.to(device)) for part in states]

    @naming_faults
    def head(self, dtype: torch.dtype) -> Compute:
        """Returns the map from states to logits in `dtype`; while it exists, so does the head in
        that dtype."""
        compute, device = self._part(self._head, dtype), _device_of(self._head)
        return lambda states: compute(states.to(device))

    @naming_faults
    @torch.no_grad()
    def replace(self, folder: Path) -> bool:
        """Loads the weights of `folder`/*.safetensors in place of these, and compares each of them
        with the file afterwards, on its device. Returns False, with nothing changed, if the files
        have other tensors than those before (names, shapes, dtypes), if they do not cover every
        weight of the model, or if `prepare` changed these.

        Raises UnavailableError if a weight is not as in the file, or errors of torch and
        safetensors; the model then holds parts of both policies.
        """
        found = _tensors(folder)
        if self.prepared or _forms(found) != self._forms:
            return False
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        sources = {id(parameters[name]): (path, name) for name, (path, *_form) in found.items()}
        embedding = sources.get(id(self.decoder.embed_tokens.weight))
        if embedding is not None:  # a tied head has its own copy once `widen` made it float32
            sources.setdefault(id(self._head.weight), embedding)
        if any(id(each) not in sources for each in parameters.values()):
            return False
        for parameter in self.model.parameters():
            path, name = sources[id(parameter)]
            with safe_open(path, framework="pt") as file:
                stored = file.get_tensor(name)
            held_in = self.dtype or stored.dtype
            for held, given in pieces(parameter, stored):
                held.copy_(given.to(held_in))
            if not equal_in(held_in, parameter, stored):
                raise UnavailableError(f"{name} of {folder} was not loaded as it is in the policy")
        return True

    def _layers(self) -> Sequence[Any]:
        layers: Sequence[Any] = self.decoder.layers[: self.config.num_hidden_layers]
        return layers

    def _part(self, module: Any, dtype: torch.dtype) -> Compute:
        """A module of the model, computing in `dtype`."""
        if dtype is self.dtype:
            compute: Compute = module
            return compute
        wide = self._wide and dtype is torch.bfloat16
        if wide:
            multiply_wide(module)
        weights = {}
        for name, parameter in module.named_parameters():
            owner = module.get_submodule(name.rpartition(".")[0])
            value = parameter.to(dtype)
            weights[name] = value.float() if wide and type(owner) is torch.nn.Linear else value
        return lambda *inputs, **named: functional_call(module, weights, inputs, named)

    def _arguments(self, states: Sequence[Tensor], *, cached: bool) -> list[list[dict[str, Any]]]:
        """What the decoder passes to each layer next to the states: by chunk, then by layer. Masks
        and positions depend on the family and the version of transformers, so its own code makes
        them, with layers that only note what they are given."""
        noted: list[dict[str, Any]] = []
        shell = copy.copy(self.decoder)
        shell._modules = dict(shell._modules)
        recorders = [_Recorder(i, layer, noted) for i, layer in enumerate(self._layers())]
        shell.layers = torch.nn.ModuleList(recorders)
        shell.norm = torch.nn.Identity()
        cache = DynamicCache(config=self.config) if cached else None
        given = []
        for part in states:
            noted.clear()
            shell(inputs_embeds=part, past_key_values=cache, use_cache=cached)
            given.append(list(noted))
        return given


class _Recorder(torch.nn.Module):
    """Stands for layer `number`: notes its arguments, and counts the tokens in the cache."""

    def __init__(self, number: int, layer: Any, noted: list[dict[str, Any]]) -> None:
        super().__init__()
        self._number, self._noted = number, noted
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, states: Tensor, *, past_key_values: Any = None, **given: Any) -> Tensor:
        if past_key_values is not None:
            nothing = states.new_zeros((states.shape[0], 1, states.shape[1], 1))
            past_key_values.update(nothing, nothing, self._number)
        self._noted.append(given)
        return states


def _moved(value: Any, device: torch.device, known: dict[int, Tensor]) -> Any:
    """`value` with its tensors on `device`; `known` are those moved before, by their id."""
    if isinstance(value, dict):
        return {name: _moved(each, device, known) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(each, device, known) for each in value)
    if not isinstance(value, Tensor) or value.device == device:
        return value
    if id(value) not in known:
        known[id(value)] = value.to(device)
    return known[id(value)]


def _device_of(module: torch.nn.Module) -> torch.device:
    return next(module.parameters()).device


def _places(model: Any, devices: Sequence[torch.device]) -> dict[int, torch.device]:
    """The device of each parameter of a model on the meta device, by the parameter's id. A tied
    head is where the embedding is."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    last = torch.nn.ModuleList([decoder.norm, head])
    parts = [decoder.embed_tokens, *decoder.layers, last]
    members = [list(part.parameters()) for part in parts]
    numbers = placed([sum(each.numel() for each in part) for part in members], len(devices))
    found: dict[int, torch.device] = {}
    for part, number in zip(members, numbers, strict=True):
        for parameter in part:
            found.setdefault(id(parameter), devices[number])
    return found


_Tensors = dict[str, tuple[Path, tuple[int, ...], str]]
"""Name of each tensor of a policy → (file, shape, dtype in safetensors' words)."""


def _tensors(folder: Path) -> _Tensors:
    found: _Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                found[name] = (path, tuple(part.get_shape()), str(part.get_dtype()))
    return found


def _forms(tensors: _Tensors) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (shape, dtype) for name, (_path, shape, dtype) in tensors.items()}


@naming_faults
def _load(
    folder: Path,
    tensors: _Tensors,
    config: Any,
    devices: Sequence[torch.device],
    dtype: torch.dtype | None,
) -> tuple[Any, set[torch.dtype]]:
    """Builds the model of `config` with the weights of `folder` in `dtype` (None: as stored), each
    on its device. In main memory it holds one tensor of the files at a time next to the result,
    whose mapping ends with it. Returns (model, dtypes in the files).

    Raises UnavailableError if the weights' names or shapes are not those of the model, or errors of
    torch, transformers and safetensors.
    """
    collect_as_usual()
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.bfloat16)
    model.tie_weights()
    places = _places(model, devices)
    decoder = model.get_decoder()
    # the only buffers of ARCHITECTURES
    decoder.rotary_emb = type(decoder.rotary_emb)(config).to(devices[0])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    filled: dict[int, torch.nn.Parameter] = {}
    wrong, stored_in = [], set()
    for name, (path, shape, _dtype) in tensors.items():
        parameter = parameters.get(name)
        if parameter is None or tuple(parameter.shape) != shape:
            wrong.append(name)
            continue
        with safe_open(path, framework="pt") as file:
            stored = file.get_tensor(name)
            stored_in.add(stored.dtype)
            values = stored.to(places[id(parameter)], dtype or stored.dtype, copy=True)
        filled[id(parameter)] = torch.nn.Parameter(values, requires_grad=False)
    wrong += [name for name, parameter in parameters.items() if id(parameter) not in filled]
    if wrong:
        raise UnavailableError(f"{folder} lacks or misnames weights: {sorted(wrong)[:3]}")
    for name, parameter in parameters.items():
        owner, _, kind = name.rpartition(".")
        setattr(model.get_submodule(owner), kind, filled[id(parameter)])
    return model, stored_in
