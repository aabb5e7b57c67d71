"""OpenAI's `/v1/chat/completions` and `/v1/completions` as `ModelRequest` and `ModelReply`."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from offbeat.services.chat.messages import (
    ChatMessage,
    ToolCall,
    Tools,
    normalize_arguments,
)
from offbeat.services.gateway.contents import read_content
from offbeat.services.gateway.request_fields import (
    Body,
    find_ignored_parameters,
    number,
    read_items,
    read_list,
    read_object,
    read_tools,
    require,
    require_function,
    require_messages,
    stop_words,
    take_prefill,
)
from offbeat.services.gateway.session import InvalidCallError, ModelReply, ModelRequest

SYSTEM_ROLES = ("system", "developer")
TOKEN_IDS = range(1 << 31)
"""Other ids would fail a generation call shared between episodes."""


def read_chat(body: Body) -> ModelRequest:
    given = read_list(body, "messages")
    messages = [_message(message, i) for i, message in enumerate(given)]
    prefill = take_prefill(messages) if _continues_last(body, given) else ""
    choice = body.get("tool_choice")
    forced = ("tool_choice",) if choice not in (None, "auto", "none") else ()
    shape = read_object(body, "response_format")
    shaped = ("response_format",) if shape.get("type", "text") != "text" else ()
    return ModelRequest(
        require_messages(tuple(messages)),
        _tools(read_tools(body, _is_function, "functions", are_called=choice != "none")),
        reads_calls=choice != "none",
        max_tokens=number(body, "max_completion_tokens", "max_tokens"),
        num_answers=_number_or(1, body, "n"),
        stop=stop_words(body.get("stop"), "stop"),
        wants_logprobs=bool(body.get("logprobs")),
        ignored=find_ignored_parameters(body, (*forced, *shaped)),
        prefill=prefill,
    )


def _continues_last(body: Body, messages: Sequence[Body]) -> bool:
    """Return whether the last message begins the answer: vLLM's parameter, or the field of Mistral's and DeepSeek's."""
    continues = bool(body.get("continue_final_message") or (messages and messages[-1].get("prefix")))
    if continues:
        is_answer = bool(messages) and messages[-1]["role"] == "assistant"
        require(is_answer, "continue_final_message: the last message is not the assistant's")
    elif body.get("add_generation_prompt") is False:
        raise InvalidCallError("add_generation_prompt: false is not supported without continue_final_message")
    return continues


def _is_function(tool: Any) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "function" and isinstance(tool.get("function"), Mapping)


def _tools(functions: Sequence[Body]) -> Tools:
    for tool in functions:
        require_function(tool["function"])
    return tuple(functions)


def read_completion(body: Body) -> ModelRequest:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and all(type(token) is int and token in TOKEN_IDS for token in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple):
        raise InvalidCallError("prompt: one text or one list of token ids is needed")
    return ModelRequest(
        prompt=prompt,
        has_start=body.get("add_special_tokens") is not False,
        max_tokens=_number_or(16, body, "max_tokens"),
        num_answers=_number_or(1, body, "n"),
        stop=stop_words(body.get("stop"), "stop"),
        wants_logprobs=body.get("logprobs") is not None,
        ignored=find_ignored_parameters(body, ("logprobs",) if body.get("logprobs") else ()),
    )


def _number_or(default: int, body: Body, key: str) -> int:
    value = number(body, key)
    return default if value is None else value


def _message(message: Any, index: int) -> ChatMessage:
    where = f"messages[{index}]"
    require(isinstance(message, Mapping) and isinstance(message.get("role"), str), f"{where} has no role")
    role = "system" if message["role"] in SYSTEM_ROLES else str(message["role"])
    require(role in ("system", "user", "assistant", "tool"), f"{where}: role {role!r} is not known")
    require(not message.get("function_call"), f"{where}.function_call is not supported: send tool_calls")
    content = read_content(message.get("content"), f"{where}.content", role=role)
    return ChatMessage(
        role,
        content.text,
        tuple(_call(call, where) for call in read_items(message, "tool_calls")),
        str(message.get("tool_call_id") or ""),
        str(message.get("reasoning_content") or ""),
        content.images,
    )


def _call(call: Any, where: str) -> ToolCall:
    try:
        function = call["function"]
        return ToolCall(str(function["name"]), normalize_arguments(function["arguments"]), str(call.get("id") or ""))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidCallError(f"{where}.tool_calls: {call!r} is no call of a function: {error}") from error


# --- answers --------------------------------------------------------------------------------------------------------


def write_chat(body: Body, replies: Sequence[ModelReply], answer_id: str, model: str) -> dict[str, Any]:
    choices = [
        {
            "index": i,
            "message": {
                "role": "assistant",
                "content": reply.message.content or (None if reply.message.tool_calls else ""),
                **_calls(reply),
            },
            "logprobs": _chat_logprobs(reply) if body.get("logprobs") else None,
            "finish_reason": reply.finish_reason,
            **({"token_ids": list(reply.token_ids)} if body.get("return_token_ids") else {}),
        }
        for i, reply in enumerate(replies)
    ]
    head = _head("chat.completion", answer_id, model)
    if body.get("return_token_ids"):  # vLLM's name and places
        head["prompt_token_ids"] = list(replies[0].prompt_ids)
    return {**head, "choices": choices, "usage": usage(replies)}


def stream_chat(body: Body, replies: Sequence[ModelReply], answer_id: str, model: str) -> Iterator[str]:
    """Yield server-sent events, text in one chunk."""
    head = _head("chat.completion.chunk", answer_id, model)

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event({**head, "choices": [choice]})

    for i, reply in enumerate(replies):
        yield chunk(i, {"role": "assistant", "content": ""})
        calls = _calls(reply).get("tool_calls", [])
        deltas = [{"content": reply.message.content}] if reply.message.content or not calls else []
        deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls)]
        for position, delta in enumerate(deltas):
            yield chunk(i, delta, logprobs=_chat_logprobs(reply) if body.get("logprobs") and not position else None)
        yield chunk(i, {}, reply.finish_reason)
    if read_object(body, "stream_options").get("include_usage"):
        yield event({**head, "choices": [], "usage": usage(replies)})
    yield "data: [DONE]\n\n"


def write_completion(body: Body, replies: Sequence[ModelReply], answer_id: str, model: str) -> dict[str, Any]:
    choices = [
        {
            "index": i,
            "text": reply.message.content,
            "logprobs": _text_logprobs(reply) if body.get("logprobs") is not None else None,
            "finish_reason": reply.finish_reason,
        }
        for i, reply in enumerate(replies)
    ]
    return {**_head("text_completion", answer_id, model), "choices": choices, "usage": usage(replies)}


def stream_completion(body: Body, replies: Sequence[ModelReply], answer_id: str, model: str) -> Iterator[str]:
    full = write_completion(body, replies, answer_id, model)
    counts = full.pop("usage")
    for choice in full["choices"]:
        yield event({**full, "choices": [choice]})
    if read_object(body, "stream_options").get("include_usage"):
        yield event({**full, "choices": [], "usage": counts})
    yield "data: [DONE]\n\n"


def event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def usage(replies: Sequence[ModelReply]) -> dict[str, int]:
    """Return token counts; the prompt counts once."""
    prompt, sampled = replies[0].prompt_tokens, sum(len(reply.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _head(kind: str, answer_id: str, model: str) -> dict[str, Any]:
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}


def _calls(reply: ModelReply) -> dict[str, Any]:
    calls = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.message.tool_calls
    ]
    return {"tool_calls": calls} if calls else {}


def _chat_logprobs(reply: ModelReply) -> dict[str, Any]:
    entries = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(reply.token_texts, reply.logprobs, strict=True)
    ]
    return {"content": entries, "refusal": None}


def _text_logprobs(reply: ModelReply) -> dict[str, Any]:
    starts = list(accumulate(map(len, reply.token_texts[:-1]), initial=0)) if reply.token_texts else []
    return {
        "tokens": list(reply.token_texts),
        "token_logprobs": list(reply.logprobs),
        "top_logprobs": None,
        "text_offset": starts,
    }
