"""From an artifact's path to programs, weights and state on devices: the ladder, and the order in which things load.

No program is deserialized before its digest and its verdict are known. Reading, digests and loading run in threads
during the import of jax. All digests are checked before the first step. By then either the programs of a first request
are loaded or all of them, as the caller chooses.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ling3export.artifacts.calibration import found_beside
from ling3export.artifacts.files import TRUST
from ling3export.artifacts.records import canonical, to_json
from ling3export.artifacts.schema import Manifest, Target
from ling3export.artifacts.signing import read_trusted
from ling3export.foundation.errors import ArtifactError, printable
from ling3export.machine.targets import choose_target, platforms_here, prepare
from ling3export.machine.verdict import CHECKS, JaxRuntime, enforce, judge, measuring
from ling3export.runners import stacks
from ling3export.runners.hosts.rendezvous import announced

if TYPE_CHECKING:
    import jax
    import numpy as np

    from ling3export.machine.pjrt import CompileCounter
    from ling3export.machine.verdict import Verdict
    from ling3export.runners.hosts.channel import Channel
    from ling3export.runners.hosts.hosts import Hosts
    from ling3export.runners.load.model_runner import ModelRunner
    from ling3export.runners.load.programs import Programs
    from ling3export.runners.load.recompile import Compiled

IMPORTING = threading.RLock()  # held while the import of jax changes what all threads see


def say(text: str) -> None:
    """Writes a line for the user to stderr. Never raises: the reader of stderr may have gone."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # ValueError: it was closed
            sys.stderr.write(f"{printable(text)}\n")  # one write: lines of several threads stay apart
            sys.stderr.flush()


@dataclass
class Timings:
    """Seconds that each stage of a start took; stages in threads overlap.

    Attributes:
        seconds: How long each stage took, by name: ``imports``, ``programs``, ``weights``, ``state``, ``first_step`` …
    """

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures a block; a stage that is entered again adds up."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


@dataclass
class Loaded:
    """An artifact that is ready to run.

    Attributes:
        target: Name of the target.
        runner: Programs, parameters and state, ready to run steps.
        verdicts: Whether each program fits this machine, by cell.
        compiles: Counts the programs that jax compiles from the start on; a prebuilt start leaves it at 0.
        weight_bytes: Bytes of the weights that this process maps and checks.
        channel: The connection to the other hosts; None where this one runs alone.
    """

    folder: Path
    manifest: Manifest
    target: str
    runner: "ModelRunner"
    programs: "Programs"
    verdicts: "dict[str, Verdict]"
    timings: Timings
    compiles: "CompileCounter"
    weight_bytes: int
    channel: "Channel | None" = None

    def read(self, array: "jax.Array") -> "np.ndarray":
        """Waits for an array, and fetches it. All of several hosts call this, and host 0 gets the whole array."""
        if self.channel is None:
            return self.runner.read(array)
        from ling3export.runners.load.sharded import whole_array

        return whole_array(array, self.channel.parts)

    @property
    def record(self) -> Target:
        return self.manifest.targets[self.target]


def load(
    artifact: str | Path,
    *,
    target: str | None = None,
    programs: str = "prebuilt-only",
    check: str = "all",
    report: Callable[[str], None] = say,
    manifest: Manifest | None = None,
    hosts: "Hosts | None" = None,
    agreed: dict[str, Any] | None = None,
    phases: Container[str] | None = None,
    early: bool = False,
) -> Loaded:
    """Loads an artifact.

    Args:
        target: Which target; None takes the only one that fits this machine.
        programs: ``prebuilt-only``, or ``allow-compile``: portable programs are compiled here where executables do not
            fit, and kept in the user's cache.
        check: ``all``; ``programs``: weights are used without checking their digests; ``copy``: weight files are read
            into memory of this process, so that writing into them later changes nothing, and that copy is checked.
        hosts: This process's place among several; every one of them calls this, and all return together.
        agreed: More settings that must be the same on all hosts, by name.
        manifest: Used instead of the folder's: a build measures what it has no manifest for yet.
        phases: Load the programs of these alone, and the weights and the state that they take; None for all.
        early: Return once the programs are there that a first request needs, while the others load (``Programs``).

    Raises:
        ArtifactError: The artifact is missing, damaged, or not for this machine under this policy.
        HostsError: The other hosts are not there in time, or load something else.
        Ling3Error: jax runs already in this process, with too few devices.
    """
    timings, channel, folder = Timings(), None, Path(artifact)
    signed: list[str] = []
    with timings.stage("manifest"), announced(hosts):
        if check not in CHECKS:
            raise ArtifactError(f"check: expected {' or '.join(CHECKS)}, found {check}")
        if manifest is None:
            manifest = read_trusted(folder, signed.append)
            if check == "programs" and os.environ.get(TRUST):
                raise ArtifactError(
                    f"--check: expected all or copy where keys are trusted, found {check}: a signature vouches for "
                    "weights by their digests alone"
                )
        if not manifest.has_weights:
            raise ArtifactError(
                f"artifact `{folder.name}`: expected weights, found programs alone, in {folder}",
                f"write them with: ling3export attach {folder} CHECKPOINT",
            )
        name = choose_target(manifest.targets, target, platforms_here(), 1 if hosts is None else hosts.count)
        prepare(manifest.targets[name])
    if hosts is not None:
        from ling3export.runners.hosts.channel import Channel

        report(f"host {hosts.number} of {hosts.count}: waiting for the others for at most {hosts.start_timeout:g} s")
        same = {
            "ling3export": metadata.version("ling3export"),
            "artifact": manifest.sha256,
            "target": name,
            **(agreed or {}),
        }
        with timings.stage("hosts"):
            channel = Channel(hosts, same)
        report(f"host {hosts.number}: all {hosts.count} hosts are there")
    # Loading a program is one core's work: more threads than cores only fight over memory (measured: 2 times slower).
    pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="ling3-load")
    try:
        with stacks.if_slow():
            loaded = _load(folder, manifest, name, channel, pool, timings, programs, check, report, phases, early)
        for text in signed:
            report(text)
        return loaded
    except BaseException as error:
        if channel is not None:
            channel.fail(str(error).partition("\nhint: ")[0])
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _load(
    folder: Path,
    manifest: Manifest,
    target: str,
    channel: "Channel | None",
    pool: ThreadPoolExecutor,
    timings: Timings,
    policy: str,
    check: str,
    report: Callable[[str], None],
    phases: Container[str] | None,
    early: bool,
) -> Loaded:
    """``load``, once the target is known and the other hosts are there."""

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        with timings.stage(stage):
            return work()

    record = manifest.targets[target]
    if phases is not None:
        record = _reduced(record, phases)
    checked: Future[None] | None = None
    with timings.stage("imports"), collector_off():
        from ling3export.artifacts.store import Store  # numpy comes with what is imported from here on
        from ling3export.runners.load import programs

        executables = programs.read_executables(folder, record, pool)
        host = 0 if channel is None else channel.hosts.number
        store, shards = Store(folder, manifest.weights.index, copied=check == "copy"), record.shards(host)
        if check == "programs":
            report("weights are not checked (--check programs)")
        else:
            checked = pool.submit(timed, "check", partial(store.check_many, shards))
        with no_plugin_search() if record.platform == "cpu" and "jax" not in sys.modules else nullcontext():
            import jax

        from ling3export.machine import pjrt
        from ling3export.runners.load import fresh, model_runner
    with timings.stage("backend"):
        if channel is not None:
            channel.join()
        jax.devices()
    compiles = pjrt.CompileCounter()
    mesh = pjrt.recorded_mesh(record.mesh)
    with timings.stage("programs"):
        verdicts = judge(record, JaxRuntime.here())
        compiled: dict[str, Compiled] = {}
        if recompile := enforce(verdicts, policy, target, str(folder)):
            from ling3export.runners.load.recompile import compile_here

            stacks.expect_slow()
            compiled = compile_here(folder, record, recompile, mesh, report)
        read = {file: future.result() for file, future in executables.items()}  # also what will not be used
        # The state first: where its zeros are written, that is the longest piece of work.
        source = fresh.state_source(read, record, mesh)
        zeroed = pool.submit(timed, "state", source)
        first = programs.first_needed(record) if early else None
        loading = programs.load_programs(read, record, verdicts, compiled, pool, first)
    with ExitStack() as failed:
        failed.callback(loading.close)
        with timings.stage("weights"):
            params = model_runner.parameter_arrays(store, record, mesh)
        with timings.stage("programs"):
            for cell in loading if first is None else first:
                loading[cell]
        state = zeroed.result()
        if checked is not None:
            checked.result()
        failed.pop_all()
    ready = model_runner.ModelRunner(record, loading, params, state, source, mesh)
    return Loaded(folder, manifest, target, ready, loading, verdicts, timings, compiles, store.nbytes(shards), channel)


def _reduced(target: Target, phases: Container[str]) -> Target:
    """A target with the cells of some phases, and what they take of its parameters and its state."""
    cells = {name: cell for name, cell in target.cells.items() if cell.phase in phases}
    taken = {(leaf.group, leaf.name) for cell in cells.values() for leaf in cell.inputs}
    parameters = tuple(entry for entry in target.parameters if ("params", entry.name) in taken)
    arrays = tuple(entry for entry in target.state.arrays if ("state", entry.name) in taken)
    program = target.state_program if arrays == target.state.arrays else None
    state = replace(target.state, arrays=arrays)
    return replace(target, cells=cells, parameters=parameters, state=state, state_program=program)


def calls_measured(
    folder: Path, manifest: Manifest, target: str, report: Callable[[str], None], channel: "Channel | None"
) -> dict[str, float]:
    """The measured seconds of each cell's call, where a calibration next to the artifact is of this target and machine.

    Several hosts decide alike: they use it where each of them has the same one.
    """
    measured, note = found_beside(folder, manifest, measuring)
    if measured is not None and (made := measured.target) != target:
        measured, note = None, f"calibration: not used: made for {made}, found {target}"
    if channel is not None:
        digest = sha256(b"" if measured is None else canonical(to_json(measured))).digest()
        if len({*channel.gather(digest)}) > 1:
            others = "expected the same beside the artifact of each host, found others"
            measured, note = None, f"calibration: not used: {others}"
    if note is not None:
        report(note)
    if measured is None:
        return {}
    report(f"prefill paddings are chosen by the calibration of {measured.made}")
    return {name: times.median for name, times in measured.cells.items()}


@contextmanager
def collector_off() -> Iterator[None]:
    """Turns the garbage collector off: a precaution while jax is imported next to threads that digest files.

    One start of many ended in a segmentation fault, where jaxlib 0.11.2 looked up a type that was being registered, in
    another thread than the main one (docs/log/hosts.md). Only a garbage collection can enter jaxlib from those threads.
    """
    with IMPORTING:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


@contextmanager
def no_plugin_search() -> Iterator[None]:
    """Lets this thread find no installed distributions within the block: importing jax would search all of them.

    jax looks for a ROCm plugin in the metadata of every distribution; an environment for builds and tests has hundreds
    (docs/log/start.md, 2026-11-23). Programs for the processor need no plugin.
    """
    with IMPORTING:
        distributions, mine = metadata.distributions, threading.get_ident()

        def others(**where: Any) -> Any:
            return () if threading.get_ident() == mine else distributions(**where)

        metadata.distributions = others
        try:
            yield
        finally:
            metadata.distributions = distributions
