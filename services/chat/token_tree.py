"""An episode's calls as a tree of token sequences; a node is a completion with its prompt.

A call rendered as a node's text plus a suffix continues it: only the suffix is encoded. Invariants: nodes record what
was sent and sampled, token by token; sampled tokens are never re-encoded; a node's tokens and images start with its
parent's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import NamedTuple

from msgspec import structs

from offbeat.services.chat.image_references import ImageReferences
from offbeat.services.chat.messages import ChatMessage, Tools
from offbeat.services.chat.template import ChatTemplate, UnusableError
from offbeat.services.messages.types import Completion, FinishReason, PromptImage, RoutingArray

ROOT = -1


class Continuation(NamedTuple):
    """Prompt that continues the node `parent`."""

    parent: int
    tokens: tuple[int, ...]
    images: tuple[PromptImage, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    parent: int = ROOT
    text: str = ""
    """Rendered prompt, with references in place of images, or the agent's text."""
    unverified: int = 0
    """Assistant messages not known to be sampled."""
    is_chat: bool = True
    anchor: str = ""
    """Answered state, if known."""
    prefill: str = ""
    """Beginning of the answer that the agent wrote, at the end of `text`."""
    images: tuple[PromptImage, ...] = ()
    """By position."""


@dataclass(slots=True)
class Node:
    prompt: Prompt
    message: ChatMessage
    completion: Completion
    """Without its experts."""
    num_kept: int
    """Completion tokens that count: all, or to the stop word's end."""
    routing: RoutingArray | None = None
    """Experts of the tokens that count, after those whose experts the nodes before it have."""
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
    _references: ImageReferences = field(init=False)

    def __post_init__(self) -> None:
        self._references = ImageReferences(self.template)

    @property
    def leaves(self) -> list[int]:
        """Nodes that no other continues."""
        parents = {node.prompt.parent for node in self.nodes}
        return [number for number in range(len(self.nodes)) if number not in parents]

    def plan_chat(self, messages: Sequence[ChatMessage], tools: Tools = (), prefill: str = "") -> Prompt:
        """Return a conversation's prompt.

        prefill: beginning of the answer.

        Raises:
            UnusableError: rendering failed, the template's answers do not begin with their text, or images do not fit.
        """
        messages = [self._references.write(message) for message in messages]
        start = self.template.render(messages, tools, prompt=True)
        full_text = start + prefill
        anchor = messages[-1].content if messages else ""
        if prefill:
            self._require_prefill(messages, tools, prefill, start)
            extended = self._find_extended(self._by_text.get(start, ()), start, full_text)
            if extended is not None:
                parent, tokens, images = extended
                return Prompt(tokens, parent, full_text, anchor=anchor, prefill=prefill, images=images)
        answer_indexes = [i for i, message in enumerate(messages) if message.role == "assistant"]
        for index in reversed(answer_indexes):
            try:
                continuation = self._find_continuation(messages, tools, index, full_text)
            except UnusableError:
                continue  # only the whole can be rendered, such as after a greeting: no answer to the part before it
            if continuation is not None:
                parent, tokens, images = continuation
                later = sum(other > index for other in answer_indexes) + bool(prefill)
                return Prompt(tokens, parent, full_text, later, anchor=anchor, prefill=prefill, images=images)
        unverified = len(answer_indexes) + bool(prefill)
        tokens, images = self._references.encode(full_text)
        return Prompt(tokens, ROOT, full_text, unverified, anchor=anchor, prefill=prefill, images=images)

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
        """Continue the longest known prefix, with its images.

        Raises:
            UnusableError: the tokens are those of several images.
        """
        fits = [n for n, node in enumerate(self.nodes) if tokens[: len(node.tokens)] == node.tokens]
        parent = max(fits, key=lambda n: len(self.nodes[n].tokens), default=ROOT)
        images = () if parent == ROOT else self.nodes[parent].prompt.images
        if any((own := self.nodes[n].prompt.images) != images[: len(own)] for n in fits):
            raise UnusableError("these tokens are those of several images: send the messages with their images")
        return Prompt(tokens, parent, is_chat=False, images=images)

    def record(self, prompt: Prompt, message: ChatMessage, completion: Completion, num_kept: int) -> int:
        """Return the answer's number."""
        number = len(self.nodes)
        node = Node(prompt, message, replace(completion, routing=None), num_kept)
        if completion.routing is not None:
            num_known = sum(map(len, self.routing_of(prompt.parent)))
            # a view would keep the rows of the whole prompt in memory
            node.routing = completion.routing[num_known : len(node.tokens) - 1].copy()
        self.nodes.append(node)
        if prompt.is_chat:
            self._by_text.setdefault(prompt.text.removesuffix(prompt.prefill), []).append(number)
        if prompt.parent != ROOT:
            self.nodes[prompt.parent].delivered = True  # the agent continued from it
        return number

    def path(self, number: int) -> Iterator[int]:
        while number != ROOT:
            yield number
            number = self.nodes[number].prompt.parent

    def routing_of(self, number: int) -> list[RoutingArray]:
        """Return the experts of a node's tokens, in parts; each answer has those of the call that sampled it."""
        parts = [self.nodes[n].routing for n in self.path(number)]
        return [part for part in reversed(parts) if part is not None]

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
    ) -> Continuation | None:
        """Return how the assistant message at `index` is continued, if it is one of the policy's."""
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
        # a truncated answer is ended here by an unsampled token
        is_ended = self.nodes[parent].tokens[-1] == self.template.end_id
        return self._continue(parent, full_text[end:], num_known=int(is_ended))

    def _find_extended(self, candidates: Sequence[int], before: str, full_text: str) -> Continuation | None:
        """Return how a truncated answer is continued, if the agent extended one."""
        for number in reversed(candidates):
            node = self.nodes[number]
            text = before + self._plain_text(node)
            if node.tokens[-1] not in self.template.stop_ids and full_text.startswith(text):
                return self._continue(number, full_text[len(text) :])
        return None

    def _continue(self, number: int, text: str, num_known: int = 0) -> Continuation:
        """Return a node's tokens and images with those of `text`, whose first `num_known` tokens the node has."""
        node = self.nodes[number]
        tokens, images = self._references.encode(text)
        offset = len(node.tokens) - num_known
        moved = tuple(structs.replace(image, start=offset + image.start) for image in images)
        return Continuation(number, node.tokens + tokens[num_known:], node.prompt.images + moved)

    def _plain_text(self, node: Node) -> str:
        ids = node.completion.token_ids[: node.num_kept]
        end = self.template.token_text(ids[-1]) if ids[-1] in self.template.stop_ids else ""
        return node.prompt.prefill + self.template.text_of(ids) + end


def _match_call_ids(candidates: Sequence[int], nodes: Sequence[Node], message: ChatMessage) -> int:
    """Return the candidate with equal call ids, else the newest."""
    ids = [call.call_id for call in message.tool_calls]
    exact = [n for n in candidates if ids and [call.call_id for call in nodes[n].message.tool_calls] == ids]
    return (exact or candidates)[-1]
