"""Address of a run's Redis, from the mesh's files."""

from contextlib import suppress
from pathlib import Path
from typing import cast

from redis import Redis

from offbeat.deploy.run_folder import read_claim, read_endpoints
from offbeat.services.errors import MeshError
from offbeat.services.keys import RunKeys
from offbeat.services.redis.url import address_problem
from offbeat.services.redis.url_file import read_url_file

URL_FILE = Path("redis") / "url"
"""`redis_url_file` of `deploy/deploy.yaml`, below the folder of runs."""


def resolve_url(given: str | None) -> str | None:
    """Return the URL itself or in a file; raises `MeshError`."""
    if given is None:
        return None
    if "://" in given:
        if problem := address_problem(given):
            raise MeshError(f"--redis: {problem}")
        return given
    try:
        return read_url_file(Path(given))
    except OSError as error:
        raise MeshError(f"--redis: expected a URL, or a file with one: {error}") from None


def find_url(folder: Path) -> str | None:
    """Return the Redis URL of an active `offbeat train`, or of the mesh beside the folder; raises `MeshError`."""
    endpoints = read_endpoints(folder)
    if endpoints is not None:
        return endpoints.redis_url
    path = folder.parent / URL_FILE
    try:
        has_own_redis = (folder / "redis").is_dir()  # of `offbeat train`, which has ended
        return read_url_file(path) if path.is_file() and not has_own_redis else None
    except OSError as error:
        raise MeshError(f"{path} can't be read: {error.strerror}; it is readable by who started the mesh") from None


def has_other_run(redis: Redis, run_id: str, folder: Path) -> bool:
    """Return whether the run of that name is not the folder's: a later one, or the original of a copy."""
    values = cast(list[bytes | None], redis.hmget(RunKeys(run_id).record, ["output_dir", "created_at"]))
    recorded, created_at = (value.decode() if value else "" for value in values)
    if not recorded:
        return False
    with suppress(OSError):  # the folder may have been moved since
        if not Path(recorded).samefile(folder):
            return True
    return read_claim(folder) not in ("", f"{run_id} {created_at}")
