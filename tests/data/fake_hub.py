"""Local fake of the Hub: the requests that loading a data set or a model makes."""

import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

Files = dict[str, bytes]  # by path

_API = re.compile(r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.+))?)?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub(ThreadingHTTPServer):
    """Data sets and models by name (`owner/name@branch`, unless it is main), a log of requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.sets: dict[str, Files] = {}
        self.models: dict[str, Files] = {}
        self.refused: dict[str, int] = {}  # the status that a name is answered with
        self.error_code = "RepoNotFound"  # that goes with it
        self.gated: dict[str, int] = {}  # the status of the files of a name, which itself is public
        self.files: Files = {}  # on the server, outside all data sets
        self.silent = ""  # pattern of the requests that are never answered
        self.broken = ""  # pattern of the requests of which half is answered
        self.ends = threading.Event()
        self.requests: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def downloads(self) -> list[str]:
        """Return the files that were requested, in order."""
        gets = [line for line in self.requests if line.startswith("GET ") and "/resolve/" in line]
        return [re.split("/resolve/[^/]+/", line)[1] for line in gets]

    def files_of(
        self, published: dict[str, Files], name: str, revision: str | None
    ) -> Files | None:
        """Return the files of a name by branch or commit."""
        branches = {key: files for key, files in published.items() if key.split("@")[0] == name}
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
            hub.ends.set()
            hub.shutdown()
            thread.join()


@contextmanager
def missing_server() -> Iterator[str]:
    """Yield the address of a missing server."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def silent_server() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def isolate_client(monkeypatch: pytest.MonkeyPatch, hf_home: Path) -> None:
    """Give the client of the Hub an empty HF_HOME and no token.

    Separate processes read the environment; in this one the library has already read it.
    """
    import huggingface_hub.constants as constants

    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(hf_home))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name, value in {
        "HF_HOME": str(hf_home),
        "HF_HUB_CACHE": str(hf_home / "hub"),
        "HF_TOKEN_PATH": str(hf_home / "token"),
        "AGENT_HARNESSES_PATH": str(hf_home / "agents.json"),
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)


def point_client(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let the client of the Hub use a server, here and in separate processes."""
    import huggingface_hub.constants as constants

    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


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
        if hub.silent and re.search(hub.silent, hub.requests[-1]):
            hub.ends.wait()
            return
        if content := hub.files.get(unquote(path[1:])):
            self._send_file(content, {})
            return
        if found := _API.fullmatch(path):
            kind, name, what, revision, below = (part and unquote(part) for part in found.groups())
        elif found := _FILE.fullmatch(path):
            kind, name, revision, below = (part and unquote(part) for part in found.groups())
            what = "file"
        else:
            self._send(404)
            return
        published = hub.models if kind in (None, "models") else hub.sets
        files = hub.files_of(published, name, revision)
        if name in hub.refused or not any(key.split("@")[0] == name for key in published):
            self._send(hub.refused.get(name, 404), b"", {"X-Error-Code": hub.error_code})
        elif files is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif what == "file":
            known = {"X-Repo-Commit": commit(files)}
            if name in hub.gated:
                self._send(hub.gated[name], b"", known | {"X-Error-Code": "GatedRepo"})
            elif below in files:
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
        if self.server.broken and re.search(self.server.broken, self.server.requests[-1]):
            content = content[: len(content) // 2]
            self.close_connection = True
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
