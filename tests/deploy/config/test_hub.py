"""Models of a hub: a small one of our own answers as Hugging Face's does, or its cache does without it."""

import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest
import yaml
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

from offbeat.deploy.config.hub import HubError, download, find, is_hub_id
from tests.hub import NAME, SHA, Hub
from tests.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(folder: Path) -> Iterator[str]:
    handler = type("FolderHub", (Hub,), {"folder": folder / "policy"})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def show(folder: Path, home: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "offbeat.deploy.cli.app", "config", "show", folder / "run.yaml", f"pretrain={name}"],
        cwd=ROOT,
        env={**os.environ, "HF_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


def test_an_id_is_a_snapshot_from_the_hub_and_then_from_its_cache(folder: Path, hub: str, tmp_path: Path):
    first = show(folder, tmp_path, NAME, HF_ENDPOINT=hub)
    assert first.returncode == 0, first.stderr
    snapshot = Path(yaml.safe_load(first.stdout)["pretrain"])
    assert snapshot.name == SHA
    for path in (folder / "policy").iterdir():
        assert (snapshot / path.name).read_bytes() == path.read_bytes()
    for again in (
        show(folder, tmp_path, NAME, HF_HUB_OFFLINE="1"),
        show(folder, tmp_path, f"{NAME}@{SHA}", HF_HUB_OFFLINE="1"),
        show(folder, tmp_path, NAME, HF_ENDPOINT="http://127.0.0.1:9"),
    ):
        assert again.returncode == 0, again.stderr
        assert yaml.safe_load(again.stdout)["pretrain"] == str(snapshot)


def test_a_second_copy_of_all_weights_is_not_downloaded(folder: Path, hub: str, tmp_path: Path):
    """As Mistral's repositories have it, beside the files of transformers."""
    (folder / "policy" / "consolidated.safetensors").write_bytes(b"once more")
    done = show(folder, tmp_path, NAME, HF_ENDPOINT=hub)
    (folder / "policy" / "consolidated.safetensors").unlink()
    assert done.returncode == 0, done.stderr
    names = {path.name for path in Path(yaml.safe_load(done.stdout)["pretrain"]).iterdir()}
    assert names == {path.name for path in (folder / "policy").iterdir()}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tiny/none", "no model tiny/none on the hub"),
        (f"{NAME}@other", "has no revision 'other'"),
    ],
)
def test_what_the_hub_does_not_have_is_named(folder: Path, hub: str, tmp_path: Path, name: str, says: str):
    done = show(folder, tmp_path, name, HF_ENDPOINT=hub)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("environment", "most"), [({"HF_HUB_OFFLINE": "1"}, 0), ({}, 2)])
def test_without_a_hub_an_id_is_refused_at_once(folder: Path, tmp_path: Path, environment: dict[str, str], most: int):
    requests = Counter[str]()

    class Dead(BaseRequestHandler):
        def handle(self) -> None:  # and closes the connection
            requests["all"] += 1

    with ThreadingTCPServer(("127.0.0.1", 0), Dead) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = show(folder, tmp_path, NAME, HF_ENDPOINT=f"http://127.0.0.1:{server.server_address[1]}", **environment)
        server.shutdown()
    assert done.returncode == 2
    assert "pretrain: there is no folder tiny/boxes, and the model hub can't be reached" in done.stderr
    assert requests["all"] <= most


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_hub_that_is_too_slow_is_one_that_can_not_be_reached(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
):
    model = tmp_path / "models--tiny--boxes"
    if is_cached:
        shutil.copytree(folder / "policy", model / "snapshots" / SHA)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(SHA)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("offbeat.deploy.config.hub.is_online", lambda: True)
    monkeypatch.setattr(HfApi, "model_info", no_answer)
    if is_cached:
        assert find(NAME) == str(model / "snapshots" / SHA)
    else:
        with pytest.raises(HubError, match="the model hub can't be reached"):
            find(NAME)


def test_a_download_that_breaks_off_is_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.deploy.config.hub.is_online", lambda: True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_answer)
    with pytest.raises(HubError, match=f"{NAME} can't be downloaded from the hub: ReadTimeout"):
        download(NAME)


def no_answer(*_: object, **__: object) -> None:
    """Raise as the hub's HTTP client, whose errors are not OSErrors."""
    raise type("ReadTimeout", (HTTPError,), {})("")


def test_a_snapshot_without_weights_is_no_policy(folder: Path, tmp_path: Path):
    model = tmp_path / "hub" / "models--tiny--boxes"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(SHA)
    (model / "snapshots" / SHA).mkdir(parents=True)
    (model / "snapshots" / SHA / "config.json").write_text("{}")
    done = show(folder, tmp_path, NAME, HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "has no weights" in done.stderr


def test_a_folder_goes_before_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("Qwen/Qwen2.5-0.5B-Instruct")
    assert is_hub_id("Qwen/Qwen2.5-0.5B-Instruct@main")
    Path("Qwen/Qwen2.5-0.5B-Instruct").mkdir(parents=True)
    assert not is_hub_id("Qwen/Qwen2.5-0.5B-Instruct")
    assert not any(is_hub_id(name) for name in ("tiny", "/models/qwen", "./models/qwen", "a/b/c", "../x"))
