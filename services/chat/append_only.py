"""Chat template as token pieces, for policies that answer an env.

Invariant: first prompt + answer + piece + answer + ... equals the template's tokens, if the template is append-only
(determined at load, as is whether it keeps thoughts).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import NamedTuple, cast

from tokenizers import Tokenizer

from offbeat.services.chat.image_tokens import ImageReader, ImageTokens, make_image_tokens
from offbeat.services.chat.template import ChatTemplate, load_chat_template
from offbeat.services.chat.tokenizer import find_end_ids, load_tokenizer, require_template
from offbeat.services.chat.vision import ImageProcessor
from offbeat.services.errors import RolloutError

ChatMessageDict = dict[str, str]
Render = Callable[[Sequence[ChatMessageDict], bool], str]
"""(messages, add generation prompt) -> text."""

FunctionTemplate = Callable[[str | None], ChatTemplate]
"""tool_call_parser -> template for function calls."""

MARKS = tuple(f"offbeat{i}mark{i}" for i in range(6))
PADDING = "\n\n\n \t"
"""Space before a mark, reversed behind it: more newlines than a template writes around a message, and no tab."""
MAX_CACHED_TEXTS = 2_048
MAX_CACHED_CHARS = 512
"""Longer texts rarely repeat."""


class _Pieces(NamedTuple):
    head: str
    between: str
    tail: str


class _Stripping(NamedTuple):
    """Characters that the template strips before and after a message; None: all space."""

    left: str | None
    right: str | None

    def apply(self, text: str) -> str:
        return text.lstrip(self.left).rstrip(self.right)


KEPT = _Stripping("", "")


class ChatFormat:
    def __init__(
        self,
        render: Render,
        tokenizer: Tokenizer,
        extra_stop_ids: Sequence[int] = (),
        reader: Callable[[], ImageReader] | None = None,
        template: Callable[[], ChatTemplate] | None = None,
        calling: FunctionTemplate | None = None,
    ) -> None:
        """Analyze and check the template.

        extra_stop_ids: besides the template's. reader: creates the image reader; None: no images. template: creates the
        renderer for templates that rewrite history; None rejects these. calling: creates that of function calls.

        Raises:
            RolloutError: no special token ends an answer, or the template is unusable.
        """
        self._tokenizer = tokenizer
        self._render = render
        self._reader = reader
        self._loading = Lock()
        self._calling = None if calling is None else lru_cache(calling)
        self._first = {False: _split_first(render, None)}
        self._stripping = {False: _find_stripping(render, system=False)}
        if _supports_system(render):
            self._first[True] = _split_first(render, MARKS[0])
            self._stripping[True] = _find_stripping(render, system=True)
        self.opened_thought = _opened_thought(self._first[False].tail)
        """Start of each answer's thought that the template writes itself; empty if it writes none."""
        self._next: _Pieces | None = None
        self.rewriting: ChatTemplate | None = None
        """Renderer, for templates that rewrite earlier turns."""
        self.rewrites = ""
        """What the template rewrites; empty if append-only."""
        try:
            self._next = _analyze_later_turns(render)
        except NotAppendOnlyError as error:
            if template is None:
                raise
            self.rewriting, self.rewrites = template(), str(error)
        self._encode = lru_cache(MAX_CACHED_TEXTS)(self._encode_now)
        self._decode = lru_cache(MAX_CACHED_TEXTS)(self._decode_now)
        self.end_id = self._end_of_turn(self._next) if self.rewriting is None else self.rewriting.end_id
        self.stop_ids = tuple(dict.fromkeys((self.end_id, *extra_stop_ids)))
        if self.rewriting is None:
            _check_tokens(self, render)

    @cached_property
    def image_tokens(self) -> ImageTokens:
        """Return image support; raises RolloutError if the model or template has none."""
        return make_image_tokens(lambda messages: self._render(messages, True), self._reader)

    def calling(self, tool_call_parser: str | None) -> ChatTemplate:
        """Return the renderer of function calls; thread-safe.

        Raises:
            RolloutError: as `load_function_template`.
        """
        if self._calling is None:
            raise RolloutError("this chat format offers no functions")
        with self._loading:
            return self._calling(tool_call_parser)

    def first_prompt(self, system: str, observation: str) -> tuple[int, ...]:
        """Return the tokens before the first answer; empty `system`: no system message.

        Raises:
            RolloutError: an unsupported system message.
        """
        pieces, strip = self._first.get(bool(system)), self._stripping.get(bool(system), {})
        if pieces is None:
            raise RolloutError("the chat template takes no system message: set agent_system_template to an empty text")
        system, observation = (
            strip.get(place, KEPT).apply(text) for place, text in (("system", system), ("first", observation))
        )
        return self.encode(pieces.head + system + pieces.between + observation + pieces.tail)

    def next_prompt(self, observation: str) -> tuple[int, ...]:
        """Return the tokens from an answer's end-of-turn token (exclusive) to the next answer.

        Raises:
            RolloutError: the template rewrites history.
        """
        if self._next is None:
            raise NotAppendOnlyError(self.rewrites)
        observation = self._stripping[False].get("later", KEPT).apply(observation)
        return self.encode(self._next.head + observation + self._next.tail)[1:]

    def answer(self, token_ids: tuple[int, ...]) -> str:
        """Decode an answer without special tokens."""
        return self._decode(token_ids) if len(token_ids) <= MAX_CACHED_CHARS else self._decode_now(token_ids)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def encode(self, text: str) -> tuple[int, ...]:
        return self._encode(text) if len(text) <= MAX_CACHED_CHARS else self._encode_now(text)

    def _encode_now(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _decode_now(self, token_ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _end_of_turn(self, pieces: _Pieces | None) -> int:
        assert pieces is not None
        first = self._encode(pieces.head)[0]
        token = self._tokenizer.get_added_tokens_decoder().get(first)
        if token is None or not pieces.head.startswith(token.content):
            raise RolloutError(
                f"the chat template puts {pieces.head[:20]!r} after an answer, which is no special token of the "
                "tokenizer: the end of an answer can't be determined"
            )
        return first


def load_chat_format(folder: Path, calling: FunctionTemplate | None = None) -> ChatFormat:
    """Load a Hugging Face folder's chat format.

    Raises:
        RolloutError: no tokenizer or usable chat template.
    """
    tokenizer = load_tokenizer(folder)
    require_template(folder, tokenizer)
    backend = cast(Tokenizer, tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()

    def render(messages: Sequence[ChatMessageDict], prompt: bool) -> str:
        return cast(str, tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt))

    def reader() -> ImageReader:
        return ImageProcessor(folder)

    return ChatFormat(
        render,
        backend,
        find_end_ids(folder, tokenizer),
        reader,
        template=lambda: load_chat_template(folder),
        calling=calling,
    )


def _turns(contents: Sequence[str], system: str | None = None) -> list[ChatMessageDict]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def _find_stripping(render: Render, *, system: bool) -> dict[str, _Stripping]:
    """Return what the template strips of the system message, the first observation and later ones."""
    marks = {"system": MARKS[0], "first": MARKS[1], "later": MARKS[3]}
    padded = {mark: f"{PADDING}{mark}{PADDING[::-1]}" for mark in marks.values()}
    turns = _turns([padded.get(mark, mark) for mark in MARKS[1:4]], padded[MARKS[0]] if system else None)
    text = render(turns, True)
    return {place: _Stripping(*_find_stripped_sides(text, mark)) for place, mark in marks.items() if mark in text}


def _find_stripped_sides(text: str, mark: str) -> Iterator[str | None]:
    before, _, after = text.partition(mark)
    for kept in (before[::-1], after):
        if kept.startswith(PADDING[::-1]):
            yield ""
        else:
            yield "\n" if kept.startswith(PADDING[-1]) else None


def _supports_system(render: Render) -> bool:
    from jinja2 import TemplateError

    try:
        return MARKS[0] in render(_turns(MARKS[1:2], MARKS[0]), True)
    except TemplateError:
        return False


def _split_first(render: Render, system: str | None) -> _Pieces:
    text, user = render(_turns(MARKS[1:2], system), True), MARKS[1]
    head, rest = ("", text) if system is None else _split(text, system)
    return _Pieces(head, *_split(rest, user))


def _opened_thought(tail: str) -> str:
    _, start, rest = tail.rpartition("<think>")
    return start + rest if start and "</think>" not in rest else ""


def _split_next(render: Render, system: str | None) -> _Pieces:
    user, answer, reply, second_answer, second_reply = MARKS[1:]
    short = render(_turns((user,), system), True)
    long = render(_turns((user, answer, reply), system), True)
    if not long.startswith(short + answer):
        raise _not_append_only(short + answer, long)
    head, tail = _split(long.removeprefix(short + answer), reply)
    expected = long + second_answer + head + second_reply + tail
    longest = render(_turns((user, answer, reply, second_answer, second_reply), system), True)
    if longest != expected:
        raise _not_append_only(expected, longest)
    return _Pieces(head, "", tail)


def _analyze_later_turns(render: Render) -> _Pieces:
    """Split around later observations, if earlier turns persist."""
    pieces = _split_next(render, None)
    if _supports_system(render) and (with_system := _split_next(render, MARKS[0])) != pieces:
        raise _not_append_only(str(pieces), str(with_system))
    user, thought, answer, reply = MARKS[1:5]
    thinking = f"<think>\n{thought}\n</think>\n\n{answer}"
    short, long = render(_turns((user,)), True), render(_turns((user, thinking, reply)), True)
    if not long.startswith(short + thinking):
        raise _not_append_only(short + thinking, long)
    return pieces


def _split(text: str, mark: str) -> tuple[str, str]:
    before, separator, after = text.partition(mark)
    if not separator or mark in after:
        raise RolloutError(f"the chat template shows a message {text.count(mark)} times, not once: it can't be used")
    return before, after


class NotAppendOnlyError(RolloutError):
    """The template rewrites earlier turns."""


def _not_append_only(expected: str, actual: str) -> NotAppendOnlyError:
    offset = next(
        (i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), min(len(expected), len(actual))
    )
    return NotAppendOnlyError(
        "the chat template is not append-only: with another turn it renders the earlier ones differently "
        f"(expected ...{expected[max(0, offset - 20) : offset + 30]!r}, "
        f"got ...{actual[max(0, offset - 20) : offset + 30]!r})"
    )


def _check_tokens(chat: ChatFormat, render: Render) -> None:
    observations = ("P _\n_ G", "0 1 Left _", "You see: 3 apples.\n\nGo on?")
    first = chat.first_prompt("", observations[0])
    short = render(_turns((*observations[:1], "Down", *observations[1:2])), True)
    long = render(_turns((observations[0], "Down", observations[1], "Up", observations[2])), True)
    for text, observation in ((short, observations[1]), (long, observations[2])):
        full, piece = chat.encode(text), (chat.end_id, *chat.next_prompt(observation))
        if full[: len(first)] != first or full[-len(piece) :] != piece:
            raise RolloutError(
                "the tokenizer encodes the parts of a conversation differently from the whole: tokens that were sampled "
                "could not be kept as they are"
            )
