"""Two servers without a router: clients talk to the one that decodes, which asks the other one for long prompts."""

import json

import httpx2
import pytest
from click.testing import CliRunner

from ling3export.runners.cli.main import main
from tests.support.serving import Server, data_lines

NAME = "micro-tp1-snapshots"
LONG, SHORT = list(range(20, 90)), list(range(30, 45))
BODY = {"model": NAME, "temperature": 0, "max_tokens": 9, "ignore_eos": True, "return_token_ids": True}
TEXT = "Question: Omar has 4 apples, buys 7 and drops 2. How many now?\nAnswer:"
BOTH = ("--check", "programs", "--transfer", "tcp", "--role")


@pytest.fixture(scope="module")
def servers(artifact):
    """P; D, which asks P; and one that is asked by nobody, and asks nobody."""
    path = artifact(NAME)
    with (
        Server(path, *BOTH, "prefill") as p,
        Server(path, "--check", "programs", "--prefix-cache", "off") as alone,
        Server(path, *BOTH, "decode", "--prefill", p.url, "--max-local-prefill", 16) as d,
    ):
        yield p, d, alone


def answer(server, path="/v1/completions", **body):
    found = httpx2.post(server.url + path, json=BODY | body, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()


def remote(server, what):
    return server.metrics().get(f'ling3_remote_prefill_total{{what="{what}"}}', 0)


def tokens(found):
    return [choice["token_ids"] for choice in found["choices"]]


def test_clients_get_the_answers_of_one_server(servers):
    p, d, alone = servers
    assert tokens(answer(d, prompt=SHORT)) == tokens(answer(alone, prompt=SHORT)) and remote(d, "short") == 1
    found = answer(d, prompt=LONG)
    assert tokens(found) == tokens(answer(alone, prompt=LONG))
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": len(LONG)}
    assert set(found["kv_transfer_params"]["phases_ms"]) == {"queue", "prefill", "save", "transfer", "decode"}
    assert (remote(d, "taken"), p.metrics()['ling3_transfer_total{what="pulled"}']) == (1, 1)
    said = d.metrics()
    assert (said["ling3_remote_prefills_queued"], said["ling3_remote_prefills_running"]) == (0, 0)
    # Several prompts, of which one is short; choices of one prompt, each with its own first token.
    several = {"prompt": [LONG[1:], SHORT[1:], LONG[2:]], "temperature": 0.8, "seed": 5, "cache_salt": "a"}
    assert tokens(answer(d, **several)) == tokens(answer(alone, **several)) and remote(d, "taken") == 3
    choices = {"prompt": LONG, "n": 3, "temperature": 1, "seed": 7, "cache_salt": "b"}
    assert tokens(answer(d, **choices)) == tokens(answer(alone, **choices)) and remote(d, "taken") == 6
    likely = {"prompt": LONG, "cache_salt": "c", "logprobs": 2}
    one, other = (answer(each, **likely)["choices"][0]["logprobs"] for each in (d, alone))
    assert one["tokens"] == other["tokens"] and one["token_logprobs"] == pytest.approx(
        other["token_logprobs"], abs=1e-4
    )
    regex = {"prompt": LONG, "cache_salt": "d", "guided_regex": "[0-9]{4}x", "ignore_eos": False}
    assert answer(d, **regex)["choices"][0]["text"] == answer(alone, **regex)["choices"][0]["text"]
    assert remote(d, "taken") == 8 and remote(d, "refused") == remote(d, "failed") == 0


def test_a_text_streams_from_the_first_token_on(servers):
    _, d, alone = servers
    before, body = (
        remote(d, "taken"),
        BODY | {"prompt": TEXT, "stream": True, "stream_options": {"include_usage": True}},
    )
    with httpx2.stream("POST", d.url + "/v1/completions", json=body, timeout=60) as found:
        chunks = [json.loads(each) for each in data_lines(found.iter_lines()) if not each.endswith("[DONE]")]
    usage, choices = chunks[-1]["usage"], [choice for each in chunks for choice in each["choices"]]
    whole = answer(alone, prompt=TEXT)
    assert [id for choice in choices for id in choice.get("token_ids", ())] == tokens(whole)[0]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] > 16
    assert set(chunks[-1]["phases_ms"]) == {"queue", "prefill", "save", "transfer", "decode"}
    assert remote(d, "taken") == before + 1


def test_a_next_turn_is_not_asked_for_where_what_it_adds_is_short(servers):
    _, d, alone = servers
    before = remote(d, "taken"), remote(d, "short")
    turn = {"prompt": LONG, "cache_salt": "turns", "max_tokens": 20}
    said = tokens(answer(d, **turn))[0]
    longer = turn | {"prompt": [*LONG, *said, 7, 8, 9]}
    found = answer(d, **longer)
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 80}  # the last whole block of the turn
    assert tokens(found) == tokens(answer(alone, **longer))
    assert (remote(d, "taken"), remote(d, "short")) == (before[0] + 1, before[1] + 1)


def test_a_server_that_dies_is_done_without_and_one_that_comes_is_asked(artifact):
    path, body = artifact(NAME), {"prompt": LONG}
    with Server(path, *BOTH, "prefill") as p, Server(path, *BOTH, "prefill") as q:
        asks = ("--prefill", p.url, "--prefill", q.url, "--max-local-prefill", 16, "--prefix-cache", "off")
        with Server(path, *BOTH, "decode", *asks) as d:
            first = tokens(answer(d, **body))
            assert first == tokens(answer(d, **body)) and remote(d, "taken") == 2
            assert [each.metrics()["ling3_prompt_tokens_total"] > 0 for each in (p, q)] == [True, True], "in turn"
            p.process.kill()
            p.process.wait()
            assert all(tokens(answer(d, **body)) == first for _ in range(4))
            assert remote(d, "taken") + remote(d, "failed") == 6 and remote(d, "failed") >= 1
            q.process.kill()
            q.process.wait()
            assert all(tokens(answer(d, **body)) == first for _ in range(4))
            assert remote(d, "no_server") >= 1
            assert "left aside for 1 s" in d.said()
            assert d.stop() == 0


def test_options_that_do_not_fit_are_refused_by_name(artifact):
    path, url = str(artifact(NAME)), "http://127.0.0.1:8101"
    apart = ("--transfer", "tcp", "--role", "decode")
    for words, status, text in (
        (("--prefill", url), 1, "--prefill: expected --transfer with --role decode or both, found none"),
        (("--prefill", url, "--transfer", "tcp", "--role", "prefill"), 1, "or both, found --role prefill"),
        (("--prefill", "8101", *apart), 1, "--prefill: expected http://HOST:PORT, found 8101"),
        (("--max-local-prefill", "5", *apart), 1, "--max-local-prefill 5: expected --prefill with it, found none"),
        (("--max-queue", "5"), 1, "--max-queue 5: expected --prefill with it, found none"),
        (("--prefill-timeout", "0.5", *apart), 1, "--prefill-timeout 0.5: expected --prefill with it, found none"),
        (("--prefill", url, "--max-local-prefill", "-1", *apart), 2, "'--max-local-prefill': -1"),
        (("--prefill", url, "--max-queue", "0", *apart), 2, "'--max-queue': 0"),
        (("--prefill", url, "--prefill-timeout", "0", *apart), 2, "'--prefill-timeout': 0"),
    ):
        found = CliRunner().invoke(main, ["serve", path, "--port", "0", *words])
        assert (found.exit_code, text in found.stderr) == (status, True), (words, found.stderr)
        assert status == 2 or "hint: " in found.stderr
