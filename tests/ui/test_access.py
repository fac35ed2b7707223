"""The page for everybody: keyboard alone, names of controls, contrast in both schemes, from phone to wide screen, no outside resource."""

import pytest
from playwright.sync_api import expect

VIEWS = ("chat", "live", "server")

# Relative luminance and contrast as WCAG 2.2 has them, of every text that is shown, against the background behind it.
CONTRAST = """() => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return text.startsWith("color(srgb") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
  };
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color[3] === 1) return color;
      if (color[3] !== 0) throw new Error("half transparent");
    }
    throw new Error("no background");
  };
  const rows = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = walk.nextNode()); ) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility() || node.closest("option")) continue;
    const a = light(parse(getComputedStyle(node).color)), b = light(behind(node));
    rows.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text.data.trim().slice(0, 40)]);
  }
  for (const node of document.querySelectorAll("input, textarea")) {
    if (!node.checkVisibility()) continue;
    const a = light(parse(getComputedStyle(node, "::placeholder").color)), b = light(behind(node));
    rows.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), `placeholder of ${node.id || node.name}`]);
  }
  return rows;
}"""

# Lines of charts, the focus ring, edges of fields: 3 to 1 (WCAG 1.4.11).
GRAPHICS = """() => {
  const style = getComputedStyle(document.documentElement), probe = document.createElement("i");
  document.body.append(probe);
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (name) => {
    probe.style.color = `var(${name})`;
    const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map(Number);
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  };
  const rows = [];
  for (const front of ["--accent", "--second", "--third", "--edge", "--good", "--bad"]) {
    for (const back of ["--page", "--card", "--field"]) {
      const a = light(front), b = light(back);
      rows.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), `${front} on ${back}`]);
    }
  }
  probe.remove();
  return rows;
}"""


def event(body):
    return f'data: {{"choices": [{{"index": 0, "delta": {body}, "finish_reason": null}}]}}\n\n'


def fill_chat(one):
    """Everything that a conversation can show."""
    stream = event('{"reasoning_content": "so"}') + event('{"content": "text\\n```\\ncode\\n```\\nmore"}') + \
        event('{"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]}')
    end = stream + 'data: {"error": {"message": "an error"}}\n\n'
    one.page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=end))
    answer = one.ask("question", wait="Failed")
    answer.locator("summary").click()
    one.page.unroute("**/v1/chat/completions")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(tab, scheme):
    one = tab(color_scheme=scheme, viewport={"width": 1000, "height": 900}).open()
    one.set(temperature=1)
    fill_chat(one)
    seen = 0
    for view in VIEWS:
        one.page.locator(f"nav a[data-view={view}]").click()
        expect(one.page.locator(f"#{view}")).to_be_visible()
        rows = one.page.evaluate(CONTRAST)
        seen += len(rows)
        assert [row for row in rows if row[0] < 4.5] == [], view
    one.page.locator("#show-help").click()
    assert [row for row in one.page.evaluate(CONTRAST) if row[0] < 4.5] == []
    one.page.keyboard.press("Escape")
    assert [row for row in one.page.evaluate(GRAPHICS) if row[0] < 3] == []
    assert seen > 100


def test_theme_button(tab):
    """The choice goes before the system's and outlives a reload."""
    one = tab(color_scheme="light").open()
    background = "getComputedStyle(document.documentElement).backgroundColor"
    light = one.page.evaluate(background)
    button = one.page.get_by_role("button", name="Theme")
    button.click()
    assert one.page.evaluate(background) == light
    button.click()
    dark = one.page.evaluate(background)
    assert dark != light
    one.page.reload()
    expect(button).to_have_text("dark")
    assert one.page.evaluate(background) == dark
    one.page.emulate_media(color_scheme="dark")
    button.click()
    expect(button).to_have_text("auto")
    assert one.page.evaluate(background) == dark


def test_names(tab):
    """Each control has a name, each reference leads somewhere, ids are there once."""
    one = tab().open()
    one.set(temperature=1)
    fill_chat(one)
    assert one.page.evaluate("""() => {
        const named = (node) => node.getAttribute("aria-label") || node.labels?.[0]?.textContent.trim() ||
                                (node.matches("button, a, summary") && node.textContent.trim());
        const nameless = [...document.querySelectorAll("button, a, summary, input, select, textarea")].filter((node) => !node.closest("[hidden]") && !named(node));
        const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
        const lost = [...document.querySelectorAll("[aria-labelledby], label[for]")]
            .filter((node) => !document.getElementById(node.getAttribute("aria-labelledby") || node.htmlFor));
        const images = [...document.querySelectorAll("svg")].filter((node) => !node.getAttribute("aria-label") && !node.getAttribute("aria-hidden"));
        return [nameless, lost, images].map((nodes) => nodes.map((node) => node.outerHTML)).concat([ids.filter((id, i) => ids.indexOf(id) !== i)]);
    }""") == [[], [], [], []]
    assert one.page.locator("html").get_attribute("lang") == "en"
    for role, n in (("main", 1), ("banner", 1), ("navigation", 1), ("log", 1)):
        expect(one.page.get_by_role(role)).to_have_count(n)
    expect(one.page.get_by_role("heading", level=1)).to_have_count(1)


def focused(one):
    return one.page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")


def test_keyboard_alone(tab, server):
    """From the first key to a second answer without a pointer; what has the focus is seen."""
    one = tab(viewport={"width": 900, "height": 700}).open()
    press = one.page.keyboard.press
    assert focused(one) == "prompt"
    one.page.keyboard.type("What is 3+5?")
    press("Shift+Enter")
    one.page.keyboard.type("Say it.")
    press("Enter")
    expect(one.page.locator("#chat-state")).to_have_text("Answer complete")
    expect(one.page.locator("article.user")).to_have_text("What is 3+5?\nSay it.")
    assert focused(one) == "prompt"
    press("Alt+r")
    expect(one.page.locator("#chat-state")).to_have_text("Answer complete")
    expect(one.page.locator("article")).to_have_count(2)
    press("Alt+p")
    assert one.page.evaluate("document.activeElement.name") == "temperature"
    one.page.keyboard.type("0.5")
    expect(one.page.locator("#changed")).to_have_text("temperature")
    press("Alt+p")
    press("Alt+2")
    expect(one.page.locator("#live")).to_be_visible()
    press("Alt+3")
    expect(one.page.locator("#server")).to_be_visible()
    one.page.evaluate("document.activeElement.blur()")
    press("/")
    assert focused(one) == "prompt"
    expect(one.page.locator("#chat")).to_be_visible()
    expect(one.page.locator("#prompt")).to_have_value("")
    press("Alt+n")
    expect(one.page.locator("article")).to_have_count(0)


def test_tab_order(tab):
    """Tab reaches every control that is shown and leads round; each shows a ring."""
    one = tab(viewport={"width": 900, "height": 700}).open()
    one.page.locator(".skip").focus()
    seen = [focused(one)]
    for _ in range(20):
        one.page.keyboard.press("Tab")
        if one.page.evaluate("document.activeElement === document.body"):
            break
        seen.append(focused(one))
        assert one.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", seen[-1]
    assert seen == ["Go to the chat", "Chat", "Live", "Server", "theme", "set-key", "show-help", "messages", "Parameters", "prompt", "send"]
    one.page.keyboard.press("/")
    one.page.locator("#show-help").focus()
    one.page.keyboard.press("Enter")
    expect(one.page.locator("dialog#help")).to_be_visible()
    one.page.keyboard.press("Escape")
    expect(one.page.locator("dialog#help")).to_be_hidden()
    assert focused(one) == "show-help"


@pytest.mark.parametrize("width,height,shown", [(320, 568, 1), (390, 844, 1), (820, 1180, 1), (1440, 900, 2), (2560, 1300, 3)])
def test_widths(tab, shots, width, height, shown):
    """No part is wider than the screen, and the parts that fit are side by side."""
    one = tab(viewport={"width": width, "height": height}, color_scheme="dark" if width == 390 else "light").open()
    one.set(temperature=1)
    fill_chat(one)
    for view in VIEWS:
        one.page.locator(f"nav a[data-view={view}]").click()
        expect(one.page.locator(f"#{view}")).to_be_visible()
        assert sum(one.page.locator(f"#{part}").is_visible() for part in VIEWS) == shown
        assert one.page.evaluate("""() => [...document.querySelectorAll("html, body, main > section, header")]
            .filter((node) => node.checkVisibility() && node.scrollWidth > node.clientWidth).map((node) => node.id || node.tagName)""") == []
        one.page.screenshot(path=shots / f"{width}-{view}.png")
    one.page.locator("nav a[data-view=chat]").click()
    expect(one.page.locator("#send")).to_be_in_viewport()


def test_no_outside_resource(tab):
    one = tab().open()
    hosts = {url.split("/")[2] for url in one.requests if not url.startswith("data:")}
    assert hosts == {one.url.split("/")[2]}
