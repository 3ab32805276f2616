"""Only ``artifacts/files.py`` writes, removes and renames files, and artifacts are run only after a check of trust."""

import ast
import os
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from ling3export.artifacts import files
from ling3export.foundation.errors import ArtifactError
from tests.support.rooms import modules

DOOR = "artifacts.files"
OPENERS = {"create", "open_own", "open_lock"}  # these functions of files.py return open files
PATH_WRITERS = {"write_text", "write_bytes"}
OTHER_WRITERS = {"shutil.copy", "shutil.copy2", "shutil.copyfile", "tempfile.mkstemp", "tempfile.NamedTemporaryFile"}
LINKERS = {"os.link", "os.symlink", "symlink_to", "hardlink_to"}
REMOVERS = {"remove", "unlink", "rmdir", "removedirs", "rename", "renames", "rmtree", "move", "link_to"}
OF_MODULES = {"os", "shutil"}
# Modules that read a manifest without checking its signature, each with its reason.
UNSIGNED = {
    "artifacts.catalog.publish": "what it publishes is signed here",
    "artifacts.signing": "the door itself",
    "artifacts.staging": "whether an artifact is there at all",
    "runners.batch.run": "the digest that names answers; the engines of a cluster ask for trust",
    "runners.bench_serving.measure": "counts tokens by the tokenizer's files",
    "cli.catalog": "the digest that an evaluation names",
    "cli.graph": "programs are read as text, and do not run",
    "cli.main": "inspect prints it",
    "compile.into": "compares it with the one that it read with trust",
    "opened": "programs are read as text; loading them asks for trust",
    "report.compared": "programs are read as text, and do not run",
}
# Functions that turn bytes of an artifact into something that runs.
EXECUTERS = {
    "machine.kernels": "native kernels",
    "machine.pjrt": "executables",
    "machine.portable": "portable programs",
    "machine.untouched": "a function of the system",
    "artifacts.staging": "a function of the system",
    "runners.text.tokenizer": "templates, in jinja2's sandbox, in a process that can be ended",
}
EXECUTING = {"deserialize_executable", "deserialize_portable_artifact", "deserialize", "CDLL", "from_string"}


def opens_to_write(call: ast.Call) -> bool:
    """Whether a call may open a path for writing: true unless it shows that it only reads, or opens a descriptor."""
    function = ast.unparse(call.func)
    name = function.rpartition(".")[2]
    if name in PATH_WRITERS or function in OTHER_WRITERS:
        return True
    if function == "os.open":
        flags = ast.unparse(call.args[1])
        return ast.unparse(call.args[0]) != "os.devnull" and ("os.O_RDONLY" not in flags or "O_CREAT" in flags)
    if name != "open" or any(keyword.arg == "closefd" for keyword in call.keywords):
        return False
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if arguments and isinstance(arguments[0], ast.Call) and ast.unparse(arguments[0].func) in OPENERS:
        return False
    texts = [each.value for each in arguments if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return any(set(text) <= set("rwaxbt+") and set(text) & set("wax+") for text in texts)


def removes(call: ast.Call) -> bool:
    """Whether a call may remove, rename or link a file, including ``path.replace(target)`` with one argument."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return isinstance(function, ast.Name) and function.id in REMOVERS - {"remove", "move", "rename"}
    owner = ast.unparse(function.value)
    if function.attr == "replace":
        return owner == "os" or (owner not in ("dataclasses", "copy") and len(call.args) == 1 and not call.keywords)
    if function.attr in ("remove", "move"):  # lists and sets have remove, too
        return owner in OF_MODULES
    return function.attr in REMOVERS or bool({function.attr, f"{owner}.{function.attr}"} & LINKERS)


def callers(found: Callable[[ast.Call], bool]) -> set[str]:
    """Short names of the modules that have such a call."""
    return {
        name.removeprefix("ling3export.")
        for name, file in modules().items()
        if any(isinstance(node, ast.Call) and found(node) for node in ast.walk(ast.parse(file.read_text())))
    }


def test_only_one_module_writes_removes_and_renames_files():
    """Regression: `eval run` wrote through a link at predictions.jsonl.partial; `catalog gc` removed through one."""
    assert callers(opens_to_write) == callers(removes) == {DOOR}


def test_calls_that_write_are_found():
    written = "open(p, 'a+b')", "p.open('w')", "open(p, mode='x')", "os.open(p, flags)", "os.open(p, os.O_WRONLY)"
    read = "open(p)", "p.open('rb')", "os.open(p, os.O_RDONLY)", "open(create(p), 'wb')", "Checkpoint.open(source)"
    for text in (*written, "(p / 'a').write_text(x)", "p.write_bytes(x)", "shutil.copyfile(p, q)"):
        assert opens_to_write(ast.parse(text, mode="eval").body), text
    for text in (*read, "open(d, 'wb', closefd=False)", "os.open(os.devnull, os.O_WRONLY)"):
        assert not opens_to_write(ast.parse(text, mode="eval").body), text


def test_calls_that_remove_are_found():
    removing = "os.remove(p)", "os.replace(p, q)", "p.unlink()", "(p / 'a').rename(q)", "shutil.rmtree(p)"
    for text in (*removing, "p.replace(q)", "os.rmdir(n, dir_fd=d)", "unlink(p)", "shutil.move(p, q)", "os.link(p, q)"):
        assert removes(ast.parse(text, mode="eval").body), text
    for text in ("text.replace('a', 'b')", "names.remove(n)", "replace(record, a=1)", "path.exists()", "remove(p)"):
        assert not removes(ast.parse(text, mode="eval").body), text


def calls(*names: str) -> Callable[[ast.Call], bool]:
    """Whether a call is of one of these functions, in whatever object."""
    return lambda call: ast.unparse(call.func).rpartition(".")[2] in names


def test_artifacts_are_opened_with_trust_where_something_of_them_runs():
    """Regression: `attach` and `build --into` ran unsigned code although LING3_TRUST was set."""
    assert callers(calls("read_manifest")) == set(UNSIGNED)
    assert callers(calls(*EXECUTING)) == set(EXECUTERS)


def test_removing_follows_no_link_below_the_folder_that_is_given(tmp_path):
    ours, others = tmp_path / "ours", tmp_path / "others"
    for folder in (ours, others):
        folder.mkdir()
        (folder / "a").write_text("kept")
    (ours / "link").symlink_to(others)
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        files.remove(ours / "link" / "a", ours)
    files.remove_tree(ours / "link", ours)
    assert (others / "a").exists() and (ours / "link").is_symlink()
    assert files.remove(ours / "link") and (others / "a").exists() and not files.remove(ours / "link")
    with (others / "a").open() as held:
        assert not files.remove(ours / "a", held=held.fileno()) and files.remove(others / "a", held=held.fileno())
    files.rename(ours / "a", others / "b")
    files.remove_tree(others, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_blob_is_copied_where_it_cannot_have_a_second_name(tmp_path, monkeypatch):
    (tmp_path / "blob").write_text("bytes")
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError("another disk")))
    files.link_or_copy(tmp_path / "blob", tmp_path / "folder" / "file")
    assert (tmp_path / "folder" / "file").read_text() == "bytes"
    with pytest.raises(ArtifactError, match="write `file`"):
        files.link_or_copy(tmp_path / "blob", tmp_path / "folder" / "file")
