"""Overrides of elements of lists, which Hydra knows by number alone."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from offbeat.trainer.config.issue import ConfigIssue

if TYPE_CHECKING:
    from omegaconf import DictConfig


def find_list_overrides(overrides: Sequence[str], composed: "DictConfig") -> Iterator[ConfigIssue]:
    """Yield overrides through lists that Hydra can't apply. composed: the file without overrides."""
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(composed)
    for override in overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        parts, node = key.split("."), cast(Any, tree)
        for place, part in enumerate(parts):
            if isinstance(node, list):
                elements = cast(list[Any], node)
                is_there = part.isdecimal() and int(part) < len(elements)
                if not is_there or override.startswith("~"):
                    remedy = _find_remedy(elements, parts, place, f"{equals}{value}")
                    yield ConfigIssue(key, f"{'.'.join(parts[:place])} is a list: {remedy}")
                    break
                node = elements[int(part)]
            else:
                node = cast(dict[Any, Any], node).get(part) if isinstance(node, dict) else None


def _find_remedy(elements: Sequence[Any], parts: Sequence[str], place: int, assigned: str) -> str:
    """Return what to write in place of an override; elements may have names."""
    if not elements or not assigned:
        return f"set it as a whole ({'.'.join(parts[:place])}=[...])"
    names = [str(each["name"]) if isinstance(each, dict) and "name" in each else "" for each in elements]
    number = names.index(parts[place]) if parts[place] in names else 0
    target = ".".join([*parts[:place], str(number), *parts[place + 1 :]])
    known = ", ".join(f"{at} is {name}" for at, name in enumerate(names) if name)
    return f"{target}{assigned}" + (f" ({known})" if known else f" (elements 0 to {len(elements) - 1})")
