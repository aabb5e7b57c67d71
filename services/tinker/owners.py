"""API keys.

Invariant: keys are not stored; an owner's id is a digest.
"""

import hmac
from hashlib import blake2b
from pathlib import Path

from offbeat.services.errors import MeshError
from offbeat.services.tinker.errors import UnauthorizedError

PREFIX = "tml-"


class Keys:
    def __init__(self, allowed: frozenset[str] | None) -> None:
        """allowed: None accepts every well-formed key."""
        self._allowed = allowed

    @property
    def are_checked(self) -> bool:
        return self._allowed is not None

    def owner(self, key: str) -> str:
        """Return the owner's id; raises UnauthorizedError."""
        if not key.startswith(PREFIX):
            raise UnauthorizedError(f"send an API key that begins with {PREFIX} as X-API-Key: set TINKER_API_KEY")
        if self._allowed is not None:
            # no early exit: the time taken must not depend on which key matches
            matching = [each for each in self._allowed if hmac.compare_digest(each.encode(), key.encode())]
            if not matching:
                raise UnauthorizedError("the API key is not known: ask whoever runs the server for one")
        return blake2b(key.encode(), digest_size=12).hexdigest()


def read_keys(path: Path | None) -> Keys:
    """Read a file of keys; raises MeshError if it has no usable ones."""
    if path is None:
        return Keys(None)
    try:
        keys = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise MeshError(f"tinker.keys_file: {path} can't be read: {error}") from error
    if wrong := [i for i, key in enumerate(keys, 1) if not key.startswith(PREFIX)]:
        raise MeshError(f"tinker.keys_file: key {wrong[0]} of {path} does not begin with {PREFIX}")
    if not keys:
        raise MeshError(f"tinker.keys_file: {path} is empty: write one key per line")
    return Keys(frozenset(keys))
