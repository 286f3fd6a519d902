"""The few endpoints of the Hub that its client uses, on 127.0.0.1."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "a" * 40


class HubStub(ThreadingHTTPServer):
    """Repositories by name, files by path. `asked` collects the paths of all requests."""

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]], gated: set[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories, self.gated = repositories, gated
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: HubStub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = urlsplit(self.path).path.strip("/")
        self.server.asked.append(path)
        parts = path.split("/")
        is_api = parts[:2] == ["api", "models"]
        repository, rest = (
            "/".join(parts[2:4] if is_api else parts[:2]),
            parts[4 if is_api else 2 :],
        )
        files = self.server.repositories.get(repository)
        if files is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
        if repository in self.server.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body)
        if is_api and rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in files.items()
            ]
            return self._send(200, json.dumps(tree).encode(), {}, with_body)
        if is_api:
            siblings = [{"rfilename": name} for name in files]
            info = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings}
            return self._send(200, json.dumps(info).encode(), {}, with_body)
        name = "/".join(rest[2:])
        if rest[:1] != ["resolve"] or name not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        headers = {"ETag": f'"{etag(files[name])}"', "X-Repo-Commit": COMMIT}
        return self._send(200, files[name], headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def hub_stub(
    repositories: Mapping[str, Mapping[str, bytes]], gated: set[str] | None = None
) -> Iterator[HubStub]:
    server = HubStub(repositories, gated or set())
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
