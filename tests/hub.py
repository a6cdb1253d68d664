"""A small server in place of the hub, for its real client."""

import base64
import http.server
import json
import threading

import pytest
from huggingface_hub import constants

OWNER = "somebody"


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as creating a repository and a commit of small files needs; `server` keeps what it got."""

    def answer(self, status: int, body: object = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            files = [{"type": "file", "path": path, "size": 1, "oid": "1"} for path in self.server.files]
            self.answer(200, files)
            return
        may_write = self.path.endswith("/auth-check/write") and self.server.refuses not in self.path
        self.answer(200 if may_write else 404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if self.server.refuses in self.path:
            is_card = "/validate-yaml" in self.path
            self.answer(400 if is_card else 403, {"error": "no", "errors": [{"message": "no"}]})
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            name = json.loads(body)["name"]
            self.answer(200, {"url": f"{self.server.url}/{OWNER}/{name}"})
        elif "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self.answer(200, {"files": [file | {"shouldIgnore": False} for file in files]})
        elif "/commit/" not in self.path:  # the card's header, to be checked
            self.answer(200, {"errors": [], "warnings": []})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "deletedFile":
                    del self.server.files[line["value"]["path"]]
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = f"{self.server.url}{self.path.split('/commit/')[0].removeprefix('/api/models')}/commit/1"
            self.answer(200, {"commitUrl": commit, "commitOid": "1", "success": True})

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(name="hub")
def hub_server(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.refuses = "nothing is refused"
    server.created = []
    server.files = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield server
    server.shutdown()
