"""The chat format of who plays: it can also offer an env's functions, whose calls vLLM's parsers may have to read."""

from functools import partial
from pathlib import Path

from services.chat.functions import load_function_template
from services.rollout.chat import ChatFormat, load_chat_format


def load_playing_format(folder: Path) -> ChatFormat:
    """The chat format of a Hugging Face folder. Raises RolloutError, see `load_chat_format`."""
    return load_chat_format(folder, partial(load_function_template, folder))
