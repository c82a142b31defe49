"""Proves the live page in a real browser: what it draws, on a phone and in the dark, and by keyboard only.

Needs Chromium on PATH, which `make test` installs where it can (Debian's package); without it these tests say so and
are skipped. The pictures lie under the tests' temporary folder.
"""

import json
import re
import shutil
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web
from playwright.async_api import Browser, Page, async_playwright, expect

from prfaas.wire import headers
from prfaas.wire.control import LinkReport, ThresholdUpdate

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH; `make browser` installs it"),
]
PATIENCE_MS = 60_000
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"], timeout=PATIENCE_MS)
        yield launched
        await launched.close()


@pytest.fixture
async def busy(world):
    """A gateway that has offloaded, served at home, met a failure, and knows its link."""
    await world.start("d0", "d1", "p0", "x0", "x1")
    links = (LinkReport(cluster="eu", state="Alive", effective_mbps=93, utilisation_percent=61.4),)
    update = ThresholdUpdate(
        tokens=1500, bandwidth="Scarce", offload_clusters=("eu",), expires_seconds=60, reason=HOSTILE, links=links
    )
    await world.control("PUT", "/threshold", msgspec.json.encode(update))

    async def cached(request: web.Request, body: bytes) -> web.StreamResponse:
        reported = {headers.PROMPT_TOKENS: str(len(body) // 4), headers.CACHED_TOKENS: str(len(body) // 8)}
        reported[headers.TTFT_SECONDS] = "prefill=0.000001"
        return web.json_response({"object": "chat.completion"}, headers=reported)

    for worker in world.workers.values():
        worker.reply = cached
    for number in range(6):
        text = f"{number} is the number. " + "x" * (40_000 if number % 2 else 300)
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        await world.post(body, headers={"x-request-id": f"request-{number}"})
    await world.workers["x0"].stop()
    return world


async def opened(browser: Browser, url: str, **context) -> tuple[Page, list[str]]:
    """Return the page, once it is live, and what its console complains of."""
    page = await (await browser.new_context(**context)).new_page()
    page.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    page.on("console", lambda entry: complaints.append(entry.text) if entry.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    await page.goto(url)
    return page, complaints


expect.set_options(timeout=PATIENCE_MS)


async def test_the_page_draws_what_the_gateway_knows_and_runs_none_of_it(busy, browser, tmp_path):
    page, complaints = await opened(browser, busy.admin_url + "/ui/", viewport={"width": 1280, "height": 900})
    await expect(page.locator("#state")).to_have_text("Live")
    await expect(page.locator("#threshold")).to_have_text("1,500 tokens")
    await expect(page.locator("#offloaded")).to_have_text("50 % of 6")
    await expect(page.locator("#cached")).to_have_text("50 %")
    await expect(page.locator(".cluster h3")).to_contain_text(["hub", "eu"])
    await expect(page.get_by_role("meter")).to_have_attribute("aria-valuenow", "61")
    await expect(page.locator("#reason")).to_contain_text(HOSTILE)
    await expect(page.locator("#parts")).to_contain_text(re.compile(r"mean of 6: gateway queue \d+ ms, prefill 0 ms"))
    assert await page.locator("img").count() == 0
    await expect(page.locator("#rows tr")).to_have_count(6)
    await expect(page.locator("#chart path.threshold")).to_have_count(1)
    await page.screenshot(path=tmp_path / "wide.png", full_page=True)
    await busy.post(json.dumps({"model": "m", "messages": []}).encode())
    await expect(page.locator("#rows tr")).to_have_count(7)
    assert complaints == []


async def test_the_page_fits_a_phone_in_the_dark(busy, browser, tmp_path):
    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "is_mobile": True}
    page, complaints = await opened(browser, busy.admin_url + "/ui/", **phone)
    await expect(page.locator("#rows tr")).to_have_count(6)
    assert await page.evaluate("document.documentElement.scrollWidth") <= 360, "nothing sticks out sideways"
    assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 26)"
    await page.screenshot(path=tmp_path / "phone.png", full_page=True)
    assert complaints == []


async def test_everything_is_reached_and_worked_by_keyboard(busy, browser):
    page, _ = await opened(browser, busy.admin_url + "/ui/")
    await expect(page.locator("#rows tr")).to_have_count(6)
    reached = []
    for _ in range(8):
        await page.keyboard.press("Tab")
        reached.append(await page.evaluate("document.activeElement.textContent.trim().slice(0, 22)"))
        if reached[-1] == "Offloaded":
            await page.keyboard.press("Enter")
            await expect(page.locator("#rows tr")).to_have_count(3)
    assert reached[:7] == ["Skip to the requests", "Pause", "Dark", "All", "Offloaded", "Local", "Not served"]
    assert await page.evaluate("document.activeElement.getAttribute('role')") == "region", "the table can be scrolled"


async def test_the_page_reports_a_gateway_that_dies(world, browser):
    await world.start("d0")
    page, _ = await opened(browser, world.admin_url + "/ui/")
    await expect(page.locator("#state")).to_have_text("Live")
    await page.route("**/ui/state*", lambda route: route.abort())
    await expect(page.locator("#state")).to_contain_text("No answer from the gateway")
