"""The page's files, compressed once and served from memory: no call waits for a thread or the disk."""

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}
INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    compressed: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> "_File":
        content = path.read_bytes()
        media_type = mimetypes.guess_type(path.name)[0] or "text/plain"
        digest = hashlib.sha256(content).hexdigest()[:32]
        return cls(content, gzip.compress(content, mtime=0), media_type, f'W/"{digest}"')

    def answer(self, headers: Headers) -> Response:
        common = {**HEADERS, "etag": self.etag}
        if self.etag in headers.get("if-none-match", ""):
            return Response(status_code=304, headers=common)
        if "gzip" in headers.get("accept-encoding", ""):
            return Response(self.compressed, headers={**common, "content-encoding": "gzip"}, media_type=self.media_type)
        return Response(self.content, headers=common, media_type=self.media_type)


class PageFiles:
    """Files of a folder, with a content security policy."""

    def __init__(self, folder: Path) -> None:
        paths = (path for path in folder.rglob("*") if path.is_file())
        self._files = {path.relative_to(folder).as_posix(): _File.read(path) for path in paths}

    async def answer(self, request: Request) -> Response:
        """Return the file that the parameter `path` names, or the index."""
        file = self._files.get(request.path_params["path"] or INDEX)
        if file is None:
            raise HTTPException(404)
        return file.answer(request.headers)
