"""A model by its Hub id, from a server on this machine that answers as the Hub does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import huggingface_hub
import pytest

from tests.tiny_models import tiny_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = ("config.json", "model.safetensors", "README.md", "modeling_own.py")
CONFIG = json.dumps(tiny_config("mixtral").to_dict()).encode()


class Hub(BaseHTTPRequestHandler):
    """The few answers that the download of a file needs."""

    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path, content, status = self.path.partition("?")[0], b"{}", 404
        if path.startswith("/api/models/some-org/tiny"):
            siblings = [{"rfilename": name, "size": 1, "path": name, "type": "file", "oid": COMMIT} for name in FILES]
            facts = {"id": "some-org/tiny", "modelId": "some-org/tiny", "sha": COMMIT, "siblings": siblings}
            content, status = json.dumps(siblings if "/tree/" in path else facts).encode(), 200
        elif path == f"/some-org/tiny/resolve/{COMMIT}/config.json":
            content, status = CONFIG, 200
        if body and "/resolve/" in path:
            self.asked.append(path.rpartition("/")[2])
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, "ETag": '"abc"', "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    Hub.asked.clear()
    # What HF_ENDPOINT, HF_HUB_OFFLINE and HF_HUB_CACHE set when the package is imported.
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url + "".join(template[1:]))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_estimate_fetches_config_json_alone(hub: None, run: Any, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_bytes(CONFIG)
    found, local = (run("estimate", model, "--tokens", 8, "--json") for model in ("some-org/tiny", tmp_path / "tiny"))
    assert (found.code, Hub.asked) == (0, ["config.json"]), found.err
    assert json.loads(found.out) | {"model": ""} == json.loads(local.out) | {"model": ""}
    assert run("estimate", "some-org/other", "--tokens", 8).code == 3 and Hub.asked == ["config.json"]
