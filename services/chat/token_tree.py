"""An episode's calls as a tree of token sequences; a node is a completion with its prompt.

A call rendered as a node's text plus a suffix continues it: only the suffix is encoded. Invariants: nodes record what
was sent and sampled, token by token; sampled tokens are never re-encoded; a node's tokens start with its parent's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix

from offbeat.services.chat.messages import ChatMessage, Tools
from offbeat.services.chat.template import ChatTemplate, UnusableError
from offbeat.services.messages.types import Completion, FinishReason

ROOT = -1


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    parent: int = ROOT
    text: str = ""
    """Rendered prompt, or the agent's text."""
    unverified: int = 0
    """Assistant messages not known to be sampled."""
    is_chat: bool = True
    anchor: str = ""
    """Answered state, if known."""
    prefill: str = ""
    """Beginning of the answer that the agent wrote, at the end of `text`."""


@dataclass(slots=True)
class Node:
    prompt: Prompt
    message: ChatMessage
    completion: Completion
    num_kept: int
    """Completion tokens that count: all, or to the stop word's end."""
    delivered: bool = False
    """Whether the agent received it."""

    @property
    def is_truncated(self) -> bool:
        return self.completion.finish_reason is FinishReason.LENGTH

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt.tokens + self.completion.token_ids[: self.num_kept]


@dataclass(slots=True)
class TokenTree:
    template: ChatTemplate
    nodes: list[Node] = field(default_factory=list[Node])
    _by_text: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def plan_chat(self, messages: Sequence[ChatMessage], tools: Tools = (), prefill: str = "") -> Prompt:
        """Return a conversation's prompt.

        prefill: beginning of the answer.

        Raises:
            UnusableError: rendering failed, or the template's answers do not begin with their text.
        """
        start = self.template.render(messages, tools, prompt=True)
        full_text = start + prefill
        anchor = messages[-1].content if messages else ""
        if prefill:
            self._require_prefill(messages, tools, prefill, start)
            extended = self._find_extended(self._by_text.get(start, ()), start, full_text)
            if extended is not None:
                return Prompt(extended[1], extended[0], full_text, anchor=anchor, prefill=prefill)
        answer_indexes = [i for i, message in enumerate(messages) if message.role == "assistant"]
        for index in reversed(answer_indexes):
            try:
                continuation = self._find_continuation(messages, tools, index, full_text)
            except UnusableError:
                continue  # only the whole can be rendered, such as after a greeting: no answer to the part before it
            if continuation is not None:
                parent, tokens = continuation
                later = sum(other > index for other in answer_indexes) + bool(prefill)
                return Prompt(tokens, parent, full_text, later, anchor=anchor, prefill=prefill)
        unverified = len(answer_indexes) + bool(prefill)
        return Prompt(self.template.encode(full_text), ROOT, full_text, unverified, anchor=anchor, prefill=prefill)

    def plan_text(self, text: str, *, has_start: bool = True) -> Prompt:
        """Continue the longest known text, of prompts that were texts. has_start: begin a new one with `start_ids`."""
        best, known = ROOT, ""
        for number, node in enumerate(self.nodes):
            if node.prompt.is_chat or not node.prompt.text:
                continue
            text_so_far = node.prompt.text + self._plain_text(node)
            if len(text_so_far) > len(known) and text.startswith(text_so_far):
                best, known = number, text_so_far
        new, start = text[len(known) :], self.template.start_ids
        tokens = self.template.encode(new)
        if best != ROOT:
            tokens = self.nodes[best].tokens + tokens
        elif has_start and tokens[: len(start)] != start:
            tokens = start + tokens
        return Prompt(tokens, best, text, is_chat=False, anchor=new)

    def plan_tokens(self, tokens: tuple[int, ...]) -> Prompt:
        """Continue the longest known prefix."""
        fits = [n for n, node in enumerate(self.nodes) if tokens[: len(node.tokens)] == node.tokens]
        parent = max(fits, key=lambda n: len(self.nodes[n].tokens), default=ROOT)
        return Prompt(tokens, parent, is_chat=False)

    def record(self, prompt: Prompt, message: ChatMessage, completion: Completion, num_kept: int) -> int:
        """Return the answer's number."""
        number = len(self.nodes)
        self.nodes.append(Node(prompt, message, completion, num_kept))
        if prompt.is_chat:
            self._by_text.setdefault(prompt.text.removesuffix(prompt.prefill), []).append(number)
        if prompt.parent != ROOT:
            self.nodes[prompt.parent].delivered = True  # the agent continued from it
        return number

    def path(self, number: int) -> Iterator[int]:
        while number != ROOT:
            yield number
            number = self.nodes[number].prompt.parent

    def _require_prefill(self, messages: Sequence[ChatMessage], tools: Tools, prefill: str, start: str) -> None:
        answered = (*messages, ChatMessage("assistant", prefill))
        # templates may trim an answer
        if not self.template.render(answered, tools, prompt=False).startswith(start + prefill.rstrip()):
            raise UnusableError(
                "the policy's chat template puts other text before an answer's, so that a final assistant message can't be "
                "continued: end with a user message"
            )

    def _find_continuation(
        self, messages: Sequence[ChatMessage], tools: Tools, index: int, full_text: str
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return the node of the assistant message at `index`, if continued, and the tokens to send."""
        before = self.template.render(messages[:index], tools, prompt=True)
        candidates = self._by_text.get(before, ())
        same = [n for n in candidates if self.nodes[n].message.is_same_answer(messages[index])]
        if not same:
            return self._find_extended(candidates, before, full_text)
        answered = self.template.render(messages[: index + 1], tools, prompt=False)
        if not answered.startswith(before) or not full_text.startswith(before):
            return None
        # up to where they differ: a template may close the conversation after the answer's end
        turn = commonprefix((answered[len(before) :], full_text[len(before) :]))  # noqa: RUF071
        written, ending, _ = turn.rpartition(self.template.end_text)
        readings = (self.template.message_of(written, tools=tools), ChatMessage("assistant", written))
        if not ending or not any(reading.is_same_answer(messages[index]) for reading in readings):
            return None
        end = len(before) + len(written)
        parent = _match_call_ids(same, self.nodes, messages[index])
        tokens, suffix = self.nodes[parent].tokens, self.template.encode(full_text[end:])
        # a truncated answer is ended here by an unsampled token
        return parent, tokens + (suffix[1:] if tokens[-1] == self.template.end_id else suffix)

    def _find_extended(
        self, candidates: Sequence[int], before: str, full_text: str
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return a truncated node that the agent extended, and the tokens."""
        for number in reversed(candidates):
            node = self.nodes[number]
            text = before + self._plain_text(node)
            if node.tokens[-1] not in self.template.stop_ids and full_text.startswith(text):
                return number, node.tokens + self.template.encode(full_text[len(text) :])
        return None

    def _plain_text(self, node: Node) -> str:
        ids = node.completion.token_ids[: node.num_kept]
        end = self.template.token_text(ids[-1]) if ids[-1] in self.template.stop_ids else ""
        return node.prompt.prefill + self.template.text_of(ids) + end


def _match_call_ids(candidates: Sequence[int], nodes: Sequence[Node], message: ChatMessage) -> int:
    """Return the candidate with equal call ids, else the newest."""
    ids = [call.call_id for call in message.tool_calls]
    exact = [n for n in candidates if ids and [call.call_id for call in nodes[n].message.tool_calls] == ids]
    return (exact or candidates)[-1]
