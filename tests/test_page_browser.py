"""The page in a browser: it is shown from a file, to all widths and schemes, and says nothing."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from specmill.page import page
from tests.browser import CHROMIUM, Tab, tab
from tests.pages import everything
from tests.test_page import hostile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium: apt-get install chromium"),
]


Ask = Callable[[Tab], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(page(everything()))
    return path.as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Ask], None]]:
    """Runs what asks a tab; one browser for all tests, which starts for seconds."""
    with asyncio.Runner() as runner:
        opening = tab(tmp_path_factory.mktemp("profile"))
        opened = runner.run(opening.__aenter__())

        def asked(ask: Ask) -> None:
            opened.events.clear()
            runner.run(ask(opened))

        yield asked
        runner.run(opening.__aexit__(None, None, None))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_shown_without_a_complaint_a_request_or_sideways_scrolling(
    file: str, scheme: str, browser: Callable[[Ask], None]
) -> None:
    async def ask(opened: Tab) -> None:
        for width in (390, 768, 1280):
            await opened.open(file, width, scheme)
            everything_open = "document.querySelectorAll('details').forEach(one => one.open = true)"
            await opened.value(everything_open)
            assert await opened.value("document.documentElement.scrollWidth") <= width
            sections = await opened.value("document.querySelectorAll('main > section').length")
            assert sections == 13
            empty = "[...document.querySelectorAll('svg')].filter(one => one.clientHeight < 100)"
            assert await opened.value(f"{empty}.length") == 0
        assert opened.complaints() == []
        assert {url for url in opened.requests() if not url.startswith("data:")} == {file}
        paper = await opened.value("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}[scheme]

    browser(ask)


CONTRAST = """
(() => {
  const parts = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => {
    const [r, g, b] = parts(colour).map(
      v => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = one => {
    const colour = getComputedStyle(one).backgroundColor;
    return parts(colour)[3] === 0 ? behind(one.parentElement) : colour;
  };
  return Math.min(...[...document.querySelectorAll('p, li, a, th, td, caption, summary, code')]
    .map(one => [getComputedStyle(one).color, behind(one)].map(light))
    .map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)));
})()
"""
"""The least contrast of text with what is behind it, as WCAG 2.2 defines it (1.4.3)."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(
    file: str, scheme: str, browser: Callable[[Ask], None]
) -> None:
    async def ask(opened: Tab) -> None:
        await opened.open(file, 1280, scheme)
        assert await opened.value(CONTRAST) >= 4.5

    browser(ask)


def test_a_link_to_a_folded_section_opens_it(file: str, browser: Callable[[Ask], None]) -> None:
    async def ask(opened: Tab) -> None:
        await opened.open(file, 1280, "light")
        assert not await opened.value("document.querySelector('#cost > details').open")
        await opened.value("document.querySelector('nav a[href=\"#cost-inside\"]').click()")
        assert await opened.value("document.querySelector('#cost > details').open")
        top = "document.querySelector('#cost h2').getBoundingClientRect().top"
        assert 0 <= await opened.value(top) < 800

    browser(ask)


def test_a_phone_shows_an_option_line_by_line(file: str, browser: Callable[[Ask], None]) -> None:
    width = "document.querySelector('.wordy tbody td:last-child').getBoundingClientRect().width"

    async def ask(opened: Tab) -> None:
        await opened.open(file, 390, "light")
        # 390 less a rem to both sides: what is said needs no scrolling
        assert await opened.value(width) == 358
        await opened.open(file, 1280, "light")
        assert await opened.value(width) < 700

    browser(ask)


def test_the_keyboard_skips_the_list_and_opens_a_table(
    file: str, browser: Callable[[Ask], None]
) -> None:
    async def ask(opened: Tab) -> None:
        await opened.open(file, 1280, "light")
        await opened.press("Tab")
        text = await opened.value("document.activeElement.textContent")
        assert text == "Skip the list of sections"
        assert await opened.value("document.activeElement.getBoundingClientRect().left") >= 0
        await opened.press("Enter")
        for _ in range(200):
            await opened.press("Tab")
            if await opened.value("document.activeElement.tagName") == "SUMMARY":
                break
        assert await opened.value("document.activeElement.closest('main') !== null")
        await opened.press("Enter")
        assert await opened.value("document.activeElement.parentElement.open")

    browser(ask)


def test_a_screen_reader_gets_headings_pictures_and_tables_by_name(
    file: str, browser: Callable[[Ask], None]
) -> None:
    async def ask(opened: Tab) -> None:
        await opened.open(file, 1280, "light")
        await opened.value("document.querySelectorAll('details').forEach(one => one.open = true)")
        nodes = (await opened.call("Accessibility.getFullAXTree"))["nodes"]
        names: dict[str, list[str]] = {}
        for node in nodes:
            role, name = node.get("role", {}).get("value"), node.get("name", {}).get("value")
            names.setdefault(role, []).append(name)
        assert names["heading"][:2] == ["Does speculation pay?", "What to deploy"]
        assert len(names["image"]) == 11
        assert len(names["table"]) > 20
        assert all(names["image"] + names["table"] + names["region"] + names["navigation"])
        assert names["rowheader"].count("eagle3") > 5

    browser(ask)


def test_hostile_text_runs_nothing(tmp_path: Path, browser: Callable[[Ask], None]) -> None:
    path = tmp_path / "index.html"
    path.write_text(page(hostile()))

    async def ask(opened: Tab) -> None:
        await opened.open(path.as_uri(), 1280, "light")
        assert await opened.value("document.querySelectorAll('script, img').length") == 0
        assert opened.complaints() == []
        assert not [event for event in opened.events
                    if event["method"] == "Page.javascriptDialogOpening"]  # fmt: skip

    browser(ask)
