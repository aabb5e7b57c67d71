"""References to images in rendered conversations, so that texts are equal only if their images are."""

import re
from dataclasses import replace
from hashlib import blake2b

from offbeat.envs.prompts import ROW_IMAGE
from offbeat.services.chat.messages import ChatMessage
from offbeat.services.chat.template import ChatTemplate, UnusableError
from offbeat.services.errors import EpisodeError, RolloutError
from offbeat.services.messages.types import PromptImage

DIGEST_BYTES = 16
REFERENCE = re.compile(f"{ROW_IMAGE}([0-9a-f]{{{2 * DIGEST_BYTES}}}){ROW_IMAGE}")


class ImageReferences:
    """Images of an episode by digest."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._pngs: dict[str, bytes] = {}

    def write(self, message: ChatMessage) -> ChatMessage:
        """Return a message with references in place of its images."""
        if not message.images:
            return message
        first, *others = message.content.split(ROW_IMAGE)
        parts = [self._refer(png) + text for png, text in zip(message.images, others, strict=True)]
        return replace(message, content="".join([first, *parts]), images=())

    def encode(self, text: str) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """Return a rendered text's tokens and images, positions from its start.

        Raises:
            UnusableError: the policy has no image input, or a text holds its placeholder.
        """
        found = [match[1] for match in REFERENCE.finditer(text) if match[1] in self._pngs] if self._pngs else []
        if not found:
            return self._template.encode(text), ()
        try:
            images = self._template.image_tokens
            marked = REFERENCE.sub(lambda match: images.mark if match[1] in self._pngs else match[0], text)
            return images.place(self._template.encode(marked), [self._pngs[digest] for digest in found])
        except EpisodeError as error:
            message = f"{error.detail}: texts beside images can't have the policy's own placeholder"
            raise UnusableError(message) from error
        except RolloutError as error:
            raise UnusableError(f"the policy has no image input: {error}") from error

    def _refer(self, png: bytes) -> str:
        digest = blake2b(png, digest_size=DIGEST_BYTES).hexdigest()
        self._pngs.setdefault(digest, png)
        return f"{ROW_IMAGE}{digest}{ROW_IMAGE}"
