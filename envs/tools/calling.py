"""The tools: each finds its call in an answer and says what came of it."""

from abc import abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from envs.config import Config
from envs.dataset.code import FENCED
from envs.dataset.env import last_group
from envs.dataset.rows import read_table
from envs.extras import require
from envs.parsing import compile_pattern
from envs.sandbox import Limits, run_python
from envs.webshop.search import words


class ToolResult(NamedTuple):
    """What a call gave."""

    text: str
    ok: bool


class Tool(Config):
    """One entry of `tools`."""

    pattern: str
    """Regular expression whose group is the call's text; the last match counts."""
    instruction: str
    """Added to the system prompt."""

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern

    def called(self, answer: str) -> str | None:
        """The call's text; None where the answer does not call this tool."""
        return last_group(self.pattern, answer)

    @abstractmethod
    def use(self, text: str) -> ToolResult:
        """Do what is asked for; a call that fails says why."""


class PythonTool(Tool):
    """A program, run in the sandbox; what it prints is the result."""

    tool_id: Literal["python_code"]
    pattern: str = FENCED
    instruction: str = "You may run Python in a fenced block (```python) and will see what it prints."
    limits: Limits = Limits()

    def use(self, text: str) -> ToolResult:
        """See `Tool.use`."""
        outcome = run_python(text, limits=self.limits)
        return ToolResult(outcome.stdout.rstrip() or "(nothing was printed)", True) if outcome.ok else _failed(outcome)


class SearchTool(Tool):
    """Passages of a corpus on disk, best first by BM25."""

    tool_id: Literal["search"]
    corpus: Path
    """A .jsonl, .json, .csv, .parquet or .txt file, or a folder that `datasets` saved; each row is a passage."""
    text_key: str = "text"
    top_k: int = Field(default=3, ge=1)
    pattern: str = "<search>(.*?)</search>"
    instruction: str = "You may search by <search>words</search> and will see the best passages."

    def use(self, text: str) -> ToolResult:
        """See `Tool.use`."""
        asked = words(text)
        index, passages = _index(self.corpus, self.text_key)
        if not asked:
            return ToolResult("the search is empty", False)
        scores = np.asarray(index.get_scores(asked))
        best = [int(i) for i in np.argsort(-scores, kind="stable")[: self.top_k] if scores[i] > 0]
        found = "\n".join(f"[{place + 1}] {passages[i]}" for place, i in enumerate(best))
        return ToolResult(found or "nothing was found", bool(best))


AnyTool = Annotated[PythonTool | SearchTool, Field(discriminator="tool_id")]


def _failed(outcome: Any) -> ToolResult:
    printed = f"{outcome.stdout.rstrip()}\n" if outcome.stdout.strip() else ""
    return ToolResult(f"{printed}{outcome.error}", False)


@lru_cache(maxsize=4)
def _index(corpus: Path, text_key: str) -> tuple[Any, list[str]]:
    """Raises ValueError where the corpus can't be read."""
    table = read_table(corpus)
    if text_key not in table.column_names:
        raise ValueError(f"text_key: {corpus} has no column {text_key!r}; it has {', '.join(table.column_names)}")
    passages = [str(text) for text in table[text_key]]
    index: Any = require("bm25s", "webshop").BM25()
    index.index([words(text) for text in passages], show_progress=False)
    return index, passages
