"""The dashboard in a real browser: drawn live from the event stream, text never run as markup."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from orchestrator_world import World

from prime_orchestrator.api.app import create_app
from prime_orchestrator.serve import bind

pytestmark = pytest.mark.chromium
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture
def page_url(world: World) -> Iterator[str]:
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(world.backend), log_level="warning", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def test_page_draws_what_happens_without_a_reload(world: World, page_url: str) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=chromium, args=list(FLAGS))
        page = browser.new_page()
        trouble: list[str] = []
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("console", lambda m: trouble.append(m.text) if m.type == "error" else None)
        page.goto(page_url)
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
        browser.close()
    assert trouble == []
