"""Pictures in prompts: the placeholder that the template writes for one becomes as many tokens as the model makes of it."""

from dataclasses import dataclass
from typing import Protocol

from offbeat.services.errors import EpisodeError
from offbeat.services.messages.types import Picture


class ImageReader(Protocol):
    """Counts the tokens of images (`offbeat.services.chat.vision.PictureReader`)."""

    image_token_id: int

    def count(self, png: bytes, /) -> int:
        """Return the number of tokens of an image. Raises ValueError if it can't be read."""
        ...


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Expands an image placeholder into the model's number of image tokens."""

    mark: str
    """Placeholder of an image in a message."""
    reader: ImageReader

    def place(self, ids: tuple[int, ...], png: bytes, wanted: int) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
        """Expand the placeholders of a prompt, each for the same image; positions count from its start.

        Raises:
            EpisodeError: the prompt does not contain `wanted` placeholders (for example, the observation's text has
            one), or the image can't be
                read.
        """
        placeholder = self.reader.image_token_id
        if ids.count(placeholder) != wanted:
            raise EpisodeError("bad_observation", f"{ids.count(placeholder)} placeholders for {wanted} pictures")
        try:
            count = self.reader.count(png)
        except ValueError as error:
            raise EpisodeError("bad_picture", str(error)) from error
        out: list[int] = []
        pictures: list[Picture] = []
        for token in ids:
            if token == placeholder:
                pictures.append(Picture(len(out), count, png))
                out += [placeholder] * count
            else:
                out.append(token)
        return tuple(out), tuple(pictures)
