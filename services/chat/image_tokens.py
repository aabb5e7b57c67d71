"""Image placeholders in prompts."""

from dataclasses import dataclass
from typing import Protocol

from offbeat.services.errors import EpisodeError
from offbeat.services.messages.types import Picture


class ImageReader(Protocol):
    """Counts image tokens (`offbeat.services.chat.vision.PictureReader`)."""

    image_token_id: int

    def count(self, png: bytes, /) -> int:
        """Return an image's number of tokens. Raises ValueError if it can't be read."""
        ...


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Expands an image placeholder to the model's number of image tokens."""

    mark: str
    """Placeholder in a message."""
    reader: ImageReader

    def place(self, ids: tuple[int, ...], png: bytes, num_pictures: int) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
        """Expand the placeholders of a prompt, all for the same image; positions count from the prompt's start.

        Raises:
            EpisodeError: the number of placeholders is not `num_pictures` (the observation's text may contain one), or the
                image can't be read.
        """
        placeholder = self.reader.image_token_id
        if ids.count(placeholder) != num_pictures:
            raise EpisodeError("bad_observation", f"{ids.count(placeholder)} placeholders for {num_pictures} pictures")
        try:
            count = self.reader.count(png)
        except ValueError as error:
            raise EpisodeError("bad_picture", str(error)) from error
        expanded: list[int] = []
        pictures: list[Picture] = []
        for token in ids:
            if token == placeholder:
                pictures.append(Picture(len(expanded), count, png))
                expanded += [placeholder] * count
            else:
                expanded.append(token)
        return tuple(expanded), tuple(pictures)
