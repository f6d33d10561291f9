"""What of a machine and its libraries may change the bits of a proof pass, whichever the engine."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
import transformers

from prime_engine.exact import image_digest
from prime_engine.linears import native_bfloat16


def machine_facts(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Returns facts of an exact class, as text: versions, the container's image, and what a CPU's
    kernels depend on, or an accelerator's."""
    facts = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "image": image_digest(),
        "arithmetic": _arithmetic(device, dtype),
    }
    if device.type == "cuda":  # pragma: no cover - needs an accelerator
        card = torch.cuda.get_device_properties(device)
        return facts | {
            "capability": f"{card.major}.{card.minor}",
            "multiprocessors": str(card.multi_processor_count),
            "shared memory": str(card.shared_memory_per_block),
            "card memory": str(card.total_memory),
            "mig": "yes" if " MIG " in f" {card.name} " else "no",
            "cuda": str(torch.version.cuda),
        }
    return facts | {
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "bfloat16": "native" if native_bfloat16() else "widened",
        "threads": str(torch.get_num_threads()),
    }


def _arithmetic(device: torch.device, dtype: torch.dtype) -> str:
    """Returns a digest of fixed products and sums on this machine. Processors and settings of the
    libraries (MKL_CBWR, for example) change bits without changing any version."""
    random = np.random.default_rng(1)
    right = torch.from_numpy(random.standard_normal((576, 320), np.float32)).to(device, dtype)
    hashed = hashlib.sha256()
    for rows in (1, 2, 31, 257):
        left = torch.from_numpy(random.standard_normal((rows, 576), np.float32)).to(device, dtype)
        products = left @ right, torch.nn.functional.linear(left, right.T.contiguous())
        for made in (*products, left.float().exp(), left.float().logsumexp(dim=1)):
            hashed.update(made.float().cpu().numpy().tobytes())
    return hashed.hexdigest()[:32]
