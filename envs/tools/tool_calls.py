"""Tools, which find their calls in answers."""

from abc import abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import numpy as np
from pydantic import Field, field_validator, model_validator

from offbeat.envs.config import Config
from offbeat.envs.dataset.code import FENCED
from offbeat.envs.dataset.env import last_group
from offbeat.envs.dataset.rows import read_table
from offbeat.envs.optional_imports import require
from offbeat.envs.parsing import compile_pattern
from offbeat.envs.sandbox import Limits, check_isolation, run_python
from offbeat.envs.tools.functions import Call, Function
from offbeat.envs.tools.mcp_server import NOTHING, McpAddress, McpSession
from offbeat.envs.tools.retriever import RetrievalError, check_server, retrieve
from offbeat.envs.webshop.search import words

MCP_INSTRUCTION = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
"""Verbatim from Qwen2.5."""


class ToolResult(NamedTuple):
    text: str
    ok: bool
    is_empty: bool = False
    """The call returned nothing."""


class OpenTool(Protocol):
    @property
    def instruction(self) -> str: ...

    def find_call(self, answer: str) -> str | None: ...

    def accepts(self, text: str) -> bool:
        """Return whether the call is for this tool."""
        ...

    def use(self, text: str, timeout_s: float) -> ToolResult:
        """Make the call; the result describes failures. timeout_s: upper bound besides the tool's own."""
        ...

    @property
    def functions(self) -> tuple[Function, ...]:
        """Functions for chat templates."""
        ...

    def call_function(self, call: Call, timeout_s: float) -> ToolResult:
        """Call a function; the result describes failures. timeout_s: upper bound besides the tool's own."""
        ...

    def close(self) -> None: ...


class Tool(Config):
    pattern: str
    """Regular expression with the text as group; the last match counts."""
    instruction: str
    """Addition to the system prompt."""

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern

    def find_call(self, answer: str) -> str | None:
        return last_group(self.pattern, answer)

    @abstractmethod
    def open(self) -> OpenTool:
        """Prepare the tool for an env; raises ValueError if unavailable."""


class StatelessTool(Tool):
    def open(self) -> OpenTool:
        return self

    def accepts(self, text: str) -> bool:  # noqa: ARG002
        return True

    @abstractmethod
    def use(self, text: str, timeout_s: float) -> ToolResult: ...

    @property
    @abstractmethod
    def functions(self) -> tuple[Function, ...]:
        """Return one function of one argument, the call's text."""

    def call_function(self, call: Call, timeout_s: float) -> ToolResult:
        (argument,) = self.functions[0].parameters["required"]
        text = call.arguments.get(argument)
        if isinstance(text, str):
            return self.use(text, timeout_s)
        return ToolResult(f"{call.name} needs the argument {argument!r}, a text", False)

    def close(self) -> None: ...


def _text_function(name: str, description: str, argument: str) -> tuple[Function, ...]:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return (Function(name, description, schema),)


class PythonTool(StatelessTool):
    tool_id: Literal["python_code"]
    pattern: str = FENCED
    instruction: str = "You may run Python in a fenced block (```python) and will see what it prints."
    limits: Limits = Limits()

    @property
    def functions(self) -> tuple[Function, ...]:
        return _text_function("python_code", "Run a Python program and see what it prints.", "code")

    def open(self) -> OpenTool:
        check_isolation(self.limits)
        return self

    def use(self, text: str, timeout_s: float) -> ToolResult:
        limits = self.limits.model_copy(update={"timeout_s": min(timeout_s, self.limits.timeout_s)})
        result = run_python(text, limits=limits)
        if not result.ok:
            return _report_failure(result)
        printed = result.stdout.strip()
        return ToolResult(result.stdout.rstrip() if printed else "(nothing was printed)", True, not printed)


class SearchTool(StatelessTool):
    tool_id: Literal["search"]
    corpus: Path | None = None
    """A .jsonl, .json, .csv, .parquet or .txt file, or a `datasets` folder, searched by BM25; a row is a passage."""
    text_key: str = "text"
    """Column of `corpus`."""
    url: str = Field(default="", pattern="^(https?://.+)?$")
    """Of a retrieval server in place of `corpus`: takes `{queries, topk, return_scores}` as Search-R1's."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Of a request to `url`."""
    top_k: int = Field(default=3, ge=1)
    pattern: str = "<search>(.*?)</search>"
    instruction: str = "You may search by <search>words</search> and will see the best passages."

    @property
    def functions(self) -> tuple[Function, ...]:
        return _text_function("search", "Search a corpus by words and see the best passages.", "query")

    @model_validator(mode="after")
    def _one_of_both(self) -> "SearchTool":
        if (self.corpus is None) == (not self.url):
            raise ValueError("set either corpus or url")
        return self

    def open(self) -> OpenTool:
        if self.corpus is None:
            check_server(self.url, self.timeout_s)
        else:
            _load_index(self.corpus, self.text_key)
        return self

    def use(self, text: str, timeout_s: float) -> ToolResult:
        if not words(text):
            return ToolResult("the search is empty", False)
        try:
            best = self._search(text, timeout_s)
        except RetrievalError as error:
            return ToolResult(f"the search failed: {error}", False)
        lines = "\n".join(f"[{rank}] {passage}" for rank, passage in enumerate(best, 1))
        return ToolResult(lines or "nothing was found", bool(best))

    def _search(self, text: str, timeout_s: float) -> list[str]:
        if self.corpus is None:
            return retrieve(self.url, text.strip(), self.top_k, min(timeout_s, self.timeout_s))
        index, passages = _load_index(self.corpus, self.text_key)
        scores = np.asarray(index.get_scores(words(text)))
        return [passages[int(i)] for i in np.argsort(-scores, kind="stable")[: self.top_k] if scores[i] > 0]


class McpTool(Tool):
    """MCP server functions in Qwen's and Hermes' template format (`<tools>`, `<tool_call>`, `<tool_response>`)."""

    tool_id: Literal["mcp"]
    command: tuple[str, ...] = ()
    """Program and arguments of a server to start."""
    url: str = ""
    """Of a running server (streamable HTTP)."""
    functions: tuple[str, ...] = ()
    """Offered functions; empty: all."""
    timeout_s: float = Field(default=20.0, gt=0)
    """Timeout per call."""
    pattern: str = r"<tool_call>\s*(.*?)\s*</tool_call>"
    instruction: str = MCP_INSTRUCTION
    """Addition to the system prompt; `{tools}` becomes the schemas, one per line."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "McpTool":
        if bool(self.command) == bool(self.url):
            raise ValueError("set either command or url")
        return self

    def open(self) -> OpenTool:
        address = McpAddress(self.command, self.url, self.timeout_s)
        return _OpenMcp(self, McpSession(address, self.functions, self.instruction))


class _OpenMcp:
    def __init__(self, tool: McpTool, session: McpSession) -> None:
        self._tool, self._session = tool, session
        self.instruction = session.instruction
        self.find_call = tool.find_call
        self.accepts = session.accepts
        self.functions = session.functions
        self.close = session.close

    def use(self, text: str, timeout_s: float) -> ToolResult:
        output, ok = self._session.use(text, timeout_s)
        return ToolResult(f"<tool_response>\n{output}\n</tool_response>", ok, output == NOTHING)

    def call_function(self, call: Call, timeout_s: float) -> ToolResult:
        output, ok = self._session.call_function(call, timeout_s)
        return ToolResult(output, ok, output == NOTHING)


AnyTool = Annotated[PythonTool | SearchTool | McpTool, Field(discriminator="tool_id")]


def longest_call_s(tool: AnyTool) -> float:
    match tool:
        case PythonTool():
            return tool.limits.timeout_s
        case McpTool():
            return tool.timeout_s
        case SearchTool():
            return tool.timeout_s if tool.url else 0.0


def _report_failure(result: Any) -> ToolResult:
    printed = f"{result.stdout.rstrip()}\n" if result.stdout.strip() else ""
    return ToolResult(f"{printed}{result.error}", False)


@lru_cache(maxsize=4)
def _load_index(corpus: Path, text_key: str) -> tuple[Any, list[str]]:
    """Return index and passages; raises ValueError if unreadable."""
    table = read_table(corpus, "corpus")
    if text_key not in table.column_names:
        raise ValueError(f"text_key: {corpus} has no column {text_key!r}; it has {', '.join(table.column_names)}")
    passages = [str(text) for text in table[text_key]]
    index: Any = require("bm25s", "webshop").BM25()
    index.index([words(text) for text in passages], show_progress=False)
    return index, passages
