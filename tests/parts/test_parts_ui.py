"""The page of `headway ui` in a real browser, as a visitor uses it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from headway.telemetry.tags import change_tags
from headway.tracking.http_server import Address
from headway.tracking.runs_folder import RunsFolder
from headway.tracking.ui.server import UiServer
from support.parts_table import CHROMIUM, program
from support.tracking import WrittenRun

pytestmark = pytest.mark.parts(CHROMIUM)

HOSTILE = '<img src=x onerror="window.hit=1">'
#: Milliseconds; the page asks again every few seconds.
PATIENCE = 60_000


@dataclass
class Visit:
    page: Any
    server: UiServer
    live: WrittenRun
    troubles: list[str]

    def open(self, fragment: str = "") -> None:
        self.page.goto(f"{self.server.url}{fragment}")
        self.page.wait_for_selector(".legend li")

    def legend(self, chart: int = 0) -> list[str]:
        return list(self.page.locator(".chart").nth(chart).locator(".legend li").all_inner_texts())

    def wait_for_legend(self, text: str) -> None:
        self.page.locator(".legend li", has_text=text).first.wait_for()

    def plot(self) -> dict[str, float]:
        found = self.page.locator(".u-over").first
        found.scroll_into_view_if_needed()
        return dict(found.bounding_box())

    def picture(self) -> bytes:
        return bytes(self.page.locator(".chart canvas").first.screenshot())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("there is no playwright: pip install playwright")
    chromium = program("chromium")
    if chromium is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        # Root has no sandbox; nothing but this test's own server is visited.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Visit]:
    """A visit to three runs: one that trains, one that has ended, and one with a hostile name."""
    runs = [WrittenRun(tmp_path / "runs" / name) for name in ("live", "ended", HOSTILE.replace("/", "_"))]
    for number, run in enumerate(runs):
        run.begin(alive=number == 0)
        for step in range(1, 401):
            run.step(step, **{"train/loss": 1.0 + number + 400 / (step + 40) + (step % 7) / 10})
    runs[1].end(runs[1].started + 900, "finished")
    folder = RunsFolder(tmp_path / "runs", ended_seconds=float("inf"))
    with UiServer(Address("127.0.0.1", 0, "ui"), folder) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        context = browser.new_context(viewport={"width": 1280, "height": 1400}, color_scheme="light")
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        troubles: list[str] = []
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: None if request.url.startswith(server.url) else troubles.append(request.url))
        yield Visit(page, server, runs[0], troubles)
        assert not troubles, troubles  # no error, nothing that the policy refused, nothing from elsewhere
        context.close()
        server.shutdown()


def loss(run: int, step: int) -> float:
    return 1.0 + run + 400 / (step + 40) + (step % 7) / 10


def test_list_and_filter(visit: Visit) -> None:
    visit.open()
    rows = visit.page.locator("#runs tbody tr")
    assert rows.count() == 3 and "live" in rows.first.inner_text() and "running" in rows.first.inner_text()
    assert "400/100" in rows.first.inner_text() and "256 tok/s" in rows.first.inner_text()
    assert f"{loss(0, 400):.4f}" in rows.first.inner_text()
    ended = rows.filter(has_text="finished").inner_text()
    assert "256 tok/s" in ended and "15 m 0 s" in ended, "speed and time of a run that has ended"
    assert visit.page.locator("#smoothing").input_value() == "0.6"
    assert "no step" in visit.page.locator("#alerts").inner_text(), "the run began long ago"
    visit.page.fill("#filter", "finished")
    assert rows.count() == 1 and "ended" in rows.first.inner_text()
    visit.page.fill("#filter", "nothing like it")
    assert "No run matches" in visit.page.locator("#runs tbody").inner_text()
    visit.page.fill("#filter", "")
    visit.page.get_by_role("button", name="Run", exact=True).click()
    assert [text.split()[0] for text in rows.all_inner_texts()] == ["<img", "ended", "live"]


def test_a_hostile_name_is_text(visit: Visit) -> None:
    visit.open()
    assert HOSTILE in visit.page.locator("#runs").inner_text() and HOSTILE in " ".join(visit.legend())
    assert visit.page.evaluate("window.hit") is None and visit.page.locator("img").count() == 0


def test_compare_smooth_and_hover(visit: Visit) -> None:
    visit.open("#run=live&run=ended&smoothing=0")
    visit.wait_for_legend("ended")
    assert [text.split()[0] for text in visit.legend()] == ["live", "ended"]
    box = visit.plot()
    for share in (0.25, 0.5):
        visit.page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
        for number, text in enumerate(visit.legend()):
            step = int(re.search(r"step ([\d,]+)", text)[1].replace(",", ""))  # type: ignore[index]
            assert abs(step - (1 + share * 399)) <= 2, "the point under the cursor"
            assert f"{loss(number, step):.5g}" in text, (step, text)
    before = visit.picture()
    visit.page.locator("#smoothing").fill("0.95")
    # The last smoothed value, computed here.
    total = share = 0.0
    for step in range(1, 401):
        total, share = 0.95 * total + 0.05 * loss(0, step), 0.95 * share + 0.05
    visit.page.mouse.move(0, 0)
    visit.wait_for_legend(f"{total / share:.5g}")
    assert visit.picture() != before
    visit.page.get_by_label("log axis").first.check()
    assert "chart=log" in visit.page.url and "smoothing=0.95" in visit.page.url
    visit.page.reload()
    visit.wait_for_legend("ended")
    assert visit.page.get_by_label("log axis").first.is_checked(), "the address says what was chosen"


def test_zoom(visit: Visit) -> None:
    visit.open("#run=live&smoothing=0")
    box, whole = visit.plot(), visit.picture()
    with visit.page.expect_request(lambda request: "from=" in request.url) as asked:
        visit.page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 50)
        visit.page.mouse.down()
        visit.page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 60, steps=4)
        visit.page.mouse.up()
    query = parse_qs(urlsplit(asked.value.url).query)
    assert float(query["from"][0]) == pytest.approx(1 + 0.5 * 399, abs=3)
    assert float(query["to"][0]) == pytest.approx(1 + 0.75 * 399, abs=3)
    visit.page.mouse.move(box["x"] + 2, box["y"] + 50)
    visit.wait_for_legend("step 20")
    assert visit.picture() != whole
    visit.page.mouse.dblclick(box["x"] + 50, box["y"] + 50)
    visit.page.locator("#unzoom").wait_for(state="hidden")
    visit.page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 50)
    visit.wait_for_legend("step 10")


def test_the_page_follows_the_run(visit: Visit) -> None:
    visit.open("#run=live&smoothing=0&chart=train/loss&chart=mine/own")
    assert "No values here" in visit.page.locator(".chart").nth(1).inner_text()
    visit.live.step(401, **{"train/loss": 0.125, "mine/own": 7.5})
    visit.wait_for_legend("step 401")
    assert "0.125" in visit.legend()[0]
    visit.page.locator("#runs tbody tr", has_text="401/100").wait_for()
    visit.page.locator(".chart").nth(1).locator(".legend li", has_text="7.5").wait_for()
    visit.page.locator("select[aria-label=Metric]").first.select_option("mine/own")
    visit.page.locator(".chart").first.locator(".legend li", has_text="7.5").wait_for()
    visit.page.get_by_role("button", name="Add a chart").click()
    assert visit.page.locator(".chart").count() == 3


def test_a_link_to_a_run_that_is_gone_shows_the_others_and_its_zoom(visit: Visit) -> None:
    visit.open("#run=gone&run=live&smoothing=0&zoom=100&zoom=200")
    assert "step 201" in visit.legend()[0], "one point beyond the zoom"
    visit.page.locator("#unzoom").click()
    visit.wait_for_legend("step 400")
    assert "zoom" not in visit.page.url
    # A link in the same window, whose part after the # alone is another.
    visit.page.evaluate("location.hash = 'run=ended&smoothing=0&zoom=100&zoom=150'")
    visit.wait_for_legend("step 151")
    assert "ended" in visit.legend()[0]


def test_the_focus_stays_while_the_list_is_read_again(visit: Visit) -> None:
    visit.open()
    visit.page.locator("#runs tbody input").first.focus()
    visit.live.step(401)
    visit.page.locator("#runs tbody tr", has_text="401/100").wait_for()
    assert visit.page.evaluate("document.activeElement.type") == "checkbox"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_narrow_window_and_the_colours(visit: Visit, theme: str) -> None:
    visit.page.emulate_media(color_scheme=theme)
    visit.page.set_viewport_size({"width": 420, "height": 900})
    visit.open()
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 420, "nothing is wider than the window"
    for place in (".chart", "#filter", "#runs tbody tr"):
        box = visit.page.locator(place).first.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 420
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 27)"
    assert visit.page.evaluate(ground) == (dark if theme == "dark" else light), "as the system has it"
    button = visit.page.locator("#theme")
    button.click()
    assert button.inner_text() == "Colours: light" and visit.page.evaluate(ground) == light
    button.click()
    assert button.inner_text() == "Colours: dark" and visit.page.evaluate(ground) == dark
    visit.page.reload()
    visit.page.wait_for_selector(".legend li")
    assert visit.page.evaluate(ground) == dark, "it is remembered"


def test_without_the_server_the_page_says_so(visit: Visit) -> None:
    visit.open()
    visit.page.route("**/api/**", lambda route: route.fulfill(status=500, body="the disk is gone"))
    visit.page.locator("#connection.lost", has_text="the disk is gone").wait_for()
    visit.page.unroute("**/api/**")
    visit.page.locator("#connection:not(.lost)").wait_for()
    assert {"500" in trouble for trouble in visit.troubles} == {True}, "the browser says so too"
    visit.troubles.clear()


def test_the_page_of_one_run(visit: Visit, tmp_path: Path) -> None:
    """Its curves come by group as they are scrolled to, and while it trains the page says what is new."""
    page = visit.page
    page.goto(f"{visit.server.url}/run?run=live")
    first = page.locator("#groups details").first
    first.locator(".legend li").first.wait_for()
    assert first.locator("h3").first.inner_text() == "train/loss", "losses come first"
    assert page.locator("#groups .chart select").count() == 0
    page.fill("#filter", "no such metric")
    assert page.locator("#groups details:visible").count() == 0
    page.fill("#filter", "loss")
    assert "train/loss" in page.locator("#groups").inner_text()
    page.get_by_text("The resolved config").click()
    for step in range(401, 420):
        visit.live.step(step, **{"train/loss": 0.125})
    page.locator("#now", has_text="Step 419").wait_for()
    page.locator(".legend li", has_text="step 419").first.wait_for()
    page.goto(visit.server.url)
    page.locator("#runs tbody tr", has_text="ended").get_by_role("link", name="open").click()
    page.locator("#now", has_text="finished").wait_for()
    page.get_by_role("link", name="Report").click()
    page.wait_for_selector("figure canvas")


def test_a_list_by_group_with_a_key_of_the_config(visit: Visit) -> None:
    change_tags(visit.live.path, ["good", "late"])
    visit.open("#group=tag")
    page = visit.page
    page.locator("tr.group", has_text="tag: good").wait_for()
    assert page.locator("#runs tbody tr:not(.group)", has_text="live").count() == 2, "it has two tags"
    page.locator("tr.group", has_text="tag: late").get_by_role("button").click()
    page.wait_for_function("document.querySelectorAll('.chart .legend')[0].children.length === 1")
    page.select_option("#group", "")
    page.wait_for_function("document.querySelectorAll('tr.group').length === 0")


def test_what_is_shown_can_be_saved(visit: Visit) -> None:
    visit.open()
    chart = visit.page.locator(".chart").first
    saved = {}
    for kind, place in (("PNG", chart), ("CSV", chart), ("CSV", visit.page.locator("main > section").first)):
        with visit.page.expect_download() as download:
            place.get_by_role("button", name=kind, exact=True).click()
        saved[download.value.suggested_filename] = Path(download.value.path()).read_bytes()
    assert set(saved) == {"train-loss.png", "train-loss.csv", "runs.csv"}
    assert saved["train-loss.png"].startswith(b"\x89PNG") and len(saved["train-loss.png"]) > 5000
    values = saved["train-loss.csv"].decode().splitlines()
    assert values[0] == "run,step,train/loss" and len(values) == 1 + 3 * 400
    listed = saved["runs.csv"].decode().splitlines()
    assert listed[0].startswith('"Run","State","Step"') and len(listed) == 4
    assert any(line.startswith('"ended","finished","400"') for line in listed)
