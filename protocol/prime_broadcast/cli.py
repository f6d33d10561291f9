"""`prime-broadcast`: the broadcast on its own, for any folder of files.

    serve FOLDER        publish a folder (again, after each change) and serve it
    relay URL           pass on what another server serves
    fetch URL DEST      bring the newest version, or one, into DEST/<version>
    verify FOLDER       read every byte of a fetched version and check it against its manifest
    diff OLD NEW        how large the delta between two checkpoint folders would be

An Ethereum key in a file (mode 0600) identifies the publisher; a client that fetches names its
address. In a pool, `trainer` and `orchestrator relay` do the same under the trainer's key. Commands
import what they need when they are called, so `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prime_core import ids
from prime_core.command_line import program, run
from prime_core.errors import PrimeError, UserError
from prime_core.ids import ZERO_ADDRESS
from prime_core.waiting import until_stopped

if TYPE_CHECKING:
    from prime_broadcast.manifest import Trust
    from prime_broadcast.relay import RelayEvent
    from prime_broadcast.transfer import Link
    from prime_core.checkpoint import SignedManifest
    from prime_core.signing import LocalSigner

app = program(
    "prime-broadcast",
    "Moves folders of weights: signed, chunked, verified on arrival, with lossless deltas.",
)

ChainId = Annotated[int, typer.Option(help="Chain of the EIP-712 domain; 0 outside of a pool.")]
Contract = Annotated[str, typer.Option(help="Pools contract of the domain; zero outside a pool.")]
PoolNumber = Annotated[int, typer.Option("--pool", help="Pool of the policies; 0 outside a pool.")]
SignerOption = Annotated[str, typer.Option("--signer", help="Address whose signature is accepted.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port; 0 takes a free one.")]


@app.command("serve")
def serve_command(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder to publish.", exists=True)],
    data: Annotated[Path, typer.Option(help="Where published versions are kept.")],
    key: Annotated[Path, typer.Option(help="File with the signing key; made if missing.")],
    host: Host = "127.0.0.1",
    port: Port = 8475,
    version: Annotated[
        int | None,
        typer.Option(help="Version to publish as (default: the next, if FOLDER changed)."),
    ] = None,
    chain_id: ChainId = 0,
    contract: Contract = ZERO_ADDRESS,
    pool: PoolNumber = 0,
    once: Annotated[bool, typer.Option(help="Publish and end without serving.")] = False,
    as_json: AsJson = False,
) -> None:
    """Publish FOLDER as the next version, and serve all versions. A folder equal to the last
    version is not published again."""
    from prime_broadcast.bars import work_bar
    from prime_broadcast.manifest import total_size
    from prime_broadcast.publish import publish_next
    from prime_broadcast.server import Origin, Serving
    from prime_core.signing import Domain

    signer = _open_key(key)
    domain = Domain(chain_id=chain_id, contract=ids.address(contract))
    with work_bar(shown=not as_json):
        manifest = publish_next(folder, data, version, pool, signer, domain)
    facts: dict[str, Any] = {
        "version": manifest.version,
        "digest": manifest.digest(),
        "signer": signer.address,
        "bytes": total_size(manifest),
        "deltas": {str(d.base): d.size for d in manifest.deltas},
    }
    if once:
        _print(facts, as_json)
        return
    with Origin(data, Serving(host, port)) as origin:
        _print({**facts, "url": origin.url}, as_json)
        if not as_json:
            typer.echo(
                f"fetch it with: prime-broadcast fetch {origin.url} DEST --signer {signer.address}"
            )
        until_stopped().wait()


@app.command("relay")
def relay_command(
    upstream: Annotated[list[str], typer.Argument(help="Servers to fetch from, best first.")],
    data: Annotated[Path, typer.Option(help="Where policies are kept.")],
    signer: SignerOption,
    host: Host = "127.0.0.1",
    port: Port = 8476,
    keep: Annotated[int, typer.Option(help="Versions to keep.", min=1)] = 5,
    poll: Annotated[
        float, typer.Option(help="Seconds between two requests for new versions.", min=0.1)
    ] = 1.0,
    chain_id: ChainId = 0,
    contract: Contract = ZERO_ADDRESS,
    pool: PoolNumber = 0,
    as_json: AsJson = False,
) -> None:
    """Serve what UPSTREAM serves. Each chunk is served as soon as it is checked."""
    from prime_broadcast.client import read_index
    from prime_broadcast.relay import Relay, RelayEvent
    from prime_broadcast.server import Serving
    from prime_broadcast.sources import normal_url
    from prime_broadcast.transfer import Link

    trust = _trust(signer, chain_id, contract, pool)
    urls = [normal_url(url) for url in upstream]

    def tell(event: RelayEvent) -> None:
        facts = {"event": event.kind, "version": event.version, "detail": event.detail}
        _print(facts, as_json)

    stop = until_stopped()
    relay = Relay(data, trust, Serving(host, port), keep=keep, on_event=tell)
    links = [Link(url) for url in urls]
    known: dict[Link, tuple[list[SignedManifest], str | None]] = {}
    with relay:
        _print({"event": "serving", "url": relay.url}, as_json)
        while not stop.is_set():
            for link in links:
                try:
                    known[link] = read_index(link, known.get(link))
                    relay.offer(known[link][0], [[url] for url in urls])
                    break
                except PrimeError as error:
                    if link is links[-1]:
                        tell(RelayEvent("failed", 0, f"no upstream answers: {error}"))
            stop.wait(poll)


@app.command("fetch")
def fetch_command(
    url: Annotated[list[str], typer.Argument(help="Servers, then DEST as the last argument.")],
    signer: SignerOption,
    version: Annotated[
        int | None, typer.Option(help="Version to fetch (default: the newest).")
    ] = None,
    chain_id: ChainId = 0,
    contract: Contract = ZERO_ADDRESS,
    pool: PoolNumber = 0,
    parallel: Annotated[int, typer.Option(help="Chunks fetched at once.", min=1)] = 4,
    per_source: Annotated[
        int | None, typer.Option(help="Connections to one server (default: two).", min=1)
    ] = None,
    patience: Annotated[
        float, typer.Option(help="Give up after this many seconds without progress.", min=1)
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Fetch a version into DEST/<version>. By deltas where that is cheaper."""
    from prime_broadcast.bars import transfer_bar
    from prime_broadcast.chunks import PER_SOURCE
    from prime_broadcast.client import fetch, look_up
    from prime_broadcast.folder import on_disk
    from prime_broadcast.sources import SourceBook, normal_url

    if len(url) < 2:
        raise UserError("name at least one server and, last, the folder to fetch into")
    dest = Path(url[-1])
    sources = [normal_url(one) for one in url[:-1]]
    trust = _trust(signer, chain_id, contract, pool)
    known = on_disk(dest, trust)
    wanted, others = look_up(sources, trust, version, max(known, default=None))
    with transfer_bar(f"policy {wanted.manifest.version}", shown=not as_json) as progress:
        stats = fetch(
            wanted,
            sources,
            dest / str(wanted.manifest.version),
            bases=list(known.values()),
            chain={m.version: m for m in others},
            book=SourceBook(),
            parallel=parallel,
            per_source=per_source or PER_SOURCE,
            patience=patience,
            progress=progress,
        )
    _print({"path": str(dest / str(stats.version)), **stats.as_json()}, as_json)


@app.command("verify")
def verify_command(
    folder: Annotated[Path, typer.Argument(help="A fetched version.", exists=True)],
    signer: Annotated[
        str | None, typer.Option("--signer", help="Also check that this address signed.")
    ] = None,
    chain_id: ChainId = 0,
    contract: Contract = ZERO_ADDRESS,
    pool: PoolNumber = 0,
    as_json: AsJson = False,
) -> None:
    """Read every byte of FOLDER and check it against its manifest.json."""
    from prime_broadcast.bars import work_bar
    from prime_broadcast.manifest import MANIFEST_NAME, read_signed, total_size, verify_folder

    signed = read_signed(folder / MANIFEST_NAME)
    if signer is not None:
        _trust(signer, chain_id, contract, pool).check(signed)
    with work_bar(shown=not as_json):
        verify_folder(folder, signed.manifest)
    manifest = signed.manifest
    facts = {
        "version": manifest.version,
        "step": manifest.step,
        "digest": manifest.digest(),
        "result_digest": manifest.result_digest,
        "bytes": total_size(manifest),
        "signature_checked": signer is not None,
    }
    _print(facts, as_json)


@app.command("diff")
def diff_command(
    old: Annotated[Path, typer.Argument(help="Checkpoint folder.", exists=True)],
    new: Annotated[Path, typer.Argument(help="Checkpoint folder of a later version.", exists=True)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to keep the delta in.")
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Also apply the delta and compare the result.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Make the delta from OLD to NEW and say how small it is."""
    from prime_broadcast import delta as deltas
    from prime_broadcast.bars import work_bar
    from prime_broadcast.manifest import build_manifest, total_size, verify_folder

    with (
        work_bar(shown=not as_json),
        tempfile.TemporaryDirectory(prefix="broadcast-diff-") as scratch,
    ):
        base = build_manifest(old, pool=0, version=0, step=0)
        target = build_manifest(new, pool=0, version=1, step=1)
        path = output or Path(scratch) / "delta-0"
        begun = time.monotonic()
        size = deltas.encode(old, base, new, target, path)
        encoded = time.monotonic()
        facts: dict[str, Any] = {
            "bytes": total_size(target),
            "delta_bytes": size,
            "ratio": round(total_size(target) / size, 2),
            "encode_seconds": round(encoded - begun, 3),
        }
        if check:
            result = Path(scratch) / "result"
            result.mkdir()
            deltas.apply(old, base, path, target, result)
            facts["apply_seconds"] = round(time.monotonic() - encoded, 3)
            verify_folder(result, target)
            facts["identical"] = True
    _print(facts, as_json)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. `arguments`: by default the process's own."""
    run(app, "prime-broadcast", None if arguments is None else list(arguments))


def _trust(signer: str, chain_id: int, contract: str, pool: int) -> Trust:
    from prime_broadcast.manifest import Trust
    from prime_core.signing import Domain

    domain = Domain(chain_id=chain_id, contract=ids.address(contract))
    return Trust(ids.address(signer), domain, pool)


def _open_key(path: Path) -> LocalSigner:
    """The key in `path` (64 hex digits), made on first use. Raises UserError if it is readable by
    others or holds something else."""
    from prime_core.given import read_given
    from prime_core.signing import LocalSigner

    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise UserError(f"the key file {path} cannot be made: {error.strerror}") from error
    hint = "name another file; one that is missing is made"
    text = read_given(path, "key file", hint, limit=200).decode("ascii", "replace").strip()
    if path.stat().st_mode & 0o077:
        raise UserError(f"others may read the key file {path}", hint=f"chmod 600 {path}")
    if len(text) != 64 or not all(digit in "0123456789abcdef" for digit in text):
        raise UserError(f"{path} holds no key: expected 64 lowercase hex digits", hint=hint)
    return LocalSigner(bytes.fromhex(text))


def _print(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts), flush=True)
    else:
        shown = (f"{name} {value}" for name, value in facts.items() if value not in (None, "", {}))
        print(" · ".join(shown), flush=True)


if __name__ == "__main__":
    main()
