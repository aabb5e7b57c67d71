"""File with a Redis URL and its generated password."""

import secrets
from pathlib import Path
from urllib.parse import urlsplit

from offbeat.services.errors import MeshError
from offbeat.services.redis.url import address_problem, redact
from offbeat.services.secret_file import create_secret_file, write_beside

PASSWORD_BYTES = 24


def create_url_file(path: Path, address: str) -> str:
    """Return `address` (`redis://HOST:PORT/DB`) with the password in `path`, generated if there is no file.

    Raises:
        MeshError: the file holds no URL.
        OSError: the file can't be read or written.
    """
    create_secret_file(path, _with_password(address, secrets.token_urlsafe(PASSWORD_BYTES)))
    current = read_url_file(path)
    if redact(current) == redact(address):
        return current
    url = _with_password(address, urlsplit(current).password or "")
    write_beside(path, url).replace(path)
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
