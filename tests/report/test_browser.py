"""The page in a real browser, as a reader opens it: from disk."""

import base64
import gzip
import json
import os
import random
import shutil
import struct
import zlib
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from qkablate.report.page import render_page
from qkablate.report.section import Section

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOSTILE = '</script><script>alert(1)</script><img src="https://x.invalid/" onerror="alert(2)">'
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "device_scale_factor": 2}
SWEEP = ("variant=standard,no_q,shared_qk", "model.d_model=16,32", "seed=range(4)")


@pytest.fixture(scope="module")
def browser():
    """Return a headless browser; without one, skip unless QKABLATE_NEEDS_BROWSER is set."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        missing = f"no browser: none of {', '.join(BROWSERS)} is on the path"
        if os.environ.get("QKABLATE_NEEDS_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Containers have no user namespaces; the page is our own.
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


def losses(manifest):
    """Made-up test losses: no_q is worse, shared_qk is not."""
    chance = random.Random(0)

    def loss(run):
        worse = 0.05 if manifest.arms[run.arm].variant == "no_q" else 0.0
        return 2 + run.changes["seed"] / 10 + worse + chance.gauss(0, 0.002)

    return loss


def write(world, path):
    path.write_text(
        render_page([Section("A sweep", "", world.study())], "A sweep"),
        encoding="utf-8",
    )
    return path.as_uri()


@pytest.fixture
def address(cached_world, tmp_path):
    """Return the address of a report with curves, a divergence and a failure with hostile words."""
    world = cached_world(*SWEEP)
    loss = losses(world.manifest)
    for number, run in enumerate(world.runs()):
        outcome = loss(run)
        if number == 22:
            outcome = "diverged"
        elif number == 23:
            outcome = {"status": "failed", "error": HOSTILE}
            outcome["loss"] = {"train": None, "val": None, "test": None}
        world.write(run, outcome)
        world.curve(run, {step: 2 + 4 / step + loss(run) / 100 for step in range(1, 13)})
    return write(world, tmp_path / "report.html")


@pytest.fixture
def opened(browser):
    """Open a page; fail if it logs to the console, requests anything, or runs a foreign script."""
    contexts = []
    trouble: list[str] = []

    def open_page(address, **settings):
        context = browser.new_context(**settings)
        contexts.append(context)
        shown = context.new_page()
        shown.on("console", lambda message: trouble.append(f"console: {message.text}"))
        shown.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        shown.on("dialog", lambda dialog: trouble.append(f"dialog: {dialog.message}"))

        def record_request(request):
            if request.url != address and not request.url.startswith(("data:", "blob:")):
                trouble.append(f"request: {request.url}")

        shown.on("request", record_request)
        shown.goto(address)
        shown.wait_for_selector("html[data-ready]", state="attached")
        return shown

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []


def brightness(shown) -> float:
    """Return the brightness of the page's upper left corner, from 0 to 255."""
    png = shown.screenshot(clip={"x": 1, "y": 1, "width": 1, "height": 1})
    place, data = 8, b""
    while place < len(png):
        size, kind = struct.unpack(">I4s", png[place : place + 8])
        data += png[place + 8 : place + 8 + size] if kind == b"IDAT" else b""
        place += 12 + size
    return sum(zlib.decompress(data)[1:4]) / 3


def fits(shown) -> bool:
    """Return whether nothing makes the page itself scroll sideways."""
    return shown.evaluate(
        "(page => page.scrollWidth <= page.clientWidth)(document.documentElement)"
    )


@pytest.mark.slow
def test_all_charts_are_drawn_without_errors_or_requests(opened, address):
    shown = opened(address)
    places = shown.locator(".vega")
    assert places.count() >= 7
    for place in places.all():
        assert place.locator("svg").count() == 1
        assert place.locator("svg path").count() > 0
    assert "1 diverged, 1 failed" in shown.locator("table.sortable").inner_text()


def test_failed_chart_does_not_affect_others(address, browser, tmp_path):
    """A browser that lacks what one of them needs, say: here one spec is no picture."""
    text = Path(unquote(urlparse(address).path)).read_text(encoding="utf-8")
    begin = text.index(">", text.index('id="specs"')) + 1
    packed = text[begin : text.index("<", begin)]
    specs = json.loads(gzip.decompress(base64.b64decode(packed)))
    specs["panels"][0] = {"mark": {"type": "no such mark"}, "data": {"values": [{"a": 1}]}}
    again = base64.b64encode(gzip.compress(json.dumps(specs).encode())).decode()
    path = tmp_path / "one-is-broken.html"
    path.write_text(text.replace(packed, again), encoding="utf-8")
    shown = browser.new_page()
    shown.goto(path.as_uri())
    shown.wait_for_selector("html[data-ready]", state="attached")
    first, *others = shown.locator(".vega").all()
    assert "This chart could not be drawn: " in first.inner_text()
    assert all(place.locator("svg").count() == 1 for place in others)
    shown.close()


@pytest.mark.slow
def test_hostile_text_is_escaped(opened, address):
    shown = opened(address)
    shown.locator("summary", has_text="All runs").click()
    assert shown.get_by_text(HOSTILE).count() >= 1
    assert shown.locator("img").count() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "is_light"),
    [
        ({"color_scheme": "light"}, True),
        ({"color_scheme": "dark"}, False),
        (PHONE, True),
        (PHONE | {"color_scheme": "dark"}, False),
    ],
    ids=["light", "dark", "phone", "phone, dark"],
)
def test_page_fits_the_window_and_follows_the_color_scheme(
    opened, address, settings, is_light, tmp_path
):
    shown = opened(address, **settings)
    assert (brightness(shown) > 200) == is_light
    assert (brightness(shown) < 60) != is_light
    assert fits(shown)
    assert len(shown.screenshot(full_page=True, path=tmp_path / "page.png")) > 20_000
    # Every picture is inside its place.
    assert shown.evaluate(
        "[...document.querySelectorAll('.vega')].every(place => {"
        " const svg = place.querySelector('svg').getBoundingClientRect();"
        " return svg.width <= place.closest('.panel').scrollWidth + 1 && svg.height > 20; })"
    )


def test_wide_tables_scroll_independently(opened, address):
    shown = opened(address, **PHONE)
    shown.locator("summary", has_text="All runs").click()
    table = shown.locator("[id=c1-runs] .scroll")
    assert table.evaluate("box => box.scrollWidth > box.clientWidth")
    assert fits(shown)


def test_arms_are_cards_on_a_phone(opened, address):
    shown = opened(address, **PHONE)
    cards = shown.locator(".cards")
    assert cards.evaluate("box => box.scrollWidth <= box.clientWidth")
    card = shown.locator(".cards tbody tr", has_text="no_q-d32")
    assert card.locator("td[data-label=verdict]").is_visible()
    assert not shown.locator(".cards td[data-empty]").first.is_visible()
    label = "getComputedStyle(cell, '::before').content"
    assert card.locator("td[data-label=parameters]").evaluate(f"cell => {label}") == '"parameters"'


def test_long_verdict_does_not_widen_the_page(opened, cached_world, tmp_path):
    world = cached_world("variant=standard,no_q", "seed=range(4)", "sweep.floor=true")
    worse = losses(world.manifest)
    at_floor = {"uniform": -10.1}  # 10 is added to the floor
    for run in world.runs():
        world.write(run, worse(run) + at_floor.get(world.manifest.arms[run.arm].variant, 0.0))
    shown = opened(write(world, tmp_path / "long.html"), viewport={"width": 390, "height": 7000})
    longest = "option => option.textContent.length"
    options = shown.locator("select[data-verdict] option").all()
    assert max(option.evaluate(longest) for option in options) > 55
    assert fits(shown)


def test_charts_are_not_cut_on_a_phone(opened, cached_world, tmp_path):
    world = cached_world("variant=standard,no_q", "model.d_model=8,16,24,32,40,48", "seed=0,1")
    shown = opened(write(world.finish(losses(world.manifest)), tmp_path / "wide.html"), **PHONE)
    heat = shown.locator("#c1-heat svg")
    assert int(heat.get_attribute("width")) > PHONE["viewport"]["width"]
    assert shown.evaluate(
        "[...document.querySelectorAll('.panel')].every("
        "panel => panel.scrollWidth <= panel.clientWidth)"
    )


@pytest.mark.slow
def test_charts_follow_the_theme(opened, address):
    shown = opened(address, color_scheme="light")
    color = "getComputedStyle(document.querySelector('.vega .mark-symbol path')).fill"
    light = shown.evaluate(color)
    theme = shown.locator("#theme")
    theme.click()  # light, whatever the system says
    assert shown.evaluate(color) == light
    theme.click()
    assert "dark" in theme.inner_text()
    assert shown.evaluate(color) != light
    assert brightness(shown) < 60
    shown.emulate_media(media="print")
    assert brightness(shown) > 200
    assert shown.evaluate(color) == light
    assert not theme.is_visible()


@pytest.mark.slow
def test_print_uses_light_colors_in_dark_theme(opened, address):
    shown = opened(address, color_scheme="dark", viewport={"width": 1280, "height": 900})
    assert brightness(shown) < 60
    shown.emulate_media(media="print")
    shown.set_viewport_size({"width": 1032, "height": 700})  # A4 across, without margins
    assert brightness(shown) > 200
    assert fits(shown)
    assert shown.evaluate(
        "[...document.querySelectorAll('.vega svg')].every("
        "svg => svg.getBoundingClientRect().right <= innerWidth)"
    )


def column(shown, number) -> list[str]:
    rows = "[...document.querySelectorAll('table.sortable tbody tr:not([hidden])')]"
    return shown.evaluate(f"{rows}.map(row => row.cells[{number}].textContent)")


def numbers(texts) -> list[float]:
    return [float(text.split()[0].replace(",", "")) for text in texts if text != "–"]


@pytest.mark.slow
def test_sorting(opened, address):
    shown = opened(address)
    before = column(shown, 0)
    button = shown.locator("table.sortable th button", has_text="gap, nats")
    head = shown.locator("table.sortable thead th").nth(1)
    button.click()
    rising = column(shown, 1)
    assert numbers(rising) == sorted(numbers(rising))
    assert rising[-2:] == ["–", "–"]  # baselines come last, either way
    assert head.get_attribute("aria-sort") == "ascending"
    button.click()
    falling = column(shown, 1)
    assert numbers(falling) == sorted(numbers(falling), reverse=True)
    assert falling[-2:] == ["–", "–"]
    assert head.get_attribute("aria-sort") == "descending"
    assert sorted(column(shown, 0)) == sorted(before)
    shown.locator("table.sortable th button").first.click()
    assert column(shown, 0) == sorted(before)
    assert head.get_attribute("aria-sort") is None
    shown.locator("table.sortable th button", has_text="parameters").click()
    sizes = numbers(column(shown, 3))
    assert sizes == sorted(sizes)


@pytest.mark.slow
def test_filtering(opened, address):
    shown = opened(address)
    shown.locator("[data-filter]").fill("no_q d32")
    assert column(shown, 0) == ["no_q-d32"]
    assert shown.locator("output").inner_text() == "1 of 6 arms"
    shown.locator("[data-filter]").fill("")
    shown.locator("[data-verdict]").select_option("worse at this rate (not tuned)")
    assert {name.partition("-")[0] for name in column(shown, 0)} == {"no_q"}
    shown.locator("[data-verdict]").select_option("")
    assert shown.locator("output").inner_text() == "6 arms"


def test_page_is_usable_by_keyboard(opened, address):
    shown = opened(address)
    seen = []
    while "gap, nats [95\u00a0%]" not in seen and len(seen) < 40:
        shown.keyboard.press("Tab")
        seen.append(shown.evaluate("document.activeElement.textContent.trim()"))
    assert seen[0] == "Skip to the summary"
    assert seen[-1] == "gap, nats [95\u00a0%]"
    shown.keyboard.press("Enter")
    assert shown.locator("th[aria-sort=ascending]").inner_text().startswith("gap")


def test_controls_and_charts_have_accessible_names(opened, address):
    """For those who hear the page."""
    shown = opened(address)
    nameless = """
    [...document.querySelectorAll('button, input, select, .scroll, .vega, section, figure')]
      .filter(node => !(node.textContent.trim() || node.getAttribute('aria-label')
        || (node.labels && node.labels.length && node.labels[0].textContent.trim())))
      .map(node => node.outerHTML.slice(0, 80))"""
    assert shown.evaluate(nameless) == []
    assert shown.evaluate("document.documentElement.lang") == "en"
    assert shown.locator("h1").count() == 1
    assert shown.locator("th:not([scope])").count() == 0


def test_tooltip_shows_estimate_interval_and_n(opened, address):
    shown = opened(address)
    shown.locator("#c1-gaps .vega .mark-symbol path").first.hover(force=True)
    tooltip = shown.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    assert "[" in tooltip.inner_text()
    assert "n = " in tooltip.inner_text()
    assert "standard-d" in tooltip.inner_text()


@pytest.mark.slow
def test_axes_can_be_switched_to_linear(opened, address):
    shown = opened(address)

    def ticks():
        shown.wait_for_selector("html[data-ready]", state="attached")
        return shown.locator("#c1-losses .vega .role-axis-label text").all_inner_texts()

    logarithmic = ticks()
    shown.locator("#linear").check()
    assert ticks() != logarithmic
    shown.locator("#linear").uncheck()
    assert ticks() == logarithmic


@pytest.mark.slow
def test_one_size_is_shown_at_a_time(opened, world, tmp_path):
    sizes = ",".join(str(8 * k) for k in range(1, 15))
    many = world(
        "variant=standard,no_q", f"model.d_model={sizes}", "model.heads=1", "seed=range(2)"
    )
    loss = losses(many.manifest)
    for run in many.runs():
        many.write(run, loss(run))
        many.curve(run, {step: 2 + 4 / step + loss(run) / 100 for step in range(1, 9)})
    shown = opened(write(many, tmp_path / "many.html"))
    panels = shown.locator("#c1-losses .panel")
    assert [panel.is_visible() for panel in panels.all()] == [True] + [False] * 13
    shown.locator("#c1-losses select").select_option("9")
    shown.wait_for_selector("html[data-ready]", state="attached")
    assert [panel.is_visible() for panel in panels.all()].index(True) == 9
    assert panels.nth(9).locator("svg path").count() > 0


@pytest.mark.slow
def test_sweep_without_results_is_rendered(opened, world, tmp_path):
    shown = opened(write(world("variant=standard,no_q", "seed=range(2)"), tmp_path / "none.html"))
    assert "There is no completed pair of runs" in shown.locator(".answer").inner_text()
    assert "4 waiting" in shown.locator(".status").inner_text()
    assert shown.locator("svg").count() == 0
