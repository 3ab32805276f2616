"""Weights alias the mapped file, state has memory of its own, and neither compiles anything."""

import json

from tests.support.builds import python

SCRIPT = """
import gc, json, sys
from ling3export.machine.environment import prepare_cpu
prepare_cpu(4)
import jax, ml_dtypes, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from ling3export.runners.load.fresh import fresh_zeros
from ling3export.runners.load.model_runner import device_array
from ling3export.machine.pjrt import CompileCounter

def anonymous():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) * 1024

def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]

mesh = Mesh(np.array(jax.devices()), ("tp",), axis_types=(AxisType.Auto,))
split, everywhere = NamedSharding(mesh, P("tp")), NamedSharding(mesh, P())
path, rows = sys.argv[1], 8
np.random.default_rng(0).integers(0, 100, 32 << 20, np.uint8).tofile(path)
memory = np.memmap(path, np.uint8, "r")
view = memory.view(ml_dtypes.bfloat16).reshape(rows, -1)
jax.device_put(np.zeros(1), jax.devices()[0])
events, before, result = CompileCounter(), anonymous(), {}

weight, replica = device_array(view, split), device_array(view, everywhere)
base, part = view.ctypes.data, view.nbytes // 4
result["split"] = [pointer - base for pointer in pointers(weight)] == [0, part, 2 * part, 3 * part]
result["replicated"] = [pointer - base for pointer in pointers(replica)] == [0] * 4
result["little_memory"] = anonymous() - before < 4 << 20
odd = device_array(memory[8 : 8 + (1 << 20)], split)
result["unaligned_is_copied"] = pointers(odd)[0] != memory.ctypes.data + 8
expected = np.array(view[5, :9].view(np.uint16))
del memory, view
gc.collect()
result["kept_alive"] = bool((np.asarray(weight)[5, :9].view(np.uint16) == expected).all())

zeros = [fresh_zeros((4, 5, 7), "float32", split), fresh_zeros((3,), "int32", everywhere),
         fresh_zeros((), "bfloat16", everywhere), fresh_zeros((4, 0), "float32", split)]
result["zeros"] = all(not np.asarray(z, np.float32).any() for z in zeros)
result["shapes"] = [[list(z.shape), z.dtype.name, list(z.sharding.spec)] for z in zeros]
result["compiles"] = events.count + events.traces
many = [fresh_zeros((4, 1000), "float32", split) for _ in range(9)]
add = jax.jit(lambda arrays: [a + 1 for a in arrays], donate_argnums=0)
before = [pointers(a) for a in many]
result["donated"] = [pointers(a) for a in add(many)] == before
print(json.dumps(result))
"""


def test_weights_alias_and_zeros_can_be_donated(tmp_path):
    done = python("-W", "error", "-c", SCRIPT, tmp_path / "weights")
    assert done.stderr == ""
    assert json.loads(done.stdout) == {
        "split": True,
        "replicated": True,
        "little_memory": True,
        "unaligned_is_copied": True,
        "kept_alive": True,
        "zeros": True,
        "shapes": [
            [[4, 5, 7], "float32", ["tp"]],
            [[3], "int32", []],
            [[], "bfloat16", []],
            [[4, 0], "float32", ["tp"]],
        ],
        "compiles": 0,
        "donated": True,
    }
