"""A fake W&B server on the loopback interface, which accepts runs and can misbehave."""

import gzip
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote

from tests.tracking.wandb.log_reader import RunMetadata


@dataclass
class ReceivedRun(RunMetadata):
    """Data of one run that the server received."""

    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    system: dict[int, dict[str, Any]] = field(
        default_factory=dict
    )  # measurements of the machine, by time
    files: dict[str, bytes] = field(default_factory=dict)
    sessions: int = 0  # number of ends that were reported
    exit_code: int | None = None
    complete: bool = False

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the history in order, without duplicates."""
        return [self.lines[number] for number in sorted(self.lines)]


@dataclass
class Artifact:
    """An artifact that a run has uploaded."""

    name: str
    kind: str
    run: str
    files: dict[str, bytes] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    fake: "FakeServer"

    def handle_error(self, *_: object) -> None:
        """Ignore clients that disconnect, which the tests cause."""


class FakeServer:
    """`with FakeServer() as server:`, and WANDB_BASE_URL=server.url.

    status: the status of every response. hangs_at, dies_at: a part of the path at which the server
    never answers, or dies.
    """

    def __init__(
        self, status: int = 200, hangs_at: str | None = None, dies_at: str | None = None
    ) -> None:
        self.status, self.hangs_at, self.dies_at = status, hangs_at, dies_at
        self.dead = threading.Event()
        self.over = threading.Event()
        self.runs: dict[str, ReceivedRun] = {}
        self.artifacts: list[Artifact] = []
        self.keys: set[str] = set()
        self.sweep_config = ""  # of a W&B sweep, as YAML
        self.commands: list[dict[str, Any]] = []  # to its agent, one by one
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
        """Refuse new connections, and close existing ones, from now on."""
        self.dead.set()
        self._http.socket.close()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/graphql"):
            request = json.loads(body)
            match = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
            name = request.get("operationName") or (match[1] if match else "")
            return {"data": self._graphql(name, request.get("variables") or {})}
        if path.endswith("/file_stream"):
            self._stream(path.split("/")[-2], json.loads(body))
        if path.startswith("/put/"):
            kind, owner, name = map(unquote, path.removeprefix("/put/").split("/", 2))
            self._put(kind, owner, name, body)
        return {}

    def _put(self, kind: str, owner: str, name: str, body: bytes) -> None:
        if kind == "run":
            self.runs[owner].files[name] = body
        elif kind == "artifact":
            self.artifacts[int(owner)].files[name] = body
        else:
            self.artifacts[int(owner)].manifest = json.loads(body)

    def artifacts_of(self, run: str) -> dict[str, Artifact]:
        """Return the complete artifacts of a run, by kind."""
        return {a.kind: a for a in self.artifacts if a.run == run and a.is_complete}

    def _graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "Viewer" in operation:
            viewer = {"id": "1", "entity": "somebody", "username": "somebody", "flags": "{}"}
            return {"viewer": {**viewer, "teams": {"edges": []}}}
        if operation == "UpsertBucket":
            return {"upsertBucket": {"bucket": self._bucket(variables), "inserted": True}}
        if operation == "RunResumeStatus":
            project = {"id": "1", "name": variables.get("project")}
            bucket = self._resume_status(variables["name"])
            return {"model": {**project, "entity": {"id": "1", "name": "somebody"}, **bucket}}
        if operation == "CreateRunFiles":
            place = f"{self.url}/put/run/{variables['run']}"
            files = [{"name": f, "uploadUrl": f"{place}/{quote(f)}"} for f in variables["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        if operation == "SweepWithRuns":
            sweep = {"id": "1", "name": variables["sweep"], "config": self.sweep_config}
            return {"project": {"sweep": {**sweep, "runs": {"edges": []}}}}
        if operation == "UpsertSweep":
            self.sweep_config = variables["config"]
            project = {"id": "1", "name": "qkablate", "entity": {"id": "1", "name": "somebody"}}
            sweep = {"id": "1", "name": "abcdefgh", "state": "RUNNING", "project": project}
            return {"upsertSweep": {"sweep": sweep, "configValidationWarnings": []}}
        if operation == "CreateAgent":
            return {"createAgent": {"agent": {"id": "1"}}}
        if operation == "Heartbeat":
            is_busy = "true" in variables["runState"]
            commands = [] if is_busy or not self.commands else [self.commands.pop(0)]
            return {"agentHeartbeat": {"agent": {"id": "1"}, "commands": json.dumps(commands)}}
        if "Artifact" in operation:
            return self._artifact(operation, variables)
        return {}

    def _artifact(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        if operation == "ArtifactType":
            return {"project": None}  # no type of that name
        if operation == "CreateArtifact":
            request = variables["input"]
            kind = request["artifactTypeName"]
            self.artifacts.append(
                Artifact(request["artifactCollectionName"], kind, request["runName"])
            )
            sequence = {"id": "1", "latestArtifact": None}
            own = {"id": str(len(self.artifacts) - 1), "state": "PENDING"}
            return {"createArtifact": {"artifact": {**own, "artifactSequence": sequence}}}
        if operation in ("CreateArtifactManifest", "UpdateArtifactManifest"):
            id = variables.get("artifactID") or variables["artifactManifestID"]
            file = {"id": "1", "uploadUrl": f"{self.url}/put/manifest/{id}/it", "uploadHeaders": []}
            answer = {"artifactManifest": {"id": id, "file": file}}
            return {operation[0].lower() + operation[1:]: answer}
        if operation == "CreateArtifactFiles":
            edges = []
            for spec in variables["input"]["artifactFiles"]:
                id, name = spec["artifactID"], spec["name"]
                url = f"{self.url}/put/artifact/{id}/{quote(name)}"
                node = {"storagePath": name, "uploadUrl": url, "uploadHeaders": []}
                edges.append({"node": {**node, "artifact": {"id": id}}})
            return {"createArtifactFiles": {"files": {"edges": edges}}}
        if operation == "CommitArtifact":
            self.artifacts[int(variables["artifactID"])].is_complete = True
            return {"commitArtifact": {"artifact": {"id": variables["artifactID"], "digest": ""}}}
        return {}

    def _resume_status(self, name: str) -> dict[str, Any]:
        """Return the server's data of a run that is resumed."""
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

    def _bucket(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.setdefault(variables["name"], ReceivedRun())
        run.name = variables.get("displayName") or run.name
        run.project = variables.get("project") or run.project
        run.entity = variables.get("entity") or run.entity
        run.group = variables.get("groupName") or run.group
        run.job_type = variables.get("jobType") or run.job_type
        run.tags = variables.get("tags") or run.tags
        config = json.loads(variables.get("config") or "{}")
        run.config |= {key: entry["value"] for key, entry in config.items()}
        entity = {"id": "1", "name": run.entity or "somebody"}
        project = {"id": "1", "name": run.project, "entity": entity}
        bucket = {"id": "1", "name": variables["name"], "displayName": run.name, "config": "{}"}
        count = len(run.lines)
        return {**bucket, "sweepName": None, "historyLineCount": count, "project": project}

    def _stream(self, name: str, sent: dict[str, Any]) -> None:
        run = self.runs[name]
        files = sent.get("files") or {}
        for file, lines in (("history", run.lines), ("events", run.system)):
            part = files.get(f"wandb-{file}.jsonl") or {"content": []}
            for number, line in enumerate(part["content"], part.get("offset", 0)):
                lines[number] = json.loads(line)
        if part := files.get("wandb-summary.json"):
            run.summary = json.loads(part["content"][-1])
        if sent.get("complete"):
            run.complete, run.exit_code = True, sent.get("exitcode")
            run.sessions += 1


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
        """Print nothing."""

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
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
