"""Runs every command and every Python block of every page, and compares the output; links and named files exist.

The commands of a page run in order in a folder of its own, with this environment's commands first on PATH. SWAPS
replaces real checkpoints, large paddings and other machines by small ones. Artifacts built from them are kept between
runs.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ling3export.checkpoint.synth import synthesize
from tests.support.artifacts_fixture import DEMO, RECIPES, ROOT, Artifacts, sources_of
from tests.support.builds import UNOPTIMIZED
from tests.support.documents import Command, commands, is_whole, matches
from tests.support.hosting import free_port
from tests.support.package_copy import copied

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
LOG = sorted(f"docs/log/{page.name}" for page in (ROOT / "docs/log").glob("*.md"))  # the past, not the present
LINKING = [*PAGES, "CHANGELOG.md", *LOG, "artifacts/FORMAT.md"]
FIRST = ("README.md", "docs/getting-started.md")  # a newcomer's first commands; the other pages run in `make extras`
WITH_COMMANDS = [page for page in PAGES if (ROOT / page).is_file() and commands((ROOT / page).read_text())]

MICRO = ("--paddings", "16", "--tp", "2", "--max-running", "4", "--context", "512", "--score-paddings", "16")
# The demo with the options of other tests, and a slice of four chips for the micro model: each compiles once for all
# pages.
DEMO_OPTIONS = " ".join(RECIPES["demo-tp1"].options())
SLICE = "--target tpu:v6e:2x2 --paddings 16 --max-running 4 --context 512"
# Commands that need an optional extra: `make test` leaves them out, and `make extras` runs them.
OPTIONAL = ("--format savedmodel", "lm-eval run", "inspect eval")
MAKING = ("ling3export synth ", "ling3export build CHECKPOINT ")  # commands that make what a later command needs
# Files that a page takes from another page.
GIVEN = {
    "docs/hosts.md": ["micro", "micro.ling3"],
    "docs/targets.md": ["micro", "micro.ling3"],
    "docs/disaggregation.md": ["micro"],
    "docs/measure.md": ["micro.ling3"],
    "docs/share.md": ["micro", "micro.ling3"],
    "docs/engine.md": ["micro.ling3"],
    "docs/graphs.md": ["micro.ling3"],
    "docs/python.md": ["micro.ling3"],
    "docs/serve.md": ["micro.ling3"],
    "docs/evaluation.md": ["gsm8k", "mmlu", "task.py"],
    "docs/prefix-cache.md": ["micro", "shared.ling3"],
}
SWAPS = {
    "README.md": [
        (
            "build Ling-3.0-tiny-fp8 ling3.ling3 --weights int4 --max-running 1 --context 8192",
            f"build {DEMO} ling3.ling3 {DEMO_OPTIONS}",
        )
    ],
    "docs/getting-started.md": [
        ("build Ling-3.0-tiny-fp8 ling3.ling3 --weights int4", f"build {DEMO} ling3.ling3 {DEMO_OPTIONS}")
    ],
    "docs/targets.md": [
        ("CHECKPOINT ling3-v6e.ling3 --target tpu:v6e:4x4 --paddings 16,128,512", f"micro ling3-v6e.ling3 {SLICE}")
    ],
    "docs/hosts.md": [
        ("CHECKPOINT four.ling3 --target cpu:4x4", "micro four.ling3 --target cpu:4x1 --paddings 16 --max-running 1")
    ],
    # The page size and number of snapshots of an artifact that other tests build, too.
    "docs/prefix-cache.md": [
        ("ling3export build micro shared.ling3 --snapshots 6 --page-size 16", "ling3export inspect shared.ling3")
    ],
    "docs/evaluation.md": [
        ("--score-paddings 512", DEMO_OPTIONS),
        ("--suite gsm8k", "--suite gsm8k --limit 2 --max-tokens 32"),
        ("--suite mmlu-pro", "--suite mmlu-pro --max-tokens 32"),
        ("--suite cats.yaml", "--suite cats.yaml --max-tokens 32"),
        ("--tasks arc_easy,gsm8k", "--tasks arc_easy,gsm8k --help"),  # test_adapters.py runs tasks that need no network
    ],
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
# Commands for other machines: nothing is copied or downloaded, but the options are checked.
ELSEWHERE = {
    "rsync": 'test -d "$2"',
    "ssh": 'shift; exec bash -c "$* --help" > /dev/null',
    "hf": f'test "$1 $3" = "download --local-dir" && cp -r "{DEMO}" "$4"',
}
QUESTION = {
    "question_id": 70,
    "question": "Which?",
    "options": ["one", "two", "three"],
    "answer": "B",
    "category": "law",
    "cot_content": "A: Let's think step by step. The answer is (B).",
}
TASK = """from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
@task
def sums():
    return Task(dataset=[Sample(input="Question: Tom has 2 plums.\\nAnswer:", target="2")], scorer=includes())
"""


class Reader:
    """A user who types the commands of a page."""

    def __init__(self, page: str, folder: Path, artifact: Artifacts) -> None:
        self.page, self.folder, self.artifact = page, folder, artifact
        programs = folder / "bin"
        programs.mkdir(parents=True)
        for name, script in ELSEWHERE.items():
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(0o755)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | OFFLINE
        self.environment["PATH"] = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment |= {"HOME": str(folder / "home"), "XDG_DATA_HOME": str(folder / "home")}
        self.swaps = [*SWAPS.get(page, []), ("CHECKPOINT", str(DEMO)), ("8000", str(free_port()))]
        self.swaps += [("8001", str(free_port())), ("127.0.0.1:8476", f"127.0.0.1:{free_port()}")]
        for name in GIVEN.get(page, []):
            self.give(name)

    def give(self, name: str) -> None:
        """Puts an artifact or data set that the page needs into the folder."""
        place = self.folder / name
        if name == "gsm8k":
            shutil.copytree(ROOT / "tests/data/gsm8k", place)
        elif name == "mmlu":
            place.mkdir()
            for file in ("test.jsonl", "validation.jsonl"):
                (place / file).write_text(json.dumps(QUESTION) + "\n")
        elif name == "shared.ling3":
            shutil.copytree(self.artifact("micro-tp1-snapshots"), place)
        elif name == "task.py":
            place.write_text(TASK)
        else:
            micro = self.artifact.kept(
                "micro", [sources_of("ling3export.checkpoint.synth"), 0], lambda path: synthesize(path, "micro", 0)
            )
            if name != "micro":
                micro = self.artifact.built(name, micro, *MICRO, variables=UNOPTIMIZED)
            shutil.copytree(micro, place)

    def swapped(self, text: str) -> str:
        for old, new in self.swaps:
            text = text.replace(old, new)
        return text

    def does(self, command: Command) -> None:
        """Runs a command to its end and compares its output."""
        text, shown = self.swapped(command.text), [self.swapped(line) for line in command.shown]
        cwd = self.folder
        if command.python:
            text, shown = shlex.join([sys.executable, "-c", text]), ["…"]
        elif text.startswith("make "):  # other tests run the commands of these targets
            text, shown, cwd = text.replace("make", "make -n", 1), ["…"], ROOT
        elif text.startswith("pip install "):
            text, shown, cwd = dry(text), ["…"], self.sources()
        elif re.match(r"ling3export build .*(--target|/demo )", text) and "--into" not in text:
            return self.builds(text)
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=cwd,
            env=self.environment | ({} if "tpu" in text else UNOPTIMIZED),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=600,
        )
        said = f"{self.page}: $ {text}\n{done.stdout}{done.stderr}"
        fails = any(line.startswith("error:") for line in shown)
        assert done.returncode == fails, said
        assert matches(shown, done.stderr if fails else done.stdout), said

    def builds(self, text: str) -> None:
        """Runs an expensive build, or takes an earlier one with the same options."""
        _, _, checkpoint, name, *options = shlex.split(text, comments=True)
        shutil.copytree(self.artifact.built(name, self.folder / checkpoint, *options), self.folder / name)

    def sources(self) -> Path:
        if not (self.folder / "sources").exists():
            shutil.copy(ROOT / "constraints.txt", copied(self.folder / "sources"))
        return self.folder / "sources"

    @contextmanager
    def serving(self, command: Command) -> Iterator[None]:
        """A server that runs until the page's end, and must then end without an error."""
        argv = shlex.split(self.swapped(command.text), comments=True)
        if "--port" not in argv:
            argv += ["--port", dict(self.swaps)["8000"]]
        with subprocess.Popen(
            argv, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().strip() == self.swapped(command.shown[0])
                yield
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
            finally:
                process.kill()


def dry(text: str) -> str:
    """A dry run of ``pip install``: it reads the package, its extras and constraints, and installs nothing."""
    options = "--dry-run --no-deps --no-build-isolation --disable-pip-version-check"
    return text.replace("pip install", f"python -m pip install {options}", 1)


def run(page: str, left: list[Command], folder: Path, artifact: Artifacts) -> None:
    """Runs commands of a page in order. A server that one of them starts runs until the last has ended."""
    reader = Reader(page, folder / "reader", artifact)
    with ExitStack() as servers:
        for command in left:
            if command.text.startswith("ling3-runner serve "):
                servers.enter_context(reader.serving(command))
            else:
                reader.does(command)


def is_optional(command: Command) -> bool:
    return any(word in command.text for word in OPTIONAL)


@pytest.mark.parametrize(
    "page", [page if page in FIRST else pytest.param(page, marks=pytest.mark.extras) for page in WITH_COMMANDS]
)
def test_commands_print_what_is_shown(page: str, tmp_path: Path, artifact: Artifacts):
    run(page, [each for each in commands((ROOT / page).read_text()) if not is_optional(each)], tmp_path, artifact)


@pytest.mark.extras
@pytest.mark.parametrize("page", ["docs/build.md", "docs/evaluation.md"])
def test_commands_of_optional_extras_print_what_is_shown(page: str, tmp_path: Path, artifact: Artifacts):
    found = commands((ROOT / page).read_text())
    left = [each for each in found if is_optional(each) or each.text.startswith(MAKING)]
    assert any(map(is_optional, left))
    run(page, left, tmp_path, artifact)


@pytest.mark.parametrize("page", LINKING)
def test_links_and_named_files_exist(page: str):
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
    if page not in (*LOG, "CHANGELOG.md"):  # these pages name files of earlier versions
        named = re.findall(
            r"(?<![\w/])(?:ling3export|foundation|model|artifacts|runners|tests|tools|bench|deploy|docs)/[\w/-]+\.\w+",
            text,
        )
        assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_blocks_are_read_as_described():
    text = (
        "```console\n$ a \\\n  b\none\n…\n$ for x in 1; do\n    c\n  done\n  two\n```\n\n```\n$ not this\n```\n\n"
        "```python\nprint(1)\n```\n"
    )
    assert commands(text) == [
        Command("a \\\n  b", ["one", "…"]),
        Command("for x in 1; do\n    c\n  done", ["  two"]),
        Command("print(1)\n", python=True),
    ]
    assert is_whole("a 'b'") and not is_whole("a 'b")


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ([], "", True),
        ([], "x\n", False),
        (["took … ms"], "took 12 ms\n", True),
        (["took … ms"], "took 12 s\n", False),
        (["a", "…", "z"], "a\nb\nc\nz\n", True),
        (["a", "z"], "a\nb\nz\n", False),
    ],
)
def test_shown_lines_match_as_described(shown, printed, same):
    assert matches(shown, printed) is same
