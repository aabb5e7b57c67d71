"""Token of a mesh on this machine."""

from pathlib import Path
from urllib.parse import urlsplit

from offbeat.services.ports import LOOPBACK_NAMES

TOKEN_FILE = Path("runs") / "control" / "token"
"""`token_file` of `deploy/deploy.yaml`, from the folder of `ray start`."""


def find_token(url: str) -> str | None:
    """Return the token of the mesh started from this folder, for a URL of this machine."""
    try:
        if urlsplit(url).hostname not in LOOPBACK_NAMES:
            return None
        return TOKEN_FILE.read_text().strip() or None
    except (OSError, ValueError):  # none, or another user's; no URL
        return None
