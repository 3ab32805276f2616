"""Files are written through one door: ``artifacts/files.py`` alone opens names to write; few remove any."""

import ast
from pathlib import Path

from tests.support.rooms import modules

DOOR = "artifacts.files"
OPENERS = {"create", "open_own", "open_lock"}  # functions of the door: what they give is open already
PATH_WRITERS = {"write_text", "write_bytes"}
OTHER_WRITERS = {"shutil.copy", "shutil.copy2", "shutil.copyfile", "tempfile.mkstemp", "tempfile.NamedTemporaryFile"}
# Modules that open otherwise, each with its reason.
EXCEPTIONS = {
    "foundation.reading": "opens to read, without links",
    "runners.ffn.segment": "shared memory: a file without a name, or one without links whose owner is checked",
    "runners.hosts.channel": "/dev/null",
    "runners.hosts.hosts": "opens to read",
    "machine.kernels": "memory without a name",
    "artifacts.catalog.pull": "room of the catalogue: copies into a new folder",
}


def opens_to_write(call: ast.Call) -> bool:
    """Whether a call may open a name to write: any that does not show that it only reads."""
    function = ast.unparse(call.func)
    name = function.rpartition(".")[2]
    if name in PATH_WRITERS or function in OTHER_WRITERS:
        return True
    if function == "os.open":
        flags = ast.unparse(call.args[1])
        return "os.O_RDONLY" not in flags or "O_CREAT" in flags
    if name != "open":
        return False
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if arguments and isinstance(arguments[0], ast.Call) and ast.unparse(arguments[0].func) in OPENERS:
        return False
    texts = [each.value for each in arguments if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return any(set(text) <= set("rwaxbt+") and set(text) & set("wax+") for text in texts)


def writers(files: dict[str, Path]) -> set[str]:
    return {
        name.removeprefix("ling3export.")
        for name, file in files.items()
        if any(isinstance(node, ast.Call) and opens_to_write(node) for node in ast.walk(ast.parse(file.read_text())))
    }


def test_names_are_opened_to_write_by_one_module_alone():
    """`eval run` wrote through a link at predictions.jsonl.partial, which it opened by itself."""
    assert writers(modules()) - {DOOR} == set(EXCEPTIONS)


def test_calls_that_write_are_found():
    written = "open(p, 'a+b')", "p.open('w')", "open(p, mode='x')", "os.open(p, flags)", "os.open(p, os.O_WRONLY)"
    read = "open(p)", "p.open('rb')", "os.open(p, os.O_RDONLY)", "open(create(p), 'wb')", "Checkpoint.open(source)"
    for text in (*written, "(p / 'a').write_text(x)", "p.write_bytes(x)", "shutil.copyfile(p, q)"):
        assert opens_to_write(ast.parse(text, mode="eval").body), text
    for text in read:
        assert not opens_to_write(ast.parse(text, mode="eval").body), text


# Modules that remove or rename, how often, and why what they remove is theirs: a new call has to be looked at first.
REMOVING = {
    "artifacts.catalog.layout": (2, "names that are digests, and own partials, below blobs that are no links"),
    "artifacts.catalog.pull": (3, "a blob and its partial, below the folder that it made"),
    "artifacts.manifest": (1, "leftovers of the name that it writes"),
    "artifacts.signing": (1, "the half of a pair that it has just written"),
    "artifacts.staging": (6, "its hidden folders, and the artifact that --force names"),
    "artifacts.store_writer": (1, "the file that it has just opened"),
    "cache.cells": (1, "an entry of the cache, by its digest"),
    "cache.cleanup": (3, "entries of the cache, listed as such"),
    "cache.store": (2, "entries of the cache, by their digests"),
    "compile.build": (1, "weights of its own staging folder"),
    "compile.into": (5, "programs of its own staging folder, below a folder that it holds open"),
    "runners.batch.run": (3, "the output that --force names, and its partial"),
    "runners.evals.folder": (3, "files of a run, by their fixed names"),
    "runners.ffn.connector": (1, "a segment of shared memory"),
    "runners.ffn.segment": (2, "segments of shared memory whose owner is checked"),
    "runners.ffn.worker": (1, "a segment of shared memory"),
    "runners.load.references": (1, "blobs of the catalogue's own cache"),
    "runners.transfer.folder": (6, "states, by their names, in a folder whose owner and mode are checked"),
    "savedmodel.export": (3, "its own staging folder"),
}
REMOVERS = {"remove", "unlink", "rmdir", "removedirs", "rename", "renames", "rmtree", "move", "link_to"}
OF_MODULES = {"os", "shutil"}


def removes(call: ast.Call) -> bool:
    """Whether a call may remove or rename a file: also ``path.replace(target)``, of one argument."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return isinstance(function, ast.Name) and function.id in REMOVERS - {"remove", "move", "rename"}
    owner = ast.unparse(function.value)
    if function.attr == "replace":
        return owner == "os" or (owner not in ("dataclasses", "copy") and len(call.args) == 1 and not call.keywords)
    if function.attr in ("remove", "move"):  # lists and sets remove, too
        return owner in OF_MODULES
    return function.attr in REMOVERS


def test_names_are_removed_and_renamed_where_it_was_looked_at():
    """`catalog gc` removed another folder's files through a link."""
    found = {}
    for name, file in modules().items():
        count = sum(isinstance(node, ast.Call) and removes(node) for node in ast.walk(ast.parse(file.read_text())))
        if count and (short := name.removeprefix("ling3export.")) != DOOR:
            found[short] = count
    assert found == {name: count for name, (count, reason) in REMOVING.items() if reason}


def test_calls_that_remove_are_found():
    removing = (
        "os.remove(p)",
        "os.replace(p, q)",
        "p.unlink()",
        "(p / 'a').rename(q)",
        "shutil.rmtree(p)",
        "p.replace(q)",
    )
    for text in (*removing, "os.rmdir(n, dir_fd=d)", "unlink(p)", "shutil.move(p, q)", "rmtree(p)"):
        assert removes(ast.parse(text, mode="eval").body), text
    for text in ("text.replace('a', 'b')", "names.remove(n)", "replace(record, a=1)", "path.exists()"):
        assert not removes(ast.parse(text, mode="eval").body), text
