"""Images of calls, from what agents send to what the policy sees. Functions raise UnusableError."""

import asyncio
from dataclasses import replace
from hashlib import blake2b

from offbeat.services.chat.image_files import to_png
from offbeat.services.chat.image_tokens import ImageReader
from offbeat.services.chat.messages import ChatMessage
from offbeat.services.chat.template import ChatTemplate, UnusableError
from offbeat.services.chat.token_tree import Prompt, TokenTree
from offbeat.services.chat.vision import IMAGE_INPUT_ADVICE
from offbeat.services.errors import RolloutError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Those of OpenAI's and Anthropic's APIs."""
MAX_IMAGES = 100
"""Per prompt."""
MAX_EPISODE_BYTES = 256 << 20
"""Of a trajectory, whose segments have their images each; Redis takes twice as much."""


class RequestImages:
    """Images of an episode's calls, which most calls send again."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._pngs: dict[bytes, bytes] = {}
        """By digest of what was sent."""

    async def read(self, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        """Return messages with their images as PNG, which fit the policy."""
        count = sum(len(message.images) for message in messages)
        if count > MAX_IMAGES:
            raise UnusableError(f"the messages have {count} images; a prompt can have {MAX_IMAGES}")
        return await asyncio.to_thread(self._read, messages) if count else messages

    def _read(self, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        try:
            reader = self._template.image_tokens.reader
        except RolloutError as error:
            raise UnusableError(
                "the policy has no image input, and the messages have images: send texts alone, or, for the run, "
                f"{IMAGE_INPUT_ADVICE} ({error})"
            ) from error
        names = (f"image {number} of the messages" for number in range(1, 1 + MAX_IMAGES))
        return tuple(
            replace(message, images=tuple(self._as_png(image, reader, next(names)) for image in message.images))
            if message.images
            else message
            for message in messages
        )

    def _as_png(self, image: bytes, reader: ImageReader, name: str) -> bytes:
        digest = blake2b(image, digest_size=16).digest()
        if digest not in self._pngs:
            try:
                png = to_png(image, FORMATS)
                reader.count(png)  # which is kept
            except ValueError as error:
                raise UnusableError(f"{name}, as PNG: {error}") from error
            self._pngs[digest] = png
            self._pngs[blake2b(png, digest_size=16).digest()] = png  # as an earlier response has it
        return self._pngs[digest]


def check_episode_images(tree: TokenTree, prompt: Prompt) -> None:
    """Require the images of all segments to fit into a trajectory."""
    if not prompt.images:
        return
    others = (tree.nodes[number].prompt.images for number in tree.leaves if number != prompt.parent)
    num_bytes = sum(len(image.png) for images in (prompt.images, *others) for image in images)
    if num_bytes > MAX_EPISODE_BYTES:
        raise UnusableError(
            f"the images of this episode's conversations have more than {MAX_EPISODE_BYTES >> 20} MiB: send smaller ones, "
            "or continue a conversation instead of beginning others"
        )
