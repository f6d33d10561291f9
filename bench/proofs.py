"""Cost and soundness of activation proofs: `python -m bench proofs [--json] [--quick]
[--minutes M] [--device cpu|cuda:0]`.

timing      ours and `toploc` 0.1.6 in turn, one thread, hidden size 5120 × 4,096 tokens, CPU time
bytes       tie-free windows of which both packages must make the same proof
honest      windows of a trained model, made by other setups than the one that replays them
forgeries   proofs made without the states, on synthetic and on the trained model's windows
malformed   random and mutated bytes through decoding and comparison

The package runs in a process of its own (bench/toploc_peer.py). Where it cannot be installed, its
figures are those measured earlier, as the rows say, and byte equality counts as not shown.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.form import ROOT, Row
from bench.honest import Bench
from bench.honest_files import honest_windows
from prime_core.errors import MalformedError, UnavailableError
from prime_core.proof_form import PROOF_WINDOW
from prime_core.verdict import Outcome
from prime_verify import build
from prime_verify.build import PlannedRow
from prime_verify.canaries.forgeries import FORGERIES, Forge, forged_rows
from prime_verify.proofs import activations
from prime_verify.proofs.sketch import float_to_bf16
from prime_verify.proofs.thresholds import FLOORS
from prime_verify.rollout_file import FileRow

FOLDER = ROOT / "var" / "bench"
_MINUTES = 20


def peer_python(name: str, check: str, steps: Sequence[Sequence[str]]) -> Path:
    """The interpreter of peer `name`: made by `pip install` with each of `steps` in turn unless
    `python -c check` succeeds already.

    Raises UnavailableError, with pip's last line, if it cannot be made.
    """
    home = FOLDER / name
    python = home / "bin" / "python"
    if python.exists() and _run([str(python), "-c", check]).returncode == 0:
        return python
    print(f"bench: making {home} (minutes, once)", file=sys.stderr)
    shutil.rmtree(home, ignore_errors=True)
    commands = [[sys.executable, "-m", "venv", str(home)]]
    commands += [[str(python), "-m", "pip", "install", "-q", *step] for step in steps]
    for command in [*commands, [str(python), "-c", check]]:
        done = _run(command)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            shutil.rmtree(home, ignore_errors=True)
            raise UnavailableError(f"the peer {name} cannot be installed here: {last[:300]}")
    return python


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_MINUTES * 60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def passes(proof: bytes, window: NDArray[np.uint16]) -> bool:
    """Whether a proof passes as one of float32 states, by its window alone."""
    try:
        decoded = activations.decode(proof, len(window))
    except MalformedError:
        return False
    match = activations.verify([decoded], [window])
    return bool(
        match.exponent[0] <= FLOORS["exponent"]
        and match.sign[0] <= FLOORS["sign"]
        and match.mantissa[0] <= FLOORS["mantissa"]
    )


def accepted_on_model(files: int) -> tuple[int, int]:
    """(accepted, tried): whole files of the trained model with outlier dimensions, honest but for
    their proofs, through every check."""
    bench = Bench(max_output_tokens=96)
    accepted = 0
    for number in range(files):
        lease, plan = bench.lease(number)
        generations = build.generate_rows(plan, bench.run, bench.engine())
        states = [generation.states for generation in generations]
        for forge in FORGERIES.values():

            def change(
                rows: list[FileRow],
                plan: Sequence[PlannedRow],
                states: Sequence[NDArray[np.uint16]] = states,
                forge: Forge = forge,
            ) -> list[FileRow]:
                return forged_rows(rows, states, forge)

            made = bench.assemble(lease, plan, generations, bench.engine(), change)
            accepted += bench.judge(made).outcome is Outcome.ACCEPTED
    return accepted, files * len(FORGERIES)


EARLIER_BUILD_US, EARLIER_VERIFY_US = 33.5, 19.0
"""µs a token of toploc 0.1.6 on one CPU thread, H 5120 × 4,096 tokens, measured earlier."""
PACKAGES = ("numpy", "torch")
Windows = list[NDArray[np.uint16]]


def _states(tokens: int, hidden: int, seed: int) -> NDArray[np.uint16]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((tokens, hidden), dtype=np.float32)
    values[:, rng.integers(0, hidden, 4)] *= 20  # outlier dimensions, as trained models have
    return float_to_bf16(values)


def _decode(proofs: Sequence[bytes], windows: Windows) -> list[activations.DecodedProof]:
    return [activations.decode(p, len(w)) for p, w in zip(proofs, windows, strict=True)]


class Toploc:
    """The peer's process, asked one thing at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, question: str) -> Any:
        """Raises UnavailableError if the process has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError as error:
            raise UnavailableError(f"toploc's process died: {error}") from error
        if not answer:
            raise UnavailableError(f"toploc's process died of {question.partition(' ')[0]}")
        return json.loads(answer)


@contextmanager
def toploc_peer(states: NDArray[np.uint16], scratch: Path) -> Iterator[Toploc]:
    """The peer with `states` (uint16 [T, H]) loaded. Raises UnavailableError."""
    python = peer_python(
        "toploc",
        "import toploc",
        (
            ("setuptools", "wheel", "ninja", "numpy", "torch==2.13.0"),
            (
                *("--no-deps", "--no-binary", "toploc", "--no-build-isolation"),
                "toploc==0.1.6",
            ),
        ),
    )
    np.save(scratch / "states.npy", states)
    process = subprocess.Popen(
        [str(python), str(ROOT / "bench" / "toploc_peer.py"), str(scratch / "states.npy")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield Toploc(process)
    finally:
        process.kill()
        process.communicate()


def _cpu_us(work: Callable[[], object], tokens: int) -> float:
    """CPU time, so that a busy machine counts for little."""
    start = time.process_time()
    work()
    return (time.process_time() - start) / tokens * 1e6


def timing(states: NDArray[np.uint16], repeats: int, peer: Toploc | None) -> list[Row]:
    """Build and verify, µs a token, and their ratio to the peer: medians, turn by turn."""
    windows = activations.split_windows(states)
    proofs = activations.build(windows)
    works: dict[str, Callable[[], object]] = {
        "build": lambda: activations.build(windows),
        "verify": lambda: activations.verify(_decode(proofs, windows), windows),
    }
    rows: list[Row] = []
    for name, earlier, bar in (
        ("build", EARLIER_BUILD_US, 6.0),
        ("verify", EARLIER_VERIFY_US, 4.0),
    ):
        own, theirs = [], []
        for turn in range(repeats + 1):
            measured = _cpu_us(works[name], len(states))
            asked = peer.ask(name) / len(states) * 1e6 if peer else earlier
            if turn:  # the first warms up
                own.append(measured)
                theirs.append(asked)
        cost, other = statistics.median(own), statistics.median(theirs)
        said = "toploc 0.1.6, this run, µs" if peer else "toploc 0.1.6, measured earlier, µs"
        rows.append(Row(f"{name}_us_token", cost, "µs"))
        rows.append(Row(f"{name}_ratio", other / cost, "×", bar, "higher", other, said))
    return rows


def tie_free(count: int, hidden: int, seed: int) -> NDArray[np.uint16]:
    """Windows [count, 32·hidden] whose 200 largest magnitudes are all different."""
    rng = np.random.default_rng(seed)
    size = PROOF_WINDOW * hidden
    windows = np.empty((count, size), dtype=np.uint16)
    for window in windows:
        window[:] = rng.integers(0x3C00, 0x3F80, size)  # below 1
        top = rng.choice(size, 200, replace=False)
        window[top] = rng.choice(np.arange(0x3F80, 0x4300), 200, replace=False)
        window ^= (rng.integers(0, 2, size, dtype=np.uint16) << np.uint16(15)).astype(np.uint16)
    return windows


def bytes_equal(count: int, hidden: int, peer: Toploc | None, scratch: Path) -> Row:
    """How many tie-free windows get the package's proof, byte for byte."""
    equal, batch = 0, 100
    for start in range(0, count if peer else 0, batch):
        assert peer is not None
        windows = tie_free(min(batch, count - start), hidden, start)
        np.save(scratch / "windows.npy", windows)
        theirs = peer.ask(f"prove {scratch / 'windows.npy'}")
        ours = activations.build(list(windows))
        equal += sum(a.hex() == b for a, b in zip(ours, theirs, strict=True))
    said = "toploc 0.1.6" if peer else "toploc is not installed"
    return Row("bytes_equal_windows", equal, f"of {count}", count, "higher", peer_name=said)


def forgeries(hidden: int, count: int) -> list[Row]:
    """How many made-up proofs of each kind pass on synthetic windows, and on the trained model's
    files with all checks; and how many honest proofs of the same setup do not."""
    windows = activations.split_windows(_states(count * PROOF_WINDOW, hidden, 1))
    proofs = activations.build(windows)
    rows, total = [], 0
    for kind, forge in FORGERIES.items():
        passed = sum(map(passes, forge(windows, hidden), windows))
        total += passed
        rows.append(Row(f"forged_{kind}", passed, f"of {len(windows)} synthetic windows", 0))
    copied = sum(map(passes, proofs[1:], windows[:-1]))
    rejected = sum(not passes(p, w) for p, w in zip(proofs, windows, strict=True))
    model, tried = accepted_on_model(1 if count < 100 else 4)
    return [
        *rows,
        Row("forged_copied", copied, f"of {count - 1} synthetic windows", 0),
        Row("forgeries_accepted", total + copied + model, f"with {tried} files of a model", 0),
        Row("same_setup_rejected", rejected, f"of {count} windows", 0),
    ]


def malformed(count: int) -> Row:
    """Random and mutated bytes through decoding and comparison; anything but MalformedError
    counts."""
    rng = np.random.default_rng(2)
    (window,) = activations.split_windows(_states(8, 64, 3))
    (honest,) = activations.build([window])
    crashes = 0
    for turn in range(count):
        data = rng.bytes(int(rng.choice([0, 1, 2, 257, 258, 258, 259])))
        if turn % 2:
            changed = bytearray(honest)
            for place in rng.integers(0, len(changed), 3):
                changed[place] = int(rng.integers(0, 256))
            data = bytes(changed)
        try:
            activations.verify([activations.decode(data, len(window))], [window])
        except MalformedError:
            continue
        except Exception:
            crashes += 1
    return Row("crashes", crashes, f"of {count} malformed proofs", 0)


def run(quick: bool, minutes: float | None = None, device: str = "cpu") -> list[Row]:
    """All rows; `quick` takes a smaller size of the same work, `minutes` bounds the honest windows'
    time; `device` is where these are generated and replayed (proofs themselves are the CPU's)."""
    hidden, tokens, repeats = (1024, 1024, 5) if quick else (5120, 4096, 7)
    states = _states(tokens, hidden, 0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scratch = Path(folder)
        peer = None
        try:
            peer = stack.enter_context(toploc_peer(states, scratch))
            timed = timing(states, repeats, peer)
        except UnavailableError as error:
            print(f"bench: {error}; its figures are those measured earlier", file=sys.stderr)
            timed = timing(states, repeats, None)
        equal = bytes_equal(100 if quick else 1000, 256, peer, scratch)
    return [
        *timed,
        equal,
        *honest_windows(300 if quick else 10_000, minutes, device),
        *forgeries(hidden, 50 if quick else 300),
        malformed(200 if quick else 5000),
    ]
