"""Damaged copies of the toy: a manifest with right digests, tokenizer files, recompiled programs.

If an artifact is accepted, its answers to the toy's prompts must be numpy's.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from msgspec.structs import replace

from ling3export.artifacts.calibration import SCHEMA, Calibration, CellTimes, beside, found_beside, programs_digest
from ling3export.artifacts.manifest import MANIFEST, file_record, read_checked, read_manifest
from ling3export.artifacts.records import sha256_of, to_json
from ling3export.artifacts.schema import Executable, Receipt, Receipts, Tolerance
from ling3export.foundation.errors import ArtifactError, Ling3Error
from ling3export.foundation.phases import ON_LOGITS
from ling3export.machine.environment import prepare_cpu
from ling3export.machine.verdict import Verdict, VerdictStatus, measuring
from ling3export.report.inspect import describe
from ling3export.runners.load import recompile
from ling3export.runners.load.loader import calls_measured
from ling3export.runners.text import tokenizer as chat
from ling3export.runners.text.tokenizer import TokenizerFiles
from ling3export.verify.measure import measure_target
from ling3export.verify.verify import check_digests
from tests.fuzz.harness import Case, WrongResultError
from tests.fuzz.mutations import json_text, mutated, mutated_bytes, spelled
from tests.support.manifests import changed_targets, sealed

TEXT = "How many apples has the old man? \x00é😀 <|endoftext|> 12"
MESSAGES = ({"role": "user", "content": "Hi <role>"}, {"role": "assistant", "content": "12"})
LOOP = "{% for i in range(9999) %}"
TEMPLATES = (
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}",
    f"{LOOP}{{{{ 'x' * 9999 }}}}{{% endfor %}}",
    "{% set n = namespace(a=[]) %}" + LOOP + "{% set n.a = n.a + [n.a] %}{% endfor %}{{ n.a }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'a' * 10 ** 11 }}",
    "{{ [messages] * 10 ** 11 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '{:99999999999}'.format(1) }}",
    "{{ messages[0]['content'] | center(10 ** 11) }}",
    "{{ messages | tojson(indent=10 ** 10) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ 'x'.format(1) ~ '{0.__class__}'.format(1) }}",
    "{{ messages.append(1) }}",
    "{% include 'x' %}",
    "{{ raise_exception('\x1b[31mno') }}",
    "{{ strftime_now('%Y' * 999) }}",
    "{{ nothing.at.all }}",
)


@contextmanager
def manifests(folder: Path) -> Iterator[Case]:
    """A manifest with right digests is read, inspected, verified, and run for two tokens."""
    toy = toy_copy(folder)
    original = json.loads((toy / MANIFEST).read_text())

    def case(rng: Random) -> None:
        look(_manifest(rng, original), measured=rng.random() < 0.2)

    def look(data: bytes, measured: bool) -> None:
        (toy / MANIFEST).write_bytes(data)
        manifest = read_manifest(toy)
        for text in (describe(manifest), describe(manifest, wide=True)):
            if not all(line.isprintable() for line in text.split("\n")):
                raise WrongResultError(f"inspect shows control characters: {text!r}")
        json.dumps(to_json(manifest), allow_nan=False).encode()
        check_digests(toy, manifest)
        check_answers(toy)
        if measured:
            for name in manifest.targets:
                measure_target(toy, name, manifest)

    look(sealed(original), measured=True)
    yield case


@contextmanager
def calibrations(folder: Path) -> Iterator[Case]:
    """A calibration next to the toy, mostly with right digests, is shown by inspect and used for costs."""
    toy = toy_copy(folder)
    manifest = read_manifest(toy)
    ((name, target),) = manifest.targets.items()
    receipt, seconds = (
        Receipt("passed", 1e-6, 1e-6, 1e-5, 3),
        CellTimes(calls=2, median=2e-3, fastest=1e-3, slowest=3e-3),
    )
    original = to_json(
        Calibration(
            SCHEMA,
            name,
            programs_digest(target),
            str(manifest.weights_digest),
            "2026-11-22",
            measuring(),
            64,
            Receipts(Tolerance("largest", 1e-5), dict.fromkeys(target.cells, receipt), {}),
            dict.fromkeys(target.cells, seconds),
        )
    )

    def case(rng: Random) -> None:
        data = json.dumps(mutated(rng, original)).encode()
        beside(toy).write_bytes(data if rng.random() < 0.8 else mutated_bytes(rng, data))
        look()

    def look() -> None:
        notes: list[str] = []
        calls_measured(toy, manifest, name, notes.append, None)
        found, note = found_beside(toy, manifest)
        texts = [describe(manifest, calibration=found, note=note or ""), *notes]
        if not all(line.isprintable() for text in texts for line in text.split("\n")):
            raise WrongResultError(f"a calibration shows control characters: {texts!r}")
        if notes and found is None:
            raise ArtifactError(notes[0])

    beside(toy).write_text(json.dumps(original))
    look()
    yield case


@contextmanager
def recompiled(folder: Path) -> Iterator[Case]:
    """Programs that were compiled on this machine: their records with right digests, their bytes without."""
    toy = toy_copy(folder)
    os.environ["LING3_CACHE"] = str(folder / "cache")  # of this process only
    from ling3export.machine.pjrt import recorded_mesh

    cache, small = recompile.cache_folder(), []
    (target,) = read_manifest(toy).targets.values()
    for cell in target.cells.values():  # reuse the build's programs: compiling them would take half a minute
        key = recompile.cache_key(cell.stablehlo.sha256, recorded_mesh(target.mesh))
        executable = Executable(target.requires, target.mesh, cell.call)
        recompile.store_program(cache, key, (read_checked(toy, cell.exec), executable), lambda text: None)
        small += [] if cell.phase in ON_LOGITS else sorted(cache.glob(f"{key}.*"))  # a sampler takes four seconds
    files = {path: path.read_bytes() for path in cache.iterdir()}
    changed_targets(toy, lambda target: replace(target, requires=replace(target.requires, jaxlib="0.0.0")))
    check_answers(toy, "allow-compile")
    if files != {path: path.read_bytes() for path in cache.iterdir()}:
        raise WrongResultError("programs were compiled again that were there")

    def case(rng: Random) -> None:
        for path, data in files.items():
            path.write_bytes(data)
        path = rng.choice(small)
        crafted = path.suffix == ".json" and rng.random() < 0.8
        if crafted:
            tree = json.loads(files[path])
            del tree["sha256"]
            tree = mutated(rng, tree)
            with suppress(ValueError, TypeError, AttributeError):  # the value has no place for a digest
                tree["sha256"] = sha256_of(tree)
            path.write_bytes(json_text(tree))
        else:
            path.write_bytes(mutated_bytes(rng, files[path]))
        try:
            check_answers(toy, "allow-compile")
        except Ling3Error as error:
            if crafted:
                raise
            raise WrongResultError(f"a damaged program was not compiled again: {error}") from error

    yield case


@contextmanager
def portable(folder: Path) -> Iterator[Case]:
    """Portable programs with wrong digests: they must not reach StableHLO's reader, which may abort."""
    toy = toy_copy(folder)
    os.environ["LING3_CACHE"] = str(folder / "cache")  # of this process only
    from ling3export.machine.pjrt import recorded_mesh

    (target,) = read_manifest(toy).targets.values()
    mesh, verdict = recorded_mesh(target.mesh), Verdict("decode@2", VerdictStatus.RECOMPILE, "no executable")
    path = toy / target.cells[verdict.cell].stablehlo.path
    whole = path.read_bytes()

    def case(rng: Random) -> None:
        flipped = bytearray(whole)
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        data = rng.choice((whole, bytes(flipped), mutated_bytes(rng, whole)))
        path.write_bytes(data)
        recompile.compile_here(toy, target, [verdict], mesh, str)
        if data != whole:
            raise WrongResultError("a damaged program was read")

    yield case


@contextmanager
def tokenizers(folder: Path) -> Iterator[Case]:
    """Tokenizer files with right digests are used for ids, text, streams and conversations."""
    from tests.support.short_chats import write_short
    from tests.support.toy_artifact import EOS

    chat.SECONDS = 0.3  # many templates never end
    write_short(folder, EOS)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 1], "pad_token_id": 0}))
    files = {path: path.read_bytes() for path in folder.glob("*.json")}
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    files[folder / "chat_template.jinja"] = template.encode()

    def case(rng: Random) -> None:
        changed = rng.choice(sorted(files))
        for path, data in files.items():
            path.write_bytes(_damaged(rng, data) if path == changed else data)
        there = [path for path in files if path == changed or rng.random() < 0.7]
        look([path.name for path in there])

    def look(names: list[str]) -> None:
        found = TokenizerFiles(folder, [file_record(folder, name) for name in names], (EOS,))
        found.eos_token_ids()
        if found.chats:
            found.render_chat(MESSAGES)
        if found.exist:
            tokenizer = found.tokenizer("text")
            stream, ids = tokenizer.stream(["a", "é"]), tokenizer.encode(TEXT)
            for token in (*ids[:20], 0, EOS, 2**31):
                stream.push(token)
            stream.finish()
            tokenizer.decode(ids)

    look([path.name for path in files if path.suffix == ".json"])
    yield case


def toy_copy(folder: Path) -> Path:
    """A toy artifact that may be damaged, in a process with the devices that it needs."""
    prepare_cpu(2)
    from tests.support.toy_artifact import shared

    return Path(shutil.copytree(shared(), folder / "toy.ling3"))


def check_answers(toy: Path, programs: str = "prebuilt-only") -> None:
    """Loads the artifact and compares its answers with numpy's."""
    from ling3export.runners.engine.engine import Engine
    from tests.support.toy_artifact import PROMPTS, answer

    with Engine(toy, programs=programs, report=lambda text: None) as engine:
        found = [each.token_ids for each in engine.generate(PROMPTS, max_tokens=2, ignore_eos=True)]
    if found != (wanted := [answer(prompt, 2)[0] for prompt in PROMPTS]):
        raise WrongResultError(f"silently different tokens: {found} instead of {wanted}")


def _manifest(rng: Random, original: dict[str, Any]) -> bytes:
    """A damaged manifest with right digests, unless the damage removed their places."""
    tree = mutated(rng, original)
    try:
        text = sealed(tree)
    except (ArithmeticError, AttributeError, KeyError, LookupError, TypeError, ValueError):
        if not isinstance(tree, dict):
            return json_text(tree)
        text = (
            json_text({**{key: value for key, value in tree.items() if key != "sha256"}, "sha256": "0" * 64}, 2) + b"\n"
        )
    text = spelled(text.decode(errors="surrogatepass")).encode(errors="surrogatepass")
    covered, line, _ = text.rpartition(b'  "sha256": "')
    if rng.random() < 0.05:
        covered = mutated_bytes(rng, covered)
    return covered + line + hashlib.sha256(covered).hexdigest().encode() + b'"\n}\n'


def _damaged(rng: Random, data: bytes) -> bytes:
    """Damages JSON as a tree or as bytes; damages a template as bytes, or replaces it."""
    try:
        tree = json.loads(data)
    except ValueError:
        return mutated_bytes(rng, data) if rng.random() < 0.5 else rng.choice(TEMPLATES).encode()
    if rng.random() < 0.2:
        return mutated_bytes(rng, data)
    tree = mutated(rng, tree)
    if isinstance(tree, dict) and "chat_template" in tree and rng.random() < 0.2:
        tree["chat_template"] = rng.choice(TEMPLATES)
    return json_text(tree)
