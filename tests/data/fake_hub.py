"""Local fake of the Hub: the requests that loading a data set makes."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]  # by path

_API = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.+))?)?")
_FILE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub(ThreadingHTTPServer):
    """Data sets by name (`owner/name@branch`, unless it is main), and a log of requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.sets: dict[str, Files] = {}
        self.refused: dict[str, int] = {}  # the status that a name is answered with
        self.files: Files = {}  # on the server, outside all data sets
        self.requests: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files_of(self, name: str, revision: str | None) -> Files | None:
        """By branch or commit."""
        branches = {key: files for key, files in self.sets.items() if key.split("@")[0] == name}
        found = branches.get(name if revision in (None, "main") else f"{name}@{revision}")
        return found or next((f for f in branches.values() if commit(f) == revision), None)


@contextmanager
def serving() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def commit(files: Files) -> str:
    """Return the hash of a commit of these files."""
    content = b"".join(path.encode() + b"\0" + files[path] for path in sorted(files))
    return hashlib.sha1(content).hexdigest()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        hub, path = self.server, urlsplit(self.path).path
        hub.requests.append(f"{self.command} {unquote(path)}")
        below: str | None
        if found := _API.fullmatch(path):
            name, what, revision, below = (part and unquote(part) for part in found.groups())
        elif found := _FILE.fullmatch(path):
            name, revision, below = map(unquote, found.groups())
            what = "file"
        elif content := hub.files.get(unquote(path[1:])):
            self._send_file(content, {})
            return
        else:
            self._send(404)
            return
        files = hub.files_of(name, revision)
        if name in hub.refused or not any(key.split("@")[0] == name for key in hub.sets):
            self._send(hub.refused.get(name, 404), b"", {"X-Error-Code": "RepoNotFound"})
        elif files is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif what == "file":
            known = {"X-Repo-Commit": commit(files)}
            if below in files:
                self._send_file(files[below], known)
            else:
                self._send(404, b"", known | {"X-Error-Code": "EntryNotFound"})
        elif what == "tree":
            self._send_json(_tree(files, f"{below}/" if below else ""))
        else:
            siblings = [{"rfilename": path} for path in files]
            self._send_json({"id": name, "sha": commit(files), "siblings": siblings})

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        pass

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send_file(self, content: bytes, known: dict[str, str]) -> None:
        """Send the whole file or the requested range."""
        status = 200
        known = known | {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(part[1]), int(part[2] or len(content) - 1)
            known["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content, status = content[start : end + 1], 206
        self._send(status, content, known)

    def _send(self, status: int, content: bytes = b"", known: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (known or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _tree(files: Files, below: str) -> list[dict[str, object]]:
    """Return all files and folders of a folder, as the Hub lists them."""
    folders = {path[: cut.start()] for path in files for cut in re.finditer("/", path)}
    entries: list[dict[str, object]] = [
        {"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders
    ]
    for path, content in files.items():
        oid = hashlib.sha1(content).hexdigest()
        entries.append({"type": "file", "path": path, "oid": oid, "size": len(content)})
    return [entry for entry in entries if str(entry["path"]).startswith(below)]
