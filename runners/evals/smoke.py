"""The smoke test of the product: graders that look at counters and files only, never at what the model said."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ling3export.runners.evals.graders import GraderSpec, Verdict
from ling3export.runners.evals.objects import Outcome
from ling3export.runners.evals.tasks import Task

PARTIAL = "predictions.jsonl.partial"
SHORT, LONG = 5, 40  # tokens; any vocabulary has the ids


def product_state(
    before: dict[str, Any], after: dict[str, Any], folder: Path, records: int, output: int
) -> dict[str, Any]:
    """The state that a trial left behind.

    Args:
        before: The backend's counters before the trial.
        after: And after it.
        folder: Of the run.
        records: How many records the run has written so far.
        output: How many tokens came back.
    """
    files = {path.name: _file(path) for path in sorted(folder.iterdir()) if path.is_file()}
    return {"counters": after, "delta": delta(before, after), "files": files, "records": records, "output": output}


def delta(before: Any, after: Any) -> Any:
    """What counters grew by: of objects each field, of whole numbers the difference; the rest is left out."""
    if isinstance(after, dict):
        old = before if isinstance(before, dict) else {}
        grown = {name: delta(old.get(name), value) for name, value in after.items()}
        return {name: value for name, value in grown.items() if value is not None}
    if isinstance(after, int) and not isinstance(after, bool):
        return after - (before if isinstance(before, int) else 0)
    return None


def smoke_tasks() -> list[Task]:
    """The tasks of the suite."""
    checks: tuple[tuple[str, int, tuple[Callable[[dict[str, Any]], str], ...]], ...] = (
        ("short-prompt", SHORT, (_nothing_compiles, _tokens_out, _one_prefill)),
        ("long-prompt", LONG, (_nothing_compiles, _tokens_out)),
        ("cells-again", SHORT, (_nothing_compiles, _one_prefill)),
        ("records-on-disk", SHORT, (_records,)),
    )
    return [
        Task(
            id=f"product-smoke-{name}",
            suite="product-smoke",
            input={"prompt_ids": list(range(1, length + 1))},
            graders=[_spec(check) for check in (_tokens_in(length), *looks)],
        )
        for name, length, looks in checks
    ]


def _spec(check: Callable[[dict[str, Any]], str]) -> GraderSpec:
    """A state check from a function that says what is wrong, or nothing."""

    def function(task: Task, transcript: object, outcome: Outcome) -> Verdict:
        wrong = check(outcome.state)
        return {"passed": not wrong, "explanation": wrong or "as it should be"}

    return GraderSpec("state_check", check.__name__.strip("_"), {}, function)


def _tokens_in(length: int) -> Callable[[dict[str, Any]], str]:
    def tokens_in(state: dict[str, Any]) -> str:
        return _differs("tokens in", length, state["delta"]["tokens_in"])

    return tokens_in


def _tokens_out(state: dict[str, Any]) -> str:
    return _differs("tokens out", state["output"], state["delta"]["tokens_out"])


def _nothing_compiles(state: dict[str, Any]) -> str:
    return _differs("compile events", 0, state["delta"]["compile_events"])


def _one_prefill(state: dict[str, Any]) -> str:
    calls = sum(cell["calls"] for name, cell in state["delta"]["cells"].items() if name.startswith("prefill@"))
    return _differs("prefill calls", 1, calls)


def _records(state: dict[str, Any]) -> str:
    return _differs("lines in the predictions file", state["records"], state["files"].get(PARTIAL, {}).get("lines"))


def _differs(what: str, wanted: object, found: object) -> str:
    return "" if wanted == found else f"{what}: expected {wanted}, found {found}"


def _file(path: Path) -> dict[str, int]:
    data = path.read_bytes()
    return {"bytes": len(data), "lines": data.count(b"\n")}
