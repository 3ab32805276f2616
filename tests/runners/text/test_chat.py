"""Chat templates: the published one, its possible places, its input, and clear errors for broken ones."""

import json

import pytest

from ling3export.artifacts.manifest import file_record
from ling3export.foundation.errors import ArtifactError, RequestError
from ling3export.runners.text import tokenizer as chat
from ling3export.runners.text.tokenizer import ChatTemplate, TokenizerFiles
from tests.support.short_chats import write_short

EOS = 2044
HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def files(folder, template=None, jinja=None):
    """Tokenizer files; ``template`` replaces that of tokenizer_config.json, ``jinja`` is a file of its own."""
    write_short(folder, EOS)
    path = folder / "tokenizer_config.json"
    if template is not None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    records = [file_record(folder, name.name) for name in sorted(folder.iterdir())]
    return TokenizerFiles(folder, records, [EOS])


def test_the_checkpoints_template_is_rendered(tmp_path):
    found = files(tmp_path)
    text = "<role>SYSTEM</role>be brief<|role_end|><role>HUMAN</role>hello<|role_end|>"
    assert found.render_chat(HELLO) == text + "<role>ASSISTANT</role>"
    assert found.render_chat(HELLO, add_generation_prompt=False) == text
    ids = found.tokenizer("test").encode(text, special=False)
    assert ids[:2] == [EOS + 2, found.tokenizer("test").encode("S")[0]], "special tokens are tokens"


def test_a_file_goes_before_the_configuration(tmp_path):
    assert files(tmp_path, "config", "file {{ messages[0].content }}").render_chat(HELLO) == "file be brief"


def test_the_default_is_used_among_named_templates(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    assert files(tmp_path, named).render_chat(HELLO) == "default"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ eos_token }}{{ bos_token }}", "<|endoftext|><|startoftext|>"),
        ("{{ messages | tojson }}", json.dumps(HELLO)),
        ("{{ {'a': '<é>'} | tojson(indent=1) }}", '{\n "a": "<é>"\n}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m['content'] }}{% endfor %}", "hello"),
        ("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}", "x\nx\n"),
        ("{{ messages[0].role.upper() }}", "SYSTEM"),
        ("{{ '<b>' }}", "<b>"),
    ],
)
def test_the_variables_of_a_template(tmp_path, template, text):
    assert files(tmp_path, template).render_chat(HELLO) == text


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([], "an empty list"),
        ("hello", "str"),
        ({"role": "user", "content": "x"}, "dict"),
        (["hello"], "str at place 0"),
        ([*HELLO, {"role": "user"}], "no content at place 2"),
        ([{"content": "x"}], "no role at place 0"),
        ([{"role": "user", "content": None}], "content null at place 0"),
        ([{"role": 3, "content": "x"}], "role 3 at place 0"),
    ],
)
def test_malformed_messages_are_named(tmp_path, messages, found):
    with pytest.raises(RequestError) as caught:
        files(tmp_path).render_chat(messages, name="prompt 4")
    wanted = 'expected messages, [{"role": TEXT, "content": TEXT}, ...]'
    assert caught.value.message == f"prompt 4: {wanted}, found {found}"


def test_a_template_that_refuses_messages_is_the_messages_fault(tmp_path):
    refusing = "{{ raise_exception('roles must alternate') }}"
    said = "messages: expected messages that the chat template takes, found it refuse them: roles must alternate"
    with pytest.raises(RequestError, match=said):
        files(tmp_path, refusing).render_chat(HELLO)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "expected one that jinja2 compiles, found Expected an expression, got 'end of statement block'"),
        ("{{ nothing.at.all }}", "expected it to render messages, found UndefinedError: 'nothing' is undefined"),
        ("{{ 1 + 'a' }}", "expected it to render messages, found TypeError: unsupported operand"),
        (
            "{{ ''.__class__.__mro__ }}",
            "found SecurityError: access to attribute '__class__' of 'str' object is unsafe",
        ),
        ("{{ messages.append(1) }}", "found SecurityError"),
        ("{% for i in range(1000000) %}{% endfor %}", "found OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "expected it to end, found no end"),
        # the compiler computed it, which never ended
        ("{{ 10 ** (10 ** 10) }}", "found a power of more than 65,536 bits"),
        (
            "{{ messages[0].content | wordwrap(2) }}",
            "expected one that jinja2 compiles, found No filter named 'wordwrap'",
        ),
        ({"a": 1}, "expected a text, found dict, in "),
        ("{{" + "[" * 5000 + "}}", "expected one that jinja2 compiles, found it nested too deeply"),
    ],
)
def test_a_broken_template_is_a_clear_error(tmp_path, template, message):
    with pytest.raises(ArtifactError) as caught:
        files(tmp_path, template).render_chat(HELLO)
    assert caught.value.message.startswith("chat template `tokenizer_config.json`: expected ")
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (
            "{% for i in range(9999) %}{% for m in messages %}{{ m.role[:0] }}{% endfor %}{% endfor %}",
            "no end within 0 s",
        ),
        ("{% for m in messages %}{% for i in range(9999) %}{{ m.content }}{% endfor %}{% endfor %}", "more than 1,000"),
        ("{{ messages[0].content * 9999 }}", "more than 1,000"),
        ("{% set x = [0] * 10 ** 9 %}", "more than 1,000 characters or elements"),
        ("{% set x = 10 ** 9 * [0] %}", "more than 1,000 characters or elements"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "no end within 0 s"),
        (
            "{% for i in [0] * 9 if i in ([1] * 9) %}{% else %}{{ 3 ** 9999 * 3 ** 99999 }}{% endfor %}",
            "a power of more",
        ),
    ],
)
def test_messages_that_a_template_makes_too_much_of_are_ended(tmp_path, monkeypatch, template, found):
    """Regression: lists of a thousand million elements, and loops without any output, exceeded the five seconds."""
    monkeypatch.setattr(chat, "LARGEST", 1000)
    monkeypatch.setattr(chat, "SECONDS", 0.0 if "end" in found else chat.SECONDS)
    whole = files(tmp_path, template)
    with pytest.raises(ArtifactError) as caught:
        whole.render_chat(HELLO)
    assert f"chat template `tokenizer_config.json`: expected it to end, found {found}" in caught.value.message


def test_features_of_published_templates_work():
    source = (
        "{% macro m(x) %}<{{ x }}>{% endmacro %}{% set t %}{{ m(1) }}{{ m('a') }}{% endset %}{{ t ~ 2 ~ [1, 'b'] }} "
        "{{ '%s-%03d' % ('a', 7) }} {{ '{:>4}{}'.format(1, none) }} {{ [1, 2] | map('string') | join(', ') }} "
        "{{ ', '.join(messages | map(attribute='role')) }} {{ 'a b' | replace(' ', '_') | indent(2, true) }} "
        "{{ {'a': [1.5, none, true, 'é']} | tojson }} {{ [1] | tojson(indent=1) }} {{ [1, 2] + [3] }} {{ 'ab' * 2 }} "
        "{{ 7 % 4 }} {{ 2 ** 5 }} {{ undefined_name ~ '' }}{{ [[1, 2], [3]] | sum(start=[]) }} {{ 'x'.zfill(3) }}"
    )
    text = chat.ChatTemplate(source, {}, "t").render(HELLO)
    assert text.startswith("<1><a>2[1, 'b'] a-007    1None 1, 2 system, user   a_b {")
    assert text.endswith("} [\n 1\n] [1, 2, 3] abab 3 32 [1, 2, 3] 00x")
    assert '{"a": [1.5, null, true, "é"]}' in text


def test_a_tokenizer_at_which_the_library_panics_is_a_clear_error(tmp_path):
    """A prefix that is longer than the text from which it is cut.

    Regression: a panic is no Exception and passed all handlers.
    """
    write_short(tmp_path, EOS)
    path = tmp_path / "tokenizer.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value | {"model": value["model"] | {"continuing_subword_prefix": "true"}}))
    with pytest.raises(ArtifactError, match=r"expected one that `tokenizers` reads, found range end index"):
        TokenizerFiles(tmp_path, [file_record(tmp_path, "tokenizer.json")], [EOS]).tokenizer("test")


def test_no_template_is_refused_by_name(tmp_path):
    write_short(tmp_path, EOS)
    records = TokenizerFiles(tmp_path, [file_record(tmp_path, "tokenizer.json")], [EOS])
    with pytest.raises(RequestError, match="prompt 0: this artifact has no chat template, in "):
        records.render_chat(HELLO, name="prompt 0")


def test_a_template_runs_with_fresh_messages_each_time():
    template = ChatTemplate("{{ messages | length }}{{ bos_token }}", {"bos_token": "<s>"}, "here")
    assert [template.render(HELLO[:n]) for n in (1, 2, 1)] == ["1<s>", "2<s>", "1<s>"]
