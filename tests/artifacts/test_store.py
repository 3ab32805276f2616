"""The weight store: its bytes, its digests, and errors for damaged files and full disks."""

import errno
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors

from ling3export.artifacts import store_writer as writer_module
from ling3export.artifacts.parameters import Tensor
from ling3export.artifacts.records import WrongRecordError, from_json, to_json
from ling3export.artifacts.store import Store, StoreWriter
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import ArtifactError
from tests.support.limits import file_size_limit

BF16 = ml_dtypes.bfloat16
FILE = "weights/tiny.safetensors"
TINY = {"a": Tensor((2, 3), "bfloat16", 2), "n": Tensor((4,), "float32"), "b": Tensor((2, 4, 8), "float32", 2)}
TINY_HEADER = (
    b'{"__metadata__":{"format":"ling3"},'
    b'"b":{"dtype":"F32","shape":[2,4,8],"data_offsets":[0,256]},'
    b'"n":{"dtype":"F32","shape":[4],"data_offsets":[256,272]},'
    b'"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[272,284]}}'
)


def tiny(folder: Path) -> dict[str, Tensor]:
    """A store of three tensors: one in shards, written from transposed views, one unsplit, one of odd size."""
    with StoreWriter(folder, {FILE: TINY}) as writer:
        for shard in range(2):
            writer.write("a", np.arange(3 * shard, 3 * shard + 3).astype(BF16), shard=shard)
            writer.write("b", np.arange(32, dtype=np.float32).reshape(8, 4).T, shard=shard)
        writer.write("n", np.arange(4, dtype=np.float32), shard=None)
        return writer.finish()


def random_store(folder: Path) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """Two files of aligned and odd-sized tensors, and the expected content of each (BF16 as uint16)."""
    random = np.random.default_rng(0)
    files = {
        "one.safetensors": {
            "odd": Tensor((4, 7), "bfloat16", 4),
            "experts": Tensor((4, 3, 64, 32), "bfloat16", 4),
            "whole": Tensor((33, 16), "float32"),
        },
        "two.safetensors": {"ids": Tensor((5,), "int32"), "head": Tensor((4, 10, 32), "bfloat16", 4)},
    }
    arrays = {}
    with StoreWriter(folder, files) as writer:
        for name, tensor in [item for tensors in files.values() for item in tensors.items()]:
            kind = np.uint16 if tensor.dtype == "bfloat16" else np.int32
            array = arrays[name] = random.integers(0, 1 << 15, tensor.shape).astype(kind)
            value = array.view(BY_NAME[tensor.dtype].numpy)
            for shard in range(tensor.parts):
                writer.write(name, value[shard] if tensor.shards else value, shard=shard if tensor.shards else None)
        return writer.finish(), arrays


def test_golden_bytes(tmp_path: Path) -> None:
    index = tiny(tmp_path)
    transposed = np.arange(32, dtype="<f4").reshape(8, 4).T.tobytes()
    numbers = np.arange(4, dtype="<f4").tobytes()
    odd = bytes.fromhex("0000803f0040" + "40408040a040")
    assert (tmp_path / FILE).read_bytes() == (
        b"\xf8\x0f\0\0\0\0\0\0" + TINY_HEADER.ljust(4088) + transposed + transposed + numbers + odd
    )
    digest = [hashlib.sha256(data).hexdigest() for data in (transposed, numbers, odd[:6], odd[6:])]
    assert index == {
        "b": Tensor((2, 4, 8), "float32", 2, FILE, 4096, (digest[0], digest[0])),
        "n": Tensor((4,), "float32", 0, FILE, 4352, (digest[1],)),
        "a": Tensor((2, 3), "bfloat16", 2, FILE, 4368, (digest[2], digest[3])),
    }


def test_safetensors_reads_it(tmp_path: Path) -> None:
    index, arrays = random_store(tmp_path)
    for file in ("one.safetensors", "two.safetensors"):
        with safetensors.safe_open(tmp_path / file, "numpy") as opened:
            assert opened.metadata() == {"format": "ling3"}
            assert set(opened.keys()) == {name for name, entry in index.items() if entry.file == file}
            for name in opened.keys():
                value = opened.get_tensor(name)
                assert value.dtype == (BF16 if index[name].dtype == "BF16" else value.dtype)
                np.testing.assert_array_equal(value.view(arrays[name].dtype), arrays[name])


def test_views_are_mapped_aligned_and_read_only(tmp_path: Path) -> None:
    index, arrays = random_store(tmp_path)
    store = Store(tmp_path, index)
    assert sum(stored.nbytes for stored in index.values()) == sum(array.nbytes for array in arrays.values())
    for name, array in arrays.items():
        view = store.view(name)
        assert not view.flags.writeable
        assert view.flags.aligned
        np.testing.assert_array_equal(view.view(array.dtype), array)
    for name in ("experts", "whole", "head"):
        assert store.view(name).ctypes.data % 64 == 0
    assert store.view("experts")[1].ctypes.data % 64 == 0
    assert store.view("experts").dtype == BF16


@pytest.mark.parametrize("order", ["C", "F", "transposed", "strided", "reversed", "outer"])
def test_any_view_in_any_piece_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    monkeypatch.setattr(writer_module, "BLOCK", 96)
    monkeypatch.setattr(writer_module, "COPIED", 512)
    base = np.random.default_rng(1).integers(0, 1 << 16, (6, 90, 70), dtype=np.uint16)
    value = {
        "C": base,
        "F": np.asfortranarray(base),
        "transposed": base.transpose(0, 2, 1),
        "strided": base[:, ::3, 5:41],
        "reversed": base[::-1, :, ::-1],
        "outer": base.transpose(2, 0, 1),
    }[order]
    with StoreWriter(tmp_path, {"x": {"x": Tensor(value.shape, "bfloat16", 0)}}) as writer:
        offset = 0
        for piece in np.array_split(value, 4):
            writer.write("x", piece.view(BF16), shard=None, offset=offset)
            offset += piece.nbytes
        index = writer.finish()
    store = Store(tmp_path, index)
    np.testing.assert_array_equal(store.view("x").view(np.uint16), value)
    store.check_many([("x", 0, None)])


def test_shards_grow_side_by_side_in_threads(tmp_path: Path) -> None:
    value = np.random.default_rng(2).integers(0, 1 << 16, (8, 5, 3000), dtype=np.uint16)
    with StoreWriter(tmp_path, {"x": {"x": Tensor(value.shape, "bfloat16", 8)}}) as writer:

        def write(shard: int) -> None:
            for layer in range(5):
                writer.write("x", value[shard, layer], shard=shard, offset=layer * 6000)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(8)))
        index = writer.finish()
    store = Store(tmp_path, index)
    store.check_many([("x", 0, 3), ("x", 3, None)], threads=3)
    np.testing.assert_array_equal(store.view("x").view(np.uint16), value)


def piece(size: int, dtype: Any = BF16) -> np.ndarray:
    return np.zeros(size, dtype)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda w: w.write("c", piece(3), shard=0), "tensor `c`: expected one of the plan's, found an unknown name"),
        (lambda w: w.write("a", piece(3), shard=None), f"tensor `a`: expected a shard below 2, found None, in {FILE}"),
        (lambda w: w.write("a", piece(3), shard=2), f"tensor `a`: expected a shard below 2, found 2, in {FILE}"),
        (lambda w: w.write("n", piece(4, "f4"), shard=0), f"tensor `n`: expected no shard, found 0, in {FILE}"),
        (
            lambda w: w.write("n", piece(4, "f8"), shard=None),
            f"tensor `n`: expected dtype float32, found float64, in {FILE}",
        ),
        (
            lambda w: w.write("a", piece(1), shard=1, offset=2),
            f"tensor `a` shard 1: expected a piece at byte 0 of 6, found 2 bytes at 2, in {FILE}",
        ),
        (
            lambda w: w.write("a", piece(4), shard=1),
            f"tensor `a` shard 1: expected a piece at byte 0 of 6, found 8 bytes at 0, in {FILE}",
        ),
    ],
)
def test_misuse_is_named(tmp_path: Path, write: Callable[[StoreWriter], None], message: str) -> None:
    with StoreWriter(tmp_path, {FILE: TINY}) as writer, pytest.raises(ValueError) as caught:  # noqa: PT011
        write(writer)
    assert str(caught.value) == message
    assert not (tmp_path / FILE).exists()


def test_a_plan_with_a_doubled_name_or_a_wrong_axis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor `b`: expected one, found two, in y"):
        StoreWriter(tmp_path, {"x": TINY, "y": TINY})
    with pytest.raises(WrongRecordError, match=r"expected a leading axis of 4 shards, found \[2, 4\], at shape"):
        Tensor((2, 4), "float32", 4)
    with pytest.raises(WrongRecordError, match="expected no empty axis"):
        Tensor((0, 4), "float32")
    with pytest.raises(WrongRecordError, match=r'expected bfloat16 or float32 .*, found "float64"'):
        Tensor((4,), "float64")
    with pytest.raises(ArtifactError, match="expected a path below the artifact's folder"):
        StoreWriter(tmp_path, {"../x": TINY})
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_store_is_no_safetensors_file_and_finish_removes_it(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, {FILE: TINY})
    writer.write("n", piece(4, "f4"), shard=None)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(tmp_path / FILE, "numpy")
    with pytest.raises(ArtifactError) as caught:
        writer.finish()
    assert str(caught.value) == "weights: expected every tensor written, found parts missing of b, a"
    assert not (tmp_path / FILE).exists()


def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    index, _ = random_store(tmp_path)
    random = np.random.default_rng(3)
    for number in range(200):
        path = tmp_path / ("one.safetensors" if number % 2 else "two.safetensors")
        whole = path.read_bytes()
        header = 4096 if number % 4 < 2 else 0  # half of them in the header
        at = int(random.integers(0, 4096) if header else random.integers(4096, len(whole)))
        flipped = bytearray(whole)
        flipped[at] ^= int(random.integers(1, 256))
        path.write_bytes(flipped)
        with pytest.raises(ArtifactError, match=f"{path.name}"):
            Store(tmp_path, index).check_many([(name, 0, None) for name in index], threads=2)
        path.write_bytes(whole)
    Store(tmp_path, index).check_many([(name, 0, None) for name in index], threads=2)


def test_a_flip_outside_the_shards_in_use_is_not_looked_at(tmp_path: Path) -> None:
    index, _ = random_store(tmp_path)
    path, entry = tmp_path / "one.safetensors", index["experts"]
    data = bytearray(path.read_bytes())
    data[entry.offset + 2 * entry.shard_bytes] ^= 1
    path.write_bytes(data)
    store = Store(tmp_path, index)
    store.check_many([("experts", 0, 2), ("experts", 3, 4)])
    with pytest.raises(ArtifactError) as caught:
        store.check_many([("experts", 2, 3)])
    found = hashlib.sha256(store.view("experts")[2]).hexdigest()
    assert str(caught.value) == (
        f"tensor `experts` shard 2: expected sha256 {entry.sha256[2]}, found {found}, in {path}\n"
        "hint: copy the artifact again, or build it again"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), f"weight file `{FILE}`: expected a readable file, found No such file"),
        (lambda path: os.truncate(path, 4379), f"weight file `{FILE}`: expected 4,380 bytes, found 4,379"),
        (lambda path: os.truncate(path, 4381), f"weight file `{FILE}`: expected 4,380 bytes, found 4,381"),
        (lambda path: path.write_bytes(b" " * 4380), f"weight file `{FILE}`: its header is not what the manifest"),
    ],
)
def test_layout_is_checked_before_anything_is_mapped(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    index = tiny(tmp_path)
    Store(tmp_path, index).check_many([("a", 0, None)])
    change(tmp_path / FILE)
    for use in (lambda store: store.view("n"), lambda store: store.check_many([("a", 0, 1)])):
        with pytest.raises(ArtifactError, match=message):
            use(Store(tmp_path, index))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("shape", [2, -3], "expected a number from 0 to 9,007,199,254,740,992, found -3, at shape"),
        ("shape", [2, 0], "expected a number from 1 to 1,099,511,627,776, found 0, at shape"),
        ("offset", 4370, "tensor `a`: expected byte offset 4368, found 4370, in the index of"),
        ("file", "../x", 'expected a path below the artifact.s folder.*found "../x", at file'),
        ("sha256", None, "expected a list, found null, at sha256"),
    ],
)
def test_a_crafted_index_is_refused(tmp_path: Path, field: str, value: Any, message: str) -> None:
    """Wrong types, or contradictions with the files; test_manifest.py has contradictions within an index."""
    index = tiny(tmp_path)
    raw = to_json(index["a"]) | {field: value}
    with pytest.raises((ArtifactError, WrongRecordError), match=message):
        Store(tmp_path, index | {"a": from_json(Tensor, raw)}).view("n")
    del raw["shape"]
    with pytest.raises(WrongRecordError, match="expected the field shape, found none"):
        from_json(Tensor, raw)
    with pytest.raises(WrongRecordError, match="expected an object, found 3"):
        from_json(Tensor, 3)


def test_asking_for_what_is_not_there(tmp_path: Path) -> None:
    store = Store(tmp_path, tiny(tmp_path))
    with pytest.raises(ArtifactError, match="tensor `c`: expected it in the artifact, found no such weight"):
        store.view("c")
    with pytest.raises(ValueError, match="tensor `a`: expected shards within 0:2, found 1:3"):
        store.check_many([("a", 1, 3)])
    with pytest.raises(ValueError, match="tensor `n`: expected shards within 0:1, found 0:2"):
        store.check_many([("n", 0, 2)])


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(ArtifactError) as caught:
        tiny(tmp_path)
    assert caught.value.message.startswith(
        "write `tiny.safetensors`: expected room for 4,380 bytes, found a full disk ("
    )
    assert caught.value.message.endswith(f"bytes free), in {tmp_path / 'weights'}")
    assert caught.value.hint == "free some space or write to another volume"
    assert not (tmp_path / FILE).exists()


def test_a_volume_that_cannot_reserve_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    store = Store(tmp_path, tiny(tmp_path))
    store.check_many([("a", 0, None), ("b", 0, None), ("n", 0, None)])
    assert store.view("n").tolist() == [0, 1, 2, 3]


def test_a_file_size_limit_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with file_size_limit(65536), pytest.raises(ArtifactError) as caught:
        StoreWriter(tmp_path, {"x": {"x": Tensor((100000,), "float32", 0)}})
    assert str(caught.value) == (
        f"write `x`: expected room for 404,096 bytes, found a file-size limit of 65,536 bytes, in {tmp_path}\n"
        "hint: raise the limit (ulimit -f) or write to another volume"
    )
    assert list(tmp_path.iterdir()) == []
