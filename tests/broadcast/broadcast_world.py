"""What the broadcast's tests share: keys, checkpoints, layouts, servers that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path

import numpy as np
from served import served
from served import until as until

from devnet.ports import free_port
from prime_broadcast import layout
from prime_broadcast.client import Base, FetchStats, fetch
from prime_broadcast.durable import NOTE
from prime_broadcast.manifest import Trust
from prime_broadcast.publish import finalize, publish
from prime_core.checkpoint import Manifest, SignedManifest
from prime_core.ids import ZERO_ADDRESS
from prime_core.signing import Domain, LocalSigner

POOL = 7
DOMAIN = Domain(chain_id=31337, contract=ZERO_ADDRESS)
TRAINER = LocalSigner(b"\x11" * 32)
STRANGER = LocalSigner(b"\x22" * 32)
TRUST = Trust(TRAINER.address, DOMAIN, POOL)
CHUNK = 16 << 10


def sign(manifest: Manifest, signer: LocalSigner = TRAINER) -> SignedManifest:
    return manifest.signed(signer, DOMAIN)


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 → bf16 bit patterns (uint16), rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def safetensors_bytes(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """A safetensors file of name → (dtype, shape, data)."""
    import json

    header, position = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        end = position + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blobs = b"".join(data for _, _, data in tensors.values())
    return len(text).to_bytes(8, "little") + text + blobs


class Run:
    """A training run whose versions are published under `root`, as a trainer would."""

    def __init__(self, folder: Path, *, size: int = 200_000, seed: int = 0) -> None:
        self.folder = folder
        self.root = folder / "layout"
        self._rng = np.random.default_rng(seed)
        self._weights = self._rng.normal(0, 0.02, size).astype(np.float32)
        self._next = 0

    def checkpoint(self, path: Path) -> Path:
        """Writes the present weights as a checkpoint folder."""
        path.mkdir(parents=True)
        data = bf16(self._weights).tobytes()
        count = len(data) // 2
        body = safetensors_bytes({"model.weight": ("BF16", (count,), data)})
        (path / "model.safetensors").write_bytes(body)
        (path / "config.json").write_text('{"hidden_size": 128}\n')
        return path

    def step(self, rate: float = 3e-6) -> None:
        noise = self._rng.normal(0, 1, self._weights.size).astype(np.float32)
        self._weights = self._weights - np.float32(rate) * noise

    def publish(self, *, chunk_size: int = CHUNK) -> SignedManifest:
        """Publishes the next version (after a step, but for the first)."""
        version = self._next
        self._next += 1
        if version:
            self.step()
        source = self.checkpoint(self.folder / f"checkpoint-{version}")
        manifest = publish(
            source, self.root, pool=POOL, version=version, step=version, chunk_size=chunk_size
        )
        signed = sign(manifest)
        finalize(self.root, signed)
        return signed

    def file(self, version: int, name: str = "model.safetensors") -> bytes:
        return (layout.version_folder(self.root, version) / name).read_bytes()

    def index(self) -> list[int]:
        """The versions that the index names, newest first."""
        raw = (self.root / layout.POLICIES / layout.INDEX_NAME).read_bytes()
        return [signed.manifest.version for signed in layout.parse_index(raw)]


def same_files(folder: Path, run: Run, version: int) -> bool:
    """The folder's files are bit for bit the published ones."""
    published = layout.manifest_of(run.root, version).manifest
    return all((folder / f.name).read_bytes() == run.file(version, f.name) for f in published.files)


Behave = Callable[[BaseHTTPRequestHandler, bytes], None]
"""Gets the handler and the true bytes of the range asked for; answers as it likes."""


def answer(handler: BaseHTTPRequestHandler, body: bytes, *, claim: int | None = None) -> None:
    """A proper 206 for the asked range with this body; `claim` is the Content-Length."""
    first, last, size = handler.span  # type: ignore[attr-defined]
    handler.send_response(206 if last - first + 1 != size else 200)
    handler.send_header("Content-Range", f"bytes {first}-{last}/{size}")
    handler.send_header("Content-Length", str(len(body) if claim is None else claim))
    handler.end_headers()
    handler.wfile.write(body)


@contextmanager
def bad_server(root: Path, behave: Behave) -> Iterator[str]:
    """Serves the layout under `root` over plain http.server, each range through `behave`."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            asked.append(self.path)
            named = layout.parse_address(self.path)
            path = root / self.path.lstrip("/")
            if named is None or not path.is_file():
                self.send_error(404)
                return
            data = path.read_bytes()
            first, last = 0, len(data) - 1
            if text := self.headers.get("Range"):
                first, last = (int(part) for part in text.removeprefix("bytes=").split("-"))
            self.span = (first, last, len(data))
            behave(self, data[first : last + 1])

        def log_message(self, *args: object) -> None:
            pass

    with served(Handler) as url:
        yield url


def dead_url() -> str:
    """A URL where no server listens."""
    return f"http://127.0.0.1:{free_port()}"


def get(signed: SignedManifest, sources: list[str], dest: Path, **options: object) -> FetchStats:
    """`fetch` by an impatient client."""
    options.setdefault("patience", 5.0)
    return fetch(signed, sources, dest, **options)  # type: ignore[arg-type]


def base_of(folder: Path, signed: SignedManifest) -> Base:
    """A version that lies in `folder`, to apply deltas to."""
    return Base(folder, signed.manifest)


def left_in(folder: Path) -> set[str]:
    """What lies there, but for locks and notes of what is on its way to the platter."""
    return {p.name for p in folder.iterdir() if not p.name.startswith((".lock", NOTE, f".{NOTE}"))}


class PlainHandler(SimpleHTTPRequestHandler):
    """Python's own file server, which knows no ranges."""

    def log_message(self, *args: object) -> None:
        pass


def plain_server(root: Path) -> AbstractContextManager[str]:
    return served(partial(PlainHandler, directory=str(root)))
