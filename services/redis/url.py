"""Validation of an external Redis and its URL.

TLS options are part of the URL: `rediss://:PASSWORD@HOST:6380/0?ssl_ca_certs=/etc/redis/ca.pem`.
"""

import difflib
import logging
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from redis.exceptions import AuthenticationError, AuthenticationWrongNumberOfArgsError, RedisError, ResponseError

from offbeat.services.redis.connection import connect
from offbeat.services.redis.errors import RedisReadOnlyError

logger = logging.getLogger(__name__)

SCHEMES = ("redis", "rediss", "unix")
FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
CHOICES = {"ssl_check_hostname": ("true", "false"), "ssl_cert_reqs": ("required", "none")}
CONNECT_TIMEOUT_S = 5.0


def address_problem(url: str) -> str:
    """Return the URL's problem, without its password, or "".

    Allowed options: certificate checks and absolute file paths.
    """
    if _has_unquoted_password(url.partition("://")[2]):
        return "write /, ? and # of its password as %2F, %3F and %23"
    if problem := _form_problem(url):
        return problem
    parts = urlsplit(url)
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if problem := _option_problem(name, value, parts.scheme):
            return problem
    return ""


def _has_unquoted_password(rest: str) -> bool:
    """Return whether the part before the host may end with a password that has a separator of URLs."""
    before, _, options = rest.partition("?")
    host, _, path = before.partition("/")  # no host: the path of a socket
    if "#" in rest or (host and "@" in path and "@" not in host):
        return True
    names = {option.partition("=")[0] for option in options.split("&")}
    return "@" in options and not names <= {*FILES, *CHOICES}


def _form_problem(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return f"{redact(url)} can't be read: {error}"
    if parts.scheme not in SCHEMES or not (parts.hostname or parts.scheme == "unix"):
        return f"expected redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH, got {redact(url)!r}"
    if parts.scheme != "unix" and not parts.path.removeprefix("/").isdigit() and parts.path not in ("", "/"):
        return f"expected the number of a database after the port, got {parts.path!r}"
    return ""


def redact(url: str) -> str:
    """Return the URL without credentials and options."""
    scheme, colon, rest = url.partition("://")
    return f"{scheme}{colon}{rest.partition('?')[0].rpartition('@')[2]}"


def connection_problem(url: str) -> str:
    """Try to connect; return the reason of a failure, or "". Logs unsafe settings."""
    for name, value in parse_qsl(urlsplit(url).query):
        if name in FILES and not Path(value).exists():
            return f"{name}: {value} is not on this host"
    try:
        with connect(url, patience_s=CONNECT_TIMEOUT_S) as redis:
            redis.ping()
            for name in ("appendonly", "maxmemory-policy"):
                _warn_of(redis.config_get(name), url)
    except (AuthenticationError, AuthenticationWrongNumberOfArgsError) as error:
        return f"Redis at {redact(url)} refuses the password: {error}"
    except ResponseError as error:
        if "NOAUTH" in str(error) or "WRONGPASS" in str(error):
            return f"Redis at {redact(url)} refuses the password: {error}"
        logger.debug("Redis does not return its settings: %s", error)
    except RedisReadOnlyError as error:  # every part waits until it takes them again
        logger.error("%s: %s", redact(url), error)
    except (RedisError, OSError) as error:
        return f"no Redis answers at {redact(url)}: {error}{_hint(str(error), url)}"
    return ""


def _option_problem(name: str, value: str, scheme: str) -> str:
    known = (*FILES, *CHOICES)
    if name == "db" and scheme == "unix" and value.isdigit():
        return ""
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        return f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else f": there are {', '.join(known)}")
    if scheme != "rediss":
        return f"{name} has no effect on {scheme}://: TLS is rediss://"
    if name in FILES and not Path(value).is_absolute():
        return f"{name}: expected an absolute path, which every process of the mesh can read, got {value!r}"
    if name in CHOICES and value not in CHOICES[name]:
        return f"{name}: expected {' or '.join(CHOICES[name])}, got {value!r}"
    return ""


def _hint(error: str, url: str) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in error or "certificate verify failed" in error:
        return " (name the authority that signed it: ?ssl_ca_certs=/path/to/ca.pem)"
    if url.startswith("redis://") and ("closed by server" in error or "reset by peer" in error):
        return " (if it speaks TLS, its URL is rediss://)"
    return ""


def _warn_of(settings: object, url: str) -> None:
    if not isinstance(settings, dict):
        return
    settings = {_text(name): _text(value) for name, value in settings.items()}
    if settings.get("appendonly") == "no":
        logger.warning(
            "Redis at %s has appendonly no: what it holds is lost when it dies; set appendonly yes", redact(url)
        )
    if settings.get("maxmemory-policy") not in (None, "noeviction"):
        logger.warning("Redis at %s may forget keys when it is full: set maxmemory-policy noeviction", redact(url))


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
