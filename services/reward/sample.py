"""Sample of a reward function, and its encoding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from offbeat.services.reward.errors import Failure, RewardError


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


def encode_sample(sample: RewardSample) -> bytes:
    """Encode, equal samples equally; raises RewardError for a value without msgpack form."""
    try:
        return msgspec.msgpack.encode(sample, order="deterministic", enc_hook=_encode_array)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(Failure.BAD_ROW, str(error)) from error


def decode_sample(blob: bytes) -> RewardSample:
    return msgspec.msgpack.decode(blob, type=RewardSample)


def _encode_array(value: Any) -> Any:
    """Convert NumPy's values, as tables of `datasets` hold."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} in the row can't be sent to a reward service")


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
