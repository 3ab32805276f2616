"""Damaged files of the build side: a checkpoint's config, index and shards, and the build cache."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from random import Random

import numpy as np

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.program_records import Origin, Program
from ling3export.artifacts.records import sha256_of
from ling3export.cache.cells import SUFFIXES, Built, Cells
from ling3export.cache.cleanup import clean_up, status
from ling3export.cache.store import Cache, CacheUse, cache_folder
from ling3export.checkpoint.forms import SHAPE
from ling3export.checkpoint.reader import INDEX, Checkpoint
from ling3export.checkpoint.synth import synthesize
from ling3export.machine.environment import prepare_cpu
from ling3export.model.config import Config
from ling3export.model.parameters import expected_tensors
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plans
from ling3export.plan.pricing import described, priced
from tests.fuzz.harness import Case, WrongResultError
from tests.fuzz.mutations import json_text, mutated, mutated_bytes
from tests.support.tiny import tiny_fields, tiny_weights, write_tiny

SMALL = {"num_hidden_layers": 2, "layer_group_size": 2, "num_experts": 4, "n_group": 2, "topk_group": 2}
OPTIONS = Options(paddings=(16, 32), decode_paddings=(4,), tp=2, max_running=4, page_size=16, context=128)


@contextmanager
def configs(folder: Path) -> Iterator[Case]:
    """A damaged config.json is read and, if accepted, planned."""
    path, original = folder / "config.json", tiny_fields()

    def case(rng: Random) -> None:
        data = json_text(mutated(rng, original), 1)
        path.write_bytes(mutated_bytes(rng, data) if rng.random() < 0.1 else data)
        look()

    def look() -> None:
        printable(described(priced(Config.from_path(path, ()), OPTIONS), wide=True))

    path.write_bytes(json_text(original))
    look()
    yield case


@contextmanager
def shards(folder: Path) -> Iterator[Case]:
    """A damaged safetensors file of a checkpoint: its header as JSON of the right length, or any of its bytes."""
    path = next(_checkpoint(folder).glob("*00001-of*.safetensors"))
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])

    def case(rng: Random) -> None:
        if rng.random() < 0.7:
            text = json_text(mutated(rng, header))
            path.write_bytes(len(text).to_bytes(8, "little") + text + data[size:])
        else:
            path.write_bytes(mutated_bytes(rng, data[: size + 64]) + data[size + 64 :])
        read_checkpoint(folder)

    read_checkpoint(folder)
    yield case


@contextmanager
def forms(folder: Path) -> Iterator[Case]:
    """An FP8 or INT4 checkpoint: its quantization_config, names, shapes, dtypes and bytes of its tensors."""
    made = {form: folder / form for form in ("fp8", "int4")}
    for form, each in made.items():
        synthesize(each, "micro", 0, form=form, overrides=SMALL | {"num_nextn_predict_layers": 0})
        read_checkpoint(each)
    files = {path: path.read_bytes() for each in made.values() for path in each.glob("*") if path.is_file()}
    shapes = {path: _places(data, SHAPE) for path, data in files.items() if path.suffix == ".safetensors"}

    def case(rng: Random) -> None:
        checkpoint = made[rng.choice([*made])]
        config, shard = checkpoint / "config.json", rng.choice(sorted(checkpoint.glob("*.safetensors")))
        size = 8 + int.from_bytes(files[shard][:8], "little")
        header, data = files[shard][8:size], files[shard][size:]
        which = rng.random()
        of_shape = which > 0.9 and bool(shapes[shard])
        if which < 0.4:
            fields = json.loads(files[config])
            fields["quantization_config"] = mutated(rng, fields["quantization_config"])
            config.write_bytes(json_text(fields))
        else:
            header = json_text(mutated(rng, json.loads(header), 1)) if which < 0.7 else header
            start = rng.choice(shapes[shard]) if of_shape else rng.randrange(len(data))
            data = data if which < 0.7 else data[:start] + rng.randbytes(64) + data[start + 64 :]
            shard.write_bytes(len(header).to_bytes(8, "little") + header + data[: len(files[shard]) - size])
        try:
            read_checkpoint(checkpoint)
            if of_shape:
                raise WrongResultError("random bytes as a weight_shape, taken")
        finally:
            for path in (config, shard):
                path.write_bytes(files[path])

    yield case


@contextmanager
def indexes(folder: Path) -> Iterator[Case]:
    """The index of a checkpoint; tensors of an accepted index must have the values that were written."""
    path = _checkpoint(folder) / INDEX
    original, wanted = json.loads(path.read_text()), read_checkpoint(folder)

    def case(rng: Random) -> None:
        data = json_text(mutated(rng, original), 1)
        path.write_bytes(mutated_bytes(rng, data) if rng.random() < 0.2 else data)
        if (found := read_checkpoint(folder)) != wanted:
            raise WrongResultError(f"weights of sum {found} instead of {wanted}")

    yield case


@contextmanager
def caches(folder: Path) -> Iterator[Case]:
    """An entry of the build cache with right key and digest, or any file of the cache: used, counted and cleaned up."""
    prepare_cpu(2)  # needed if the toy has not been built yet
    from tests.support.toy_artifact import shared

    use, out, config = CacheUse("on", folder / "entries"), folder / "out", Config.from_dict(tiny_fields())
    (plan,) = make_plans(config, OPTIONS)
    (cell,) = (each for each in plan.cells if each.name == "prefill@16")
    (target,) = read_manifest(shared()).targets.values()
    record = target.cells[cell.name]
    wanted = [*((shared() / each.path).read_bytes() for each in record.files), b"HloModule toy"]
    paths = [out / f"{cell.name}.{suffix}" for suffix in SUFFIXES]
    out.mkdir()
    for path, data in zip(paths, wanted, strict=True):
        path.write_bytes(data)
    fields = {name: getattr(record, name) for name in Program.__struct_fields__}
    made = {"program": 1}
    program = Program(**fields | {"origin": Origin("compiler", sha256_of(made), 1, 1)})
    Cache(use, print).write("programs", made, {}, wanted[1])
    Cache(use, print).write("programs", {"graph": sha256_of(made)}, {}, wanted[2])
    Cells(use, lambda text: None).keep(config, plan, cell, out, Built(program, target.requires, target.mesh))
    files = {path: path.read_bytes() for path in use.where.rglob("*") if path.is_file()}
    (entry,) = use.where.glob("cells/*")
    header, _, portable = files[entry].partition(b"\n")[2].partition(b"\n")

    def case(rng: Random) -> None:
        for path in use.where.rglob("*"):
            if path.is_file():
                path.unlink()
        for path, data in files.items():
            path.write_bytes(data)
        if rng.random() < 0.7:
            entry.unlink()
            text = json_text(mutated(rng, json.loads(header)))
            body = text + b"\n" + portable
            entry.write_bytes(sha256(body).hexdigest().encode() + b"\n" + body)
        else:
            name = rng.choice(sorted(files))
            name.write_bytes(mutated_bytes(rng, files[name]))
        look()

    def look() -> bool:
        cache_folder(use)
        status(use.where)
        found = Cells(use, lambda text: None).fetch(config, plan, cell, out)
        data = [path.read_bytes() for path in paths]
        if found is not None and data != wanted:
            raise WrongResultError("the cache gave other bytes")
        status(use.where)
        clean_up(use.where, max_bytes=1 << 20)
        return found is not None

    if not look():
        raise WrongResultError("the cache does not have what was kept")
    yield case


def printable(text: str) -> None:
    """Refuses characters that a terminal would interpret."""
    if not all(line.isprintable() for line in text.split("\n")):
        raise WrongResultError(f"control characters: {text!r}")


def read_checkpoint(folder: Path) -> float:
    """Opens a checkpoint and reads every tensor; returns their sum."""
    checkpoint = Checkpoint.open(folder)
    checkpoint.digests()
    for name, form in checkpoint.forms.items():
        if form == "int4":
            checkpoint.quantized(name)
    with np.errstate(all="ignore"):
        return sum(
            float(np.sum(checkpoint.tensor(name), dtype=np.float64)) for name in expected_tensors(checkpoint.config)
        )


def _checkpoint(folder: Path) -> Path:
    fields = tiny_fields(**SMALL)
    return write_tiny(folder, fields, tiny_weights(fields))


def _places(data: bytes, ending: str) -> list[int]:
    """Starts of the tensors whose names have this ending in a safetensors file, counted from the end of its header."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [info["data_offsets"][0] for name, info in header.items() if name.endswith(ending)]
