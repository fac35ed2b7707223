"""The web page in a real browser, driven by Playwright: Debian's Chromium, Google's Chrome, or Playwright's own (`playwright install
chromium`). Without one the tests are skipped, with the reason: Ubuntu has Chromium as a snap only, which cannot be installed by a test
and keeps to folders of its own.

The page's policy forbids eval(), so waiting is by locators (expect), not by wait_for_function().
"""

import os
import pathlib
import re
import shutil

import httpx
import pytest
from playwright.sync_api import expect, sync_playwright
from server_fixtures import model_dir, sanitized, serve

PROGRAMS = ["chromium", "google-chrome-stable", "google-chrome"]
expect.set_options(timeout=60_000)


def find_chromium(playwright):
    """Path of a Chromium, or None. Snaps do not count: what `chromium` runs there cannot see the test's profile."""
    paths = [shutil.which(name) for name in PROGRAMS] + [playwright.chromium.executable_path]
    return next((p for p in paths if p and pathlib.Path(p).exists() and not p.startswith("/snap/")), None)


# Not of the session: Playwright's event loop would be in the way of asynchronous tests behind these.
@pytest.fixture(scope="module")
def browser():
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's own does not start as root
    with sync_playwright() as playwright:
        chromium = find_chromium(playwright)
        if not chromium:
            pytest.skip("no Chromium: Debian's package chromium, Google's Chrome, or `playwright install chromium` (Ubuntu's is a snap)")
        browser = playwright.chromium.launch(executable_path=chromium, args=[*sandbox, "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(serve):
    server = serve("--memory-bandwidth", "3e10")
    yield server
    assert server.process.poll() is None, f"the server is gone:\n{server.log}"
    assert server.stop() == 0, server.log


@pytest.fixture
def shots():
    """Folder of screenshots, for people."""
    folder = pathlib.Path(__file__).resolve().parents[2] / "build" / "test" / "ui"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Tab:
    """A page of a context of its own. Errors of its scripts and refusals of its policy are kept in `errors`."""

    def __init__(self, browser, url, **options):
        self.context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, "color_scheme": "light", **options})
        self.page = self.context.new_page()
        self.url = url
        self.errors, self.requests, self.dialogs = [], [], []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))

    def open(self, path="/", ready=True):
        self.page.goto(self.url + path)
        if ready:
            expect(self.page.locator("#state")).to_have_text("ready")
            expect(self.page.locator("#model")).not_to_be_empty()
        return self

    def ask(self, text, wait="Answer complete"):
        self.page.locator("#prompt").fill(text)
        self.page.keyboard.press("Enter")
        if wait:
            expect(self.page.locator("#chat-state")).to_have_text(wait)
        return self.page.locator("article.assistant").last

    def set(self, **fields):
        """Parameters of the chat."""
        if not self.page.locator("#parameters").get_attribute("open") is not None:
            self.page.locator("#parameters > summary").click()
        for name, value in fields.items():
            field = self.page.locator(f"#composer [name={name}]")
            field.select_option(value) if name == "thinking" else field.fill(str(value))

    def change_body(self, **more):
        """Fields that the page has no place for are added to what it sends."""
        def handle(route):
            route.continue_(post_data={**route.request.post_data_json, **more})
        self.page.route("**/v1/chat/completions", handle)


@pytest.fixture
def tab(browser, server):
    """Opens tabs; none may have had an error in the end, unless the test has emptied `errors`."""
    tabs = []

    def make(url=server.url, **options):
        tabs.append(Tab(browser, url, **options))
        return tabs[-1]

    yield make
    for one in tabs:
        one.context.close()
    assert [one.errors for one in tabs if one.errors] == []


def metric(server, name):
    found = re.search(rf"^nibble:{name}\S* (\S+)$", httpx.get(server.url + "/metrics").text, re.MULTILINE)
    return float(found[1])
