"""Chat templates with vLLM's tool call parsers.

Invariant: a template describes functions, and its parser reads its own call.
"""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from offbeat.services.chat.append_only import ChatFormat, load_chat_format
from offbeat.services.chat.messages import CallParser, ChatMessage, ToolCall
from offbeat.services.chat.template import ChatTemplate, UnusableError, load_chat_template
from offbeat.services.chat.tool_parsers import load_parser
from offbeat.services.chat.tool_probe import (
    ANOTHER,
    ASKED,
    CALL,
    OFFERED,
    PROBE,
    can_render_results,
)
from offbeat.services.errors import RolloutError

CANDIDATES = (
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("functools[", "phi4_mini_json"),
    ("<|python_tag|>", "llama3_json"),
    ("<|tool_call|>", "granite"),
    ("<function_call>", "granite-20b-fc"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<function=", "seed_oss"),
    ("<tool_call>", "hermes"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|action_start|>", "internlm"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<tool_calls>", "jamba"),
    ("<tool_calls>", "hunyuan_a13b"),
    ("<longcat_tool_call>", "longcat"),
    ("<function_calls>", "olmo3"),
    ("[{", "xlam"),
    ("{", "llama3_json"),
    ("[", "pythonic"),
)
"""(text in a call, vLLM parser), in order."""


def load_function_template(folder: Path, tool_call_parser: str | None = None) -> ChatTemplate:
    """Load a Hugging Face folder's template with a call parser.

    tool_call_parser: vLLM's; None: the detected JSON format, else the first of `CANDIDATES` that reads a call,
    preferably several per answer.

    Raises:
        RolloutError: the template describes no functions, writes no calls, or no parser reads them.
    """
    if tool_call_parser is not None:
        return _check(_load_with_parser(folder, tool_call_parser), f"tool_call_parser {tool_call_parser!r}")
    plain = load_chat_template(folder)
    written = render_call(plain)
    _check_end(plain, written)
    second_best: ChatTemplate | None = None
    for template in chain((plain,), _candidates(folder, written)):
        if can_parse_own_calls(template):
            if _can_parse_several(template):
                return template
            second_best = second_best or template
    if second_best is not None:
        return second_best
    raise RolloutError(
        f"the chat template writes a call of a function as {written!r}, which no known parser reads: name one of "
        "vLLM's by tool_call_parser"
    )


def render_call(template: ChatTemplate, calls: tuple[ToolCall, ...] = (CALL,)) -> str:
    """Render calls of `PROBE` functions.

    Raises:
        RolloutError: functions or calls are not written.
    """
    prompt_text = _render(template, (ASKED,), prompt=True)
    if OFFERED not in prompt_text:
        raise RolloutError(
            "the chat template does not show functions (`tools`) to the policy: leave them to the prompt"
        )
    full_text = _render(template, (ASKED, ChatMessage("assistant", "", calls)), prompt=False)
    if not full_text.startswith(prompt_text):  # the generation prompt opens a thought, say
        prompt_text = _render(template, (ASKED,), prompt=False)
    written = full_text.removeprefix(prompt_text)
    if not full_text.startswith(prompt_text) or OFFERED not in written:
        raise RolloutError("the chat template does not write an assistant's calls of functions (`tool_calls`)")
    return written[: written.rfind(template.end_text)] if template.end_text in written else written


def can_parse_own_calls(template: ChatTemplate) -> bool:
    return _parse(template, render_call(template)) == (CALL,)


def _can_parse_several(template: ChatTemplate) -> bool:
    """Return whether two calls are parsed back, or can't be rendered."""
    try:
        written = render_call(template, (CALL, ANOTHER))
    except RolloutError:
        return True
    return _parse(template, written) == (CALL, ANOTHER)


def _check_end(template: ChatTemplate, written: str) -> None:
    """Require calls and other answers to end alike, or sampling would not stop."""
    result = ChatMessage("tool" if can_render_results(template) else "user", "offbeatresult", tool_call_id=CALL.call_id)
    full_text = _render(template, (ASKED, ChatMessage("assistant", "", (CALL,)), result), prompt=True)
    _, separator, suffix = full_text.partition(written)
    if separator and not suffix.lstrip().startswith(template.end_text):
        raise RolloutError(
            f"the chat template continues with {suffix[:30]!r} after a call of functions, and ends other answers by "
            f"{template.end_text!r}: the end of a call can't be determined"
        )


def _check(template: ChatTemplate, name: str) -> ChatTemplate:
    _check_end(template, render_call(template))
    if not can_parse_own_calls(template):
        written = render_call(template)
        raise RolloutError(f"{name} does not read what the chat template writes: {written!r} gives no call")
    return template


def _candidates(folder: Path, written: str) -> Iterator[ChatTemplate]:
    for mark, name in CANDIDATES:
        if mark in written:
            try:
                yield _load_with_parser(folder, name)
            except RolloutError:
                continue  # the tokenizer lacks its tokens


def _load_with_parser(folder: Path, name: str) -> ChatTemplate:
    def parser_for(tokenizer: Any) -> CallParser:
        return load_parser(name, tokenizer)

    return load_chat_template(folder, parser_for)


def _parse(template: ChatTemplate, written: str) -> tuple[ToolCall, ...]:
    return template.message_of(template.text_of(template.encode(written)), tools=PROBE).tool_calls


def _render(template: ChatTemplate, messages: tuple[ChatMessage, ...], *, prompt: bool) -> str:
    try:
        return template.write(messages, PROBE, prompt=prompt)
    except UnusableError as error:
        raise RolloutError(f"{error}: functions can't be offered by it") from error


def load_playing_format(folder: Path) -> ChatFormat:
    """Load as `load_chat_format`."""
    return load_chat_format(folder, partial(load_function_template, folder))
