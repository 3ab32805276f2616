"""A finished run as a log that inspect's viewer and tools read (JSON, schema version 2)."""

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ling3export.runners.evals.folder import PREDICTIONS, TASKS, Prediction, read_predictions, read_run, read_tasks
from ling3export.runners.evals.tasks import prompt_of
from ling3export.runners.evals.trials import EvalError

SCORER = "ling3"
STOPS = {"eos": "stop", "stop": "stop", "length": "max_tokens"}


def inspect_log(folder: Path) -> dict[str, Any]:
    """The log of a finished run: one sample for each trial (epochs count from 1), one score for each sample.

    Args:
        folder: The run's folder.

    Raises:
        EvalError: The run is not finished, or damaged.
    """
    records, run = read_predictions(folder), read_run(folder)
    tasks = read_tasks(folder)
    if missing := [record.task_id for record in records if record.task_id not in tasks]:
        raise EvalError(f"run `{folder.name}`: expected the task `{missing[0]}`, found none, in {folder / TASKS}")
    when = datetime.fromtimestamp((folder / PREDICTIONS).stat().st_mtime, UTC).isoformat()
    model = f"ling3/{run.environment.get('target', 'model')}"
    config = run.config
    generate = {name: config[name] for name in ("max_tokens", "temperature", "top_p", "seed")}
    generate |= {"stop_seqs": config["stop"]} if config["stop"] else {}
    samples = [_sample(record, tasks[record.task_id], model) for record in records]
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": run.sha256[:22],
            "run_id": run.sha256[22:44],
            "created": when,
            "task": run.suite["name"],
            "task_id": run.sha256[44:],
            "dataset": {"name": run.suite["name"], "samples": len(tasks), "sample_ids": list(tasks), "shuffled": False},
            "model": model,
            "model_generate_config": generate,
            "config": {"epochs": config["trials"]},
            "metadata": {"environment": run.environment, "config": config, "suite": run.suite},
        },
        "plan": {"name": "plan", "steps": [{"solver": "generate", "params": {}}], "config": generate},
        "results": _results(records),
        "stats": {"started_at": when, "completed_at": when, "model_usage": {model: _usage(records)}},
        "samples": samples,
    }


def _results(records: Sequence[Prediction]) -> dict[str, Any]:
    scored = [record.passed for record in records if record.passed is not None]
    accuracy = {"name": "accuracy", "value": sum(scored) / len(scored), "params": {}} if scored else None
    score = {
        "name": SCORER,
        "scorer": SCORER,
        "scored_samples": len(scored),
        "unscored_samples": len(records) - len(scored),
        "params": {},
        "metrics": {"accuracy": accuracy} if accuracy else {},
    }
    return {"total_samples": len(records), "completed_samples": len(scored), "scores": [score]}


def _sample(record: Prediction, task: dict[str, Any], model: str) -> dict[str, Any]:
    shown = prompt_of(task["input"])
    if isinstance(shown, list) and not all(isinstance(item, dict) for item in shown):
        shown = json.dumps(shown)  # token ids
    messages = shown if isinstance(shown, list) else [{"role": "user", "content": shown}]
    said = {"role": "assistant", "content": record.text, "source": "generate", "model": model}
    sample: dict[str, Any] = {
        "id": record.task_id,
        "epoch": record.trial + 1,
        "input": shown,
        "target": record.target,
        "messages": [*messages, said],
        "output": {
            "model": model,
            "completion": record.text,
            "usage": _usage([record]),
            "choices": [{"message": said, "stop_reason": STOPS.get(record.stop_reason, "unknown")}],
        },
        "scores": {},
        "metadata": {"category": task.get("category"), "prompt_sha256": record.prompt_sha256},
        "uuid": hashlib.sha256(f"{record.task_id}|{record.trial}".encode()).hexdigest()[:22],
    }
    if task.get("choices"):
        sample["choices"] = task["choices"]
    errors = [_error(attempt) for attempt in (record.infra or {"attempts": []})["attempts"]]
    if record.passed is None:
        sample["error"] = errors.pop()
    else:
        sample["scores"][SCORER] = {"value": "C" if record.passed else "I", "answer": record.answer}
    if errors:
        sample["error_retries"] = errors
    return sample


def _error(attempt: dict[str, str]) -> dict[str, str]:
    message = f"{attempt['kind']}: {attempt['message']}"
    return {"message": message, "traceback": message, "traceback_ansi": message}


def _usage(records: Sequence[Prediction]) -> dict[str, int]:
    taken, given = sum(record.n_prompt or 0 for record in records), sum(record.n_output for record in records)
    return {"input_tokens": taken, "output_tokens": given, "total_tokens": taken + given}
