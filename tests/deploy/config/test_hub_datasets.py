"""Datasets of a hub: a small one of our own answers as Hugging Face's does, or its cache does without it."""

import gzip
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
import yaml
from huggingface_hub import constants

from offbeat.deploy.cli.env import load_settings
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.hub import HubError
from offbeat.deploy.config.hub_datasets import download, find, is_dataset_id, missing_datasets, resolve_datasets
from offbeat.deploy.play.target import load_config
from offbeat.envs.dataset.files import open_rows
from tests.dataset_repository import sums, to_lines, write_export, write_repository
from tests.hub import DATASET, EXPORT_SHA, SHA, DatasetHub
from tests.paths import ROOT

pytestmark = pytest.mark.slow

NOWHERE = "http://127.0.0.1:9"
CONFIG = """
exp_name: sums
output_dir: {folder}/run
pipeline: sft
data: {{dataset_name: NAME, prompt_key: question, response_key: answer, num_train_epochs: 2}}
sequence_length: 128
rollout_batch_size: 8
eval_steps: 0
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    write_repository(folder / "rows")
    (folder / "rows" / "pairs.jsonl.gz").write_bytes(gzip.compress(to_lines(sums(0, 5)).encode()))
    write_export(folder / "export")
    return folder


class Server:
    def __init__(self, handler: type[DatasetHub], url: str) -> None:
        self.handler, self.url = handler, url


@pytest.fixture
def server(repository: Path) -> Iterator[Server]:
    folders = {"folder": repository, "rows": repository / "rows", "export": repository / "export", "requested": []}
    handler = type("FolderHub", (DatasetHub,), folders)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield Server(handler, f"http://127.0.0.1:{http.server_port}")
        http.shutdown()


def set_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)  # read when the library was imported
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "hf" / "assets"))
    set_endpoint(monkeypatch, NOWHERE)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "hf"


@pytest.fixture
def hub(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> type[DatasetHub]:
    del cache
    set_endpoint(monkeypatch, server.url)
    return server.handler


def questions(path: str) -> list[str]:
    rows = open_rows(Path(path))
    return [rows[index]["question"] for index in range(len(rows))]


def expected(start: int, count: int) -> list[str]:
    return [row["question"] for row in sums(start, count)]


@pytest.mark.usefixtures("hub")
def test_an_id_is_the_rows_of_a_split_in_their_order(cache: Path):
    path = download(f"{DATASET}:main", "train")
    assert path.startswith(str(cache))
    assert path.endswith(f"/{SHA}/main/train")
    assert questions(path) == expected(0, 32)
    assert download(f"{DATASET}:main/test", "train").endswith(f"/{SHA}/main/test.parquet")
    assert questions(download(f"{DATASET}:main", "test")) == expected(32, 8)


@pytest.mark.usefixtures("hub")
def test_a_compressed_file_is_unpacked():
    path = download(f"{DATASET}:pairs", "train")
    assert path.endswith("/pairs/train.jsonl")
    assert questions(path) == expected(0, 5)


def test_only_the_files_of_the_split_are_downloaded(hub: type[DatasetHub]):
    download(f"{DATASET}:main/test", "train")
    files = {path.rpartition("/")[2] for path in hub.requested if "/resolve/" in path}
    assert files == {"README.md", "test-00000-of-00001.parquet"}


def test_the_cache_answers_without_the_hub(hub: type[DatasetHub], monkeypatch: pytest.MonkeyPatch):
    paths = [download(f"{DATASET}:main", "train"), download(f"{DATASET}:pairs@{SHA}", "train")]
    set_endpoint(monkeypatch, NOWHERE)
    hub.requested.clear()
    names = (f"{DATASET}:main", f"{DATASET}:pairs")
    assert [resolve(name, "train") for resolve in (download, find) for name in names] == paths * 2
    with pytest.raises(HubError, match="its cache has not all files of tiny/sums: fill it where"):
        find(f"{DATASET}:main/test", "train")
    with pytest.raises(HubError, match="config main has no split 'dev'; there is train, test"):
        find(f"{DATASET}:main/dev", "train")
    assert hub.requested == []


def test_a_cache_that_another_program_filled_is_read(repository: Path, cache: Path):
    """As by `hf download --repo-type dataset`."""
    folder = cache / "hub" / "datasets--tiny--sums"
    shutil.copytree(repository / "rows", folder / "snapshots" / SHA)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(SHA)
    assert questions(download(f"{DATASET}:socratic", "train")) == expected(40, 4)
    assert find(f"{DATASET}:main@{SHA}", "train").endswith("/main/train")


def test_a_failing_hub_is_one_that_can_not_be_reached(hub: type[DatasetHub], monkeypatch: pytest.MonkeyPatch):
    path = download(f"{DATASET}:main", "train")
    monkeypatch.setattr(hub, "status", 503)
    assert find(f"{DATASET}:main", "train") == path


@pytest.mark.usefixtures("hub")
def test_a_dataset_that_is_not_here_is_found_by_its_commit():
    found = find(f"{DATASET}:main", "test")
    assert found == f"{DATASET}:main/test@{SHA}"
    path = download(found, "train")
    assert find(f"{DATASET}:main", "test") == path
    Path(path).resolve().unlink()
    assert find(f"{DATASET}:main", "test") == found, "its file was removed from the cache"


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("name", "rows"), [(f"{DATASET}:main", (0, 32)), (f"{DATASET}:main/test", (32, 8))])
def test_a_recorded_path_is_downloaded_again_if_the_cache_has_lost_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows: tuple[int, int]
):
    """As when a run is resumed after `hf cache rm`."""
    tree = {"data": {"dataset_name": download(name, "train")}}
    assert missing_datasets(tree) == []
    assert resolve_datasets(tree, download) == (tree, [])
    shutil.rmtree(cache / "hub")
    found, issues = resolve_datasets(tree, find)
    assert issues == []
    assert found["data"]["dataset_name"].endswith(f"@{SHA}")
    assert resolve_datasets(tree, download) == (tree, [])
    assert questions(tree["data"]["dataset_name"]) == expected(*rows)
    shutil.rmtree(cache / "hub")
    set_endpoint(monkeypatch, NOWHERE)
    _, issues = resolve_datasets(tree, download)
    assert [issue.path for issue in issues] == ["data.dataset_name"]
    assert "the dataset hub can't be reached, and its cache has no snapshot of tiny/sums" in issues[0].message


@pytest.mark.usefixtures("hub")
def test_a_revision_has_rows_of_its_own():
    path = download(f"{DATASET}:main@refs/convert/parquet", "train")
    assert EXPORT_SHA in path
    assert questions(path) == expected(100, 3)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("resolve", [download, find])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tiny/none", "there is no file or folder tiny/none, and no dataset tiny/none on the hub"),
        (f"{DATASET}@other", "tiny/sums has no revision 'other' on the hub"),
        (DATASET, "tiny/sums: several configs; there is main, socratic, pairs: write `:CONFIG`"),
        (f"{DATASET}:main/dev", "tiny/sums: config main has no split 'dev'; there is train, test"),
    ],
)
def test_what_the_hub_does_not_have_is_named(resolve: Callable[[str, str], str], name: str, says: str):
    with pytest.raises(HubError, match=says):
        resolve(name, "train")


@pytest.mark.parametrize(("resolve", "status"), [(download, 403), (find, 403), (find, 401)])
def test_terms_that_were_not_accepted_are_named(
    hub: type[DatasetHub], monkeypatch: pytest.MonkeyPatch, resolve: Callable[[str, str], str], status: int
):
    monkeypatch.setattr(hub, "token", "hf_right")
    monkeypatch.setattr(hub, "refusal", status)
    with pytest.raises(HubError, match="asks for its license to be accepted: accept it on the hub, and set HF_TOKEN"):
        resolve(f"{DATASET}:main/test", "train")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert resolve(f"{DATASET}:main/test", "train")


@pytest.mark.usefixtures("hub")
def test_ids_of_all_keys_are_resolved_and_names_of_other_envs_stay():
    own = {"env_type": "my_env:Env", "env_config": {"dataset_name": "some/name"}}
    math = {
        "env_type": "math",
        "env_config": {"dataset_name": f"{DATASET}:main", "val_dataset_name": f"{DATASET}:main"},
    }
    tools = {"env_type": "tools", "env_config": {"tools": ["calculator"], **math}}
    tree = {
        "data": {"dataset_name": f"{DATASET}:socratic", "val_dataset_name": "data/val.jsonl"},
        "custom_envs": {"Own": own, "Math": math, "Tools": tools},
    }
    resolved, issues = resolve_datasets(tree, download)
    assert issues == []
    assert missing_datasets(resolved) == []
    assert resolved["data"]["dataset_name"].endswith("socratic/train.parquet")
    assert resolved["data"]["val_dataset_name"] == "data/val.jsonl"
    envs = resolved["custom_envs"]
    assert envs["Own"] == own
    for settings in (envs["Math"]["env_config"], envs["Tools"]["env_config"]["env_config"]):
        assert settings["dataset_name"].endswith("main/train")
        assert settings["val_dataset_name"].endswith("main/test.parquet")
    math["env_config"]["dataset_name"] = f"{DATASET}:other"
    _, issues = resolve_datasets(tree, find)
    assert {each.path for each in issues} == {
        "custom_envs.Math.env_config.dataset_name",
        "custom_envs.Tools.env_config.env_config.dataset_name",
    }


@pytest.mark.usefixtures("hub")
def test_settings_of_an_env_on_the_command_line_name_datasets_of_the_hub(capsys: pytest.CaptureFixture[str]):
    settings = load_settings("math", [f"dataset_name={DATASET}:main/test", "split=any"])
    assert settings["dataset_name"].endswith("main/test.parquet")
    assert settings["split"] == "any"
    assert load_settings("my_env:Env", ["dataset_name=some/name"]) == {"dataset_name": "some/name"}
    with pytest.raises(typer.Exit):
        load_settings("math", [f"dataset_name={DATASET}:main/dev"])
    assert "dataset_name: tiny/sums: config main has no split 'dev'" in capsys.readouterr().err


@pytest.mark.usefixtures("hub")
def test_play_and_rollout_read_a_dataset_by_its_id(tmp_path: Path):
    env = {"env_type": "math", "env_config": {"dataset_name": f"{DATASET}:main"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"custom_envs": {"Sums": env}}))
    config = load_config(tmp_path / "run.yaml")
    assert config.custom_envs["Sums"].env_config["dataset_name"].endswith(f"/{SHA}/main/train")
    with pytest.raises(ConfigError, match="no split 'dev'"):
        load_config(tmp_path / "run.yaml", [f"custom_envs.Sums.env_config.dataset_name='{DATASET}:main/dev'"])


def test_a_file_or_folder_goes_before_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("openai/gsm8k", "openai/gsm8k:main", "openai/gsm8k:main/test@v1.0", "HuggingFaceH4/MATH-500"):
        assert is_dataset_id(name)
    Path("openai/gsm8k").mkdir(parents=True)
    assert not is_dataset_id("openai/gsm8k")
    for name in ("data/rows.jsonl", "data/rows.jsonl.gz", "/data/rows", "./data/rows", "gsm8k", "a/b/c", "a/b:c/d/e"):
        assert not is_dataset_id(name)


def show(folder: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.yaml").write_text(CONFIG.format(folder=folder))
    return subprocess.run(
        [sys.executable, "-m", "offbeat.deploy.cli.app", "config", "show", "run.yaml", f"data.dataset_name={name}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "hf"), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


def test_a_configuration_has_the_path_and_the_steps_of_its_epochs(server: Server, tmp_path: Path):
    first = show(tmp_path, f"{DATASET}:main", HF_ENDPOINT=server.url)
    assert first.returncode == 0, first.stderr
    tree = yaml.safe_load(first.stdout)
    path = Path(tree["data"]["dataset_name"])
    assert (path.parts[-3:], tree["max_steps"]) == ((SHA, "main", "train"), 8)
    again = show(tmp_path, f"{DATASET}:main", HF_HUB_OFFLINE="1")
    assert again.stdout == first.stdout
    for name, says in (("tiny/none", "no file or folder tiny/none"), (f"{DATASET}:main/dev", "no split 'dev'")):
        refused = show(tmp_path, name, HF_ENDPOINT=server.url)
        assert refused.returncode == 2
        assert "data.dataset_name: " in refused.stderr
        assert says in refused.stderr
        assert "Traceback" not in refused.stderr
