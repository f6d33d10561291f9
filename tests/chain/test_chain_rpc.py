"""RPC endpoints that fail in every way they do: what is retried, what is believed, what is said."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from devnet.chain import CHAIN_ID
from devnet.deployed import Deployed
from devnet.ports import free_port
from prime_chain import rpc
from prime_chain.client import Call, ChainClient, PaidFee
from prime_chain.errors import (
    BadAnswerError,
    ChainRevertedError,
    DisagreementError,
    RateLimitedError,
    RpcError,
)
from prime_chain.networks import by_chain_id, by_name
from prime_chain.rpc import shown_url
from prime_core.errors import MalformedError, UnavailableError, UserError
from prime_core.ids import ZERO_ADDRESS, ZERO_DIGEST, Address

Answer = dict[str, Any] | bytes | int
"""A JSON-RPC answer without its id, raw bytes, or an HTTP status."""


class Endpoint:
    """A JSON-RPC server whose answers a test decides. Counts what it was asked."""

    def __init__(
        self, answer: Callable[[str, list[Any]], Answer], chain_id: object = CHAIN_ID
    ) -> None:
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                request = json.loads(self.rfile.read(length))
                method = request["method"]
                outer.asked.append(method)
                result: Answer = (
                    {"result": hex(chain_id) if isinstance(chain_id, int) else chain_id}
                    if method == "eth_chainId"
                    else answer(method, request["params"])
                )
                status = result if isinstance(result, int) else 200
                if isinstance(result, dict):
                    body = json.dumps({"jsonrpc": "2.0", "id": request["id"], **result}).encode()
                else:
                    body = result if isinstance(result, bytes) else b"no"
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """Clients that hang up are part of the tests."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


Serve = Callable[..., Endpoint]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[Endpoint] = []

    def build(answer: Callable[[str, list[Any]], Answer], chain_id: object = CHAIN_ID) -> Endpoint:
        made.append(Endpoint(answer, chain_id))
        return made[-1]

    yield build
    for endpoint in made:
        endpoint.close()


def _always(answer: Answer) -> Callable[[str, list[Any]], Answer]:
    return lambda method, params: answer


CALL = Call(ZERO_ADDRESS, b"\x01\x02\x03\x04", 0, "try it")


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(503, id="unavailable"),
        pytest.param(429, id="rate-limited"),
        pytest.param(b"<html>busy</html>", id="a proxy's page"),
        pytest.param(b'{"jsonrpc":"2.0","id":1,"resu', id="cut off"),
        pytest.param({"error": {"code": -32005, "message": "limit exceeded"}}, id="busy"),
        pytest.param({"error": {"code": -32000, "message": "Too many requests"}}, id="busy words"),
        pytest.param({"neither": 1}, id="no result"),
        pytest.param(b"[]", id="not an object"),
        pytest.param(b"\xff\xfe", id="not text"),
        pytest.param(b"[" * 200_000, id="too deep"),
    ],
)
def test_an_endpoint_that_does_not_answer_is_passed_over_for_the_next(
    serve: Serve, broken: Answer
) -> None:
    bad, good = serve(_always(broken)), serve(_always({"result": "0x10"}))
    client = ChainClient([bad.url, good.url], CHAIN_ID)
    assert client.block_number() == 16
    asked = len(bad.asked)
    assert client.block_number() == 16
    assert len(bad.asked) == asked  # it rests for a while
    client.close()


@pytest.mark.parametrize(
    "value", ["0x-5", "0x+5", "0x 5", "0x5\n", "0x1_0", "0x0x5", "0x٥", "0x", "5", 5, None, True,
              "0x" + "1" * 65],
)  # fmt: skip
def test_a_quantity_is_hexadecimal_digits_and_nothing_else(value: object) -> None:
    with pytest.raises(MalformedError, match="for a number"):
        rpc.number(value)
    assert rpc.number("0x0F") == 15


def test_a_rested_endpoint_is_asked_again(serve: Serve) -> None:
    time = [0.0]
    up = [False]
    first = serve(lambda method, params: {"result": "0x1"} if up[0] else 503)
    second = serve(_always({"result": "0x2"}))
    client = ChainClient([first.url, second.url], CHAIN_ID, now=lambda: time[0])
    assert client.balance(ZERO_ADDRESS) == 2
    up[0] = True
    assert client.balance(ZERO_ADDRESS) == 2
    time[0] += rpc.COOL_DOWN_SECONDS + 1
    assert client.balance(ZERO_ADDRESS) == 1
    client.close()


def test_when_none_answers_the_error_names_all_but_no_secret(serve: Serve) -> None:
    dead = f"http://127.0.0.1:{free_port()}/v2/SECRETKEY?token=SECRET"
    bad = serve(_always(503))
    client = ChainClient([dead, bad.url], CHAIN_ID, timeout=2)
    with pytest.raises(UnavailableError) as caught:
        client.block_number()
    text = str(caught.value)
    assert "no RPC endpoint answers" in text
    assert bad.url in text
    assert "SECRET" not in text
    client.close()


def test_a_rate_limit_never_looks_like_a_revert(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "RATE_PAUSES", (0.0,))
    busy = serve(_always({"error": {"code": -32005, "message": "daily request limit exceeded"}}))
    client = ChainClient([busy.url], CHAIN_ID)
    with pytest.raises(UnavailableError) as caught:
        client.call(CALL)
    assert not isinstance(caught.value, ChainRevertedError)
    client.close()


def test_an_only_endpoint_that_limits_the_rate_is_asked_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    monkeypatch.setattr(time, "sleep", paused.append)
    answers: Iterator[Answer] = iter([429, {"error": {"code": -32005, "message": "rate limit"}}])
    good = serve(lambda *_: next(answers, {"result": "0x7"}))
    client = ChainClient([good.url], CHAIN_ID)
    assert client.block_number() == 7
    assert len(paused) == 2
    for seconds, least in zip(paused, rpc.RATE_PAUSES[:2], strict=True):
        assert least <= seconds <= 1.5 * least
    client.close()


def test_a_rate_limit_is_reported_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    endpoint = rpc.Endpoint("http://rpc.example.org", CHAIN_ID, 1.0, now=lambda: now[0])

    def reports(error: UnavailableError, at: float) -> int:
        now[0], before = at, len(caplog.records)
        endpoint.failed(error)
        endpoint.answered()
        return len(caplog.records) - before

    limited, down = RateLimitedError("HTTP 429"), UnavailableError("connection refused")
    assert [reports(limited, at) for at in (0.0, 1.0, 59.0, 60.0, 61.0)] == [1, 0, 0, 1, 0]
    assert [reports(down, at) for at in (62.0, 63.0)] == [1, 1]


def test_a_paid_fee_includes_the_l1_data_fee(serve: Serve) -> None:
    receipt = {
        "from": ZERO_ADDRESS, "gasUsed": "0x10", "effectiveGasPrice": "0x3", "l1Fee": "0x5",
    }  # fmt: skip
    client = ChainClient([serve(_always({"result": receipt})).url], CHAIN_ID)
    assert client.paid_fee(ZERO_DIGEST) == PaidFee(ZERO_ADDRESS, 53, 5)
    client.close()


def test_an_endpoint_of_another_chain_is_refused_by_name(serve: Serve) -> None:
    other = serve(_always({"result": "0x10"}), chain_id=1)
    client = ChainClient([other.url], CHAIN_ID)
    with pytest.raises(UserError) as caught:
        client.check()
    assert "serves chain 1" in str(caught.value)
    assert "31337" in str(caught.value)
    assert "--rpc" in caught.value.hint
    client.close()


@pytest.mark.parametrize("answer", ["0xzz", "", "chain", None, [], 31337.5])
def test_an_endpoint_that_does_not_know_its_chain_is_passed_over(
    serve: Serve, answer: object
) -> None:
    odd, good = (
        serve(_always({"result": "0x1"}), chain_id=answer),
        serve(_always({"result": "0x2"})),
    )
    client = ChainClient([odd.url, good.url], CHAIN_ID)
    assert client.block_number() == 2
    client.close()
    client = ChainClient([odd.url], CHAIN_ID)
    with pytest.raises(UnavailableError, match="check --rpc") as caught:
        client.check()
    assert odd.url in str(caught.value)
    client.close()


@pytest.mark.parametrize(
    "url",
    ["ftp://x", "localhost:8545", "http://", "x", "http://h:99999", "http://h:x", "http://[h:1"],
)
def test_what_is_no_http_address_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="is not an HTTP address"):
        ChainClient([url], CHAIN_ID)


def test_no_endpoint_at_all_says_what_to_give() -> None:
    with pytest.raises(UserError) as caught:
        ChainClient([], CHAIN_ID)
    assert "--rpc" in caught.value.hint


def test_an_answer_without_end_is_cut_off(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_ANSWER_BYTES", 1000)
    huge = serve(_always({"result": "0x" + "0" * 5000}))
    client = ChainClient([huge.url], CHAIN_ID)
    with pytest.raises(UnavailableError, match="more than 1000 bytes"):
        client.request("eth_getCode")
    client.close()


def test_an_endpoint_that_says_nothing_is_given_up_in_time(serve: Serve) -> None:
    release = threading.Event()

    def silent(method: str, params: list[Any]) -> Answer:
        release.wait(20)
        return {"result": "0x1"}

    slow, good = serve(silent), serve(_always({"result": "0x2"}))
    client = ChainClient([slow.url, good.url], CHAIN_ID, timeout=2)
    assert client.block_number() == 2
    release.set()
    client.close()


@pytest.mark.parametrize(
    ("error", "name", "reason"),
    [
        pytest.param(
            {"code": 3, "message": "execution reverted", "data": "0x08c379a0" + f"{32:064x}"
             + f"{2:064x}" + "6e6f" + "00" * 30},
            "Error", "no", id="text",
        ),
        pytest.param(
            {"code": -32000, "message": "execution reverted",
             "data": "0x4e487b71" + f"{0x11:064x}"},
            "Panic", "Panic(code=0x11)", id="panic",
        ),
        pytest.param(
            {"code": -32015, "message": "VM execution error.", "data": "Reverted 0xdeadbeef"},
            "Unknown", None, id="unknown selector",
        ),
        pytest.param(
            {"code": 3, "message": "execution reverted: because"}, "Unknown", None, id="no data",
        ),
        pytest.param(
            {"code": 3, "message": "execution reverted", "data": {"data": "0x4e487b7101"}},
            "Unknown", None, id="nested and cut off",
        ),
    ],
)  # fmt: skip
def test_reverts_are_decoded_in_every_form_endpoints_give_them(
    serve: Serve, error: dict[str, Any], name: str, reason: str | None
) -> None:
    endpoint = serve(_always({"error": error}))
    client = ChainClient([endpoint.url], CHAIN_ID)
    with pytest.raises(ChainRevertedError) as caught:
        client.call(CALL)
    assert caught.value.name == name
    if reason is not None:
        assert caught.value.reason == reason
    assert "try it" in str(caught.value)
    client.close()


def test_a_custom_error_of_the_contracts_is_decoded_by_name(deployed: Deployed) -> None:
    call = deployed.contracts.pools.end(77)
    with pytest.raises(ChainRevertedError) as caught:
        deployed.client.call(call, sender=deployed.accounts[1].address)
    assert caught.value.name == "UnknownPool"
    assert caught.value.arguments == {"pool": 77}
    with pytest.raises(ChainRevertedError, match=r"UnknownPool\(pool=77\)"):
        deployed.client.estimate_gas(call, deployed.accounts[1].address)


def test_an_error_that_is_no_revert_keeps_its_code(serve: Serve) -> None:
    endpoint = serve(_always({"error": {"code": -32601, "message": "method not found"}}))
    client = ChainClient([endpoint.url], CHAIN_ID)
    with pytest.raises(RpcError) as caught:
        client.request("eth_nothing")
    assert (caught.value.code, caught.value.method) == (-32601, "eth_nothing")
    client.close()


@pytest.mark.parametrize("value", [None, 5, "5", "0xzz", "0x" + "f" * 65, [], {}])
def test_a_number_that_is_none_is_malformed(serve: Serve, value: Any) -> None:
    endpoint = serve(_always({"result": value}))
    client = ChainClient([endpoint.url], CHAIN_ID)
    with pytest.raises(BadAnswerError):
        client.block_number()
    client.close()


def test_a_block_without_its_hash_is_malformed(serve: Serve) -> None:
    endpoint = serve(_always({"result": {"number": "0x1"}}))
    client = ChainClient([endpoint.url], CHAIN_ID)
    with pytest.raises(BadAnswerError, match="eth_getBlockByNumber"):
        client.block("latest")
    client.close()


@pytest.mark.parametrize(
    "changed",
    [{"blockNumber": "0x4"}, {"address": ZERO_ADDRESS}, {"topics": ["0x" + "2" * 64]}, {}],
)
def test_logs_that_were_not_asked_for_are_malformed(
    serve: Serve, changed: dict[str, object]
) -> None:
    """Also where one endpoint is all there is. Without a change the same log comes twice."""
    account = Address("0x" + "11" * 20)
    log = {
        "address": account, "topics": ["0x" + "1" * 64], "data": "0x", "blockNumber": "0x3",
        "blockHash": "0x" + "3" * 64, "logIndex": "0x0", "transactionHash": "0x" + "4" * 64,
    }  # fmt: skip
    answers = [[log], [log | changed] if changed else [log, log]]
    endpoint = serve(lambda _method, _params: {"result": answers.pop(0)})
    client = ChainClient([endpoint.url], CHAIN_ID)
    wanted = [bytes.fromhex("1" * 64)]
    assert len(client.logs(2, 3, [account], wanted)) == 1
    with pytest.raises(BadAnswerError, match="a log that"):
        client.logs(2, 3, [account], wanted)
    client.close()


# ── two must agree where money is real ──


def _on_base(serve: Serve, *answers: Answer) -> ChainClient:
    urls = [serve(_always(answer), chain_id=8453).url for answer in answers]
    return ChainClient(urls, 8453, timeout=2)


def test_on_base_two_endpoints_must_give_the_same_answer(serve: Serve) -> None:
    client = _on_base(serve, {"result": "0x5"}, {"result": "0x5"})
    assert client.agree(lambda one: one.balance(ZERO_ADDRESS, 7)) == 5
    client.close()


def test_two_endpoints_that_differ_stop_the_matter(serve: Serve) -> None:
    client = _on_base(serve, {"result": "0x5"}, {"result": "0x6"})
    with pytest.raises(DisagreementError, match="2 different answers"):
        client.agree(lambda one: one.balance(ZERO_ADDRESS, 7))
    client.close()


def test_one_endpoint_of_two_is_not_enough_but_a_third_makes_up_for_it(serve: Serve) -> None:
    client = _on_base(serve, {"result": "0x5"}, 503)
    with pytest.raises(DisagreementError, match="too few answers"):
        client.agree(lambda one: one.balance(ZERO_ADDRESS, 7))
    client.close()
    client = _on_base(serve, {"result": "0x5"}, 503, {"result": "0x5"})
    assert client.agree(lambda one: one.balance(ZERO_ADDRESS, 7)) == 5
    client.close()


def test_one_endpoint_given_twice_does_not_agree_with_itself(serve: Serve) -> None:
    endpoint = serve(_always({"result": "0x5"}), chain_id=8453)
    client = ChainClient([endpoint.url, endpoint.url], 8453)
    with pytest.raises(DisagreementError):
        client.agree(lambda one: one.balance(ZERO_ADDRESS, 7))
    client.close()


def test_locally_one_endpoint_is_enough(deployed: Deployed) -> None:
    assert deployed.client.agree(lambda one: one.chain_id) == CHAIN_ID


def test_fees_cope_with_an_endpoint_that_names_no_tip(serve: Serve) -> None:
    def answer(method: str, params: list[Any]) -> Answer:
        if method == "eth_maxPriorityFeePerGas":
            return {"error": {"code": -32601, "message": "the method does not exist"}}
        zero = "0x" + "00" * 32
        return {
            "result": {
                "number": "0x1", "hash": zero, "parentHash": zero, "timestamp": "0x1",
                "baseFeePerGas": "0x64",
            }
        }  # fmt: skip

    client = ChainClient([serve(answer).url], CHAIN_ID)
    fees = client.fees()
    assert (fees.base_fee, fees.max_fee) == (100, 200 + fees.priority_fee)
    client.close()


@pytest.mark.parametrize(
    ("code", "words"), [(-32000, "already known"), (-32003, "transaction already imported")]
)
def test_sending_what_the_chain_knows_already_is_no_error(
    serve: Serve, caplog: pytest.LogCaptureFixture, code: int, words: str
) -> None:
    endpoint = serve(_always({"error": {"code": code, "message": words}}))
    client = ChainClient([endpoint.url], CHAIN_ID)
    client.send_raw(b"\x02")
    client.close()
    assert "rests for a while" not in caplog.text


def test_shown_urls_hold_no_key() -> None:
    url = "https://user:password@base.example:8443/v2/abcdef?key=1"
    assert shown_url(url) == "https://base.example:8443"


def test_networks_are_found_by_id_and_name() -> None:
    assert by_chain_id(84532) is by_name("base-sepolia")
    assert by_name("base").min_agreeing == 2
    assert by_name("local").min_agreeing == 1
    for network in (by_name("local"), by_name("base-sepolia"), by_name("base")):
        assert network.stake_tag == "safe"
        assert network.payout_tag == "finalized"
    with pytest.raises(UserError, match="chain id 1 "):
        by_chain_id(1)
    with pytest.raises(UserError, match="mainnet"):
        by_name("mainnet")
