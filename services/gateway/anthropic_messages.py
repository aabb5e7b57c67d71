"""Anthropic's `/v1/messages` as `ModelRequest` and `ModelReply`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offbeat.services.chat.messages import (
    ChatMessage,
    ToolCall,
    Tools,
    normalize_arguments,
)
from offbeat.services.gateway.contents import read_content, words
from offbeat.services.gateway.request_fields import (
    Body,
    find_ignored_parameters,
    number,
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

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read_messages(body: Body) -> ModelRequest:
    system = words(body.get("system"), "system")
    messages = [ChatMessage("system", system)] if system else []
    for index, message in enumerate(read_list(body, "messages")):
        messages += _read(message, f"messages[{index}]")
    prefill = take_prefill(messages)
    tool_choice = read_object(body, "tool_choice")
    choice = tool_choice.get("type", "auto")
    forced = ("tool_choice",) if choice in ("any", "tool") else ()
    single = ("disable_parallel_tool_use",) if tool_choice.get("disable_parallel_tool_use") else ()
    return ModelRequest(
        require_messages(tuple(messages)),
        _tools(read_tools(body, _is_function, "tools with an input_schema", are_called=choice != "none")),
        reads_calls=choice != "none",
        max_tokens=number(body, "max_tokens"),
        stop=stop_words(body.get("stop_sequences"), "stop_sequences"),
        ignored=find_ignored_parameters(body, (*forced, *single)),
        prefill=prefill,
    )


def _is_function(tool: Any) -> bool:
    return isinstance(tool, Mapping) and isinstance(tool.get("input_schema"), Mapping)


def _tools(functions: Sequence[Body]) -> Tools:
    tools: list[dict[str, Any]] = []
    for tool in functions:
        function = {
            "name": tool.get("name"),
            "description": tool.get("description") or "",
            "parameters": tool["input_schema"],
        }
        require_function(function)
        tools.append({"type": "function", "function": function})
    return tuple(tools)


def _read(message: Any, where: str) -> list[ChatMessage]:
    """Convert a message; tool results precede its text."""
    require(isinstance(message, Mapping), f"{where} is no message")
    role, content = str(message.get("role")), message.get("content")
    require(role in ("user", "assistant", "system"), f"{where}: role {role!r} is not known")
    if not isinstance(content, list):
        return [ChatMessage(role, words(content, f"{where}.content"))]
    results = [part for part in content if isinstance(part, Mapping) and part.get("type") == "tool_result"]
    calls = [part for part in content if isinstance(part, Mapping) and part.get("type") == "tool_use"]
    rest = [part for part in content if part not in results and part not in calls]
    read = [_result(part, where) for part in results]
    if rest or calls or not read:
        text, images = read_content(rest, f"{where}.content", role=role)
        read.append(ChatMessage(role, text, tuple(_call(part, where) for part in calls), images=images))
    return read


def _result(part: Body, where: str) -> ChatMessage:
    text, images = read_content(part.get("content"), f"{where}.content", role="tool")
    return ChatMessage("tool", text, tool_call_id=str(part.get("tool_use_id")), images=images)


def _call(part: Body, where: str) -> ToolCall:
    try:
        return ToolCall(str(part["name"]), normalize_arguments(part["input"]), str(part.get("id") or ""))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidCallError(f"{where}: {part!r} is no use of a tool: {error}") from error


# --- answers --------------------------------------------------------------------------------------------------------


def write_message(reply: ModelReply, answer_id: str, model: str) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if reply.message.content or not reply.message.tool_calls:
        content.append({"type": "text", "text": reply.message.content, "citations": None})
    content += [
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": call.parsed()}
        for call in reply.message.tool_calls
    ]
    return {
        "id": answer_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": "stop_sequence" if reply.stop_word else STOP_REASONS[reply.finish_reason],
        "stop_sequence": reply.stop_word or None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.token_ids)},
    }


def stream_message(reply: ModelReply, answer_id: str, model: str) -> Iterator[str]:
    full = write_message(reply, answer_id, model)
    start = {**full, "content": [], "stop_reason": None, "stop_sequence": None}
    start["usage"] = {**full["usage"], "output_tokens": 0}
    yield _event("message_start", message=start)
    for index, block in enumerate(full["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = (
                {**block, "input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
            )
        yield _event("content_block_start", index=index, content_block=empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    end = {"stop_reason": full["stop_reason"], "stop_sequence": full["stop_sequence"]}
    yield _event("message_delta", delta=end, usage=full["usage"])
    yield _event("message_stop")


def _event(kind: str, **data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n"
