"""A JSON-RPC proxy that injects faults: a test tool for everything that reads a chain.

    python -m devnet.faulty --target http://127.0.0.1:8545 --port 9545 --fault stale:0.2

Faults (`Fault.kind`):

    delay      answers after `seconds`            hang        never answers
    drop       closes the connection              truncate    sends half of the answer
    rate       HTTP 429                           busy        JSON-RPC error -32005
    internal   JSON-RPC error -32603              null        result null
    type       a result of the wrong type         oversize    an endless answer
    chain      says that it serves chain 1        stale       `seconds` behind (in blocks of 1 s)
    drip       a head without end, one byte at a time
    omit       leaves out logs and receipts       forge       adds a log that is not on the chain
    lie        flips a bit of a hex result        deaf        takes transactions, forwards none
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, get_args

import httpx

from prime_core.encoding import keccak256

Kind = Literal[
    "delay", "hang", "drop", "truncate", "rate", "busy", "internal", "null", "type", "oversize",
    "chain", "stale", "omit", "forge", "lie", "deaf", "drip",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class RpcFault:
    """What goes wrong, in which share of the requests, and for which methods (all if empty).
    `a_second`: only in requests beyond this number in the last second, like a public endpoint."""

    kind: Kind
    chance: float = 1.0
    methods: tuple[str, ...] = ()
    seconds: float = 5.0
    a_second: int = 0


class FaultyRpc:
    """The proxy, served from a thread until `close`. `faults` may be replaced at any time;
    `asked` counts requests by method, `injected` faults by kind."""

    def __init__(
        self, target: str, faults: Sequence[RpcFault] = (), *, seed: int = 0, port: int = 0
    ) -> None:
        self.faults: tuple[RpcFault, ...] = tuple(faults)
        self.asked: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self._target = target
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._passed: deque[float] = deque()
        """When the requests of the last second were let through."""
        self._http = httpx.Client(timeout=30.0, trust_env=False)
        self._closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", "0")))
                outer._answer(self, body)

            def log_message(self, *arguments: Any) -> None:
                """Nothing: tests count requests instead."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """Clients that hang up are part of the tests."""

        self._server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="faulty-rpc", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the server and lets requests that hang go."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._http.close()

    def _answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        request = json.loads(body)
        method, number = request["method"], request.get("id")
        with self._lock:
            self.asked[method] += 1
            due = [
                fault
                for fault in self.faults
                if (not fault.methods or method in fault.methods)
                and self._random.random() < fault.chance
                and not self._within(fault.a_second)
            ]
        kinds = {fault.kind: fault for fault in due}
        for wait in ("delay", "hang"):
            if wait in kinds:
                self._count(wait)
                self._closing.wait(kinds[wait].seconds if wait == "delay" else 3600)
        if "drop" in kinds or "hang" in kinds:
            self._count("drop")
            handler.close_connection = True
            return
        if "drip" in kinds:
            self._count("drip")
            handler.send_response(200)
            handler.flush_headers()
            while not self._closing.wait(0.05):
                handler.wfile.write(b"x")
            return
        if "rate" in kinds:
            self._count("rate")
            _send(handler, 429, b"too many requests")
            return
        for kind, code, words in (
            ("busy", -32005, "limit exceeded"), ("internal", -32603, "internal error"),
        ):  # fmt: skip
            if kind in kinds:
                self._count(kind)
                fault = {"code": code, "message": words}
                _send(handler, 200, _encode({"jsonrpc": "2.0", "id": number, "error": fault}))
                return
        answer = self._forward(request, kinds)
        if "result" in answer:
            answer["result"] = self._falsified(method, answer["result"], kinds)
        raw = _encode(answer)
        if "truncate" in kinds:
            self._count("truncate")
            raw = raw[: len(raw) // 2]
        if "oversize" in kinds:
            self._count("oversize")
            handler.send_response(200)
            handler.send_header("content-length", str(1 << 40))
            handler.end_headers()
            while not self._closing.is_set():
                handler.wfile.write(b" " * (1 << 20))
            return
        _send(handler, 200, raw)

    def _within(self, a_second: int) -> bool:
        """Whether a request is one of the first `a_second` of the last second; notes it if so."""
        now = time.monotonic()
        while self._passed and self._passed[0] <= now - 1.0:
            self._passed.popleft()
        if len(self._passed) >= a_second:
            return False
        self._passed.append(now)
        return True

    def _forward(self, request: dict[str, Any], kinds: dict[Kind, RpcFault]) -> dict[str, Any]:
        method, params = request["method"], list(request.get("params", []))
        if "deaf" in kinds and method == "eth_sendRawTransaction":
            self._count("deaf")
            digest = keccak256(bytes.fromhex(params[0][2:]))
            return {"jsonrpc": "2.0", "id": request.get("id"), "result": digest}
        if "stale" in kinds:
            behind = int(kinds["stale"].seconds)
            head = int(self._ask("eth_blockNumber")["result"], 16)
            old = hex(max(0, head - behind))
            if method == "eth_blockNumber":
                self._count("stale")
                return {"jsonrpc": "2.0", "id": request.get("id"), "result": old}
            for place, value in enumerate(params):
                if value in ("latest", "pending", "safe", "finalized"):
                    self._count("stale")
                    params[place] = old
        if "chain" in kinds and method == "eth_chainId":
            self._count("chain")
            return {"jsonrpc": "2.0", "id": request.get("id"), "result": "0x1"}
        return {**self._ask(method, *params), "id": request.get("id")}

    def _ask(self, method: str, *params: Any) -> dict[str, Any]:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": list(params)}
        answer: dict[str, Any] = self._http.post(self._target, json=body).json()
        return answer

    def _falsified(self, method: str, result: Any, kinds: dict[Kind, RpcFault]) -> Any:
        if "null" in kinds:
            self._count("null")
            return None
        if "type" in kinds:
            self._count("type")
            return {"unexpected": [1, 2.5, None]}
        if "omit" in kinds:
            if method == "eth_getLogs" and result:
                self._count("omit")
                with self._lock:
                    kept = [one for one in result if self._random.random() < 0.5]
                return kept if len(kept) < len(result) else kept[:-1]
            if method in ("eth_getTransactionReceipt", "eth_getTransactionByHash") and result:
                self._count("omit")
                return None
        if "forge" in kinds and method == "eth_getLogs" and result:
            self._count("forge")
            copied = dict(result[-1])
            copied["logIndex"] = hex(int(copied["logIndex"], 16) + 1)
            return [*result, copied]
        if "lie" in kinds and isinstance(result, str) and len(result) > 2:
            self._count("lie")
            return result[:-1] + ("0" if result[-1] != "0" else "1")
        return result

    def _count(self, kind: str) -> None:
        with self._lock:
            self.injected[kind] += 1


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def main() -> None:
    """Serves until interrupted."""
    parser = argparse.ArgumentParser(description="JSON-RPC proxy that injects faults")
    parser.add_argument("--target", required=True, help="URL of the real endpoint")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--fault", action="append", default=[], metavar="KIND[:CHANCE]",
        help="one of: " + ", ".join(KINDS),
    )  # fmt: skip
    given = parser.parse_args()
    faults = []
    for text in given.fault:
        kind, _, chance = text.partition(":")
        if kind not in KINDS:
            parser.error(f"{kind!r} is not a kind of fault")
        faults.append(RpcFault(kind, float(chance or 1)))
    proxy = FaultyRpc(given.target, faults, seed=given.seed, port=given.port)
    print(proxy.url, flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        proxy.close()


if __name__ == "__main__":
    main()
