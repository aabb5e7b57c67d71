"""References to the environment in imported files: they are written as references, never as their values."""

from collections.abc import Callable
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

REFERENCE, INTERPOLATION, HIDDEN = "${oc.env:", "${", "\ue000{"


def hide(tree: Any) -> Any:
    """Hide references, and texts that are no interpolations of OmegaConf's, from its resolution."""
    return _map_texts(_hide_text, tree)


def reveal(tree: Any) -> Any:
    return _map_texts(lambda text: text.replace(HIDDEN, INTERPOLATION), tree)


def restore_references(tree: Any) -> Any:
    """Return a tree of escaped texts with its references unescaped."""
    return _map_texts(lambda text: text.replace(f"\\{REFERENCE}", REFERENCE), tree)


def _hide_text(text: str) -> str:
    hidden = text.replace(REFERENCE, HIDDEN + REFERENCE.removeprefix(INTERPOLATION))
    try:
        OmegaConf.create({"text": hidden})
    except GrammarParseError:
        return text.replace(INTERPOLATION, HIDDEN)
    return hidden


def _map_texts(convert: Callable[[str], str], value: Any) -> Any:
    match value:
        case str():
            return convert(value)
        case dict():
            return {key: _map_texts(convert, each) for key, each in cast(dict[Any, Any], value).items()}
        case list():
            return [_map_texts(convert, each) for each in cast(list[Any], value)]
        case _:
            return value
