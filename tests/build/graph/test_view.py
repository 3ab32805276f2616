"""The page of ``graph view`` and the files for Model Explorer; the page in a real browser."""

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import structs

from ling3export.artifacts.manifest import read_manifest
from ling3export.cli.main import main
from ling3export.graph import diff, explorer, memory, show
from ling3export.graph.record import Graph, Operation
from ling3export.graph.view import Shown, page, path
from ling3export.report.cells import file_changes
from tests.build.graph.test_graph import lowered
from tests.support.browser import Page, browser

NAME = "micro-tp2"
HOSTILE = "</script><img src=x onerror=\"document.title='run'\">"
OPERATIONS = (
    Operation(name="look", opcode="gather", kind="gathers and scatters", layer_kind="embed", shapes=("bf16[16,64]",)),
    Operation(
        name="loop/q.1", opcode="fusion", kind="matrix products", layer_kind="kda", layers=(0, 1), times=2.0,
        scope="layers_kda/while/body/kda/q_proj/dot_general", operands=("look", "params.kda.q"), flops=1e9,
        read={"weights": 1e6}, weights=("kda.q",), seconds=1e-5, source="compiler",
    ),
    Operation(
        name=HOSTILE, opcode="fusion", kind="elementwise", layer_kind="mla", layers=(2,), scope="layer_2/mla/add",
        operands=("loop/q.1",), read={"other": 1e6}, written={"other": 5e5}, seconds=3e-5, source="compiler",
    ),
)  # fmt: skip
TOY = Graph(
    cell="decode@16", target="toy", form="optimized", operations=OPERATIONS, peak_bytes=4096, bandwidth=1e12,
    peak_flops=1e14,
)  # fmt: skip
ALIVE = memory.Timeline(
    (("look", 0), ("loop/q.1", 4096), (HOSTILE, 2048)),
    (memory.Tensor("params.kda.q", 8192, "weights", "bf16[64,64]"),),
    (memory.Tensor("loop/q.1", 4096, "temporary", "f32[16,64]", "kda"),),
    None,
)


def shown(before: Graph | None = None) -> Shown:
    return Shown(TOY, ALIVE, None if before is None else diff.compare(before, TOY))


def slower(graph: Graph) -> Graph:
    """The program with a cheaper second operation and one more at the end."""
    look, product, last = graph.operations
    gone = dataclasses.replace(look, name="gone", kind="sorts", opcode="sort")
    return dataclasses.replace(graph, operations=(look, dataclasses.replace(product, seconds=5e-6), last, gone))


def test_parts_are_named_scopes_else_the_kind_of_work():
    look, product, last = OPERATIONS
    assert path(product) == ["q_proj"]
    assert (path(look), path(last)) == (["gathers and scatters"], ["elementwise"])


def test_the_page_has_the_numbers_as_data_and_refers_to_nothing_outside():
    text = page([shown(slower(TOY))])
    assert "</script><img" not in text
    assert re.findall(r"(?:src|href)=[\"']?(?!data:)[^\s\"'>\\]", text.partition('id="data"')[0]) == []
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, never loaded
    (cell,) = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert [one["name"] for one in cell["operations"]] == [one.name for one in OPERATIONS]
    assert cell["operations"][1] | {"seconds": 2e-5, "flops": 2e9, "bytes": 2e6} == cell["operations"][1]
    assert cell["difference"]["totals"]["seconds"] == pytest.approx([4e-5, 5e-5])


def test_model_explorer_files_name_operations_that_are_there(tmp_path):
    files = explorer.documents(tmp_path / "g.json", TOY, diff.compare(slower(TOY), TOY))
    assert {name.name for name in files} == {
        "g.json", "g.time.json", "g.bytes.json", "g.flops.json", "g.before.json", "g.sync.json"
    }  # fmt: skip
    (graph,) = files[tmp_path / "g.json"]["graphs"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert nodes["loop/q.1"]["namespace"] == "layers 0-1/kda/q_proj"
    assert [edge["sourceNodeId"] for edge in nodes["loop/q.1"]["incomingEdges"]] == ["look"]
    overlay = files[tmp_path / "g.time.json"]["decode@16"]
    assert overlay["results"]["loop/q.1"]["value"] == pytest.approx(20)
    pairs = files[tmp_path / "g.sync.json"]["mappingEntries"]
    assert pairs == [
        *({"leftNodeIds": [name], "rightNodeIds": [name]} for name in nodes),
        {"leftNodeIds": ["gone"], "rightNodeIds": ["removed: gone"]},
    ]
    assert show.ranges((0, 1, 2, 4, 5)) == "layers 0-2, 4-5"


def test_the_command_writes_pages_and_files(artifact, tmp_path):
    folder = artifact(NAME)
    run = CliRunner().invoke(main, ["graph", "view", str(folder), "--output", str(tmp_path / "all.html")])
    assert run.exit_code == 0, run.output
    text = (tmp_path / "all.html").read_text()
    cells = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    ((_, target),) = read_manifest(folder).targets.items()
    assert [cell["cell"] for cell in cells] == list(target.cells)
    one, other = [name for name in target.cells if name.startswith(("decode@", "prefill@"))][:2]
    asked = ["graph", "view", str(folder), one, "--against", str(folder), "--against-cell", other]
    run = CliRunner().invoke(main, [*asked, "--model-explorer", str(tmp_path / "d.json")])
    assert run.exit_code == 0, run.output
    names = sorted(file.name for file in tmp_path.iterdir() if file.suffix == ".json")
    assert names == ["d.before.json", "d.bytes.json", "d.flops.json", "d.json", "d.sync.json", "d.time.json"]
    run = CliRunner().invoke(main, ["graph", "view", str(folder), "--against-cell", "decode@1"])
    assert (run.exit_code, "needs --against" in run.output) == (2, True)
    run = CliRunner().invoke(main, ["graph", "view", str(folder), one, "--against", str(folder), "--profile", "traces"])
    assert (run.exit_code, "neither --portable nor --against" in run.output) == (2, True)


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened


def open_page(tab: Page, place: Path, text: str) -> float:
    """Opens a page and waits until it is drawn; the seconds that took."""
    place.write_text(text)
    tab.errors.clear()
    tab.requests.clear()
    start = time.monotonic()
    tab.open(place)
    tab.until("document.body?.dataset.ready")
    return time.monotonic() - start


def boxes(tab: Page) -> list[str]:
    return list(
        tab.evaluate("[...document.querySelectorAll('[role=treeitem] > text:first-of-type')].map(n => n.textContent)")
    )


def press(tab: Page, key: str) -> None:
    tab.evaluate(
        f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}})); 1"
    )


def search(tab: Page, text: str) -> None:
    tab.evaluate(
        f"var field = document.getElementById('search'); field.value = {json.dumps(text)};"
        "field.dispatchEvent(new Event('input')); field.focus(); 1"
    )


@pytest.mark.extras
def test_the_page_folds_searches_and_obeys_keys(tab, tmp_path):
    tab.width(1100)
    open_page(tab, tmp_path / "toy.html", page([shown(slower(TOY))]))
    assert boxes(tab) == ["▸ embed", "▸ layer 0 · kda", "▸ layer 1 · kda", "▸ layer 2 · mla"]
    tab.evaluate("document.querySelector('[role=treeitem]').dispatchEvent(new MouseEvent('click', {bubbles: true})); 1")
    assert boxes(tab)[:2] == ["▾ embed", "▸ gathers and scatters"]
    press(tab, "ArrowLeft")
    assert boxes(tab)[0] == "▸ embed"
    press(tab, "ArrowDown")
    press(tab, "ArrowRight")
    assert boxes(tab)[:3] == ["▸ embed", "▾ layer 0 · kda", "▸ kda"]
    search(tab, "kda.q")
    assert tab.evaluate("document.getElementById('matches').textContent") == "1 found"
    press(tab, "Enter")
    assert tab.evaluate("document.querySelector('#detail h3').textContent") == "loop/q.1"
    assert tab.evaluate("document.getElementById('count').textContent") == "1 of 3"
    assert "1 µs" not in boxes(tab) and tab.evaluate("document.querySelectorAll('#table tbody tr').length") == 1
    press(tab, "Escape")
    assert tab.evaluate("document.querySelectorAll('#table tbody tr').length") == 3
    tab.evaluate("document.getElementById('fold').click(); 1")
    assert len(boxes(tab)) == 4
    assert "+10.0 µs" in tab.evaluate("document.getElementById('rows').textContent")
    tab.evaluate("document.activeElement.blur(); 1")
    press(tab, "2")
    assert tab.evaluate("document.querySelector('[aria-pressed=true]').textContent") == "Bytes"
    assert tab.evaluate("document.title") == "decode@16 · toy" and tab.evaluate("document.images.length") == 0
    assert tab.errors == [] and [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.extras
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_full_size_program_opens_fast_and_fits_a_narrow_screen(tab, tmp_path, scheme):
    """Ling3-Tiny's prefill@512, portable; the bound allows for a busy machine (docs/log/graphs.md has the seconds)."""
    graph, _, _ = lowered(512, "prefill")
    tab.media(scheme)
    tab.width(400)
    text = page([Shown(graph)])
    assert open_page(tab, tmp_path / "full.html", text) < 10
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
    assert len(boxes(tab)) >= 24
    search(tab, "router")
    press(tab, "Enter")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
    tab.width(1100)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1100
    assert tab.errors == []


def test_operations_are_found_and_shown_with_what_is_known():
    product = dataclasses.replace(OPERATIONS[1], fused=("convert", "convert", "dot"))
    graph = dataclasses.replace(TOY, operations=(OPERATIONS[0], product, OPERATIONS[2]))
    assert show.matching(graph, "KDA.q") == show.matching(graph, "layer 1 ") == [product]
    lines = "\n".join(show.table(graph, [product]))
    for text in (
        "kda, layers 0-1",
        "convert 2, dot",
        "2 in a call",
        "1,000.000 MFLOP, reads 1.00 MB, 10.00 µs (compiler)",
    ):
        assert text in lines
    assert "bound by compute" in lines and f"read by     {HOSTILE}" in lines
    (row,) = show.document(graph, [OPERATIONS[2]])
    assert (row["bound_by"], row["operands"], row["read_by"]) == ("memory", ("loop/q.1",), [])
    many = dataclasses.replace(TOY, operations=tuple(dataclasses.replace(product, name=f"f{i}") for i in range(7)))
    assert show.table(many, many.operations)[2].split() == [
        "f0", "kda", "0-1", "matrix", "products", "2", "20.00", "2.00", "MB", "-", "compute"
    ]  # fmt: skip


def test_bytes_that_a_prefetch_brings_count_for_its_reader():
    prefetch = Operation(name="p", opcode="copy-start", kind="prefetches", overlapped=True, read={"weights": 1e9})
    product = dataclasses.replace(OPERATIONS[1], operands=("p", "params.kda.q"))
    graph = dataclasses.replace(TOY, operations=(prefetch, product))
    assert graph.fed == {"p": 1e9, "loop/q.1": 2e6 + 1e9}
    assert (TOY.bound(OPERATIONS[1]), graph.bound(product)) == ("compute", "memory")


def test_files_that_differ_without_another_program_are_explained(artifact):
    manifest = read_manifest(artifact(NAME))
    ((name, target),) = manifest.targets.items()
    cell = next(iter(target.cells))
    other = structs.replace(target.cells[cell], exec=structs.replace(target.cells[cell].exec, sha256="0" * 64))
    toolchain = {**target.toolchain, "jaxlib": "0.0.1"}
    changed = structs.replace(target, toolchain=toolchain, cells={**target.cells, cell: other})
    after = structs.replace(manifest, targets={name: changed})
    assert file_changes((manifest, name, cell), (manifest, name, cell)) == []
    assert file_changes((manifest, name, cell), (after, name, cell)) == [
        f"other versions: jaxlib {target.toolchain['jaxlib']} → 0.0.1",
        "the executables have other bytes; a compiler may give other bytes for the same program",
    ]


def test_the_text_of_a_program_is_printed(artifact):
    folder = str(artifact(NAME))
    run = CliRunner().invoke(main, ["graph", "show", folder, "decode@8", "--text"])
    assert (run.exit_code, run.stdout[:9]) == (0, "HloModule")
    run = CliRunner().invoke(main, ["graph", "show", folder, "decode@8", "collectives", "--json"])
    rows = json.loads(run.stdout)
    assert {row["layer_kind"] for row in rows} >= {"kda", "mla"} and all(row["collective_bytes"] for row in rows)
    run = CliRunner().invoke(main, ["graph", "show", folder, "decode@8", "kda", "--text"])
    assert (run.exit_code, "without PATTERN" in run.output) == (2, True)
