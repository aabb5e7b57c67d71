"""Shared request fields, parsed strictly. Functions raise InvalidCallError."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from offbeat.services.chat.messages import ChatMessage
from offbeat.services.chat.stops import find_excess
from offbeat.services.gateway.session import InvalidCallError

Body = Mapping[str, Any]

OWN_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Set by the run: logprobs must be of the trained distribution."""
IGNORED = (
    *("min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "best_of", "use_beam_search", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("thinking", "reasoning", "reasoning_effort", "chat_template_kwargs"),
    *("allowed_token_ids", "include_stop_str_in_output", "output_config", "output_format", "context_management"),
    *("truncation", "background", "max_tool_calls"),
)
"""Of vLLM's, OpenAI's and Anthropic's, besides those of the sampling; counted unless false, empty or `DEFAULTS`."""
DEFAULTS = {"best_of": 1, "thinking": {"type": "disabled"}, "truncation": "disabled"}
IGNORED_IF_FALSE = ("parallel_tool_calls", "skip_special_tokens")
"""Parameters that are true by default."""
REFUSED_UNLESS_EMPTY = {
    "functions": "offer them as tools",
    "mcp_servers": "offer their functions as tools",
    "documents": "write them into a message",
    "conversation": "send its items in input, or previous_response_id",
    "chat_template": "the run's key chat_template replaces the policy's",
    "truncate_prompt_tokens": "send fewer messages",
}
"""Parameters that change the conversation, with what to send instead."""
REFUSED_UNLESS_ZERO = ("presence_penalty", "frequency_penalty", "logit_bias", "echo", "suffix")
REFUSED_UNLESS_ONE = ("repetition_penalty", "length_penalty")
REFUSAL = "can't be followed: the policy's own distribution is what is trained"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidCallError(message)


def read_list(body: Body, key: str) -> list[Any]:
    value = body.get(key)
    if not isinstance(value, list):
        raise InvalidCallError(f"{key} is {value!r}: a list is needed")
    return value


def read_object(body: Body, key: str) -> Body:
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidCallError(f"{key} is {value!r}: an object is needed")
    return value


def read_items(body: Body, key: str) -> list[Any]:
    return [] if body.get(key) is None else read_list(body, key)


def number(body: Body, *keys: str) -> int | None:
    """Return the first set value."""
    for key in keys:
        value = body.get(key)
        if value is not None:
            require(isinstance(value, int) and not isinstance(value, bool), f"{key} is {value!r}: an int is needed")
            return int(value)
    return None


def stop_words(value: Any, key: str) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    is_valid = isinstance(texts, list) and all(isinstance(word, str) for word in texts)
    require(is_valid, f"{key} is {value!r}: a text or a list of texts is needed")
    words = tuple(filter(None, texts))
    excess = find_excess(words)
    require(not excess, f"{key} has {excess}")
    return words


def read_tools(body: Body, is_function: Callable[[Any], bool], kind: str, *, are_called: bool) -> list[Body]:
    """Return functions; other tools are left out if none is called, else refused."""
    tools = read_items(body, "tools")
    for tool in tools if are_called else ():
        require(is_function(tool), f"tools: only {kind} can be offered, not {tool!r}")
    return [tool for tool in tools if is_function(tool)]


def require_function(function: Body) -> None:
    """Require what the parsers of calls need of a tool."""
    require(
        isinstance(function.get("name"), str), f"tools: a function's name is {function.get('name')!r}: text is needed"
    )
    for key, kind, needed in (("description", str, "text"), ("parameters", Mapping, "an object")):
        value = function.get(key)
        require(value is None or isinstance(value, kind), f"tools: {key} is {value!r}: {needed} is needed")


def find_ignored_parameters(body: Body, others: Iterable[str] = ()) -> tuple[str, ...]:
    read_object(body, "stream_options")
    for key in REFUSED_UNLESS_ZERO:
        require(not body.get(key), f"{key} {REFUSAL}")
    for key in REFUSED_UNLESS_ONE:
        require(body.get(key) in (None, 1), f"{key} {REFUSAL}")
    for key, remedy in REFUSED_UNLESS_EMPTY.items():
        require(not body.get(key), f"{key} is not supported: {remedy}")
    own = (key for key in OWN_SAMPLING if body.get(key) is not None)
    ignored = (key for key in (*IGNORED, "top_logprobs") if body.get(key) and body[key] != DEFAULTS.get(key))
    false = (key for key in IGNORED_IF_FALSE if body.get(key) is False)
    return (*own, *ignored, *false, *others)


def take_prefill(messages: list[ChatMessage]) -> str:
    """Remove a final assistant message, the beginning of the answer; return its text."""
    if not messages or messages[-1].role != "assistant":
        return ""
    last = messages.pop()
    require(not last.tool_calls, "messages: the last one uses tools, whose results are missing")
    return last.content


def require_messages(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    require(bool(messages), "messages is empty")
    return messages
