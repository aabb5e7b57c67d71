"""A hub of one model and one dataset, which are folders."""

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

SHA, NAME = "a" * 40, "tiny/boxes"
EXPORT_SHA, DATASET = "b" * 40, "tiny/sums"


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
            "X-Repo-Commit": EXPORT_SHA if EXPORT_SHA in self.path else SHA,
            "ETag": f'"{hash(content):x}"',
        }
        for name, value in (headers | ({"X-Error-Code": error} if error else {})).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


class DatasetHub(Hub):
    """The routes of a hub of one dataset, beside the model's: files at `main` and, converted, at another revision."""

    rows: Path
    export: Path
    token = ""
    """Who asks without it is refused the files."""
    refusal = 403
    status = 200
    """Of what is said about the dataset."""
    requested: ClassVar[list[str]] = []

    def _answer(self, *, body: bool) -> None:
        path = unquote(self.path.partition("?")[0]).strip("/")
        self.requested.append(path)
        about, files = path.removeprefix(f"api/datasets/{DATASET}"), path.removeprefix(f"datasets/{DATASET}/resolve/")
        if about != path:
            self._describe(about, body)
        elif files != path:
            self._send_file(files, body)
        elif path.startswith(("datasets/", "api/datasets/")):
            self._send(b"{}", body, "application/json", 404, "RepoNotFound")
        else:
            super()._answer(body=body)

    def _describe(self, about: str, body: bool) -> None:
        route, _, revision = about.strip("/").partition("/")
        found = self._find(revision or "main")
        if found is None:
            self._send(b"{}", body, "application/json", 404, "RevisionNotFound")
            return
        sha, folder = found
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = {path.relative_to(folder).as_posix(): path for path in paths}
        answer: object = {"id": DATASET, "sha": sha, "siblings": [{"rfilename": name} for name in names]}
        if route == "tree":
            answer = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": name} for name, path in names.items()
            ]
        self._send(json.dumps(answer).encode(), body, "application/json", self.status)

    def _send_file(self, files: str, body: bool) -> None:
        for revision in ("main", SHA, EXPORT_SHA):
            found, name = self._find(revision), files.removeprefix(f"{revision}/")
            if found is None or name == files or not (found[1] / name).is_file():
                continue
            if self.token and self.headers["Authorization"] != f"Bearer {self.token}" and name != "README.md":
                self._send(b"{}", body, "application/json", self.refusal, "GatedRepo")
            else:
                self._send((found[1] / name).read_bytes(), body, "application/octet-stream")
            return
        self._send(b"{}", body, "application/json", 404, "EntryNotFound")

    def _find(self, revision: str) -> tuple[str, Path] | None:
        if revision in ("main", SHA):
            return SHA, self.rows
        return (EXPORT_SHA, self.export) if revision in ("refs/convert/parquet", EXPORT_SHA) else None
