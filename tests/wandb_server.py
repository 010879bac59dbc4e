"""A W&B backend on the loopback: what of its protocol a real client needs to create runs, fill them and finish them."""

import gzip
import json
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STREAMED = {"wandb-history.jsonl": "history", "wandb-events.jsonl": "events"}


@dataclass
class StoredRun:
    """What the backend was told of one run."""

    display_name: str | None = None
    group: str | None = None
    tags: list = field(default_factory=list)
    project: str | None = None
    config: dict = field(default_factory=dict)
    history: list = field(default_factory=list)
    events: list = field(default_factory=list)
    summary: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    exit_code: int | None = None

    def rows(self, key):
        """The history rows that have the key."""
        return [row for row in self.history if key in row]


class WandbServer:
    """Context manager around a server thread; ``runs`` maps a run's id to what was stored of it.

    ``answer`` may be changed at any time: ``ok``, an HTTP status as a number, or ``hang`` (takes a request for ever).
    """

    def __init__(self, answer="ok"):
        self.answer, self.runs, self.unknown, self.num_requests = answer, {}, [], 0
        self.closing = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"backend": self}))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exc_info):
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()

    def run(self, run_id):
        return self.runs.setdefault(run_id, StoredRun())

    def graphql(self, query, variables):
        """The data for one operation, or None for one that is not known here."""
        operation = re.search(r"(?:query|mutation)\s+(\w+)", query)
        answer = getattr(self, f"_on_{operation[1]}", None) if operation else None
        if answer is None:
            self.unknown.append(query[:200])
            return None
        return answer(variables)

    def _on_Viewer(self, variables):
        who = {"id": "u1", "entity": "me", "username": "me", "name": "Me", "email": "me@example.org", "admin": False}
        return {"viewer": who | {"flags": "{}", "teams": {"edges": []}, "apiKeys": {"edges": []}}}

    def _on_ServerFeaturesQuery(self, variables):
        return {"serverInfo": {"features": []}}

    def _on_ServerInfo(self, variables):
        versions = {"max_cli_version": "99.0.0", "min_cli_version": "0.0.0"}
        return {"serverInfo": {"cliVersionInfo": versions, "latestLocalVersionInfo": None, "features": []}}

    def _on_RunResumeStatus(self, variables):
        return {"model": {"id": "P1", "name": "p", "entity": {"id": "E1", "name": "me"}, "bucket": None}}

    def _on_RunStoppedStatus(self, variables):
        return {"project": {"run": {"stopped": False}}}

    def _on_UpsertBucket(self, variables):
        run_id = variables.get("name") or variables.get("id")
        is_new, run = run_id not in self.runs, self.run(run_id)
        if variables.get("config"):
            run.config = json.loads(variables["config"])
        run.display_name = variables.get("displayName") or run.display_name
        run.group = variables.get("groupName") or run.group
        run.tags = variables.get("tags") or run.tags
        run.project = variables.get("project") or run.project
        entity = {"id": "E1", "name": variables.get("entity") or "me"}
        project = {"id": "P1", "name": run.project, "entity": entity}
        bucket = {"id": f"B{run_id}", "name": run_id, "displayName": run.display_name or run_id, "description": None}
        bucket |= {"config": json.dumps(run.config), "sweepName": None, "historyLineCount": 0, "project": project}
        return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}

    def _on_CreateRunFiles(self, variables):
        place = f"{self.url}/upload/{variables['run']}"
        files = [{"name": name, "uploadUrl": f"{place}/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": "B", "uploadHeaders": [], "files": files}}

    def stream(self, run_id, message):
        """Take a piece of a run's files and, at its end, the exit code."""
        run = self.run(run_id)
        for name, chunk in (message.get("files") or {}).items():
            if name in STREAMED:
                lines = getattr(run, STREAMED[name])
                lines[chunk["offset"] :] = [json.loads(line) for line in chunk["content"]]
            elif name == "wandb-summary.json":
                run.summary = json.loads(chunk["content"][0])
        if "exitcode" in message:
            run.exit_code = message["exitcode"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    backend: WandbServer

    def log_message(self, *args):
        pass

    def handle(self):
        with suppress(ConnectionError):  # a client that gave up
            super().handle()

    def _body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _send(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _is_refused(self):
        self.backend.num_requests += 1
        answer = self.backend.answer
        if answer == "ok":
            return False
        if answer == "hang":
            self.backend.closing.wait()
            self.close_connection = True
        else:
            self._send({"errors": [{"message": f"answered {answer} on purpose"}]}, answer)
        return True

    def do_POST(self):
        body = self._body()
        if self._is_refused():
            return
        if self.path == "/graphql":
            request = json.loads(body)
            data = self.backend.graphql(request["query"], request.get("variables") or {})
            self._send({"data": data} if data is not None else {"data": {}, "errors": [{"message": "not known here"}]})
        elif stream := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
            self.backend.stream(stream[1], json.loads(body))
            self._send({})
        else:
            self._send({}, 404)

    def do_PUT(self):
        body = self._body()
        if self._is_refused():
            return
        if upload := re.fullmatch(r"/upload/([^/]+)/(.*)", self.path):
            self.backend.run(upload[1]).files[upload[2]] = body
        self._send({})

    def do_GET(self):
        if not self._is_refused():
            self._send({})
