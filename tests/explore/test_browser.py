"""The pages in a real browser: `make soak`; apt-get install chromium."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from helpers.explored import HOSTILE, PageServer, served, write_run

from binidx.explore.explored import Explored

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium: apt-get install chromium"),
]
AXE = Path(sys.prefix, "lib", "node_modules", "axe-core", "axe.min.js")
PATHS = ("", "?steps=10:20", "step/3", "step/3/1/0", "source/0", "source/0/document/2", "source/0/duplicates")
PATHS += ("repeats", "nowhere")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    folder = tmp_path_factory.mktemp("run")
    with served(Explored.open(write_run(folder), losses=[f"{folder}/loss.csv"])) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])


def enter(browser: Any, pages: PageServer, **options: Any) -> Any:
    """A page of a new browser that has the cookie."""
    page = browser.new_context(**options).new_page()
    page.goto(pages.first)
    page.wait_for_url(f"**/{pages.digest}/")
    return page


def visit(page: Any, pages: PageServer, path: str) -> None:
    page.goto(f"http://127.0.0.1:{pages.port}/{pages.digest}/{path}")
    page.wait_for_load_state("networkidle")


def test_the_token_leaves_the_address_and_scripts_see_no_cookie(browser: Any, pages: PageServer) -> None:
    page = enter(browser, pages)
    assert page.url == f"http://127.0.0.1:{pages.port}/{pages.digest}/"
    assert page.evaluate("document.cookie") == ""
    page.go_back()
    assert "token" not in page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_their_width_and_are_accessible(scheme: str, width: int, browser: Any, pages: PageServer) -> None:
    page = enter(browser, pages, color_scheme=scheme, viewport={"width": width, "height": 800})
    for path in PATHS:
        visit(page, pages, path)
        for summary in page.query_selector_all("summary")[:2]:
            summary.click()
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        assert page.evaluate("window.pwned") is None
        if AXE.exists():
            page.evaluate(AXE.read_text())
            found = page.evaluate("axe.run()")["violations"]
            serious = [rule for rule in found if rule["impact"] in ("serious", "critical")]
            assert not [(rule["id"], [node["html"][:200] for node in rule["nodes"]][:3]) for rule in serious], path


def test_a_spike_leads_to_its_step_and_the_text_of_its_samples(browser: Any, pages: PageServer) -> None:
    page = enter(browser, pages)
    visit(page, pages, "?steps=4:8")
    page.locator("svg a").nth(1).click()
    page.wait_for_url("**/step/5")
    sample = page.locator("details.sample").first
    sample.locator("summary").click()
    sample.locator(".text").first.wait_for()
    sample.locator("h2 a").first.click()
    page.wait_for_url("**/source/*/document/*")
    page.locator("td a").first.click()  # of the reads, which are loaded after the page
    page.wait_for_url("**/step/*/*/*")
    visit(page, pages, "step/5")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**/step/6")


def test_pages_work_without_javascript(browser: Any, pages: PageServer) -> None:
    page = enter(browser, pages, java_script_enabled=False)
    visit(page, pages, "step/5")
    page.locator("summary").first.click()
    page.locator(".lazy a").first.click()
    page.wait_for_url("**/step/5/*/*")
    assert page.locator(".text").first.is_visible()
    visit(page, pages, "source/0/document/2")
    page.get_by_text("search all steps").click()
    page.wait_for_url("**/reads")


def test_hostile_text_does_not_run(browser: Any, pages: PageServer) -> None:
    page = enter(browser, pages)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    for token in range(1, len(HOSTILE) + 1):
        visit(page, pages, f"source/0/document/{pages.document_with(token)}")
        assert page.evaluate("window.pwned") is None
        assert page.evaluate("document.querySelectorAll('main img, main script, main a[href^=javascript]').length") == 0
    assert not errors


def test_another_page_reads_nothing(browser: Any, pages: PageServer) -> None:
    class Evil(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>evil</title>")

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Evil) as evil:
        Thread(target=evil.serve_forever, daemon=True).start()
        page = enter(browser, pages)
        target = f"http://127.0.0.1:{pages.port}/{pages.digest}/step/3.json"
        for host in ("127.0.0.1", "localhost"):
            page.goto(f"http://{host}:{evil.server_port}/")
            read = "url => fetch(url, {credentials: 'include'}).then(r => r.text()).catch(() => 'refused')"
            assert page.evaluate(read, target) == "refused"
            framed = "url => new Promise(done => {const f = document.createElement('iframe'); f.src = url;" \
                     "f.onload = () => { try { done(f.contentDocument.body.innerText) } catch { done('refused') } };" \
                     "document.body.append(f)})"  # fmt: skip
            assert page.evaluate(framed, target.replace("step/3.json", "")) in ("refused", "")
        evil.shutdown()
