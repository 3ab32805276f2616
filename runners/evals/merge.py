"""Shards of one run, put together into the folder that one run over the whole suite would have left."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ling3export.foundation.errors import listed
from ling3export.foundation.reading import read_bytes
from ling3export.foundation.shards import WHOLE, Shard, in_order
from ling3export.runners.evals.folder import (
    PREDICTIONS,
    TASKS,
    TRANSCRIPTS,
    Pair,
    Prediction,
    RunRecord,
    open_folder,
    read_predictions,
    read_run,
    read_tasks,
    tasks_digest,
)
from ling3export.runners.evals.run import concluded
from ling3export.runners.evals.statistics import Summary
from ling3export.runners.evals.tasks import TaskRecord
from ling3export.runners.evals.trials import EvalError

LARGEST = 1 << 30  # bytes of a transcript


def merge(folders: Sequence[Path], to: Path, *, force: bool = False) -> tuple[Summary, RunRecord]:
    """Puts all shards of one run together; nothing in their folders is changed.

    Args:
        folders: The folder of each shard, in any order.
        to: Gets the whole run. A merge that was broken off goes on.
        force: Begin anew, whatever run is in ``to``.

    Returns:
        The whole run's totals and its record.

    Raises:
        EvalError: They are not of one run, one is missing, unfinished, damaged or there twice, or ``to`` holds
            something else.
    """
    runs = [read_run(folder) for folder in folders]
    for run, folder in zip(runs, folders, strict=True):
        if run.sha256 != runs[0].sha256:
            differing = listed(run.differing(runs[0]))
            said = f"found other {differing} than in {folders[0]}, in {folder}"
            raise EvalError(f"eval merge: expected shards of one run, {said}")
    places = [(Shard.parse(run.shard), folder) for run, folder in zip(runs, folders, strict=True)]
    parts = in_order(places, "eval merge", EvalError)
    whole = replace(runs[0], shard=str(WHOLE), status="running", totals=None)
    if to.resolve() in [folder.resolve() for folder in folders]:
        raise EvalError(f"eval merge: expected another folder than those of shards, found {to}")
    tasks = read_tasks(parts[0])
    if tasks_digest(tasks) != whole.suite.tasks_sha256:
        raise EvalError(f"eval merge: expected the tasks of the run's record, found others, in {parts[0] / TASKS}")
    found: dict[Pair, tuple[Prediction, Path]] = {}
    for number, folder in enumerate(parts):
        run = replace(whole, shard=str(Shard(number, len(parts))))
        found |= {record.pair: (record, folder) for record in _records(folder, run, tasks)}
    with open_folder(to, whole, tasks, force=force) as merged:
        for pair in whole.trials(tasks):
            record, folder = found[pair]
            if pair not in merged.done:
                if whole.config.transcripts:
                    merged.keep_transcript(record.idx, record.trial, _transcript(folder, record))
                merged.add(record)
        summary = concluded(merged, whole, tasks)
    return summary, whole


def _records(folder: Path, run: RunRecord, tasks: Sequence[TaskRecord]) -> list[Prediction]:
    """The records of a shard, which are those of its trials, each once."""
    records, wanted = read_predictions(folder, run.shard), run.trials(tasks)
    found = {record.pair: (record.idx, record.prompt_sha256) for record in records}
    if found != wanted or len(records) != len(wanted):
        other = [record.label for record in records if wanted.get(record.pair) != found[record.pair]]
        said = f"found {len(records)} records, {listed(other) or 'none'} of another run, in {folder / PREDICTIONS}"
        raise EvalError(f"eval merge: expected the {len(wanted)} trials of shard {run.shard}, each once, {said}")
    return records


def _transcript(folder: Path, record: Prediction) -> bytes:
    name = f"{TRANSCRIPTS}/{record.idx}-{record.trial}.json"
    try:
        return read_bytes(folder, name, LARGEST)
    except OSError as error:
        raise EvalError(f"eval merge: expected {name}, found {error.strerror}, in {folder}") from error
