"""The page at ``/`` in a real browser, with a scripted model."""

import json
from collections.abc import Iterator

import pytest

from tests.support.browser import Page, browser
from tests.support.scripted import Talk, listening, talking

pytestmark = pytest.mark.extras

HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
ENDED = "!document.getElementById('send').hidden && [...document.querySelectorAll('article.assistant small')].length"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with talking(tmp_path_factory.mktemp("page")) as found:
        yield found


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


@pytest.fixture
def page(tab: Page, model: Talk) -> Iterator[Page]:
    """The page of a server without an API key; at the end there must be no errors and no requests to other hosts."""
    with listening(model.engine, page=True) as url:
        tab.errors.clear()
        tab.requests.clear()
        tab.open(url)
        tab.until("document.title === 'scripted'")
        yield tab
        assert tab.errors == []
        assert all(each.startswith((url, "data:,")) for each in tab.requests)
        tab.open("about:blank")


def put(page: Page, field: str, value: str) -> None:
    page.evaluate(f"document.getElementById({field!r}).value = {json.dumps(value)}; 1")


def ask(page: Page, text: str) -> None:
    put(page, "said", text)
    page.evaluate("document.getElementById('ask').requestSubmit(); 1")


def shown(page: Page, selector: str) -> list[str]:
    return list(page.evaluate(f"[...document.querySelectorAll({selector!r})].map((node) => node.textContent)"))


def stop_at_once(page: Page) -> None:
    """Makes the page press Stop once an answer has text, and record what it then shows."""
    page.evaluate("""new MutationObserver((_, watch) => {
        if (!(document.querySelector("article.assistant > .text")?.textContent.length > 20)) return;
        const ended = document.querySelectorAll("article.assistant small").length;
        window.seen = [ended, document.getElementById("send").hidden];
        document.getElementById("stop").click();
        watch.disconnect();
    }).observe(document.getElementById("talk"), { childList: true, subtree: true }); 1""")


def test_an_answer_is_streamed_and_its_thought_folded(page, model):
    """Its beginning is shown before its end."""
    model.lines.texts = ["I greet.</think>" + "Hello " * 2000]
    stop_at_once(page)
    ask(page, "Hi")
    page.until(ENDED)
    assert page.evaluate("window.seen") == [0, True]
    assert shown(page, "details.thought .text") == ["I greet."]
    assert page.evaluate("document.querySelector('details.thought').open") is False


def test_stop_ends_an_answer_and_the_next_turn_knows_what_it_had_said(page, model):
    model.lines.texts = ["</think>" + "more " * 2500]
    stop_at_once(page)
    ask(page, "Hi")
    page.until(ENDED)
    (said,) = shown(page, "article.assistant > .text")
    assert said.startswith("more more") and len(said) < 2500 * 5
    assert shown(page, "article.assistant small")[0].endswith("stopped")
    model.lines.texts = ["</think>Done."]
    ask(page, "Go")
    page.until(f"({ENDED}) === 2")
    assert f"</think>{said}<|role_end|><role>HUMAN</role>Go" in model.runner.prompts[-1]


def test_text_of_a_model_is_never_html(page, model):
    model.lines.texts = [f"{HOSTILE}</think>{HOSTILE}\n```html\n{HOSTILE}\n```\nEnd"]
    ask(page, HOSTILE)
    page.until(ENDED)
    assert shown(page, "article.user") == [HOSTILE]
    assert shown(page, "details.thought .text") == [HOSTILE]
    assert shown(page, "article.assistant > .text")[0] == f"{HOSTILE}{HOSTILE}\nEnd"
    assert shown(page, "article.assistant pre") == [f"{HOSTILE}\n"]
    assert page.evaluate("document.images.length + document.querySelectorAll('main script').length") == 0
    assert page.evaluate("document.title") == "scripted"


def test_settings_are_sent(page, model):
    put(page, "system", "Be brief.")
    put(page, "thinking", "off")
    put(page, "max_tokens", "3")
    put(page, "temperature", "0")
    model.lines.texts = ["Hello"]
    ask(page, "Hi")
    page.until(ENDED)
    assert shown(page, "article.assistant > .text") == ["Hel"]
    assert "Be brief." in model.runner.prompts[-1] and model.runner.prompts[-1].endswith("<think></think>")


def test_a_call_is_shown_and_goes_on_with_the_result_that_is_typed(page, model):
    put(page, "tools", json.dumps(TOOLS))
    model.lines.texts = [f"</think>{CALL}"]
    ask(page, "Add")
    page.until("document.querySelector('form.results textarea') !== null")
    assert shown(page, "pre.call") == ['add({"a": 1})']
    model.lines.texts = ["</think>It is 2."]
    page.evaluate("document.querySelector('form.results textarea').value = 'two'; 1")
    page.evaluate("document.querySelector('form.results').requestSubmit(); 1")
    page.until(f"({ENDED}) === 2")
    assert shown(page, "pre.result") == ["two"]
    assert shown(page, "article.assistant > .text") == ["It is 2."]
    assert "<tool_response>\ntwo\n</tool_response>" in model.runner.prompts[-1]


def test_a_phone_shows_it_without_scrolling_sideways(page, model):
    page.width(360)
    model.lines.texts = ["</think>" + "x" * 300 + f"\n```\n{'y' * 300}\n```\n"]
    ask(page, "z" * 300)
    page.until(ENDED)
    page.evaluate("document.getElementById('open').click(); 1")
    assert page.evaluate("document.documentElement.clientWidth") == 360
    for where in ("document.documentElement", "document.body", "document.getElementById('talk')"):
        assert page.evaluate(f"{where}.scrollWidth <= {where}.clientWidth"), where
    fields = "[...document.querySelectorAll('button, input, textarea')].filter((one) => one.checkVisibility())"
    assert page.evaluate(f"{fields}.length") > 10
    assert page.evaluate(f"{fields}.every((one) => one.getBoundingClientRect().right <= 360)")
    page.width(1100)


def test_a_refused_request_is_said_and_its_text_comes_back(page, model):
    put(page, "tools", "[1")
    ask(page, "Hi")
    page.until("document.querySelector('.error') !== null")
    assert shown(page, ".error")[0].startswith("tools: ")
    page.until("document.getElementById('said').value === 'Hi'")
    assert shown(page, "article") == []


def test_the_key_is_asked_for_where_the_server_has_one(tab, model):
    with listening(model.engine, "secret", page=True) as url:
        tab.open(url)
        tab.until("!document.getElementById('unlock').hidden")
        put(tab, "key", "secret")
        tab.evaluate("document.getElementById('unlock').requestSubmit(); 1")
        tab.until("document.getElementById('unlock').hidden && document.title === 'scripted'")
        model.lines.texts = ["</think>Hello"]
        ask(tab, "Hi")
        tab.until(ENDED)
        assert shown(tab, "article.assistant > .text") == ["Hello"]
        tab.open("about:blank")


MARKDOWN = """# Head

Some **bold _text_**, *weak*, `code` and [a page](https://example.org/a).

1. one
   - inner
2. two

| a | b |
|---|---|
| 1 | 2 |

> quoted

```python
x = "**no**"

y = 1
```
[no](javascript:alert(1)) 2 * 3 * 4"""


def test_markdown_becomes_elements_and_the_answer_can_be_copied_as_it_came(page, model):
    model.lines.texts = [f"</think>{MARKDOWN}"]
    ask(page, "Hi")
    page.until(ENDED)
    names = "[...document.querySelector('article.assistant > .text').children].map((node) => node.tagName).join(' ')"
    assert page.evaluate(names) == "H1 P OL TABLE BLOCKQUOTE DIV P"
    assert shown(page, ".text strong") == ["bold _text_"] and shown(page, ".text em") == ["weak"]
    assert shown(page, "ol > li > ul > li") == ["inner"] and shown(page, "td") == ["1", "2"]
    assert shown(page, "pre") == ['x = "**no**"\n\ny = 1\n']
    assert page.evaluate("document.querySelector('.block').dataset.language") == "python"
    assert page.evaluate("[...document.links].map((link) => link.href + link.rel)") == [
        "https://example.org/anoopener noreferrer"
    ]
    assert shown(page, ".text > p")[1] == "[no](javascript:alert(1)) 2 * 3 * 4"
    page.evaluate(
        "window.copied = []; navigator.clipboard.writeText = async (text) => { window.copied.push(text); }; 1"
    )
    page.evaluate("document.querySelectorAll('[data-label=Copy]').forEach((node) => node.click()); 1")
    page.until("window.copied.length === 2")
    assert page.evaluate("window.copied") == ['x = "**no**"\n\ny = 1\n', MARKDOWN]


def test_a_retry_takes_the_answers_place(page, model):
    model.lines.texts = ["</think>First."]
    ask(page, "Hi")
    page.until(ENDED)
    model.lines.texts = ["</think>Second."]
    page.evaluate("document.querySelector('[data-label=Retry]').click(); 1")
    page.until(f"({ENDED}) === 1 && document.querySelector('.text').textContent === 'Second.'")
    assert shown(page, "article") == ["Hi", shown(page, "article.assistant")[0]]
    assert "First." not in model.runner.prompts[-1]


def test_an_empty_page_says_what_to_try_and_a_new_chat_is_empty_again(page, model):
    assert page.evaluate("document.getElementById('hello').checkVisibility()")
    page.evaluate("document.querySelector('#tries button').click(); 1")
    assert page.evaluate("document.getElementById('said').value") == shown(page, "#tries button")[0]
    model.lines.texts = ["</think>Hello"]
    page.evaluate("document.getElementById('ask').requestSubmit(); 1")
    page.until(ENDED)
    assert not page.evaluate("document.getElementById('hello').checkVisibility()")
    page.evaluate("document.getElementById('fresh').click(); 1")
    assert page.evaluate("document.getElementById('hello').checkVisibility()") and shown(page, "article") == []


def test_the_settings_show_the_values_in_force(tab, model):
    with listening(model.engine, page=True, defaults={"temperature": 0.6, "top_k": 20}) as url:
        tab.open(url)
        tab.until("document.title === 'scripted'")
        names = "['temperature', 'top_p', 'top_k']"
        shown_there = tab.evaluate(f"{names}.map((name) => document.getElementById(name).placeholder)")
        assert shown_there == ["0.6", "1", "20"]
        tab.open("about:blank")


def test_light_and_dark_are_readable(page, model):
    """Text has at least 4.5 times the luminance of its background, or the reverse (WCAG AA)."""
    script = """(() => {
        const light = (colour) => {
            const canvas = document.createElement("canvas").getContext("2d");
            canvas.fillStyle = colour;
            canvas.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255)
                .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const back = getComputedStyle(document.body).backgroundColor;
        return ["h1", "h1 span", "#hello h2", "#hello p", "#tries button", "#open"].map((selector) => {
            const text = light(getComputedStyle(document.querySelector(selector)).color), ground = light(back);
            return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
        });
    })()"""
    for scheme in ("dark", "light"):
        page.media(scheme)
        assert min(page.evaluate(script)) >= 4.5, scheme
