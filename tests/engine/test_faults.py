"""A shortage of memory and a failed card are named, whichever library noticed them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_core.errors import FatalError, UnavailableError
from prime_engine import held
from prime_engine.base import GenerationRequest, ReplayRequest
from prime_engine.faults import fault, naming_faults
from prime_verify.engines import load_engine

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.6 GiB"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError(CUDA), MemoryError),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronous"),
         MemoryError),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
         MemoryError),
        (ValueError("No available memory for the cache blocks. Try increasing "
                    "`gpu_memory_utilization`"), MemoryError),
        (MemoryError(), MemoryError),
        (RuntimeError("CUDA error: unspecified launch failure"), FatalError),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3501, unhandled system error"),
         FatalError),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (KeyError("out of memory"), None),
    ],
)  # fmt: skip
def test_errors_of_this_machine_are_named_and_no_others(
    error: Exception, kind: type[Exception] | None
) -> None:
    found = fault(error)
    assert type(found) is (kind or type(None))
    assert found is None or "\n" not in str(found)


def test_torch_names_a_shortage_of_main_memory() -> None:
    @naming_faults
    def allocate() -> torch.Tensor:
        return torch.empty(1 << 60, dtype=torch.uint8)

    with pytest.raises(MemoryError, match="allocate"):
        allocate()


def test_what_a_call_without_memory_had_allocated_is_free() -> None:
    held: list[weakref.ref[Any]] = []

    @naming_faults
    def fails() -> None:
        tensor = torch.zeros(4)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError(CUDA)

    with pytest.raises(MemoryError, match="CUDA out of memory") as raised:
        fails()
    assert held[0]() is None, raised


def test_other_errors_stay_what_they_are() -> None:
    @naming_faults
    def fails() -> None:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        fails()


ROW = GenerationRequest((5, 6), 4, 1)


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.generate([ROW], 1.0),
        lambda engine: engine.replay([ReplayRequest((5, 6), (7, 8), 1)], 1.0),
        lambda engine: list(engine.proof_pass((5, 6), (7, 8), 1.0)),
        lambda engine: engine.numeric_class(),
    ],
)
@pytest.mark.parametrize(
    ("error", "kind"),
    [(torch.OutOfMemoryError(CUDA), MemoryError),
     (RuntimeError("CUDA error: device-side assert triggered"), FatalError)],
)  # fmt: skip
def test_the_plain_engine_names_them(
    tiny_folder: Path, use: Callable[[Any], object], error: Exception, kind: type[Exception]
) -> None:
    engine: Any = load_engine(tiny_folder)

    def fails(*_: Any) -> None:
        raise error

    engine.model.model.embed_tokens.forward = fails
    with pytest.raises(kind, match="CUDA"):
        use(engine)


def test_a_model_that_does_not_fit_is_named_and_a_damaged_one_is_not(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(CUDA)

    with monkeypatch.context() as patch:
        patch.setattr(held.AutoModelForCausalLM, "from_config", fails)
        with pytest.raises(MemoryError, match="CUDA out of memory"):
            load_engine(tiny_folder)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "to", fails)
        with pytest.raises(MemoryError, match="CUDA out of memory"):
            load_engine(tiny_folder)

    def refuses(*_: Any, **__: Any) -> None:
        raise OSError("the disk does not answer")

    monkeypatch.setattr(held, "safe_open", refuses)
    with pytest.raises(UnavailableError, match="no model can be loaded"):
        load_engine(tiny_folder)
