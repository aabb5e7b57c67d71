"""A model hub of one repository, which is a folder."""

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

SHA, NAME = "a" * 40, "tiny/boxes"


class Hub(BaseHTTPRequestHandler):
    """The two routes of the hub that a download calls."""

    folder: Path

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if (
            parts[:2] == ["api", "models"]
            and "/".join(parts[2:4]) == NAME
            and parts[4:] in ([], ["revision", "main"], ["revision", SHA])
        ):
            files = [{"rfilename": path.name} for path in sorted(self.folder.iterdir())]
            self._send(json.dumps({"id": NAME, "sha": SHA, "siblings": files}).encode(), body, "application/json")
        elif parts[0] == "api" and "/".join(parts[2:4]) == NAME and "tree" in parts:
            rows = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": path.name}
                for path in sorted(self.folder.iterdir())
            ]
            self._send(json.dumps(rows).encode(), body, "application/json")
        elif "/".join(parts[:2]) == NAME and parts[2] == "resolve" and (self.folder / parts[-1]).is_file():
            self._send((self.folder / parts[-1]).read_bytes(), body, "application/octet-stream")
        else:
            known = "/".join(parts[2:4]) == NAME
            self._send(b"{}", body, "application/json", 404, "RevisionNotFound" if known else "RepoNotFound")

    def _send(self, content: bytes, body: bool, kind: str, status: int = 200, error: str = "") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "X-Repo-Commit": SHA,
            "ETag": f'"{hash(content):x}"',
        }
        for name, value in (headers | ({"X-Error-Code": error} if error else {})).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)
