"""nibble report: every part is in the pages and in the JSON, a part that fails is a sentence, and what --compare finds."""

import html.parser
import json
import re
import subprocess
import xml.etree.ElementTree

import pytest

QUICK = ["--requests", "3", "--input-len", "16", "--output-len", "8", "--tokens", "2", "--repeat", "1", "--contexts", "0,32,4000000"]
SECTIONS = ["Where a decode step's time goes", "Decode by context", "One stream over HTTP", "Requests together over HTTP",
            "The floor by arithmetic", "Are the kernels right", "The machine"]


@pytest.fixture(scope="module")
def report(nibble_bin, repo):
    def run(*options, code=0):
        done = subprocess.run([nibble_bin, "report", *map(str, options)], cwd=repo, capture_output=True, text=True, timeout=900)
        assert done.returncode == code, done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def folder(report, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "first"
    report("--model", "models/glm5-tiny", "--device", "cpu", "--out", out, *QUICK)
    return out


@pytest.fixture(scope="module")
def figures(folder):
    return json.loads((folder / "report.json").read_text())


def test_every_part_is_there(figures, folder):
    assert figures["failures"] == {} and figures["model"] == "models/glm5-tiny" and figures["device"].startswith("cpu")
    assert figures["check"]["ok"] and figures["doctor"]["machine"]["cpus"] >= 1
    decode = figures["decode"]
    assert sum(c["ms"] for c in decode["breakdown"]["components"]) == pytest.approx(decode["breakdown"]["step"]["ms"], rel=0.03)
    assert figures["roofline"]["device"]["bandwidth"] == pytest.approx(decode["read_bandwidth"], rel=1e-4)
    assert [c["context"] for c in figures["contexts"]] == [0, 32]  # the third is more than the model takes
    assert figures["stream"]["completed"] == 4 and figures["stream"]["max_concurrency"] == 1
    assert figures["load"]["completed"] == 3 and figures["load"]["total_output_tokens"] == 24
    trace = json.loads((folder / "trace.json").read_text())
    assert any(e.get("cat") == "step" for e in trace["traceEvents"])


class Page(html.parser.HTMLParser):
    """Balance of tags, headings, and everything that points out of the page."""

    VOID = {"meta", "br", "hr", "img", "link"}

    def __init__(self):
        super().__init__()
        self.open, self.headings, self.links, self.pictures = [], [], [], 0

    def handle_starttag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("src", "href")]
        self.pictures += tag == "svg"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_the_page_stands_alone(folder):
    page = Page()
    page.feed((folder / "report.html").read_text())
    assert not page.open and not page.links and page.pictures == 4
    assert "".join(page.headings) == "".join(SECTIONS)


def test_markdown(folder):
    text = (folder / "report.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS
    pictures = re.findall(r"^!\[.*\]\((.*)\)$", text, re.M)
    assert sorted(pictures) == ["breakdown.svg", "contexts.svg", "load.svg", "stream.svg"]
    for name in pictures:
        assert xml.etree.ElementTree.parse(folder / name).getroot().tag.endswith("svg")
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1 and len(table.splitlines()) >= 2, table
    assert not re.search(r"\bnan\b", text, re.I)


def test_compare(report, folder, figures, tmp_path):
    """The same report has not changed; one with other figures has, for better and worse."""
    same = report("--compare", folder, folder).stdout
    assert "better" not in same and "worse" not in same and "+0.0 %" in same
    other = json.loads(json.dumps(figures))
    other["decode"]["ms_per_token"] = figures["decode"]["ms_per_token"] * 1.25
    other["load"]["output_throughput"] = figures["load"]["output_throughput"] * 2
    other["decode"]["breakdown"]["components"][0]["component"] = "something new"
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "report.json").write_text(json.dumps(other))
    said = report("--compare", folder, tmp_path / "second", "--out", tmp_path / "both").stdout
    assert re.search(r"^\| decode, model alone \|.*\| \+25\.0 % \| worse \|$", said, re.M)
    assert re.search(r"^\| together, answer tokens \|.*\| \+100\.0 % \| better \|$", said, re.M)
    assert re.search(r"^\| something new \| – \|", said, re.M)
    assert (tmp_path / "both" / "compare.md").read_text() == said
    page = Page()
    page.feed((tmp_path / "both" / "compare.html").read_text())
    assert not page.open and not page.links


def test_parts_that_fail_are_sentences(report, tmp_path):
    done = report("--model", tmp_path / "nothing", "--device", "cpu", "--out", tmp_path / "out", "--no-serve", "--tokens", "1", code=1)
    figures = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {"check", "decode", "contexts"} <= set(figures["failures"])
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.count("Not there: ") >= 4 and "nibble bench ended with status 1" in text and "it was left out" in text
    assert "nibble report: " in done.stderr


@pytest.mark.parametrize("arguments, code, says", [
    (["--model", "models/glm5-tiny"], 2, "--out"), (["--compare", "one"], 2, "two folders"), (["--compare", "one", "two"], 1, "one"),
    (["--model", "models/glm5-tiny", "--out", "models/none/there"], 1, "models/none/there"),
])
def test_refused(report, arguments, code, says):
    assert says in report(*arguments, code=code).stderr
