"""The loaded programs, the parameters and the state on devices: runs one step at a time, knows no requests."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ling3export.runners.load.arrays import device_weight, fresh_zeros

if TYPE_CHECKING:
    Program = Callable[..., list[jax.Array]]


class Device:
    """A target that is ready to run: the ``Backend`` of the scheduler.

    State goes through every call and is donated, so the pools exist once.

    Args:
        target: The manifest's record.
        programs: By cell.
        params: By name of the argument.
        state: By name.
        mesh: The devices.
        parts: Of several hosts: what each passes to its call, on host 0 (``Channel.parts``).
    """

    def __init__(
        self, target: dict[str, Any], programs: "Mapping[str, Program]", params: Mapping[str, jax.Array],
        state: dict[str, jax.Array], mesh: Mesh, parts: "Callable[[bytes], list[bytes]] | None" = None,
    ) -> None:  # fmt: skip
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self.state = state
        self._parts = parts
        self.cells = {name: _Cell(cell, programs[name], params) for name, cell in target["cells"].items()}

    def step(self, phase: str, padding: int, fields: Mapping[str, np.ndarray]) -> jax.Array:
        """Runs ``prefill`` or ``decode``.

        Args:
            phase: Which.
            padding: Token slots or sequences.
            fields: Every field of the step contract, by name.

        Returns:
            Logits, fp32 ``[rows, vocab]``, still being computed.
        """
        return self._run(f"{phase}@{padding}", fields, {})["logits"]

    def score(self, padding: int, fields: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Runs ``score``.

        Args:
            padding: Token slots.
            fields: Every field of the step contract, by name.

        Returns:
            ``logits`` as of ``prefill``; ``logprob`` fp32 and ``best`` int32 ``[padding]``; still being computed.
        """
        out = self._run(f"score@{padding}", fields, {})
        for name in ("logprob", "best"):
            out[name].copy_to_host_async()
        return out

    def sample(self, logits: jax.Array, rows: int, fields: Mapping[str, np.ndarray]) -> jax.Array:
        """Tokens, int32 ``[rows]``, still being computed; also written to the state."""
        token = self._run(f"sample@{rows}", fields, {"logits": logits})["token"]
        token.copy_to_host_async()
        return token

    def read(self, handle: jax.Array) -> np.ndarray:
        """Waits for an array, and fetches it. What lies on several hosts is whole on host 0, else this host's part."""
        if handle.is_fully_addressable or handle.is_fully_replicated or self._parts is None:
            return np.asarray(handle)
        return _assembled(handle, self._parts)

    def wait(self, handle: jax.Array) -> None:
        """Waits until an array is computed."""
        handle.block_until_ready()

    def _run(self, name: str, fields: Mapping[str, np.ndarray], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        cell = self.cells[name]
        batch["packed"] = device_weight(cell.pack(fields), self._replicated)
        arguments = [self.state[key] for key in cell.state_in]
        outputs = cell.program(*cell.params, *arguments, *(batch[key] for key in cell.batch_in))
        count = len(cell.state_out)
        self.state.update(zip(cell.state_out, outputs[:count], strict=True))
        return dict(zip(cell.out, outputs[count:], strict=True))


class _Cell:
    """A program and what its flat inputs and outputs are."""

    def __init__(self, record: dict[str, Any], program: "Program", params: Mapping[str, jax.Array]) -> None:
        self.program = program
        self.record = record
        groups: dict[str, list[str]] = {"params": [], "state": [], "batch": []}
        for row in record["inputs"]:
            groups[row["group"]].append(row["name"])
        self.params = [params[name] for name in groups["params"]]
        self.state_in, self.batch_in = groups["state"], groups["batch"]
        self.state_out = [row["name"] for row in record["outputs"] if row["group"] == "state"]
        self.out = [row["name"] for row in record["outputs"] if row["group"] == "out"]

    def pack(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """All fields in one int32 vector, floats bit-cast.

        Raises:
            ValueError: A field is missing, unknown, or of another shape or dtype.
        """
        rows = self.record["fields"]
        if len(fields) != len(rows):
            raise ValueError(f"fields: expected {sorted(row['name'] for row in rows)}, found {sorted(fields)}")
        packed = np.zeros(self.record["packed"], np.int32)
        for row in rows:
            value = fields[row["name"]]
            if list(value.shape) != row["shape"] or value.dtype.name != row["dtype"]:
                raise ValueError(
                    f"field `{row['name']}`: expected {row['dtype']} {row['shape']}, "
                    f"found {value.dtype} {list(value.shape)}"
                )
            packed[row["offset"] : row["offset"] + value.size] = value.reshape(-1).view(np.int32)
        return packed


def _assembled(handle: jax.Array, parts: "Callable[[bytes], list[bytes]]") -> np.ndarray:
    """An array that is split over hosts, each of which calls this for the same one."""
    whole = np.zeros(handle.shape, handle.dtype)
    held: dict[int, list[tuple[slice, ...]]] = {}  # by host: what its devices hold, in the mesh's order
    device: Any  # jax names no type for it
    for device, index in handle.sharding.devices_indices_map(handle.shape).items():
        assert index is not None
        held.setdefault(device.process_index, []).append(index)
    own = {shard.index: np.asarray(shard.data) for shard in handle.addressable_shards}
    shards = [own[index] for index in held[jax.process_index()]]
    for index, shard in zip(held[jax.process_index()], shards, strict=True):
        whole[index] = shard
    for host, part in enumerate(parts(b"".join(shard.tobytes() for shard in shards))):
        at = 0
        for index in held[host]:
            target = whole[index]
            target[...] = np.frombuffer(part, handle.dtype, target.size, at).reshape(target.shape)
            at += target.nbytes
    return whole


def fresh_state(target: dict[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """Every state array, zero."""
    return {
        row["name"]: fresh_zeros(row["shape"], row["dtype"], NamedSharding(mesh, PartitionSpec(*row["spec"])))
        for row in target["state"]["arrays"]
    }
