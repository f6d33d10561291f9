"""The `toploc` package as a process: run by its own interpreter, imports nothing of ours.

    python bench/toploc_peer.py STATES.npy       uint16 bf16 bits [T, H], windows of 32 tokens

Reads one word a line and answers with one JSON line: `build` and `verify` do that work once and
give its CPU seconds; `prove WINDOWS.npy` (uint16 [W, N]) gives its proofs in hexadecimal. A process
of its own, because the package's verifier can be killed by what it is given.
"""

import json
import sys
import time
from typing import Any

import numpy as np
import toploc
import torch

WINDOW, TOPK = 32, 128


def tensor(bits: Any) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def main() -> None:
    torch.set_num_threads(1)
    states = tensor(np.load(sys.argv[1]))
    # Its fastest form: whole windows to build from, one tensor to verify against (its C++ path).
    windows = list(states.split(WINDOW))
    proofs = toploc.build_proofs_bytes(windows, 1, TOPK, skip_prefill=True)
    for line in sys.stdin:
        word, _, path = line.strip().partition(" ")
        start = time.process_time()
        if word == "build":
            toploc.build_proofs_bytes(windows, 1, TOPK, skip_prefill=True)
            answer: Any = time.process_time() - start
        elif word == "verify":
            toploc.verify_proofs_bytes(states, proofs, WINDOW, TOPK, skip_prefill=True)
            answer = time.process_time() - start
        else:
            given = list(tensor(np.load(path)))
            made = toploc.build_proofs_bytes(given, 1, TOPK, skip_prefill=True)
            answer = [proof.hex() for proof in made]
        print(json.dumps(answer), flush=True)


main()
