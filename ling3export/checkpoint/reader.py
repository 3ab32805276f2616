"""A published checkpoint, opened strictly: exactly the tensors that its config implies, each in the shard of the index.

Opening reads config, index and the headers of the shards; weights stay on disk and are mapped on use.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ling3export.artifacts.parameters import PLAIN, WEIGHTS
from ling3export.artifacts.schema import SourceFile
from ling3export.checkpoint.forms import FP8, INT4, SHAPE, Form, check_quantization, forms_of, unpacked
from ling3export.checkpoint.shard import SafetensorsFile
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import CheckpointError, listed
from ling3export.foundation.reading import read_bytes
from ling3export.foundation.strict_json import LARGEST, DoubledKeyError, parse_json
from ling3export.model.config import Config, parsed, read_config, refuse_gguf
from ling3export.model.parameters import TensorInfo, expected_tensors, is_mtp
from ling3export.model.quantization import quantization

__all__ = ["Checkpoint", "TensorInfo", "expected_tensors", "is_mtp"]

INDEX = "model.safetensors.index.json"
LARGEST_INDEX = 32 << 20  # bytes, at about 100 a tensor
SINGLE = "model.safetensors"
# The files that a runner reads, and the most bytes of each.
TOKENIZER_FILES = {
    "tokenizer.json": 64 << 20,
    "tokenizer_config.json": LARGEST,
    "chat_template.jinja": 1 << 20,
    "generation_config.json": LARGEST,
}


class Checkpoint:
    """An opened checkpoint: its config, and each of the model's tensors by its published name.

    Made by ``open``. The MTP layers are skipped: their tensors are neither required nor readable.
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        whole: dict[str, bytes],
        shards: dict[str, SafetensorsFile],
        homes: dict[str, SafetensorsFile],
        forms: dict[str, Form],
    ) -> None:
        self.path = path
        self.config = config
        self._whole = {name: hashlib.sha256(data).hexdigest() for name, data in whole.items()}
        self._shards = shards
        self._homes = homes
        self._forms = forms

    @classmethod
    def open(cls, path: str | Path, *, ignore: Iterable[str] = ()) -> "Checkpoint":
        """Opens a folder and checks everything that can be checked without reading weights.

        Args:
            path: The folder: config.json, model*.safetensors with their index, or one model.safetensors.
            ignore: Unknown config fields to accept.

        Raises:
            ConfigError: config.json is not one that we model.
            CheckpointError: a file is absent or damaged; a tensor is missing, unknown, doubled, of another shape or
                dtype, or not where the index says; a ``weight_shape`` of INT4 says another shape.
        """
        folder = Path(path)
        refuse_gguf(folder)
        if not folder.is_dir():
            raise CheckpointError(f"checkpoint `{folder}`: expected a folder, found {_what_is(folder)}")
        whole = {"config.json": read_config(folder / "config.json")}
        where = str(folder / "config.json")
        fields = parsed(whole["config.json"], where)
        config = Config.from_dict(fields, ignore=ignore, where=where)
        if (index := _read(folder, INDEX, LARGEST_INDEX, f"index `{INDEX}`")) is not None:
            whole[INDEX] = index
        weight_map = None if index is None else _weight_map(index, folder)
        shards = {name: SafetensorsFile(folder / name) for name in _shard_names(folder, weight_map)}
        homes = _locate(shards, weight_map)
        weights = expected_tensors(config)
        forms = forms_of(weights, homes)
        expected: dict[str, TensorInfo] = {}
        for name, info in weights.items():
            expected |= forms[name].parts(name, info) if name in forms else {name: info}
        _check_names(homes, expected, config, folder)
        for name, info in expected.items():
            _check_tensor(name, info, homes[name])
        for name, form in forms.items():
            if form is INT4:
                _check_shape_tensor(name + SHAPE, weights[name].shape, homes[name + SHAPE])
        check_quantization(quantization(fields, where), forms, weights, where)
        return cls(folder, config, whole, shards, {name: homes[name] for name in expected}, forms)

    @property
    def forms(self) -> Mapping[str, str]:
        """The form of each quantized weight, ``fp8`` or ``int4``, by its published name."""
        return {name: form.name for name, form in self._forms.items()}

    @property
    def form(self) -> str | None:
        """The one form of all quantized weights; None if there are none."""
        return next(iter(self.forms.values()), None)

    def tensor(self, name: str) -> NDArray[Any]:
        """A tensor in torch's order and shape, exactly.

        Returns:
            A read-only view of its mapped shard, bfloat16 or float32. Quantized weights are decoded: FP8 to bfloat16,
            INT4 to float32.

        Raises:
            CheckpointError: the model has no tensor of that name; a quantized weight has NaN, or a number beyond
                bfloat16.
        """
        form = self._forms.get(name)
        if form is None:
            return self._read(name)
        if form is INT4:
            codes, scales = self._packed(name)
        else:
            codes, scales = self._read(name), self._read(name + form.scales)
        bits = form.decoded(codes, scales)
        if (none := form.is_none(bits)).any():
            row, column = (int(index) for index in np.unravel_index(none.argmax(), none.shape))
            scale = scales[row // form.block[0], column // form.block[1]]
            raise CheckpointError(
                f"tensor `{name}`: expected numbers that {'bfloat16' if form is FP8 else 'float32'} holds, found the "
                f"code {codes[row, column]:#x} under the scale {scale:#x}, at {[row, column]}, in "
                f"{self._file(name + form.codes)}"
            )
        return bits.view(BY_NAME["bfloat16" if form is FP8 else "float32"].numpy)

    def quantized(self, name: str) -> tuple[NDArray[np.int8], NDArray[Any]]:
        """An INT4 weight ``[out, in]`` as it is stored: w = q · scale.

        Returns:
            (q, int8 ``[out, in]`` in -8 … 7; scale, bfloat16 ``[out, in / 32]``, one for 32 neighbouring inputs.)

        Raises:
            CheckpointError: it has another form; a scale is not finite.
        """
        if self._forms.get(name) is not INT4:
            raise CheckpointError(f"tensor `{name}`: expected int4, found {self.forms.get(name, 'bf16')}")
        codes, scales = self._packed(name)
        if (none := (scales & 0x7F80) == 0x7F80).any():
            at = [int(index) for index in np.unravel_index(none.argmax(), none.shape)]
            tensor = name + INT4.scales
            bits = f"the bits {scales[*at]:#x}, at {at}, in {self._file(tensor)}"
            raise CheckpointError(f"tensor `{tensor}`: expected finite scales, found {bits}")
        return codes.view(np.int8) - np.int8(8), scales.view(BY_NAME["bfloat16"].numpy)

    def stored(self, name: str) -> tuple[NDArray[np.int8], NDArray[Any]] | None:
        """:meth:`quantized` of a weight in INT4; None of any other."""
        return self.quantized(name) if self._forms.get(name) is INT4 else None

    def _packed(self, name: str) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:  # codes, the bits of the scales
        return unpacked(self._read(name + INT4.codes)), self._read(name + INT4.scales).view(np.uint16)

    def _file(self, name: str) -> Path:
        return self._homes[name].path

    def _read(self, name: str) -> NDArray[Any]:
        if name not in self._homes:
            raise CheckpointError(f"tensor `{name}`: the model has no such tensor; it is in {self.path}")
        return self._homes[name].tensor(name)

    def check_rounding(self, dtype: str, allow: bool, weights: str = PLAIN) -> None:
        """Passes if an artifact of ``dtype`` keeps the checkpoint's numbers, or ``allow`` permits rounding them.

        Args:
            allow: Whether any numbers may be rounded.
            weights: The artifact's forms, a key of WEIGHTS; weights that are quantized there may be rounded.

        Raises:
            CheckpointError: INT4 weights would be rounded: their numbers have up to 11 significant bits. Or the experts
                are to stay as stored, and only some of them are INT4.
        """
        experts = [name for name in expected_tensors(self.config) if ".mlp.experts." in name]
        plain = [name for name in experts if name not in self._forms]
        if weights == "int4-experts" and 0 < len(plain) < len(experts) and not allow:
            raise CheckpointError(
                f"checkpoint `{self.path.name}`: expected all experts in int4, to be stored as they are, found "
                f"{len(plain)} weights of {len(experts)} in bf16 ({listed([f'`{name}`' for name in plain], 1)}), in "
                f"{self.path}",
                "--allow-rounding rounds them to int4, build --weights bf16 --dtype float32 keeps all numbers",
            )
        routed, other = (form == PLAIN for form in (WEIGHTS[weights].experts, WEIGHTS[weights].others))
        rounded = [
            name
            for name, form in self._forms.items()
            if form is INT4 and (routed if ".mlp.experts." in name else other)
        ]
        if rounded and dtype != "float32" and not allow:
            keeping = (
                "build --weights as-stored or build --dtype float32 keep"
                if routed
                else "build --weights bf16 --dtype float32 keeps"
            )
            raise CheckpointError(
                f"checkpoint `{self.path.name}`: expected numbers that {dtype} holds, found {len(rounded)} weights in "
                f"int4 ({listed([f'`{name}`' for name in rounded], 1)}), in {self.path}",
                f"{keeping} their numbers, --allow-rounding rounds them to {dtype}",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the model needs, without MTP."""
        entries = (shard.entries[name] for name, shard in self._homes.items())
        return sum(entry.stop - entry.start for entry in entries)

    def tokenizer_files(self) -> dict[str, bytes]:
        """The files of TOKENIZER_FILES that exist, by name.

        Raises:
            CheckpointError: One is too long, no regular file, or a link that leads out of the checkpoint.
        """
        files = {
            name: _read(self.path, name, largest, f"tokenizer file `{name}`")
            for name, largest in TOKENIZER_FILES.items()
        }
        return {name: data for name, data in files.items() if data is not None}

    def digests(self) -> dict[str, SourceFile]:
        """The identity of the source, by file name: sha256 of config and index, size and header's sha256 of shards."""
        digests = {name: SourceFile(sha256=digest) for name, digest in self._whole.items()}
        for name, shard in self._shards.items():
            digests[name] = SourceFile(shard.nbytes, header_sha256=shard.header_sha256)
        return digests


def _what_is(path: Path) -> str:
    return "a file" if path.exists() else "nothing"


def _read(folder: Path, name: str, largest: int, what: str) -> bytes | None:
    if not os.path.lexists(folder / name):
        return None
    try:
        return read_bytes(folder, name, largest, links=True)
    except OSError as error:
        raise CheckpointError(
            f"{what}: expected a readable file of at most {largest:,} bytes, found {error.strerror}, in {folder}"
        ) from None


def _weight_map(data: bytes, folder: Path) -> dict[str, str]:
    def broken(expected: str, actual: str) -> CheckpointError:
        return CheckpointError(f"index `{INDEX}`: expected {expected}, found {actual}, in {folder}")

    try:
        index = parse_json(data, LARGEST_INDEX)
    except DoubledKeyError as error:
        raise broken(f"`{error.key}` once", "it twice") from None
    except ValueError as error:
        raise broken("readable JSON", str(error)) from None
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise broken("an object with a `weight_map`", json.dumps(index)[:60])
    if not isinstance(index.get("metadata", {}), dict):
        raise broken("`metadata` to be an object", json.dumps(index["metadata"])[:60])
    weight_map: dict[str, str] = index["weight_map"]
    for name, shard in weight_map.items():
        named = isinstance(shard, str) and shard.isprintable() and shard.endswith(".safetensors")
        if not named or "/" in shard or "\\" in shard:
            raise broken(f"a .safetensors file of the same folder for `{name}`", json.dumps(shard))
    return weight_map


def _shard_names(folder: Path, weight_map: dict[str, str] | None) -> list[str]:
    """The shards that the index names; there may be no other model*.safetensors."""
    present = sorted(path.name for path in folder.glob("model*.safetensors"))
    if weight_map is None:
        if present == [SINGLE]:
            return present
        expected = f"{INDEX}, or {SINGLE} alone"
        raise CheckpointError(f"checkpoint `{folder}`: expected {expected}, found {listed(present) or 'neither'}")
    named = sorted(set(weight_map.values()))
    for shard in named:
        if not os.path.lexists(folder / shard):
            missing = [name for name, home in weight_map.items() if home == shard]
            raise CheckpointError(
                f"shard `{shard}`: the file with {len(missing)} tensors ({listed(missing, 1)}) is missing, in {folder}",
                "download the checkpoint again, all files",
            )
    if unknown := [name for name in present if name not in named]:
        raise CheckpointError(f"shard `{unknown[0]}`: expected in {INDEX}, found no entry for it, in {folder}")
    return named


def _locate(shards: dict[str, SafetensorsFile], weight_map: dict[str, str] | None) -> dict[str, SafetensorsFile]:
    """The shard of each tensor, compared with the index; each tensor must exist once."""
    homes: dict[str, SafetensorsFile] = {}
    for file, shard in shards.items():
        for name in shard.entries:
            if name in homes:
                raise CheckpointError(
                    f"tensor `{name}`: expected once, found twice, in {homes[name].path.name} and {file}"
                )
            homes[name] = shard
    for name, file in (weight_map or {}).items():
        if name not in homes:
            raise CheckpointError(f"tensor `{name}`: expected in {file}, as {INDEX} says, found in no shard")
        if homes[name].path.name != file:
            actual = homes[name].path.name
            raise CheckpointError(f"tensor `{name}`: expected in {file}, as {INDEX} says, found in {actual}")
    if weight_map is not None and (unknown := [name for name in homes if name not in weight_map]):
        file = homes[unknown[0]].path.name
        raise CheckpointError(f"{_tensors(unknown)}: expected in {INDEX}, found only in {file}")
    return homes


def _tensors(names: list[str]) -> str:
    return f"tensor{'s' if len(names) > 1 else ''} {listed([f'`{name}`' for name in names])}"


def _check_names(
    homes: dict[str, SafetensorsFile], expected: dict[str, TensorInfo], config: Config, folder: Path
) -> None:
    missing = [name for name in expected if name not in homes]
    extra = [name for name in homes if name not in expected and not is_mtp(name, config)]
    # A renamed tensor is both missing and extra: the hint names the extra one.
    if missing:
        hint = f"not in the model: {listed(extra)}" if extra else None
        info = expected[missing[0]]
        form = f", {info.dtypes[0]} {list(info.shape)}" if len(missing) == 1 else ""
        raise CheckpointError(f"{_tensors(missing)}{form}: missing in {folder}", hint)
    if extra:
        where = homes[extra[0]].path.name
        raise CheckpointError(f"{_tensors(extra)}: expected no such tensor, found in {where}, in {folder}")


def _check_tensor(name: str, info: TensorInfo, home: SafetensorsFile) -> None:
    entry = home.entries[name]
    if entry.shape != info.shape:
        raise CheckpointError(
            f"tensor `{name}`: expected shape {list(info.shape)}, found {list(entry.shape)}, in {home.path.name}"
        )
    if entry.dtype not in info.dtypes:
        expected = " or ".join(info.dtypes)
        hint = f"FP8 has its scales in `{name}{FP8.scales}`" if entry.dtype == "F8_E4M3" else None
        raise CheckpointError(
            f"tensor `{name}`: expected dtype {expected}, found {entry.dtype}, in {home.path.name}", hint
        )


def _check_shape_tensor(name: str, shape: tuple[int, ...], home: SafetensorsFile) -> None:
    if (stored := home.scattered(name).tolist()) != list(shape):
        raise CheckpointError(f"tensor `{name}`: expected {list(shape)}, found {stored}, in {home.path}")
