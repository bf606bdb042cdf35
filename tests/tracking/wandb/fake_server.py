"""A W&B server on the loopback interface: just enough of one to take runs, and to misbehave."""

import gzip
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote

from tests.tracking.wandb.log_reader import Described


@dataclass
class Received(Described):
    """Data that the server received of one run."""

    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    system: dict[int, dict[str, Any]] = field(default_factory=dict)  # the machine, by the time
    files: dict[str, bytes] = field(default_factory=dict)
    sittings: int = 0  # how often its end was told
    exit_code: int | None = None
    complete: bool = False

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The history, in order; what came twice counts once."""
        return [self.lines[number] for number in sorted(self.lines)]


@dataclass
class Artifact:
    """A thing that a run has left at the server."""

    name: str
    kind: str
    run: str
    files: dict[str, bytes] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    whole: bool = False


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    fake: "FakeServer"

    def handle_error(self, *_: object) -> None:
        """Nothing: clients that are gone are part of the game."""


class FakeServer:
    """`with FakeServer() as server:`, and WANDB_BASE_URL=server.url.

    status: what every request is answered with. hangs_at, dies_at: a part of the address at
    which it never answers, or is gone for good.
    """

    def __init__(
        self, status: int = 200, hangs_at: str | None = None, dies_at: str | None = None
    ) -> None:
        self.status, self.hangs_at, self.dies_at = status, hangs_at, dies_at
        self.dead = threading.Event()
        self.over = threading.Event()
        self.runs: dict[str, Received] = {}
        self.artifacts: list[Artifact] = []
        self.keys: set[str] = set()
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.fake = self
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> "FakeServer":
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._http.shutdown()
        self._http.server_close()

    def die(self) -> None:
        """From now on nobody is there: new connections are refused, old ones are closed."""
        self.dead.set()
        self._http.socket.close()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/graphql"):
            asked = json.loads(body)
            found = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
            name = asked.get("operationName") or (found[1] if found else "")
            return {"data": self._graphql(name, asked.get("variables") or {})}
        if path.endswith("/file_stream"):
            self._stream(path.split("/")[-2], json.loads(body))
        if path.startswith("/put/"):
            self._put(*map(unquote, path.removeprefix("/put/").split("/", 2)), body)
        return {}

    def _put(self, kind: str, owner: str, name: str, body: bytes) -> None:
        if kind == "run":
            self.runs[owner].files[name] = body
        elif kind == "artifact":
            self.artifacts[int(owner)].files[name] = body
        else:
            self.artifacts[int(owner)].manifest = json.loads(body)

    def of(self, run: str) -> dict[str, Artifact]:
        """By kind, what artifacts the run has left, whole."""
        return {one.kind: one for one in self.artifacts if one.run == run and one.whole}

    def _graphql(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        if "Viewer" in operation:
            viewer = {"id": "1", "entity": "somebody", "username": "somebody", "flags": "{}"}
            return {"viewer": {**viewer, "teams": {"edges": []}}}
        if operation == "UpsertBucket":
            return {"upsertBucket": {"bucket": self._bucket(given), "inserted": True}}
        if operation == "RunResumeStatus":
            project = {"id": "1", "name": given.get("project")}
            bucket = self._resumed(given["name"])
            return {"model": {**project, "entity": {"id": "1", "name": "somebody"}, **bucket}}
        if operation == "CreateRunFiles":
            place = f"{self.url}/put/run/{given['run']}"
            files = [{"name": f, "uploadUrl": f"{place}/{quote(f)}"} for f in given["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        if "Artifact" in operation:
            return self._artifact(operation, given)
        return {}

    def _artifact(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        if operation == "ArtifactType":
            return {"project": None}  # there is none of that name
        if operation == "CreateArtifact":
            asked = given["input"]
            kind = asked["artifactTypeName"]
            self.artifacts.append(Artifact(asked["artifactCollectionName"], kind, asked["runName"]))
            sequence = {"id": "1", "latestArtifact": None}
            own = {"id": str(len(self.artifacts) - 1), "state": "PENDING"}
            return {"createArtifact": {"artifact": {**own, "artifactSequence": sequence}}}
        if operation in ("CreateArtifactManifest", "UpdateArtifactManifest"):
            id = given.get("artifactID") or given["artifactManifestID"]
            file = {"id": "1", "uploadUrl": f"{self.url}/put/manifest/{id}/it", "uploadHeaders": []}
            answer = {"artifactManifest": {"id": id, "file": file}}
            return {operation[0].lower() + operation[1:]: answer}
        if operation == "CreateArtifactFiles":
            edges = []
            for spec in given["input"]["artifactFiles"]:
                id, name = spec["artifactID"], spec["name"]
                url = f"{self.url}/put/artifact/{id}/{quote(name)}"
                node = {"storagePath": name, "uploadUrl": url, "uploadHeaders": []}
                edges.append({"node": {**node, "artifact": {"id": id}}})
            return {"createArtifactFiles": {"files": {"edges": edges}}}
        if operation == "CommitArtifact":
            self.artifacts[int(given["artifactID"])].whole = True
            return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": ""}}}
        return {}

    def _resumed(self, name: str) -> dict[str, Any]:
        """Return what the server knows of a run that is resumed."""
        run = self.runs.get(name)
        if run is None:
            return {"bucket": None}
        own: dict[str, Any] = {"id": "1", "name": name, "displayName": run.name, "tags": run.tags}
        counts = {"historyLineCount": len(run.lines), "logLineCount": 0}
        counts["eventsLineCount"] = len(run.system)
        tails = {
            "historyTail": json.dumps([json.dumps(row) for row in run.rows[-1:]]),
            "eventsTail": "[]",
            "summaryMetrics": json.dumps(run.summary),
        }
        return {"bucket": {**own, **counts, **tails, "config": "{}", "wandbConfig": "{}"}}

    def _bucket(self, given: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.setdefault(given["name"], Received())
        run.name = given.get("displayName") or run.name
        run.project = given.get("project") or run.project
        run.entity = given.get("entity") or run.entity
        run.group = given.get("groupName") or run.group
        run.job_type = given.get("jobType") or run.job_type
        run.tags = given.get("tags") or run.tags
        config = json.loads(given.get("config") or "{}")
        run.config |= {key: entry["value"] for key, entry in config.items()}
        entity = {"id": "1", "name": run.entity or "somebody"}
        project = {"id": "1", "name": run.project, "entity": entity}
        bucket = {"id": "1", "name": given["name"], "displayName": run.name, "config": "{}"}
        count = len(run.lines)
        return {**bucket, "sweepName": None, "historyLineCount": count, "project": project}

    def _stream(self, name: str, sent: dict[str, Any]) -> None:
        run = self.runs[name]
        files = sent.get("files") or {}
        for file, lines in (("history", run.lines), ("events", run.system)):
            part = files.get(f"wandb-{file}.jsonl") or {"content": []}
            for number, line in enumerate(part["content"], part.get("offset", 0)):
                lines[number] = json.loads(line)
        if told := files.get("wandb-summary.json"):
            run.summary = json.loads(told["content"][-1])
        if sent.get("complete"):
            run.complete, run.exit_code = True, sent.get("exitcode")
            run.sittings += 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    def handle_one_request(self) -> None:
        fake = self.server.fake
        if fake.dead.is_set():
            self.close_connection = True
            return
        super().handle_one_request()

    def do_GET(self) -> None:
        self._respond()

    do_POST = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing: pytest's output is for the tests."""

    def _respond(self) -> None:
        fake = self.server.fake
        body = self._body()
        if fake.hangs_at and fake.hangs_at in self.path:
            fake.over.wait()
            self.close_connection = True
            return
        if fake.dies_at and fake.dies_at in self.path:
            fake.die()
        if fake.dead.is_set():
            self.close_connection = True
            return
        if key := self.headers.get("Authorization"):
            fake.keys.add(key)
        answer: dict[str, Any] = {"errors": [{"message": "no"}]}
        if fake.status == 200:
            answer = fake.answer(self.path, body)
        content = json.dumps(answer).encode()
        self.send_response(fake.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body


def dead_url() -> str:
    """Return an address where connections are refused."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return f"http://127.0.0.1:{held.getsockname()[1]}"
