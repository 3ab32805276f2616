"""Task files and graders: the specification's template, problems, and every error with its line."""

import json

import pytest
from pydantic import ValidationError

from ling3export.runners.evals.graders import grade
from ling3export.runners.evals.task_files import load_tasks, read_records
from ling3export.runners.evals.tasks import Task
from ling3export.runners.evals.trials import EvalError, Outcome, Transcript, TranscriptStep

TEMPLATE = """\
task:
  id: "refund-processing-001"
  category: "customer-support"
  difficulty: "medium"
  input:
    user_message: "I want to return this defective product"
    context: {order_id: "ORD-12345", product_id: "PROD-789", purchase_date: "2026-02-15", reason: "defective"}
  expected_outcome:
    state_checks:
      - database: {table: "refunds", condition: "order_id = 'ORD-12345' AND status = 'processed'"}
      - database: {table: "tickets", condition: "status = 'resolved'"}
    tool_calls_required: [verify_identity, process_refund, send_confirmation]
    transcript_constraints: {max_turns: 10, must_not_contain: ["I don't know", "I can't help"]}
  grading: {threshold: 0.8}
"""


def write(folder, name, content):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1), encoding="utf-8")
    return path


def test_template_of_the_specification_loads_and_grades(tmp_path):
    """The template with a predicate of the user for its database."""
    rows = {"refunds": True, "tickets": True}
    database = lambda arguments, outcome: outcome.state[arguments["table"]]  # noqa: E731
    (task,) = load_tasks(write(tmp_path, "refunds.yaml", TEMPLATE), {"database": database})
    assert (task.id, task.suite) == ("refund-processing-001", "refunds")
    assert (task.category, task.difficulty) == ("customer-support", "medium")
    assert task.threshold == 0.8
    assert task.prompt == (
        "I want to return this defective product\n\n"
        '{"order_id":"ORD-12345","product_id":"PROD-789","purchase_date":"2026-02-15","reason":"defective"}'
    )
    calls = [
        TranscriptStep(0, "tool", name=name) for name in ("send_confirmation", "verify_identity", "process_refund")
    ]
    said = Transcript("Your refund is on its way.", steps=calls, turns=3)
    grades, passed = grade(task, said, Outcome(rows))
    assert passed
    assert [item.name for item in grades] == [
        "state_check database",
        "state_check database",
        "tool_calls_required",
        "transcript_constraints",
    ]
    assert not grade(task, said, Outcome({**rows, "tickets": False}))[1]
    assert not grade(task, Transcript("I don't know", steps=calls), Outcome(rows))[1]
    assert not grade(task, Transcript("Done.", steps=calls, turns=11), Outcome(rows))[1]
    assert not grade(task, Transcript("Done.", steps=calls[1:]), Outcome(rows))[1]


def test_a_database_check_without_a_predicate_is_an_error(tmp_path):
    with pytest.raises(EvalError) as raised:
        load_tasks(write(tmp_path, "refunds.yaml", TEMPLATE))
    assert raised.value.message == (
        "`state_checks`: no predicate `database`, there is none; pass one: "
        'load_tasks(file, predicates={"database": lambda arguments, outcome: ...}), in refunds.yaml line 10'
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  difficulty:", "  dificulty:", "`dificulty`: Extra inputs are not permitted, .*, in t.yaml line 4"),
        ("max_turns", "maxturns", "`maxturns`: Extra inputs are not permitted, .*, in t.yaml line 13"),
        (
            "{threshold: 0.8}",
            "{threshold: 8}",
            "`threshold`: Input should be less than or equal to 1, found 8, in t.yaml line 14",
        ),
        ("{threshold: 0.8}", "{treshold: 0.8}", "`treshold`: Extra inputs are not permitted, .* line 14"),
        ("user_message:", "text:", "`text`: Extra inputs are not permitted, .*, in t.yaml line 6"),
        ('id: "refund-processing-001"', "id: 7", "`id`: Input should be a valid string, found 7, in t.yaml line 2"),
        (
            "{max_turns: 10,",
            "{max_turns: ten,",
            "`max_turns`: Input should be a valid integer, .*, found 'ten', in t.yaml line 13",
        ),
        ("task:\n", "task: [\n", "file `t.yaml`: it is not YAML: while parsing"),
    ],
)
def test_mistakes_in_yaml_are_named_with_their_line(tmp_path, old, new, message):
    text = TEMPLATE.replace(old, new, 1)
    assert text != TEMPLATE
    with pytest.raises(EvalError, match=message):
        load_tasks(write(tmp_path, "t.yaml", text), {"database": bool})


GOOD = {"id": "a", "input": {"prompt": "?"}, "graders": ["last_numeric"], "target": "x"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "task file `t.json`: it has no task"),
        ([GOOD, {**GOOD, "answers": 1}], "`answers`: .* in t.json line 21$"),
        ([GOOD, GOOD], "task id `a`: two tasks have it, in t.json"),
        ({**GOOD, "graders": ["exact"]}, "`graders`: a grader is one of .*, found 'exact', in t.json line 7"),
        ({**GOOD, "graders": []}, "task `a`: it has no grader, in t.json line 1"),
        ({**GOOD, "graders": [{"kind": "response_contains"}]}, "`value`: Field required, in t.json line 7"),
        ({**GOOD, "input": {}}, "`input`: give one of prompt, .*; there is none, in t.json line 3"),
        ({**GOOD, "input": {"prompt": "?", "message": "!"}}, "there is prompt and message, in t.json line 3"),
        (
            {**GOOD, "input": {"prompt_ids": [1, "2"]}},
            "`prompt_ids`: Input should be a valid integer, found '2', in t.json line 6",
        ),
        ({"input": {"prompt": "?"}}, "`id`: Field required, in t.json line 1"),
        ('{"id": NaN}', "file `t.json`: it is not JSON: .*NaN"),
        (r'{"id": "\ud800"}', "file `t.json`: it is not JSON: .*half a character"),
        ("[1, 2", "file `t.json`: it is not JSON: Expecting"),
        ([{"question": "?", "answer": "1", "hint": "2"}], "problem: `hint` is none of answer, .* in t.json line 2"),
        ([{"question": "?"}], "problem: give prompt or question, .*; there is question, in t.json line 2"),
    ],
)
def test_mistakes_in_json_are_named_with_their_line(tmp_path, document, message):
    with pytest.raises(EvalError, match=message):
        load_tasks(write(tmp_path, "t.json", document))


def test_problems_come_in_two_shapes_and_are_used_verbatim(tmp_path):
    shots = "Question: 1+1?\nAnswer: 2\n\nQuestion: 2+2?\nAnswer:"
    records = [{"prompt": shots, "answer": "#### 4"}, {"question": "3+3?", "target": 6}]
    for document in (records, {"data": records}):
        tasks = load_tasks(write(tmp_path, "gsm_8k.json", document))
        assert [task.prompt for task in tasks] == [shots, "3+3?"]
        assert [task.id for task in tasks] == ["gsm_8k-0", "gsm_8k-1"]
        assert [task.suite for task in tasks] == ["gsm_8k"] * 2
        assert [grade(task, "so 2 and 2 make 4", None)[1] for task in tasks] == [True, False]
        assert grade(tasks[1], "6.00", None)[1]


def test_dates_of_yaml_are_texts(tmp_path):
    text = TEMPLATE.replace('"2026-02-15"', "2026-02-15")
    (task,) = load_tasks(write(tmp_path, "t.yaml", text), {"database": bool})
    assert task.input.context["purchase_date"] == "2026-02-15"


@pytest.mark.parametrize(
    ("spec", "text", "passed"),
    [
        ({"kind": "response_contains", "value": ["it", "42"]}, "it is 42", True),
        ({"kind": "response_contains", "value": ["it", "43"]}, "it is 42", False),
        ({"kind": "transcript_constraints", "must_contain": ["42"]}, "it is 42", True),
        ({"kind": "transcript_constraints", "must_not_contain": ["42"]}, "it is 42", False),
        ({"kind": "last_numeric"}, "it is 42", True),
    ],
)
def test_graders_of_task_files(tmp_path, spec, text, passed):
    (task,) = load_tasks(write(tmp_path, "t.json", {**GOOD, "target": "42", "graders": [spec]}))
    assert grade(task, Transcript(text), None)[1] is passed


def test_choices_limit_the_letters(tmp_path):
    fields = {**GOOD, "graders": ["choice_letter"], "target": "B", "choices": ["one", "two"]}
    (task,) = load_tasks(write(tmp_path, "t.json", fields))
    assert grade(task, "The answer is (B). Not the answer is (C).", None)[1]


def test_a_task_written_in_python_is_checked_too():
    with pytest.raises(ValidationError, match=r"input\.text\n  Extra inputs are not permitted"):
        Task(id="a", input={"text": "?"})
    with pytest.raises(ValidationError, match=r"grading\.threshold\n  Input should be greater than 0"):
        Task(id="a", input={"prompt": "?"}, grading={"threshold": 0})


def test_a_data_set_may_be_one_large_document(tmp_path):
    """The default limit for other JSON files is 8 MiB."""
    path = write(tmp_path, "set.json", json.dumps({"data": [{"question": "q" * 1000, "n": n} for n in range(9000)]}))
    assert path.stat().st_size > 9_000_000
    assert [record["n"] for record in read_records(path)] == list(range(9000))
