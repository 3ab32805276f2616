"""``ling3export report``: what the page says, and, in a real browser, that it is whole and everything is drawn."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.program_records import Collective
from ling3export.artifacts.schema import ON_LOGITS
from ling3export.cli import main as cli
from ling3export.report.figures import MEMORY, Bars, estimated, figures, memory_parts, si, times
from ling3export.report.inspect import describe
from ling3export.report.page import render
from tests.support.browser import Page, browser

CHECKS = Path(__file__).with_name("page_checks.js").read_text()
TARGET = "tpu-v6e-2x2-tp4"
GOLDEN = Path(__file__).parents[2] / "golden/format-2-targets"
TPU_FIGURES = ["memory", "bound", "time", "bytes", "collectives"]
FEWER = "t2-memory: {fewer} of {marks} marks are drawn"
HOSTILE = "</title><script>console.error('run')</script>\"'><img src=http://example.invalid/x.png onerror=alert(1)>"


@pytest.fixture(scope="module")
def both(artifact, tpu_artifact):
    """A manifest with a target that was executed and has no estimates, and one that was compiled and has them."""
    manifest = artifact.manifest("micro-tp1")
    other = read_manifest(tpu_artifact)
    return replace(manifest, targets=manifest.targets | other.targets, notes=other.notes)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


def test_inspect_keeps_one_unit_a_table_and_footnotes_within_80_columns():
    """Footnotes of 240 characters stood under tables of 80, bytes were whole MB, and collectives did not add up."""
    manifest = read_manifest(GOLDEN)
    text = describe(manifest)
    below = text[text.index("target cpu-2x1-tp2") :].splitlines()
    assert [line for line in below if len(line) > 80 and not line.startswith("target ")] == []
    (header,) = (line for line in below if line.startswith("  estimates "))
    assert header.split() == "estimates ms bound ms moved MB bound MB collectives".split()
    cells = {
        cell.name: (cell, estimate, bound)
        for cell, estimate, bound in estimated(manifest.targets[TARGET].cells.values())
    }
    for line in below[below.index(header) + 1 :][: len(cells)]:
        name, *_, moved, least, collectives = line.split()
        cell, estimate, bound = cells[name]
        assert moved == f"{estimate.memory_bytes / 1e6:,.2f}" and least == f"{bound.moved / 1e6:,.2f}"
        assert int(collectives) == sum(each.count for each in cell.collectives.values())
    assert "The column has all of a program; the 8 that the layers of a step" in " ".join(text.split())


def opened(page: Page, folder: Path, html: str) -> Page:
    path = folder / "page.html"
    path.write_text(html)
    page.errors.clear()
    page.requests.clear()
    page.open(path)
    return page


def run(*arguments: object):
    return CliRunner().invoke(cli.main, ["report", *map(str, arguments)])


class Tags(HTMLParser):
    """What a page holds, without a browser: every tag with its attributes, texts by tag, and rows of tables."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self.open, self.cell = "", False  # the tag that text belongs to, and whether it is in a cell
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open = tag
        self.texts.setdefault(tag, []).append("")
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.cell = True

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open][-1] += data
        if self.cell:
            self.rows[-1][-1] += data.strip()

    def handle_endtag(self, tag: str) -> None:
        self.open = ""
        self.cell &= tag not in ("td", "th")

    def figures(self) -> list[str | None]:
        return [attrs["id"] for tag, attrs in self.tags if tag == "figure"]


@pytest.mark.extras
def test_every_figure_is_drawn_and_readable_in_every_medium(both, page, tmp_path):
    for width, medium in ((1100, "screen"), (400, "screen"), (700, "print")):
        page.width(width)
        opened(page, tmp_path, render(both))
        for scheme in ("light", "dark"):
            page.media(scheme, medium)
            assert page.evaluate(CHECKS) == [], (width, medium, scheme)
        assert page.errors == []
        assert page.requests == [(tmp_path / "page.html").as_uri()]


@pytest.mark.extras
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("mark.style.width = mark.style.minWidth = 0", FEWER),
        ("mark.style.position = 'relative'; mark.style.left = '-999px'", FEWER),
        ("figure.querySelector('[data-marks]').removeAttribute('aria-label')", "t2-memory: no label"),
        ("name.style.position = 'relative'; name.style.top = '24px'", " lies on "),
        ("document.querySelector('h1').style.color = '#999'", "contrast 2.85"),
        ("document.querySelector('h1').style.width = '3000px'", "the page is wider than its window"),
    ],
)
def test_the_check_sees_a_broken_page(both, page, tmp_path, damage, sentence):
    page.width(1100)
    page.media("light")
    opened(page, tmp_path, render(both))
    marks = page.evaluate("Number(document.querySelector('#t2-memory [data-marks]').dataset.marks)")
    page.evaluate(
        f"(() => {{ const figure = document.querySelector('#t2-memory'); "
        f"const mark = figure.querySelector('.mark'), name = figure.querySelector('.bars th'); {damage} }})()"
    )
    expected = sentence.format(fewer=marks - 1, marks=marks)
    assert any(expected in found for found in page.evaluate(CHECKS))


def test_names_from_outside_stay_text(both):
    target = both.targets[TARGET]
    cells = target.cells | {"decode@16": replace(target.cells["decode@16"], phase=HOSTILE)}
    targets = both.targets | {TARGET: replace(target, kind=HOSTILE, cells=cells)}
    found = Tags(render(replace(both, source=replace(both.source, name=HOSTILE), notes=(HOSTILE,), targets=targets)))
    assert found.texts["h1"] == [HOSTILE] and found.texts["title"] == [f"{HOSTILE}: report of the artifact"]
    assert {tag for tag, _ in found.tags} & {"script", "img", "link", "iframe", "object"} == set()
    assert [name for _, attrs in found.tags for name in attrs if name.startswith("on")] == []


def test_the_page_shows_the_manifest_s_numbers(both):
    html = render(both)
    shown = {row[0]: row[1:] for row in Tags(html).rows if len(row) == 12}
    for name, cell in both.targets[TARGET].cells.items():
        ratio, peak = cell.estimate.seconds / cell.floor.seconds, cell.memory.peak
        assert shown[name] == [
            "compiled, not executed",
            si(cell.compile_seconds, "s"),
            si(cell.stablehlo.bytes + cell.exec.bytes, "B"),
            si(peak, "B"),
            f"{100 * peak / int(31.24 * 2**30):.1f} %",
            str(sum(row.count for row in cell.collectives.values())),
            si(cell.estimate.seconds, "s"),
            si(cell.floor.seconds, "s"),
            times(ratio),
            "not run",
            "-",
        ]
    for name, cell in both.targets["cpu-tp1"].cells.items():
        assert shown[name][4:9] == ["–", str(sum(row.count for row in cell.collectives.values())), "–", "–", "–"]
    for text in ("never executed", "This target", "estimates no times"):
        assert text in html


def test_figures_add_up_to_the_tables(both):
    for target in both.targets.values():
        cells = list(target.cells.values())
        drawn = figures(cells, target.tp, None)
        for (label, values), cell in zip(drawn["memory"].rows, cells, strict=True):
            assert (label, sum(values)) == (cell.name, cell.memory.peak)
            assert values == list(memory_parts(cell, target.tp).values())
            assert min(values) >= 0
        if drawn["time"] is None or drawn["bytes"] is None:
            assert target.text == "cpu"
            continue
        found = estimated(cells)
        for (label, values), (_, estimate, _) in zip(drawn["time"].rows, found, strict=True):
            assert sum(values) == sum(estimate.by_kind.values()) == pytest.approx(estimate.seconds, rel=1e-3), label
        for cell, estimate, bound in found:
            assert estimate.memory_bytes is not None
            if cell.phase not in ON_LOGITS:
                assert estimate.memory_bytes > 0.9 * bound.moved  # the bound is an expectation over routings


def test_a_limit_is_the_full_width_if_the_longest_bar_comes_near_it():
    rows = [("a", [1.0, 3.0]), ("b", [2.0, 0.0])]
    assert Bars(("x", "y"), rows, "B").full == (4.0, "")
    assert Bars(("x", "y"), rows, "B", (8.0, "all")).full == (8.0, "all")
    assert [Bars(("x", "y"), rows, "B", (limit, "all")).full for limit in (3.9, 8.1)] == [(4.0, "")] * 2
    assert Bars(("x", "y"), rows, "B").marks == 3
    assert Bars((), [], "B").full == (1.0, "")


def test_an_estimate_without_the_time_of_custom_calls_says_at_least():
    """Everywhere it is shown; an artifact with estimates of a slice, made by an earlier version, without compiling."""
    manifest = read_manifest(GOLDEN)
    target = manifest.targets[TARGET]
    cell = target.cells["decode@2"]
    ms, ratio = f"{cell.estimate.seconds * 1e3:.3f}", times(cell.estimate.seconds / cell.floor.seconds)
    hidden = cell.estimate.custom_calls | {"tpu_custom_call": Collective(12, 64)}
    opaque = replace(cell, estimate=replace(cell.estimate, custom_calls=hidden))
    changed = replace(manifest, targets={TARGET: replace(target, cells=target.cells | {"decode@2": opaque})})
    note = " at least: up to 12 custom calls a call, whose time the compiler does not estimate"
    for shown, said in ((replace(manifest, targets={TARGET: target}), ""), (changed, "at least ")):
        lines = describe(shown).splitlines()
        (line,) = (line for line in lines if re.match(rf"  decode@2 +(at least )?{ms} ", line))
        assert re.match(r"  decode@2 +(at least )?", line)[1] == (said or None)
        assert (note in " ".join(" ".join(lines).split())) == bool(said)
        html = render(shown)
        seconds = si(cell.estimate.seconds, "s")
        assert html.count(f"<td>{said}{ratio}</td>") == 2
        assert html.count(f"<td>at least {seconds}</td>") == (3 if said else 0)  # cells, the machine, the sum of kinds
        assert html.count("<td>at least ") == (5 if said else 0)
        assert html.count(">decode@2 at least<") == (2 if said else 0)  # figures


def test_an_artifact_of_an_earlier_build_says_what_it_lacks(both):
    target = both.targets[TARGET]
    cells = {
        name: replace(cell, estimate=replace(cell.estimate, by_kind={}, memory_bytes=None))
        for name, cell in target.cells.items()
    }
    html = render(replace(both, targets=both.targets | {TARGET: replace(target, cells=cells)}))
    drawn = [name for name in TPU_FIGURES if name != "time"]
    assert Tags(html).figures() == ["t1-memory", *(f"t2-{name}" for name in drawn)]
    assert "did not record times by kind of operation" in html
    assert html.count("not recorded") == 2 * len(cells)


def test_the_page_is_written_beside_the_artifact_and_only_there(tpu_artifact, tmp_path):
    folder = tmp_path / "tpu.ling3"
    folder.mkdir()
    (folder / "manifest.json").write_bytes((tpu_artifact / "manifest.json").read_bytes())
    done = run(folder)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == f"wrote {tmp_path / 'tpu.report.html'}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tpu.ling3", "tpu.report.html"]
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    assert (tmp_path / "tpu.report.html").read_text() == render(read_manifest(folder))

    again = run(folder)
    assert again.exit_code == 1
    assert again.stderr == (
        f"error: report `tpu.report.html`: expected a free name, found one that exists, in {tmp_path}\n"
        "hint: choose another name, or replace it with --force\n"
    )
    (tmp_path / "tpu.report.html").write_text("old")
    assert run(folder, "--force").exit_code == 0
    assert (tmp_path / "tpu.report.html").read_text().startswith("<!doctype html>")


def test_a_page_that_cannot_be_written_leaves_nothing(tpu_artifact, tmp_path):
    inside = run(tpu_artifact, tpu_artifact / "vectors" / ".." / "page.html")
    assert inside.exit_code == 1
    assert inside.stderr == (
        f"error: report `page.html`: expected a place outside of the artifact, found one in it, {tpu_artifact}\n"
        "hint: an artifact holds what its manifest names, and nothing else\n"
    )
    nowhere = run(tpu_artifact, tmp_path / "none" / "page.html")
    assert nowhere.exit_code == 1
    assert nowhere.stderr == (
        f"error: write `page.html`: expected a writable file, found No such file or directory, in {tmp_path / 'none'}\n"
    )
    (tmp_path / "folder.html").mkdir()
    assert run(tpu_artifact, tmp_path / "folder.html", "--force").exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1, "1.00 B"),
        (999.4, "999 B"),
        (999.6, "1.00 kB"),
        (1352067072, "1.35 GB"),
        (2.1352e-3, "2.14 mB"),
        (5e-12, "0.00500 nB"),
        (9.995e5, "1.00 MB"),
        (99.96, "100 B"),
    ],
)
def test_quantities_have_three_digits(value, text):
    assert si(value, "B") == text


def test_ratios():
    shown = [times(ratio) for ratio in (1, 4.826, 99.4, 1832.06)]
    assert shown == ["1 times", "4.83 times", "99.4 times", "over 1,000 times"]
    assert len(MEMORY) == len(set(MEMORY)) == 6
