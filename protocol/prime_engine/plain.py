"""The plain engine: Hugging Face causal language models on PyTorch, any device.

    generate: left-padded prefill → [logits + noise → token → one decode step]* on unfinished rows,
              which new rows join (batch.py)
    replay:   right-padded prefill of prompt and output → all statistics of each claimed token;
              on several devices, too (held.py)

Rows do not depend on their batch beyond rounding. Offline: it downloads nothing, runs no remote
code, and loads only safetensors. Not supported: paged caches, fused sampling, tensor parallelism.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer

from prime_core.errors import MalformedError, UnavailableError
from prime_core.proof_form import FinishReason
from prime_engine.base import (
    TAIL_PROBABILITY,
    Generation,
    GenerationRequest,
    Noise,
    Replay,
    ReplayRequest,
    StateSink,
    cpu_name,
)
from prime_engine.batch import BATCH_ROWS, RowSet, finish
from prime_engine.exact import (
    PROOF_CHUNK,
    REPLAY_MODE,
    NumericClass,
    ProofPart,
    measure,
)
from prime_engine.faults import naming_faults
from prime_engine.folder import PolicyFacts, end_tokens, text_digest
from prime_engine.held import Compute, HeldModel
from prime_engine.machine import machine_facts
from prime_engine.sizing import REPLAY_CHUNK, REPLAY_LOGITS, REPLAY_TOKENS

NAME = "plain/1"

CPU_LOGITS = 1 << 21
"""float32 logits held at once in a replay; a few tensors of this size exist together."""
CPU_PREFILL = 2_048
"""Rows × length of one prefill. On a CPU, the activations between two layers should fit in cache: a
model of 3.4 M parameters validates a fifth faster than with 16,384."""


@dataclass(eq=False)
class _Row:
    """A row of the batch or of the queue: number `number` of its owner, with `place` tokens."""

    owner: RowSet
    number: int
    place: int = 0
    ended: bool = False


@dataclass
class _Running:
    """The n rows that are generated together.

    `ids` int64 (n, 1): their last tokens; `mask` int64 (n, S): 0 where a row is padded on the left;
    `positions` int64 (n, ·): of the tokens being run; `seeds` and `limits` int64 (n,): noise, and
    how many tokens may follow; `noisy` float32 (n, 1): 0 where the most probable token is chosen.
    """

    rows: list[_Row]
    ids: Tensor
    mask: Tensor
    positions: Tensor
    seeds: Tensor
    noisy: Tensor
    limits: Tensor
    cache: Any

    @property
    def count(self) -> int:
        return len(self.rows)

    def joinable(self) -> bool:
        """Whether rows of another length can be added: not to a sliding window, nor where the model
        keeps its cache elsewhere."""
        layers = self.cache.layers
        return all(type(layer) is DynamicLayer and layer.keys is not None for layer in layers)

    def select(self, kept: list[int]) -> None:
        """Drops all other rows, and columns that only pad the rest if they are a quarter."""
        self.rows = [self.rows[i] for i in kept]
        at = torch.tensor(kept, device=self.mask.device)
        for name in ("ids", "mask", "positions", "seeds", "noisy", "limits"):
            setattr(self, name, getattr(self, name).index_select(0, at))
        self.cache.batch_select_indices(at)
        padding = int(self.mask.any(dim=0).to(torch.int8).argmax())
        if 4 * padding >= self.mask.shape[1] and self.joinable():
            self.mask = self.mask[:, padding:]
            for layer in self.cache.layers:
                layer.keys = layer.keys[:, :, padding:].contiguous()
                layer.values = layer.values[:, :, padding:].contiguous()

    def join(self, new: _Running) -> None:
        """Adds the rows of `new`, padding the shorter ones on the left."""
        here, there = self.mask.shape[1], new.mask.shape[1]
        width = max(here, there)

        def joined(old: Tensor, added: Tensor) -> Tensor:
            """Along the first axis; the second is that of the tokens."""
            left, right = width - here, width - there
            trailing = (0, 0) * (old.dim() - 2)
            return torch.cat([pad(old, (*trailing, left, 0)), pad(added, (*trailing, right, 0))])

        for layer, other in zip(self.cache.layers, new.cache.layers, strict=True):
            for name in ("keys", "values"):
                old, added = getattr(layer, name), getattr(other, name)  # [n, heads, S, width]
                made = joined(old.transpose(1, 2), added.transpose(1, 2)).transpose(1, 2)
                setattr(layer, name, made.contiguous())
        self.mask = joined(self.mask, new.mask)
        self.positions = torch.cat([self.positions[:, -1:], new.positions[:, -1:]])
        for name in ("ids", "seeds", "noisy", "limits"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(new, name)]))
        self.rows = self.rows + new.rows


class PlainEngine(PolicyFacts):
    """A causal language model loaded from a policy folder. See prime_engine.base.Engine.

    `device`: one of torch's, or several with commas between them, which then share the layers and
    only replay. `batch_rows` rows are generated together. `prepare` may modify the loaded module
    (quantization in tests and on the devnet). Raises UnavailableError if the folder does not hold a
    model that this engine runs, or if the devices are of several kinds. MemoryError, here and in
    each method, says that its device or this machine has no memory left.

    On a GPU the weights are held as they are in the policy's files until the first generation, and
    replays in other dtypes convert one layer at a time. On a CPU they are held in `dtype`.
    """

    @naming_faults
    def __init__(
        self,
        folder: Path,
        *,
        noise: Noise,
        dtype: str = "float32",
        device: str = "cpu",
        batch_rows: int = BATCH_ROWS,
        prepare: Callable[[torch.nn.Module], None] | None = None,
    ) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise UnavailableError(f"the plain engine computes in float32 or bfloat16, not {dtype}")
        self._folder = Path(folder)
        self._others: dict[str, PlainEngine] = {}
        self._noise = noise
        self._devices = _equal_devices(device)
        self._torch_device = self._devices[0]
        self._batch_rows = batch_rows
        self._queue: list[_Row] = []
        self._running: _Running | None = None
        on_cpu = self._torch_device.type == "cpu"
        self._replay_tokens = CPU_PREFILL if on_cpu else REPLAY_TOKENS
        self._logit_elements = CPU_LOGITS if on_cpu else REPLAY_LOGITS
        self.dtype = dtype
        self._held_in = None if prepare is None and not on_cpu else self._tensor_dtype
        """The dtype in which the weights are loaded; None: as they are in the files."""
        self._loaded: HeldModel | None = self._load(self._held_in, prepare)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # of any kind where its files have another form
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise UnavailableError(
                f"the tokenizer in {folder} cannot be loaded ({why}): copy the model folder again"
            ) from error
        config = self._held.config
        self.vocabulary = self._held.vocabulary
        self.hidden_size = int(config.hidden_size)
        self.positions = int(config.max_position_embeddings)
        self.end_tokens = end_tokens(self._folder, config)
        self._numeric_class: NumericClass | None = None
        self._text = text_digest(self._folder)

    def _load(
        self,
        dtype: torch.dtype | None,
        prepare: Callable[[torch.nn.Module], None] | None = None,
    ) -> HeldModel:
        try:
            return HeldModel(self._folder, self._devices, dtype, prepare)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise UnavailableError(
                f"no model can be loaded from {self._folder}: {error}"
            ) from error

    @property
    def _held(self) -> HeldModel:
        """The weights, loaded again if generation released them and could not load its own."""
        if self._loaded is None:
            self._loaded = self._load(self._held_in)
        return self._loaded

    @property
    def model(self) -> Any:
        """The loaded module."""
        return self._held.model

    @property
    def _tensor_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    @property
    def name(self) -> str:
        return NAME

    @property
    def device(self) -> str:
        if self._torch_device.type == "cuda":  # pragma: no cover - needs an accelerator
            return torch.cuda.get_device_name(self._torch_device)
        return cpu_name() if self._torch_device.type == "cpu" else self._torch_device.type

    def in_dtype(self, dtype: str) -> PlainEngine:
        """See Engine.in_dtype. It replays with the same loaded weights, if those of `dtype` follow
        from them; else it loads its own, once."""
        if dtype == self.dtype:
            return self
        if dtype not in self._others:
            self._others[dtype] = self._in_other_dtype(dtype)
        return self._others[dtype]

    def _in_other_dtype(self, dtype: str) -> PlainEngine:
        if not self._held.serves(getattr(torch, dtype)):
            return PlainEngine(
                self._folder,
                noise=self._noise,
                dtype=dtype,
                device=",".join(map(str, self._devices)),
                batch_rows=self._batch_rows,
            )
        other = copy.copy(self)
        other.dtype, other._numeric_class = dtype, None
        other._queue, other._running, other._others = [], None, {}
        return other

    def replace_policy(self, folder: Path) -> bool:
        """See PolicyReplacing. Engines of `in_dtype` must not be used afterwards."""
        if self._queue or self._running is not None:
            return False
        try:
            if text_digest(folder) != self._text or not self._held.replace(folder):
                return False
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise UnavailableError(f"no model can be loaded from {folder}: {error}") from error
        self._folder, self._numeric_class = Path(folder), None
        self._others.clear()
        return True

    def close(self) -> None:
        """See Engine.close. Memory is freed with the last reference."""
        self._others.clear()

    # generation ----------------------------------------------------------------------------------

    @property
    def batch_rows(self) -> int:
        """See BatchEngine."""
        return self._batch_rows

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        temperature: float,
        sink: StateSink | None = None,
    ) -> list[Generation]:
        """See Engine.generate. On a CPU, deterministic for given requests and batch size. A GPU may
        draw other tokens when it repeats a batch; each row is then as honest as before."""
        return finish(self, self.add(requests, temperature, sink))

    def add(
        self,
        requests: Sequence[GenerationRequest],
        temperature: float,
        sink: StateSink | None = None,
    ) -> RowSet:
        """See BatchEngine.add. Raises UnavailableError on several devices."""
        self._hold_for_generation()
        for request in requests:
            self._require(request.prompt_tokens, request.max_output_tokens)
        rows = RowSet(requests, temperature, sink)
        self._queue += [_Row(rows, number) for number in range(len(requests))]
        return rows

    def _hold_for_generation(self) -> None:
        """Generation computes token by token, so it needs all weights in its dtype. They are loaded
        again if they are held in another one, which engines of `in_dtype` then do not share."""
        if len(self._devices) > 1:
            raise UnavailableError(
                "the plain engine generates on one device; on several it replays"
            )
        if self._held.dtype is self._tensor_dtype:
            return
        former, self._held_in = self._held_in, self._tensor_dtype
        self._loaded = None  # before the others are loaded: a card may not hold both
        self._others.clear()
        gc.collect()
        try:
            self._loaded = self._load(self._held_in)
        except BaseException:
            self._held_in = former
            raise

    @naming_faults
    def cancel(self, rows: RowSet) -> None:
        """See BatchEngine.cancel."""
        self._queue = [row for row in self._queue if row.owner is not rows]
        if self._running is not None:
            for row in self._running.rows:
                row.ended |= row.owner is rows  # so it is dropped later if there is no memory now
            self._keep([i for i, row in enumerate(self._running.rows) if not row.ended])

    @naming_faults
    @torch.inference_mode()
    def step(self) -> None:
        """See BatchEngine.step. New rows are prefilled together, in a step of their own, when a
        quarter of the batch is free."""
        room = self._batch_rows - (len(self._running.rows) if self._running else 0)
        running = self._running
        joins = running is None or (4 * room >= self._batch_rows and running.joinable())
        if self._queue and joins:
            some, self._queue = self._queue[:room], self._queue[room:]
            self._prefill(some)
        elif running is not None:
            running.positions = running.positions[:, -1:] + 1
            running.mask = torch.cat([running.mask, running.mask.new_ones((running.count, 1))], 1)
            self._sample(running, running.ids)
            self._running = running
            self._keep([i for i, row in enumerate(running.rows) if not row.ended])

    def _prefill(self, rows: list[_Row]) -> None:
        """Prefills new rows, samples their first tokens, and adds them to the batch."""
        device = self._torch_device
        requests = [row.owner.requests[row.number] for row in rows]
        width = max(len(r.prompt_tokens) for r in requests)
        ids = torch.zeros((len(rows), width), dtype=torch.int64)
        mask = torch.zeros((len(rows), width), dtype=torch.int64)
        for i, request in enumerate(requests):
            ids[i, width - len(request.prompt_tokens) :] = torch.tensor(request.prompt_tokens)
            mask[i, width - len(request.prompt_tokens) :] = 1
        mask = mask.to(device)
        new = _Running(
            rows=rows,
            ids=ids[:, :0].to(device),
            mask=mask,
            positions=(mask.cumsum(1) - 1).clamp_(min=0),
            seeds=torch.tensor([r.noise_seed or 0 for r in requests]).to(device),
            noisy=torch.tensor([[float(r.noise_seed is not None)] for r in requests]).to(device),
            limits=torch.tensor([r.max_output_tokens for r in requests]).to(device),
            cache=DynamicCache(config=self._held.config),
        )
        self._sample(new, ids.to(device))
        older, self._running = self._running, new
        self._keep([i for i, row in enumerate(rows) if not row.ended])
        if older is not None:
            if self._running is not None:
                older.join(self._running)
            self._running = older

    def _sample(self, running: _Running, ids: Tensor) -> None:
        """Runs `ids` [n, s], samples the next token of each row, and records it."""
        hidden = self._held.decoder(
            input_ids=ids,
            attention_mask=running.mask,
            position_ids=running.positions,
            past_key_values=running.cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        temperatures = {row.owner.temperature for row in running.rows}
        scaled = self._held.head(self._tensor_dtype)(hidden).float()
        if len(temperatures) == 1:
            scaled.div_(temperatures.pop())
        else:
            each = [row.owner.temperature for row in running.rows]
            scaled.div_(torch.tensor(each, device=scaled.device)[:, None])
        noise = self._noise(running.seeds, running.positions[:, -1], self.vocabulary)
        tokens = (scaled + noise * running.noisy).argmax(dim=1)
        chosen = scaled.gather(1, tokens[:, None])[:, 0] - scaled.logsumexp(dim=1)
        states = hidden.to(torch.bfloat16)
        ends = torch.tensor(sorted(self.end_tokens), dtype=torch.int64, device=tokens.device)
        running.limits = running.limits - 1
        over = ((running.limits < 1) | torch.isin(tokens, ends)).tolist()
        running.ids = tokens[:, None]
        members: dict[RowSet, list[int]] = {}
        for i, row in enumerate(running.rows):
            members.setdefault(row.owner, []).append(i)
        for owner, own in members.items():
            at = slice(None) if len(members) == 1 else torch.tensor(own, device=tokens.device)
            self._record(owner, [running.rows[i] for i in own], tokens[at], chosen[at], states[at])
        for row, ended in zip(running.rows, over, strict=True):
            row.place += 1
            if ended:
                row.ended = True
                self._end(row)

    def _record(
        self, owner: RowSet, rows: list[_Row], tokens: Tensor, chosen: Tensor, states: Tensor
    ) -> None:
        numbers = [row.number for row in rows]
        if owner.sink is not None:
            owner.sink.step(numbers, [row.place for row in rows], tokens, states)
            states = states[:, :0]
        owner.steps.append((torch.tensor(numbers), tokens, chosen, states))

    def _end(self, row: _Row) -> None:
        owner = row.owner
        if owner.sink is not None:
            owner.sink.end([row.number])
        owner.left -= 1
        if owner.done:
            owner.results = _gather_rows(owner.steps, len(owner.requests), self.end_tokens)
            owner.steps = []

    def _keep(self, kept: list[int]) -> None:
        """Keeps the rows at these indices of the batch."""
        assert self._running is not None
        if not kept:
            self._running = None
        elif len(kept) < self._running.count:
            self._running.select(kept)

    # replay --------------------------------------------------------------------------------------

    @naming_faults
    @torch.inference_mode()
    def replay(self, requests: Sequence[ReplayRequest], temperature: float) -> list[Replay]:
        """See Engine.replay. Rows are packed by length into prefills of bounded size."""
        for request in requests:
            if not request.output_tokens:
                raise MalformedError("a row without output tokens cannot be replayed")
            self._require(request.prompt_tokens, len(request.output_tokens))
            rivals = request.rivals if request.rivals is not None else request.output_tokens
            tokens = request.output_tokens + rivals
            if max(tokens) >= self.vocabulary or min(tokens) < 0:
                raise MalformedError("an output token is outside the vocabulary")
            if len(rivals) != len(request.output_tokens):
                raise MalformedError("a row has more or fewer rivals than output tokens")
        results: dict[int, Replay] = {}
        for batch in self._replay_batches(requests):
            found = self._replay_batch([requests[i] for i in batch], temperature)
            results.update(zip(batch, found, strict=True))
        return [results[i] for i in range(len(requests))]

    def _replay_batches(self, requests: Sequence[ReplayRequest]) -> Iterator[list[int]]:
        def length(i: int) -> int:
            return len(requests[i].prompt_tokens) + len(requests[i].output_tokens)

        batch: list[int] = []
        for i in sorted(range(len(requests)), key=length):
            if batch and (len(batch) + 1) * length(i) > self._replay_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _replay_batch(self, requests: Sequence[ReplayRequest], temperature: float) -> list[Replay]:
        # Right padding: under a causal mask no real position sees a padded one. The last output
        # token predicts no claimed token, so it is omitted.
        rows = [r.prompt_tokens + r.output_tokens[:-1] for r in requests]
        ids = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
        fits = ids.numel() <= self._replay_tokens
        chunk = ids.shape[1] if fits else min(REPLAY_CHUNK, self._replay_tokens)
        parts = self._held.prefill(ids, self._tensor_dtype, chunk, cached=not fits)
        hidden = parts[0] if fits else torch.cat(parts, dim=1)
        del parts
        device = hidden.device
        counts = [len(r.output_tokens) for r in requests]
        states = torch.cat(
            [
                hidden[i, len(row) - n : len(row)]
                for i, (row, n) in enumerate(zip(rows, counts, strict=True))
            ]
        )
        claimed = torch.tensor([t for r in requests for t in r.output_tokens], device=device)
        # −1 means that the rival is still to be determined.
        rivals = torch.tensor(
            [t for r in requests for t in r.rivals or (-1,) * len(r.output_tokens)], device=device
        )
        seeds = torch.tensor([r.noise_seed for r in requests], device=device)
        seeds = seeds.repeat_interleave(torch.tensor(counts, device=device))
        places = torch.cat(
            [torch.arange(len(r) - n, len(r)) for r, n in zip(rows, counts, strict=True)]
        ).to(device)
        judged = []
        chunk = max(1, self._logit_elements // self.vocabulary)
        head = self._held.head(self._tensor_dtype)
        for start in range(0, len(claimed), chunk):
            part = slice(start, start + chunk)
            s, c, r, k, p = (t[part] for t in (states, claimed, rivals, seeds, places))
            judged.append(self._judge(head(s), c, r, k, p, temperature))
        logprobs, winners, margins, rivals_N, contrasts, tails = (
            torch.cat(column).cpu().numpy() for column in zip(*judged, strict=True)
        )
        bits = _bits(states.to(torch.bfloat16))
        results = []
        at = 0
        for n in counts:
            span = slice(at, at + n)
            results.append(
                Replay(
                    logprobs=logprobs[span],
                    winners=winners[span],
                    margins=margins[span],
                    rivals=rivals_N[span],
                    contrasts=contrasts[span],
                    tail_mass=tails[span],
                    end_probability=float(np.exp(logprobs[at + n - 1])),
                    states=bits[span],
                )
            )
            at += n
        return results

    def _judge(
        self,
        logits: Tensor,
        claimed: Tensor,
        rivals: Tensor,
        seeds: Tensor,
        places: Tensor,
        temperature: float,
    ) -> tuple[Tensor, ...]:
        """The columns of Replay for N positions: logits (N, V), all else (N,) and moved to where
        those are."""
        claimed, rivals, seeds, places = (
            each.to(logits.device) for each in (claimed, rivals, seeds, places)
        )
        scaled = logits.float().div_(temperature)  # (N, V)
        logprobs_NV = scaled - scaled.logsumexp(dim=1, keepdim=True)
        probabilities = logprobs_NV.exp()
        tail = (probabilities * (probabilities < TAIL_PROBABILITY)).sum(dim=1)
        noisy = scaled + self._noise(seeds, places, self.vocabulary)
        best, winners = noisy.max(dim=1)
        own = claimed[:, None]
        margins = best - noisy.gather(1, own)[:, 0]
        others = noisy.scatter(1, own, -torch.inf).argmax(dim=1)
        rivals = torch.where(rivals < 0, others, rivals)
        logprobs = logprobs_NV.gather(1, own)[:, 0]
        contrasts = logprobs - logprobs_NV.gather(1, rivals[:, None])[:, 0]
        return logprobs, winners, margins, rivals, contrasts, tail

    # exact class ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def proof_pass(
        self, prompt_tokens: Sequence[int], output_tokens: Sequence[int], temperature: float
    ) -> Iterator[ProofPart]:
        """See Engine.proof_pass."""
        self._require(prompt_tokens, len(output_tokens))
        if max(output_tokens) >= self.vocabulary or min(output_tokens) < 0:
            raise MalformedError("an output token is outside the vocabulary")
        row = torch.tensor([*prompt_tokens, *output_tokens], dtype=torch.int64)
        head = self._held.head(self._tensor_dtype)
        parts = self._held.prefill(row[None, :-1], self._tensor_dtype, PROOF_CHUNK)
        for number, (hidden,) in enumerate(parts):
            start = number * PROOF_CHUNK
            end = start + len(hidden)
            logprobs, states = self._proof_part(head, hidden, row[start + 1 : end + 1], temperature)
            first = max(0, len(prompt_tokens) - 1 - start)
            if first < end - start:
                yield logprobs[first:], states[first:]

    @naming_faults
    def _proof_part(
        self, head: Compute, hidden: Tensor, tokens: Tensor, temperature: float
    ) -> ProofPart:
        """Returns what states `hidden` [n, H] say of the tokens that follow them, int64 [n]:
        log-probabilities float32 [n] and the bytes of the states."""
        # All positions go through the head, so that the shapes do not depend on the prompt.
        scaled = head(hidden).float().div_(temperature)
        chosen = scaled.gather(1, tokens[:, None].to(scaled.device))[:, 0]
        logprobs = (chosen - scaled.logsumexp(dim=1)).cpu().numpy()
        return logprobs, hidden.contiguous().view(torch.uint8).cpu().numpy()

    def facts(self) -> Mapping[str, str]:
        """See Engine.facts."""
        return {
            "engine": NAME,
            "replay": REPLAY_MODE,
            "dtype": self.dtype,
            "device": self.device,
            "attention": str(self._held.config._attn_implementation),
            "model": str(self._held.config.model_type),
            # Several compute what one would (adr/0024).
            "cards": "1" if self._torch_device.type == "cuda" else "0",
            "all-reduce": "none",
        } | machine_facts(self._torch_device, self._tensor_dtype)

    def numeric_class(self) -> NumericClass:
        """See Engine.numeric_class."""
        if self._numeric_class is None:
            self._numeric_class = measure(self)
        return self._numeric_class

    def _require(self, prompt: Sequence[int], output: int) -> None:
        if not prompt or max(prompt) >= self.vocabulary or min(prompt) < 0:
            raise MalformedError("a prompt is empty or has a token outside the vocabulary")
        if output < 1 or len(prompt) + output > self.positions:
            raise MalformedError(
                f"{len(prompt)} + {output} tokens do not fit the {self.positions} positions"
            )


def _equal_devices(names: str) -> tuple[torch.device, ...]:
    """Parses "cpu" or "cuda:0,cuda:1". Raises UnavailableError if they are of several kinds."""
    devices = tuple(torch.device(name.strip()) for name in names.split(","))
    if len({device.type for device in devices}) > 1:
        raise UnavailableError(f"{names}: one engine computes on devices of one kind")
    if devices[0].type == "cuda" and len(devices) > 1:  # pragma: no cover - needs accelerators
        kinds = {torch.cuda.get_device_name(device) for device in devices}
        if len(kinds) > 1:
            raise UnavailableError(f"{names}: one engine computes on equal cards, not {kinds}")
    return devices


def _bits(states: Tensor) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """bf16 tensor → its bit patterns as uint16, on the CPU."""
    return states.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)


def _gather_rows(
    steps: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    count: int,
    end_tokens: frozenset[int],
) -> list[Generation]:
    """Per-step results of the unfinished rows → one Generation per row."""
    rows = torch.cat([alive for alive, *_ in steps])
    order = rows.argsort(stable=True)
    tokens = torch.cat([tokens for _, tokens, _, _ in steps])[order].cpu().numpy()
    logprobs = torch.cat([chosen for _, _, chosen, _ in steps])[order].cpu().numpy()
    states = _bits(torch.cat([states for *_, states in steps])[order])
    lengths = torch.bincount(rows, minlength=count).tolist()
    results = []
    at = 0
    for length in lengths:
        part = tuple(tokens[at : at + length].tolist())
        reason: FinishReason = "end" if part[-1] in end_tokens else "length"
        results.append(
            Generation(part, logprobs[at : at + length], states[at : at + length], reason)
        )
        at += length
    return results
