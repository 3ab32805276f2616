"""Calls signatures of a SavedModel one after the other in a process of its own, passing the state on.

    python savedmodel_calls.py MODEL CALLS.json INPUTS.npz OUTPUTS.npz

CALLS.json is a list of signatures. INPUTS.npz holds ``state.NAME``, and ``N.NAME`` for each input of call N that is not
state; missing logits are taken from the call before. OUTPUTS.npz holds ``N.NAME``. Prints one JSON object.
"""

import json
import sys

import numpy as np
import tensorflow as tf


def main(model: str, calls: str, inputs: str, outputs: str) -> None:
    """Makes the calls in CALLS.json."""
    loaded = tf.saved_model.load(model)
    given = np.load(inputs)
    held = {name.removeprefix("state."): tf.constant(given[name]) for name in given.files if name.startswith("state.")}
    results = {}
    with open(calls) as file:
        names = json.load(file)
    for number, name in enumerate(names):
        signature = loaded.signatures[name]
        _, wanted = signature.structured_input_signature
        fields = {key.split(".", 1)[1]: given[key] for key in given.files if key.startswith(f"{number}.")}
        out = signature(**{key: tf.constant(fields[key]) if key in fields else held[key] for key in wanted})
        held.update(out)
        results |= {f"{number}.{key}": value.numpy() for key, value in out.items()}
    np.savez(outputs, **results)
    variables = loaded.variables if hasattr(loaded, "variables") else []
    tracked = {id(v): v for signature in loaded.signatures.values() for v in signature.variables} | {
        id(v): v for v in variables
    }
    sizes = [int(np.prod(v.shape)) * v.dtype.size for v in tracked.values()]
    print(json.dumps({"signatures": sorted(loaded.signatures), "variables": len(sizes), "bytes": sum(sizes)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
