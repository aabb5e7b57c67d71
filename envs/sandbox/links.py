"""Resolution of symbolic links that were read beforehand."""

import posixpath
from collections.abc import Mapping

MAX_LINKS = 40
"""Of one path, as in the kernel."""


def resolve(path: str, links: Mapping[str, str]) -> str:
    """Follow a path's symbolic links; stop in /proc, whose own depend on the process, and in a loop."""
    return prefixes(path, links)[-1]


def prefixes(path: str, links: Mapping[str, str]) -> list[str]:
    """Return the paths on the way of `resolve`, each of which may be a link."""
    parts, num_links = path.split("/")[::-1], 0
    current: str = "/"
    passed = [current]
    while parts and current != "/proc":
        part = parts.pop()
        if part in ("", "."):
            continue
        following: str = posixpath.dirname(current) if part == ".." else posixpath.join(current, part)
        target = links.get(following)
        if target is None:
            current = following
            passed.append(current)
            continue
        num_links += 1
        if num_links > MAX_LINKS:
            break
        parts += target.split("/")[::-1]
        current = "/" if target.startswith("/") else current
        passed.append(current)
    return passed
