from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.services.chat.messages import ChatMessage
from offbeat.services.gateway.anthropic_messages import read_messages
from offbeat.services.gateway.openai_chat import read_chat, read_completion
from offbeat.services.gateway.openai_responses import read_responses
from offbeat.services.gateway.session import InvalidCallError, ModelRequest
from offbeat.services.messages.codec import decode_requests, encode_requests
from offbeat.services.messages.types import GenerateRequest, Sampling

pytestmark = pytest.mark.slow

Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = (
    *("messages", "input", "prompt", "tools", "tool_choice", "response_format", "text", "system", "instructions", "n"),
    *("stop", "stop_sequences", "max_tokens", "max_output_tokens", "logit_bias", "temperature", "stream_options"),
)
PART_KEYS = ("type", "role", "content", "text", "tool_calls", "function", "name", "arguments", "input", "id", "output")
PART_KEYS += ("image_url", "source", "url", "data")
KINDS = ("text", "message", "function", "function_call", "function_call_output", "tool_use", "tool_result", "user")
KINDS += ("image_url", "image", "input_image", "base64", "data:image/png;base64,AAAA")
Part = st.dictionaries(
    st.sampled_from(PART_KEYS), Json | st.sampled_from(KINDS) | st.lists(Json | st.sampled_from(KINDS)), max_size=6
)
Nested = st.dictionaries(st.sampled_from(PART_KEYS), Json | Part | st.lists(Part, max_size=2), max_size=6)
Body = st.dictionaries(st.sampled_from(KEYS), Json | Nested | st.lists(Nested | Json, max_size=3), max_size=8)

READERS: dict[str, Callable[[dict[str, Any]], ModelRequest]] = {
    "chat": read_chat,
    "completion": read_completion,
    "responses": lambda body: read_responses(body, (ChatMessage("user", "before"),)),
    "messages": read_messages,
}


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=50, deadline=None)
@given(body=Body)
def test_whatever_a_body_holds_it_is_read_or_refused(reader: str, body: dict[str, Any]):
    try:
        ask = READERS[reader](body)
    except InvalidCallError:
        return
    assert all(isinstance(message.content, str) for message in ask.messages)
    assert all(isinstance(tool, dict) for tool in ask.tools)


@pytest.mark.parametrize(("last", "fits"), [((1 << 31) - 1, True), (1 << 31, False), (-1, False)])
def test_an_unencodable_token_id_is_refused_up_front(last: int, fits: bool):
    """Otherwise it would fail the turns of other sessions."""
    body = {"prompt": [5, last]}
    if fits:
        request = GenerateRequest("r", read_completion(body).prompt, Sampling())  # type: ignore[arg-type]
        assert decode_requests(encode_requests([request]))[0].prompt == (5, last)
        return
    with pytest.raises(InvalidCallError, match="list of token ids"):
        read_completion(body)
