"""The dashboard in a real browser: drawn live from the event stream, text never run as markup."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
import uvicorn
from orchestrator_world import World, signer

from prime_core.encoding import sha256
from prime_core.verdict import Reason
from prime_orchestrator.api import status
from prime_orchestrator.api.app import create_app
from prime_orchestrator.manager import endings
from prime_orchestrator.serve import bind
from prime_orchestrator.store import batches, evaluations, intents, schema
from prime_orchestrator.store.batches import BatchRow

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.chromium
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
TRANSACTION = sha256(b"transaction")


@contextmanager
def served(world: World) -> Iterator[tuple[str, Callable[[], None]]]:
    """Serves the world; yields its URL, and what stops it as SIGTERM stops `serve`."""
    listener, app = bind("127.0.0.1", 0), create_app(world.backend)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()

    def stop() -> None:
        app.state.feed.end()
        server.should_exit = True
        thread.join(30)

    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", stop
    finally:
        stop()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as engine:
        started = engine.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield started
        started.close()


def eventful(world: World) -> None:
    """A pool with batches, a void file, a slash, a transaction and an opinion."""
    digest = world.hand_in(world.member(7))
    with world.backend.store.begin() as connection:
        endings.void(connection, digest, Reason.UNROOTED, world.clock())
        for step in range(40):
            reward = 20_000 * step
            sealed = world.clock() - 10 * (39 - step)
            batches.add(
                connection, BatchRow(step, sha256(b"%d" % step), "{}", 8, reward, 1, sealed)
            )
        intents.queue_intent(connection, kind="root", key="x", payload={}, now=1.0)
        sent = {"status": "sent", "tx_hash": TRANSACTION, "updated_at": 2.0}
        connection.execute(sa.update(schema.intents).values(**sent))
        connection.execute(
            sa.insert(schema.slashes).values(
                submission_digest=digest, node=signer(7).address, validator=signer(3).address,
                evidence=sha256(b"e"), reason=4, amount="1500000000000000000", status="executed",
                created_at=3.0, execute_tx=TRANSACTION,
            )
        )  # fmt: skip
        connection.execute(
            sa.insert(schema.opinions).values(
                submission_digest=digest, validator=signer(3).address, reason=4, body="{}", at=1.0
            )
        )


def says(page: Page, text: str) -> None:
    """Waits until the page's state is `text`."""
    page.wait_for_function("text => document.getElementById('link').textContent === text", arg=text)


def links(page: Page) -> list[str]:
    found: list[Any] = page.eval_on_selector_all("main a", "all => all.map(one => one.href)")
    return found


@pytest.mark.slow
def test_page_draws_what_happens_without_a_reload(world: World, browser: Browser) -> None:
    with served(world) as (url, _):
        page = browser.new_page()
        trouble: list[str] = []
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("console", lambda m: trouble.append(m.text) if m.type == "error" else None)
        page.goto(url)
        page.wait_for_function("document.getElementById('version').textContent === '0'")
        assert page.locator("#nodes tr").count() == 0
        session = world.member(7)
        world.hand_in(session)
        page.wait_for_selector("#nodes tr")
        assert session.account.address[:8] in page.locator("#nodes").inner_text()
        assert "active" in page.locator("#nodes").inner_text()
        assert page.locator("#reach-words").inner_text() == "policy 0: 0 of 1 nodes"
        world.clock.advance(2)
        world.post("/v1/heartbeat", b'{"policy_version":0}', session)
        page.wait_for_function(
            "document.getElementById('reach-words').textContent === 'policy 0: 1 of 1 nodes'"
        )
        assert page.locator("#reach-to").inner_text() == "2.0 s after publication"
        assert page.locator("#reach polyline").count() == 1
        assert not page.locator("#held-out").is_visible()
        with world.backend.store.begin() as connection:
            evaluations.start(connection, 0, 3, now=world.clock())
        page.wait_for_selector("#evaluations tr")
        assert "0 of 3" in page.locator("#evaluations").inner_text()
        assert "running" in page.locator("#evaluations").inner_text()
        page.close()
    assert trouble == []


@pytest.mark.slow
def test_page_says_when_the_pool_stalled_and_when_it_ended(world: World, browser: Browser) -> None:
    eventful(world)
    assert world.backend.context.run.lease_seconds == 60
    with served(world) as (url, stop):
        page = browser.new_page()
        page.goto(url)
        says(page, "live")
        world.clock.advance(1800)  # START is 08:00 UTC
        says(page, "stalled since 08:00 UTC")
        assert page.locator("#unjudged").inner_text() == "1"
        stop()
        says(page, "ended at 08:30 UTC: the orchestrator stopped")
        page.close()
    world.on_chain("PoolEnded", pool=1)
    with served(world) as (url, _):
        page = browser.new_page()
        page.goto(url)
        says(page, "ended at 1970-01-01 00:00 UTC: the pool closed on chain")
        page.route("**/v1/events", lambda route: route.abort())
        page.reload()
        says(page, "no answer, trying again…")
        page.close()


def test_every_address_transaction_and_slash_is_a_link(
    world: World, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventful(world)
    node, validator = signer(7).address, signer(3).address
    with served(world) as (url, _):
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector("#nodes a")
        assert page.locator("main code").count() == page.locator("main a code").count()
        for address in sorted(set(links(page))):
            answer = page.request.get(address)
            assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        assert {f"{url}/v1/nodes/{node}", f"{url}/v1/validators/{validator}",
                f"{url}/v1/transactions/{TRANSACTION}"} <= set(links(page))  # fmt: skip
        assert "wrong_activations: 1.5 PRIME" in page.locator("#slashes").inner_text()
        monkeypatch.setitem(status._EXPLORERS, 31337, "https://explorer.example")
        page.wait_for_selector("#nodes a[href^='https://explorer.example/']")
        assert {f"https://explorer.example/address/{node}",
                f"https://explorer.example/address/{validator}",
                f"https://explorer.example/tx/{TRANSACTION}"} <= set(links(page))  # fmt: skip
        page.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axes_have_values_that_fit_and_can_be_read(
    world: World, browser: Browser, scheme: Any, width: int
) -> None:
    eventful(world)
    with served(world) as (url, _):
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 844})
        page.goto(url)
        page.wait_for_selector("#curve polyline")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        labels = page.locator("#curve text")
        texts = labels.all_text_contents()
        assert {"0.00", "0.50", "1.00"} <= set(texts)
        assert {"0", "20"} <= set(texts)
        assert {"0 %", "100 %"} <= set(page.locator("#reach text").all_text_contents())
        boxes = [label.bounding_box() for label in labels.all()]
        for box in boxes:
            assert box is not None
            assert box["height"] >= 10
            assert 0 <= box["x"] <= width - box["width"]
        assert contrast(page, "#curve text") >= 4.5
        page.close()


def contrast(page: Page, label: str) -> float:
    """Contrast (WCAG 2.1) of a chart's text with the chart's ground."""
    text, ground = page.evaluate(
        """label => { const one = document.querySelector(label);
        return [getComputedStyle(one).fill, getComputedStyle(one.closest('svg')).backgroundColor]
            .map(color => color.match(/\\d+/g).slice(0, 3).map(Number)) }""",
        label,
    )

    def luminance(color: list[int]) -> float:
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in (value / 255 for value in color)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted([luminance(text), luminance(ground)])
    return (light + 0.05) / (dark + 0.05)
