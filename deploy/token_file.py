"""Token of a mesh on this machine."""

from pathlib import Path
from urllib.parse import urlsplit

from offbeat.services.ports import LOOPBACK_NAMES

TOKEN_FILE = Path("runs") / "control" / "token"
"""`token_file` of `deploy/deploy.yaml`, from the folder of `ray start`."""


def is_remote(url: str) -> bool:
    """Return whether a URL is not of this machine."""
    try:
        return urlsplit(url).hostname not in LOOPBACK_NAMES
    except ValueError:  # no URL
        return True


def find_token(url: str) -> str | None:
    """Return the token of the mesh started from this folder, for a URL of this machine."""
    try:
        return None if is_remote(url) else TOKEN_FILE.read_text().strip() or None
    except (OSError, ValueError):  # none, or another user's
        return None
