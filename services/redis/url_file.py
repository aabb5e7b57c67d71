"""File with a Redis URL and its generated password.

Invariants: its owner alone can read it; processes that create it at once agree on one password.
"""

import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from offbeat.services.errors import MeshError
from offbeat.services.redis.url import address_problem, redact

PASSWORD_BYTES = 24


def create_url_file(path: Path, address: str) -> str:
    """Return `address` with the password in `path`, generated if there is no file.

    address: `redis://HOST:PORT/DB`.

    Raises:
        MeshError: the file holds no URL.
        OSError: the file can't be read or written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        new = _write_beside(path, _with_password(address, secrets.token_urlsafe(PASSWORD_BYTES)))
        with suppress(FileExistsError):  # another process was first
            path.hardlink_to(new)
        new.unlink()
    current = read_url_file(path)
    if redact(current) == redact(address):
        return current
    url = _with_password(address, urlsplit(current).password or "")
    _write_beside(path, url).replace(path)
    return url


def read_url_file(path: Path) -> str:
    """Return the URL in `path`.

    Raises:
        MeshError: the file holds none.
        OSError: it can't be read.
    """
    url = path.read_text().strip()
    if problem := address_problem(url):
        raise MeshError(f"{path}: {problem}")
    return url


def _with_password(address: str, password: str) -> str:
    scheme, _, rest = address.partition("://")
    return f"{scheme}://:{password}@{rest}"


def _write_beside(path: Path, url: str) -> Path:
    """Write a file, readable by its owner alone, in the same folder."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".url-", delete=False) as file:
        file.write(f"{url}\n")
    return Path(file.name)
