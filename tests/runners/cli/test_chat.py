"""``ling3-runner chat`` with a scripted model, in this process and in a terminal of its own."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ling3export.foundation.errors import RequestError
from ling3export.runners.cli.chat import Conversation, Say, talk
from ling3export.runners.cli.generate import read_prompts
from ling3export.runners.cli.main import main
from tests.support.scripted import Talk, scripted, talking

LONG = 120  # seconds
HOSTILE = "\x1b]0;title\x07"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with talking(tmp_path_factory.mktemp("chat")) as found:
        yield found


@pytest.fixture
def conversation(model: Talk):
    return Conversation(model.engine)


def said(conversation: Conversation, model: Talk, text: str, answer: str) -> list[tuple[bool, str]]:
    """The thoughts and the text of an answer, each joined."""
    model.lines.texts = [answer]
    parts: list[tuple[bool, str]] = []
    conversation.answer(text, lambda thought, part: parts.append((thought, part)))  # type: ignore[arg-type]
    return [(kind, "".join(part for each, part in parts if each == kind)) for kind in (True, False)]


def test_an_answer_is_taken_apart_into_a_thought_and_text(conversation, model):
    assert said(conversation, model, "Hi", "I greet.</think>Hello") == [(True, "I greet."), (False, "Hello")]
    assert conversation.messages == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "I greet."},
    ]


def test_the_next_prompt_begins_with_the_one_before_and_its_answer(conversation, model):
    """So the prefix cache contains both."""
    conversation.system("Be brief.")
    said(conversation, model, "Hi", "Hm.</think>Hello")
    said(conversation, model, "Go", "</think>Bye")
    before, now = model.runner.prompts[-2:]
    assert now.startswith(f"{before}Hm.</think>Hello<|role_end|><role>HUMAN</role>Go<|role_end|>")


def test_thinking_is_switched_through_the_template(conversation, model):
    conversation.think = False
    assert said(conversation, model, "Hi", "Hello") == [(True, ""), (False, "Hello")]
    assert model.runner.prompts[-1].endswith("<think></think>")
    conversation.think = True
    said(conversation, model, "Hi", "</think>Hello")
    assert model.runner.prompts[-1].endswith("<think>")


def test_the_system_text_is_replaced_and_removed(conversation, model):
    conversation.system("One.")
    conversation.system("Two.")
    said(conversation, model, "Hi", "</think>a")
    assert model.runner.prompts[-1].startswith("<role>SYSTEM</role>Two.")
    conversation.system("")
    assert [each["role"] for each in conversation.messages] == ["user", "assistant"]


def test_a_saved_conversation_is_a_line_of_generates_prompt_file(conversation, model, tmp_path):
    said(conversation, model, "Hi", "</think>Hello\n正")
    conversation.save(tmp_path / "talk.jsonl")
    assert read_prompts(tmp_path / "talk.jsonl") == [conversation.messages]
    with pytest.raises(RequestError, match="expected no such file, found one"):
        conversation.save(tmp_path / "talk.jsonl")


def test_a_turn_that_is_refused_leaves_the_conversation_as_it_was(conversation, model):
    said(conversation, model, "Hi", "</think>Hello")
    before = list(conversation.messages)
    with pytest.raises(RequestError, match="context"):
        conversation.answer("x" * 20000, lambda *_: None)
    assert conversation.messages == before


def test_a_pipe_gets_answers_on_stdout_and_thoughts_on_stderr(conversation, model, monkeypatch):
    model.lines.texts = ["Hm.</think>One", "</think>Two"]
    told = CliRunner().invoke(click.Command("t", callback=lambda: talk(conversation)), input="Hi\\\nthere\n\nGo\n")
    assert told.exit_code == 0, told.output
    assert told.stdout == "One\nTwo\n"
    assert told.stderr.startswith("Hm.\n[") and "tokens/s, first after " in told.stderr
    assert [each["content"] for each in conversation.messages[::2]] == ["Hi\nthere", "Go"]


def test_a_terminal_does_not_obey_what_a_model_writes(capsys):
    say = Say(terminal=True)
    say(False, f"a{HOSTILE}\n\tb")
    assert capsys.readouterr().out == "a\\x1b]0;title\\x07\n    b"


def test_an_unknown_command_through_a_pipe_is_an_error(conversation):
    told = CliRunner().invoke(click.Command("t", callback=lambda: talk(conversation)), input="/think maybe\n")
    assert isinstance(told.exception, RequestError)
    assert "found /think maybe" in str(told.exception)


def test_help_of_chat_has_at_most_15_options():
    text = CliRunner().invoke(main, ["chat", "-h"]).stdout
    assert sum(line.strip().startswith("-") for line in text.splitlines()) <= 15
    assert "--prefix-cache" in CliRunner().invoke(main, ["chat", "--help"]).stdout


def test_a_conversation_with_an_artifact_hits_the_prefix_cache(artifact, tmp_path):
    """Runs the command in a process of its own, with turns from a pipe."""
    system = ["--system", "Be brief, and always say what you mean to say."]
    words = ["chat", str(artifact("micro-tp1-snapshots")), "--max-tokens", "8", *system, "--think", "off"]
    command = [sys.executable, "-m", "ling3export.runners.cli", *words]
    done = subprocess.run(command, input=f"Hi\nGo\n/save {tmp_path / 'talk'}\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = [
        line for line in done.stderr.splitlines() if line.startswith("[") and "prompt tokens cached" in line
    ]
    cached = [int(line.partition("first after ")[2].split()[2]) for line in (first, second)]
    assert cached[0] == 0 < cached[1]
    ((saved),) = read_prompts(tmp_path / "talk")
    assert [each["role"] for each in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert saved[2]["content"] in done.stdout


class Terminal:
    """A child process in a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self._own, theirs = pty.openpty()
        command = [sys.executable, "-m", "tests.runners.cli.test_chat", str(folder)]
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm"},
        )
        os.close(theirs)
        self.text = ""

    def type(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def until(self, text: str) -> str:
        """The output up to ``text``."""
        end = time.monotonic() + LONG
        while text not in self.text:
            ready, _, _ = select.select([self._own], [], [], max(0, end - time.monotonic()))
            assert ready, self.text
            self.text += os.read(self._own, 1 << 16).decode(errors="replace")
        before, _, self.text = self.text.partition(text)
        return before


def test_ctrl_c_ends_an_answer_and_ctrl_d_the_talk(tmp_path):
    """In a terminal, thoughts are dim. Ctrl-C ends an endless answer, and the next prompt contains its text."""
    terminal = Terminal(tmp_path)
    try:
        terminal.until("> ")
        terminal.type("Halo\x02l\n")  # Ctrl-B: the line can be edited
        assert "\x1b[2mHm.\x1b[0m" in terminal.until("Hello").replace("\x1b[0m\x1b[2m", "")  # it came in pieces
        assert "tokens/s, first after" in terminal.until("> ")
        terminal.type("endless\n")
        terminal.until("more more more")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("ended by cancelled")
        terminal.until("> ")
        terminal.type("/save saved.jsonl\n")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(LONG) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
    (line,) = (tmp_path / "saved.jsonl").read_text().splitlines()
    messages = json.loads(line)["messages"]
    assert [each["content"] for each in messages[:3]] == ["Hallo", "Hello", "endless"]
    assert messages[3]["content"].startswith("more more more")


def child(folder: str) -> None:
    """Chats in this process's terminal with a model that may never end."""

    def script(prompt: str) -> str:
        last = prompt.rpartition("<role>HUMAN</role>")[2]
        return "</think>" + "more " * 3000 if last.startswith("endless") else "Hm.</think>Hello"

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with scripted(Path(folder), script) as (engine, _):
        os.chdir(folder)
        talk(Conversation(engine))


if __name__ == "__main__":
    child(sys.argv[1])
