"""Files are written through one door: ``artifacts/files.py`` alone opens names to write, and follows no link."""

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
