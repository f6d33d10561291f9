"""Every parser of bytes from outside: for any input it answers or raises the error that it
declares, within bounded memory. `make soak ARGS=fuzz` runs the same table for half an hour."""

from __future__ import annotations

import base64
import importlib
import json
import pkgutil
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from made_up import made_up_row
from pools import deployment
from pydantic import ValidationError
from strategies import JSON, TRICKS, as_bytes, instances, outside

import prime_broadcast
import prime_core
import prime_envs
import prime_node
import prime_validator
import prime_verify
from devnet.deployed import TEST_PERIODS
from prime_broadcast import access, codec, delta, http1, layout, manifest, tensors, transfer
from prime_broadcast.codec import Block, Kind
from prime_broadcast.sources import normal_url
from prime_chain import events, rewards
from prime_chain.client import ChainClient, parse_log
from prime_chain.codec import artifact
from prime_chain.rpc import Endpoint, RevertSignal
from prime_core import encoding, opinions, version
from prime_core.clock import Clock
from prime_core.deployment import SOLIDITY_NAMES, Deployment
from prime_core.errors import (
    MalformedError,
    PrimeError,
    UnavailableError,
    UntrustedError,
    UserError,
)
from prime_core.ids import ZERO_ADDRESS, ZERO_DIGEST
from prime_core.messages import NodeInfo, PolicyList, PoolInfo
from prime_core.rollout import SignedSubmission, decode_leaves
from prime_core.run import RunDefinition
from prime_core.settlement import Settlement, read_settlement
from prime_core.signing import LocalSigner, Strict
from prime_core.transport import problems, signatures
from prime_core.transport.client import OrchestratorClient
from prime_core.verdict import Evidence, Verdict
from prime_envs.environments import crowd
from prime_envs.tasks import load_json, parse_task
from prime_verify import audit, pages
from prime_verify.proofs import activations, hardware, sketch, thresholds
from prime_verify.rollout_file import FileError, FileMetadata, read_rollout_file, write_rollout_file
from prime_verify.setups import synthetic_run

MEMORY = 768 << 20
"""What a parser may take beyond what the process holds: a rollout file may unpack to 128 MiB."""
NOW = 1_700_000_000.0
PRINTABLE_FILE = FileMetadata(ZERO_DIGEST, "plain/1", "float32", "cpu")
FILE = write_rollout_file([made_up_row(i, 3 + i) for i in range(6)], PRINTABLE_FILE)
DEPLOYMENT = deployment(TEST_PERIODS)
DOMAIN = DEPLOYMENT.domain("registry")
OLD = bytes(range(256)) * 16


def wire(width: int, new: bytes) -> bytes:
    """A delta's block as `block_of` reads it."""
    block = codec.encode_block(OLD, new, width)
    head = bytes([block.kind, codec.WIDTHS.index(width)]) + len(block.first).to_bytes(2, "big")
    return head + block.first + block.second


BLOCKS = [wire(width, OLD[:9] + b"xyz" + OLD[12:]) for width in codec.WIDTHS]
BLOCKS.append(wire(2, random.Random(0).randbytes(len(OLD))))


def models() -> list[type[Strict]]:
    """Every model that is parsed from outside."""
    packages = (prime_core, prime_broadcast, prime_envs, prime_verify, prime_node, prime_validator)
    for package in packages:
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    found: dict[str, type[Strict]] = {}

    def walk(kind: type[Strict]) -> None:
        for inner in kind.__subclasses__():
            if inner.__module__.startswith("prime_") and inner.model_fields:
                found[f"{inner.__module__}.{inner.__name__}"] = inner
            walk(inner)

    walk(Strict)
    return [found[name] for name in sorted(found)]


@dataclass(frozen=True)
class Parser:
    """`read` gets the bytes; nothing but `errors` may come out of it."""

    name: str
    read: Callable[[bytes], object]
    given: st.SearchStrategy[bytes]
    errors: tuple[type[BaseException], ...] = (MalformedError,)


def of_model(model: type[Strict]) -> Parser:
    shapes = instances(model)
    return Parser(
        model.__name__, model.model_validate_json, outside(shapes.map(as_bytes), shapes),
        (ValidationError,),
    )  # fmt: skip


def like(model: type[Strict]) -> st.SearchStrategy[bytes]:
    shapes = instances(model)
    return outside(shapes.map(as_bytes), shapes)


def block_of(data: bytes) -> object:
    """Kind, width and the first frame's length, then the two frames of a delta's block."""
    kind, width, *cut = data[:4].ljust(4, b"\0")
    end = 4 + int.from_bytes(bytes(cut), "big")
    block = Block(Kind(kind % len(Kind)), data[4:end], data[end:])
    return codec.decode_block(block, OLD, len(OLD), codec.WIDTHS[width % len(codec.WIDTHS)])


def in_file(read: Callable[[Path], object], folder: Path) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        path = folder / "f"
        path.write_bytes(data)
        return read(path)

    return parse


def opened(read: Callable[[int], object], folder: Path) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        path = folder / "f"
        path.write_bytes(data)
        with path.open("rb") as file:
            return read(file.fileno())

    return parse


def fields_of(data: bytes) -> dict[str, str]:
    """A head's fields from lines `name: value`."""
    pairs = (line.partition(":") for line in data.decode("latin-1").split("\n"))
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def signed_head() -> bytes:
    key = signatures.SessionKey.generate()
    made = signatures.sign_headers(key, "POST", "http://a/b?c", b"x", now=NOW, nonce="n" * 20)
    return "\n".join(f"{name}: {value}" for name, value in made.items()).encode()


def verify_head(data: bytes) -> object:
    fields = fields_of(data)
    return signatures.verify_headers("POST", "a", "/b?c", fields, now=NOW)


def answered(data: bytes) -> object:
    """One answer (status, fields, body) to each of an OrchestratorClient's calls."""
    head, _, body = data.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    status = 200 + int.from_bytes(first[:2], "big") % 400
    fields = [line.partition(b":")[::2] for line in lines if line.partition(b":")[0].strip()]

    def answer(request: httpx.Request) -> httpx.Response:
        asked = [(version.HEADER.encode(), b"1")] + [(n.strip(), v.strip()) for n, v in fields]
        return httpx.Response(status, headers=asked, stream=httpx.ByteStream(body))

    client = OrchestratorClient(
        "http://127.0.0.1:1",
        LocalSigner(b"\1" * 32),
        clock=Clock(now=lambda: NOW, sleep=lambda s: None),
    )
    client._http = httpx.Client(transport=httpx.MockTransport(answer))
    calls: list[Callable[[], object]] = [
        client.pool,
        lambda: client.get_object(ZERO_DIGEST),
        lambda: list(client.nodes()),
        lambda: client.get_changed("/v1/policies", PolicyList, "tag"),
        lambda: client.download(body.decode("utf-8", "replace"), limit=100),
        lambda: client.post("/v1/leases", b"{}", PolicyList),
    ]
    with client:
        for call in calls:
            try:
                call()
            except PrimeError as error:
                str(error).encode()  # it is printed and kept
    return None


def rpc(data: bytes) -> object:
    """One JSON-RPC answer to each call whose answer is parsed."""
    endpoint = Endpoint("http://127.0.0.1:1", 31337, 5.0)

    def answer(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        body = data.replace(b'"ID"', str(asked["id"]).encode())
        return httpx.Response(200, content=body)

    endpoint._http = httpx.Client(transport=httpx.MockTransport(answer))
    endpoint._checked = True
    chain: Any = SimpleNamespace(  # a client of this endpoint alone
        request=lambda method, *params, parse=lambda value: value: endpoint.request(
            method, params, parse
        ),
        agree=lambda read, at_stake: read(chain),
        numbered=lambda block: block,
    )
    for call in (
        lambda: ChainClient.receipt(chain, ZERO_DIGEST),
        lambda: ChainClient.transaction(chain, ZERO_DIGEST),
        lambda: ChainClient.block(chain, "latest"),
        lambda: ChainClient.logs(chain, 0, 1, [ZERO_ADDRESS]),
        lambda: ChainClient.nonce(chain, ZERO_ADDRESS),
        lambda: ChainClient.code(chain, ZERO_ADDRESS),
        lambda: ChainClient.balance(chain, ZERO_ADDRESS),
    ):
        try:
            call()
        except (UnavailableError, RevertSignal):
            continue
    endpoint.close()
    return None


HEX = st.sampled_from(
    ["0x", "0x0", "0x1", "0x" + "11" * 32, "0x" + "22" * 20, "0x" + "f" * 65, "0xzz"]
)
LOGS = st.fixed_dictionaries(
    {
        "address": st.sampled_from([*DEPLOYMENT.addresses(), ZERO_ADDRESS]),
        "topics": st.lists(HEX, max_size=4),
        "data": HEX | st.binary(max_size=400).map(lambda raw: "0x" + raw.hex()),
        "blockNumber": HEX,
        "blockHash": HEX,
        "logIndex": HEX,
        "transactionHash": HEX,
    }
)
RESULTS = st.fixed_dictionaries(
    {
        **dict.fromkeys(
            (
                "transactionHash",
                "hash",
                "blockHash",
                "parentHash",
                "blockNumber",
                "number",
                "value",
            ),
            HEX,
        ),
        **dict.fromkeys(("status", "gasUsed", "timestamp", "baseFeePerGas", "input", "to"), HEX),
        "contractAddress": st.none() | HEX,
        "logs": st.lists(LOGS, max_size=2),
    }
)
ANSWERS = st.fixed_dictionaries(
    {"id": st.just("ID"), "result": RESULTS | HEX | st.lists(LOGS, max_size=2) | st.none()}
) | st.fixed_dictionaries(
    {
        "id": st.just("ID"),
        "error": st.fixed_dictionaries({"code": TRICKS, "message": TRICKS, "data": HEX | TRICKS}),
    }
)


@st.composite
def our_logs(draw: st.DrawFn) -> bytes:
    """Logs of our own events, with data of any kind."""
    name = draw(st.sampled_from(sorted(SOLIDITY_NAMES)))
    topics = draw(st.sampled_from([*codec_of(SOLIDITY_NAMES[name]), b"\0" * 32]))
    raw = draw(LOGS)
    more = draw(st.lists(st.binary(min_size=32, max_size=32), max_size=3))
    raw |= {"address": getattr(DEPLOYMENT.contracts, name)}
    raw |= {"topics": ["0x" + topic.hex() for topic in (topics, *more)]}
    raw |= dict.fromkeys(("blockNumber", "logIndex"), "0x1")
    raw |= dict.fromkeys(("blockHash", "transactionHash"), ZERO_DIGEST)
    return as_bytes(raw)


def codec_of(name: str) -> list[bytes]:
    return list(artifact(name).events)


def event(data: bytes) -> object:
    try:
        log = parse_log(json.loads(data))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, MalformedError):
        return None  # what the endpoint's wrapper catches: row "RPC answers"
    return events.decode(log, 0, DEPLOYMENT)


GATE = access.Gate(access.Rules(DOMAIN), "http://127.0.0.1:1", now=lambda: NOW)
TASKS = st.fixed_dictionaries(
    {
        "problem_id": st.text(max_size=5) | TRICKS,
        "task_type": st.sampled_from(["mathematics", "code"]) | TRICKS,
        "prompt": st.text(max_size=5) | TRICKS,
        "verification_info": JSON | st.just('{"answer": 1}'),
        "metadata": JSON,
    }
)


def like_pass() -> st.SearchStrategy[bytes]:
    """Passes as text, whole and damaged."""
    texts = like(access.SignedPass).map(lambda raw: base64.urlsafe_b64encode(raw).rstrip(b"="))
    return outside(texts)


def instances_of_problem() -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {
            "type": st.sampled_from([f"urn:prime:problem:{kind}" for kind in problems._KINDS])
            | TRICKS,
            "detail": TRICKS,
            "hint": TRICKS,
            "spoken": TRICKS | st.just([1, 2]),
        }
    )


def kept_problem(data: bytes) -> object:
    """A peer's refusal is kept in journals and printed."""
    error = problems.from_problem(400, data)
    return str(error).encode(), getattr(error, "hint", "").encode()


def instances_of_tensors() -> st.SearchStrategy[bytes]:
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "U8"]) | TRICKS,
            "shape": st.lists(st.integers(0, 9) | TRICKS, max_size=3),
            "data_offsets": st.just([0, 4]) | st.lists(TRICKS, max_size=3),
        }
    )
    return st.dictionaries(st.text(max_size=3), entry, max_size=3).map(as_bytes)


def opinions_of(data: bytes) -> object:
    verdict = rewards._parse(Verdict, data)
    return opinions.check_opinions(verdict, ZERO_DIGEST, DEPLOYMENT, [ZERO_ADDRESS])


def table(folder: Path) -> list[Parser]:
    text = st.text(max_size=40) | TRICKS.map(str)
    urls = text.map(lambda t: t.encode("utf-8", "surrogatepass"))
    head = outside(st.just(b"GET /v1/x?pass=a HTTP/1.1\r\nHost: a\r\nRange: bytes=1-2\r\n\r\n"))
    reply = outside(st.just(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"))
    whole = st.tuples(
        st.integers(0, 400).map(lambda n: n.to_bytes(2, "big")),
        st.sampled_from([b"", b"location: http://[", b"location: http://a:x/", b"retry-after: \xb2",
                         b"content-encoding: gzip", b"retry-after: 1e999", b"prime-protocol: 99",
                         b"location: //\xff", b"location: ftp://a/", b"location: http://\xc3\xa9/"]),
        st.one_of(like(PoolInfo), like(NodeInfo).map(lambda raw: b"[" + raw + b"]"), urls,
                  instances_of_problem().map(as_bytes)),
    ).map(lambda parts: parts[0] + b"\n" + parts[1] + b"\n\n" + parts[2])  # fmt: skip
    run = synthetic_run(24).raw()
    run_json = st.just(json.loads(run))
    footer = outside(st.binary(max_size=200)).map(
        lambda raw: b"PAR1" + raw + len(raw).to_bytes(4, "little") + b"PAR1"
    )
    safetensors = instances_of_tensors().map(
        lambda raw: len(raw).to_bytes(8, "little") + raw + bytes(64)
    )
    magic = like(delta.DeltaHeader).map(
        lambda raw: delta.MAGIC + len(raw).to_bytes(4, "little") + raw
    )
    named = [
        Parser("rollout file", read_rollout_file, outside(st.just(FILE)), (FileError,)),
        Parser("rollout file's footer", read_rollout_file, footer, (FileError,)),
        Parser("run file", RunDefinition.parse, outside(st.just(run), run_json)),
        Parser("signed manifest", manifest.parse_signed, like(manifest.SignedManifest)),
        Parser("index of policies", layout.parse_index, like(PolicyList)),
        Parser("canonical JSON", encoding.parse_canonical_json, outside(JSON.map(as_bytes), JSON)),
        Parser("leaves", decode_leaves, like(SignedSubmission).map(lambda raw: b"[" + raw + b"]")),
        Parser("evidence", audit._parse_evidence, like(Evidence)),
        Parser("settlement", lambda raw: rewards._parse(Settlement, raw), like(Settlement)),
        Parser("settlement's file", in_file(read_settlement, folder), like(Settlement),
               (UserError,)),
        Parser("deployment's file", in_file(Deployment.load, folder), like(Deployment),
               (UserError,)),
        Parser("calibration", lambda raw: thresholds.parse_signed(raw, ZERO_ADDRESS, DOMAIN),
               like(thresholds.Calibration), (MalformedError, UntrustedError)),
        Parser("opinions", opinions_of, like(Verdict), (MalformedError, UntrustedError)),
        Parser("delta's header", opened(delta.read_header, folder), outside(magic)),
        Parser("delta's block", block_of,
               outside(st.sampled_from(BLOCKS))),
        Parser("tensors", opened(tensors.read_tensors, folder), outside(safetensors), ()),
        Parser("proofs",
               lambda raw: [activations.decode(p, 4096) for p in activations.unpack(raw, 2)],
               outside(st.just(activations.pack([b"\x90\0" + b"\1\2" * 128] * 2)))),
        Parser("sketch", lambda raw: sketch.decode(raw, 1),
               outside(st.binary(min_size=128, max_size=128))),
        Parser("hardware solution", lambda raw: hardware.decode_solution(raw, 4, 1),
               outside(st.binary(min_size=128, max_size=128))),
        Parser("page headers", lambda raw: pages.require_plain_pages(
            raw, start=0, length=len(raw), values=1 << 20, budget=1 << 20),
            outside(st.just(FILE[4:200]))),
        Parser("HTTP request", lambda raw: http1.parse_head(raw + b"\r\n\r\n"), head,
               (http1.RequestError,)),
        Parser("HTTP answer", lambda raw: transfer.parse_answer(raw + b"\r\n\r\n"), reply),
        Parser("byte range", lambda raw: http1.byte_range(raw.decode("latin-1"), 100), head, ()),
        Parser("HTTP signature", verify_head, outside(st.builds(signed_head)),
               (MalformedError, UntrustedError)),
        Parser("protocol version", lambda raw: version.agree(raw.decode("latin-1")),
               outside(st.just(b"1")), (UserError,)),
        Parser("pass", lambda raw: GATE.admit(raw.decode("latin-1")), like_pass(),
               (MalformedError, UntrustedError)),
        Parser("problem document", kept_problem, outside(instances_of_problem().map(as_bytes),
                                                         instances_of_problem()), ()),
        Parser("orchestrator's answers", answered, outside(whole), ()),
        Parser("RPC answers", rpc, outside(ANSWERS.map(as_bytes), ANSWERS), ()),
        Parser("events", event, outside(our_logs())),
        Parser("URLs", lambda raw: normal_url(raw.decode("utf-8", "surrogateescape")),
               outside(urls)),
        Parser("task row", lambda raw: parse_task(load_json(raw, "row"), "row"),
               outside(TASKS.map(as_bytes), TASKS)),
        Parser("environment's header", lambda raw: crowd.read_header(raw, "h"), like(crowd.Header)),
    ]  # fmt: skip
    return [*named, *map(of_model, models())]


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Within, the process may take MEMORY more; beyond it Python raises MemoryError."""
    if sys.platform != "linux":
        yield
        return
    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


PARSERS = table(Path(tempfile.mkdtemp(prefix="prime-fuzz-")))
EXAMPLES, OF_A_MODEL = 60, 15
OF_LARGE_MODELS = {"evidence", "settlement", "settlement's file", "opinions", "index of policies"}
"""Parsers of which one example takes longer to make than to read. The soak run makes more."""
NOT_TIMED = settings(
    deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
)


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_only_the_declared_error_comes_out(parser: Parser, request: pytest.FixtureRequest) -> None:
    seconds = request.config.getoption("--fuzz-seconds")
    model = isinstance(parser.read, MethodType) or parser.name in OF_LARGE_MODELS
    examples = OF_A_MODEL if model else EXAMPLES

    def attempts(number: int, examples: int) -> None:
        @seed(number)
        @settings(NOT_TIMED, max_examples=examples)
        @given(parser.given)
        def attempt(data: bytes) -> None:
            with suppress(*parser.errors):
                parser.read(data)

        attempt()

    with bounded_memory():
        if not seconds:
            attempts(0, examples)
            return
        end, number = time.monotonic() + seconds / len(PARSERS), 0
        while time.monotonic() < end:
            number += 1
            attempts(number, 300)
