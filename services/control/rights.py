"""Rights of a caller."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Scope = Literal["read", "write"]
RIGHTS = "offbeat.rights"


@dataclass(frozen=True, slots=True)
class Rights:
    """Code and folders that a run may name; None: any."""

    allow_modules: tuple[str, ...] | None = None
    """Modules or globs; submodules included. Without programs."""
    output_roots: tuple[str, ...] | None = None
    """Absolute folders, or URLs of object stores."""

    @property
    def any_module(self) -> bool:
        return self.allow_modules is None or "*" in self.allow_modules

    def allows_module(self, module: str) -> bool:
        if self.allow_modules is None:
            return True
        return any(
            fnmatch.fnmatchcase(module, pattern) or module == stem or module.startswith(f"{stem}.")
            for pattern in self.allow_modules
            if (stem := pattern.removesuffix(".*"))
        )

    def allows_folder(self, place: str | Path) -> bool:
        """Return whether a path, symbolic links resolved, or a URL is below a root."""
        if self.output_roots is None:
            return True
        return any(_is_below(str(place), root) for root in self.output_roots)


UNRESTRICTED = Rights()


@dataclass(frozen=True, slots=True)
class TokenGrant:
    token: str
    scope: Scope = "write"
    rights: Rights = UNRESTRICTED


@dataclass(frozen=True, slots=True)
class Tokens:
    """Bearer tokens; without any, local programs may call."""

    operate: str | None = None
    """Token to read and write, with `rights`."""
    read: str | None = None
    """Token to read."""
    rights: Rights = UNRESTRICTED
    """Of `operate`, and of callers without a required token."""
    others: tuple[TokenGrant, ...] = ()

    @property
    def grants(self) -> tuple[TokenGrant, ...]:
        operate = [TokenGrant(self.operate, "write", self.rights)] if self.operate else []
        read = [TokenGrant(self.read, "read")] if self.read else []
        return (*operate, *read, *self.others)


NO_TOKENS = Tokens()


def rights_of(scope: Mapping[str, Any]) -> Rights:
    return scope.get(RIGHTS, UNRESTRICTED)


def _is_below(place: str, root: str) -> bool:
    place, root = place.removeprefix("file://"), root.removeprefix("file://")
    if "://" in place or "://" in root:
        # `::` chains file systems in fsspec
        plain = "::" not in place and ".." not in place.split("/")
        return plain and (place == root or place.startswith(f"{root.rstrip('/')}/"))
    return Path(place).resolve().is_relative_to(Path(root).resolve())
