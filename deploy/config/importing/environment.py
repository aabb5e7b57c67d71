"""References to the environment in imported files: they are written as references, never as their values."""

import re
from collections.abc import Callable
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

REFERENCE, INTERPOLATION, HIDDEN = "${oc.env:", "${", "\ue000{"
ANY_REFERENCE = re.compile(r"\$\{\s*oc\.env\s*:")
"""As OmegaConf reads them."""
ESCAPED_REFERENCE = re.compile(rf"\\({ANY_REFERENCE.pattern})")


def hide(tree: Any) -> Any:
    """Hide references, and texts that are no interpolations of OmegaConf's, from its resolution."""
    return map_texts(_hide_text, tree)


def reveal(tree: Any) -> Any:
    return map_texts(lambda text: text.replace(HIDDEN, INTERPOLATION), tree)


def restore_references(tree: Any) -> Any:
    """Return a tree of escaped texts with its references unescaped."""
    return map_texts(lambda text: ESCAPED_REFERENCE.sub(r"\1", text), tree)


def _hide_text(text: str) -> str:
    hidden = ANY_REFERENCE.sub(lambda match: match[0].replace(INTERPOLATION, HIDDEN), text)
    try:
        OmegaConf.create({"text": hidden})
    except GrammarParseError:
        return text.replace(INTERPOLATION, HIDDEN)
    return hidden


def map_texts(convert: Callable[[str], str], value: Any) -> Any:
    match value:
        case str():
            return convert(value)
        case dict():
            return {key: map_texts(convert, each) for key, each in cast(dict[Any, Any], value).items()}
        case list():
            return [map_texts(convert, each) for each in cast(list[Any], value)]
        case _:
            return value
