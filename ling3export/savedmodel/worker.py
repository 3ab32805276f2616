"""A process that writes one SavedModel: a job in, a message out for each signature, then the record."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import stablehlo

from ling3export.artifacts.records import from_json
from ling3export.artifacts.store import Store
from ling3export.foundation.processes import Parent
from ling3export.model.config import Config
from ling3export.model.geometry import Geometry
from ling3export.model.inputs import Field
from ling3export.model.parameters import parameters as weights
from ling3export.model.program import StepProgram, Tree, build_step, put
from ling3export.savedmodel.export import ExportJob

# TensorFlow itself: oneDNN changes what its kernels round, and its notes would hide an error.
SETTINGS = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}
# The StableHLO that TensorFlow 2.21 reads. jax writes for readers of the last four weeks, and has no setting for it.
READ = "1.13.0"


@contextmanager
def written_for(version: str) -> Iterator[None]:
    """Within the block jax writes StableHLO that readers of ``version`` understand, or fails.

    Raises:
        RuntimeError: jax did not call the function: TensorFlow might not be able to read the module.
    """
    name, requirements = "get_version_from_compatibility_requirement", []
    before = getattr(stablehlo, name)

    def answer(requirement: Any) -> str:
        requirements.append(requirement)
        return version

    setattr(stablehlo, name, answer)
    try:
        yield
    finally:
        setattr(stablehlo, name, before)
    if not requirements:
        raise RuntimeError(f"StableHLO version: expected jax {jax.__version__} to ask {name}, found that it did not")


def pack(batch: Tree, fields: tuple[Field, ...]) -> jax.Array:
    """The named fields of a call as the packed vector that a step takes."""
    parts = []
    for field in fields:
        value = batch[field.name].reshape(-1)
        parts.append(lax.bitcast_convert_type(value, jnp.int32) if field.dtype == "float32" else value)
    return jnp.concatenate(parts)


def signature_of(step: StepProgram) -> dict[str, jax.ShapeDtypeStruct]:
    """Inputs of a signature: state arrays, fields and, for ``sample``, logits, by name."""
    fields = {field.name: jax.ShapeDtypeStruct(field.shape, jnp.dtype(field.dtype)) for field in step.fields}
    rest = {name: value for name, value in step.arguments[2].items() if name != "packed"}
    return {**step.arguments[1], **fields, **rest}


def method_of(step: StepProgram, done: Any) -> Any:
    """``(params, inputs) -> outputs`` of one cell, both flat; ``done`` is called when it is traced."""

    def method(params: Tree, inputs: Tree) -> Tree:
        batch = {name: inputs[name] for name in step.arguments[2] if name != "packed"}
        state = {name: inputs[name] for name in step.arguments[1]}
        used = params if step.arguments[0] else {}
        state, out = step.call(used, state, {**batch, "packed": pack(inputs, step.fields)})
        done()
        return {**state, **out}

    return method


def parameters(config: Config, geometry: Geometry, store: Store) -> Tree:
    """All parameters, mapped where jax can."""
    tree: Tree = {}
    for parameter in weights(config, geometry):
        put(tree, parameter.path, jnp.asarray(parameter.of(store.view(parameter.tensor))))
    return tree


def described(values: Tree) -> dict[str, dict[str, Any]]:
    """Shape and dtype by name."""
    return {name: {"shape": list(value.shape), "dtype": str(value.dtype)} for name, value in values.items()}


def export(job: ExportJob, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Writes the SavedModel, and describes its signatures; ``tell`` gets a message for each."""
    import tensorflow as tf
    from orbax.export import ExportManager, JaxModule, ServingConfig

    methods, configs, signatures = {}, [], {}
    waiting = {cell.name for cell in job.cells}

    def traced(name: str) -> None:
        if name in waiting:  # a step may be traced more than once
            waiting.remove(name)
            tell({"signature": name})

    for cell in job.cells:
        step = build_step(job.config, job.geometry, cell.phase, cell.padding, None)
        inputs = signature_of(step)
        # A function's name becomes a node's, where TensorFlow allows no @.
        key = f"{cell.phase}_{cell.padding}"
        methods[key] = method_of(step, functools.partial(traced, cell.name))
        specs = {at: tf.TensorSpec(value.shape, str(value.dtype), name=at) for at, value in inputs.items()}
        configs.append(ServingConfig(cell.name, input_signature=[specs], method_key=key))
        outputs = jax.eval_shape(method_of(step, lambda: None), step.arguments[0], inputs)
        signatures[cell.name] = {"inputs": described(inputs), "outputs": described(outputs)}
    params = parameters(job.config, job.geometry, Store(job.folder, job.weights.index))
    module = JaxModule(params, methods, trainable=False)
    with written_for(READ):
        ExportManager(module, configs).save(str(job.model))
    state = build_step(job.config, job.geometry, "decode", job.cells[-1].padding, None).arguments[1]
    return {"signatures": signatures, "state": described(state)}


def main() -> None:
    """Runs one job."""
    os.environ.update(SETTINGS)
    parent = Parent()
    parent.send({"record": export(from_json(ExportJob, parent.receive()), parent.send)})
    os._exit(0)  # TensorFlow's own teardown has nothing left to do, and takes a second


if __name__ == "__main__":
    main()
