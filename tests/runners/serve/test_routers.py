"""What routers make of a client's request asks for nothing that the server refuses."""

import pytest

from ling3export.runners.serve.schema import ApiError, ChatBody, checked

# What vllm-router 0.1.17 makes of {"model": "toy", …, "max_tokens": 4}.
ADDED = {
    "stream": False,
    "logprobs": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
}


def test_the_fields_that_the_router_adds_ask_for_nothing():
    """The server refused every call that came through it: unsupported_parameter, `no_stop_trim`."""
    asked = {"model": "toy", "messages": [{"role": "user", "content": "A"}], "max_tokens": 4}
    plain, routed = (checked(ChatBody, body, "toy") for body in (asked, asked | ADDED))
    assert routed == plain
    for name in ("no_stop_trim", "return_hidden_states"):
        with pytest.raises(ApiError, match=f"`{name}`: expected it left out or false"):
            checked(ChatBody, asked | {name: True}, "toy")
