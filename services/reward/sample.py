"""Samples of reward functions, and their encoding."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import msgspec

from offbeat.services.reward.errors import Failure, RewardError

MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True)
class RewardSample:
    """A finished response, or episode."""

    prompt: Sequence[Mapping[str, Any]]
    """Before the response, in OpenAI's form; of an episode with its earlier observations and answers."""
    response: str
    """The last answer."""
    num_response_tokens: int = 0
    ground_truth: Any = None
    """None if the row, or an env's `reward_row`, has none."""
    tag: str = ""
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The remaining columns of the dataset, or of an env's `reward_row`."""


@dataclass(frozen=True, slots=True)
class GroupMember(RewardSample):
    """A finished response, or episode, that rewards compare with the others of its group."""

    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Values of the rewards that score it alone, by name."""
    own_reward: float = 0.0
    """The env's or agent's own."""


def as_member(sample: RewardSample, rewards: Mapping[str, float], own_reward: float) -> GroupMember:
    fields = {each.name: getattr(sample, each.name) for each in dataclasses.fields(sample)}
    return GroupMember(**fields, rewards=rewards, own_reward=own_reward)


@dataclass(frozen=True, slots=True)
class GroupSample:
    """Members of a group to compare, and the seed of what is random in that."""

    members: Sequence[GroupMember]
    seed: int = 0

    @property
    def prompt(self) -> Sequence[Mapping[str, Any]]:
        """Return the messages with which every member's conversation begins."""
        prompts = [member.prompt for member in self.members]
        shared = takewhile(lambda messages: all(each == messages[0] for each in messages), zip(*prompts, strict=False))
        return [messages[0] for messages in shared]

    @property
    def answers(self) -> list[str]:
        """Return the rest of each conversation: the last answer, after what comes before it in its own alone."""
        start = len(self.prompt)
        return [_continuation(member, start) for member in self.members]


def _continuation(member: RewardSample, start: int) -> str:
    answer = final_text(member.response)
    if len(member.prompt) == start:
        return answer
    return render_messages([*member.prompt[start:], {"role": "assistant", "content": answer}])


def render_messages(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(f"[{message.get('role', '')}]\n{text_of(message.get('content'))}" for message in messages)


def encode_sample(sample: RewardSample | GroupSample) -> bytes:
    """Encode, equal samples equally: integers beyond 64 bits and keys of mappings as text.

    Raises:
        RewardError: a value has no such form.
    """
    try:
        try:
            return _encode(sample)
        except (TypeError, OverflowError):
            return _encode(
                _with_texts(msgspec.to_builtins(sample, str_keys=True, builtin_types=(bytes,), enc_hook=_encode_array))
            )
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(Failure.BAD_ROW, str(error)) from error


def _encode(value: Any) -> bytes:
    return msgspec.msgpack.encode(value, order="deterministic", enc_hook=_encode_array)


def _with_texts(value: Any) -> Any:
    """Return plain data with the integers that msgpack can't hold as text."""
    match value:
        case dict():
            items: dict[str, Any] = value
            return {key: _with_texts(each) for key, each in items.items()}
        case list():
            values: list[Any] = value
            return [_with_texts(each) for each in values]
        case int() if not MIN_INTEGER <= value <= MAX_INTEGER:
            return str(value)
        case _:
            return value


def decode_sample(blob: bytes) -> RewardSample:
    return msgspec.msgpack.decode(blob, type=RewardSample)


def decode_member(blob: bytes) -> GroupMember:
    return msgspec.msgpack.decode(blob, type=GroupMember)


def decode_group(blob: bytes) -> GroupSample:
    return msgspec.msgpack.decode(blob, type=GroupSample)


def _encode_array(value: Any) -> Any:
    """Convert NumPy's values, as tables of `datasets` hold."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"a {type(value).__name__} in the row can't be kept for rewards of groups, nor sent to a service: "
        "give texts, numbers, bytes, dates, lists, mappings or arrays"
    )


def text_of(content: Any) -> str:
    """Return the text parts of a message."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    parts: Sequence[Any] = content
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def images_of(prompt: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return a conversation's image parts."""
    contents: list[Any] = [message.get("content") for message in prompt]
    return [part for content in contents if isinstance(content, list | tuple)
            for part in content if isinstance(part, Mapping) and part.get("type") == "image_url"]  # fmt: skip


def final_text(response: str) -> str:
    """Return the response after its thoughts; empty if they never end."""
    _, end, answer = response.rpartition("</think>")
    if end:
        return answer.strip()
    return "" if "<think>" in response else response.strip()
