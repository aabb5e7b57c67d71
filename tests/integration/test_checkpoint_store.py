"""A learner process that uploads to S3: killed in an upload, restarted, and resumed by URL once its folder is lost."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.backends import get_backend
from moto.s3.models import S3Backend
from rich.console import Console

from offbeat.deploy.cli.audit import audit_run
from offbeat.deploy.run_folder import newest_saved
from offbeat.trainer.training.checkpoint import read_uploaded
from offbeat.trainer.training.remote_checkpoints import RemoteFolder, fetch_by_url
from tests.integration.learner_run import ENVIRONMENT, a_run
from tests.trainer.training.object_store import BUCKET, SECRET, s3_bucket, s3_environment
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.timeout(600)

URL = f"s3://{BUCKET}/copies"
MANIFEST = "manifest.json"
KEYS = (f"checkpoint_config.output_dir={URL}", "checkpoint_config.keep_local_file=false")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with s3_bucket() as port:
        for name, value in s3_environment(port).items():
            monkeypatch.setitem(ENVIRONMENT, name, value)
        yield


def stored() -> set[str]:
    """Keys of the bucket, without a request."""
    return set(get_backend("s3")["123456789012"]["aws"].buckets[BUCKET].keys)


def later_than_the_first() -> list[str]:
    """Keys of checkpoints after step 0: of step 2, or of step 4 where the store was slower than training."""
    return sorted(key for key in stored() if "/step-" in key and "/step-000000." not in key)


@pytest.mark.usefixtures("s3")
def test_a_learner_killed_in_an_upload_and_a_lost_folder(
    redis_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, put_object = threading.Event(), S3Backend.put_object

    def hold_manifest(backend: S3Backend, bucket: str, key: str, *args: Any, **kwargs: Any) -> Any:
        """Answer no upload of a later checkpoint's manifest until its learner is dead."""
        if key.endswith(MANIFEST) and "/step-000000." not in key and not killed.is_set():
            killed.wait(240)
            raise ConnectionError("the client is dead")
        return put_object(backend, bucket, key, *args, **kwargs)

    monkeypatch.setattr(S3Backend, "put_object", hold_manifest)
    with a_run(redis_server, tmp_path, "uploading", KEYS) as run:
        victim = run.start()
        wait_until_sync(lambda: bool(later_than_the_first()), timeout_s=240, every_s=0.001)
        victim.kill()
        victim.wait()
        killed.set()
        url = f"{URL}/{later_than_the_first()[0].split('/')[1]}"
        assert not any(key.endswith(MANIFEST) for key in later_than_the_first()), "killed in the upload"
        assert [each.step for each in RemoteFolder(url).read_list()] in ([], [0])
        assert run.start().wait(timeout=240) == 0, run.complaint()
        uploaded = [each.step for each in RemoteFolder(url).read_list()]
        assert uploaded[-1] == 6
        folder = run.config.output_dir
        assert not list((folder / "checkpoints").glob("step-*"))
        assert newest_saved(folder) == (6, f"{url}/{read_uploaded(folder / 'checkpoints')[1][-1].name}")
        (folder / "config.yaml").write_text(run.config.model_dump_json())
        assert audit_run(str(folder), console=Console(width=200), redis_url=redis_server) == 0
        for path in (each for each in folder.rglob("*") if each.is_file()):
            assert SECRET.encode() not in path.read_bytes(), path
        shutil.rmtree(folder)
    again = [*KEYS, f"resume_from_checkpoint={URL}", "max_steps=8"]
    with a_run(redis_server, tmp_path, "again", again) as run:
        assert run.start().wait(timeout=240) == 0, run.complaint()
        assert "resuming from" in (log := (run.config.output_dir / "logs" / "learner.log").read_text())
        assert "restored/step-000006" in log
        assert run.phase() == "finished"
        newest = fetch_by_url(RemoteFolder(URL).url + "/" + runs(URL, "again")[0], tmp_path / "fetched")
        assert newest.state.step == 8
    assert [each.step for each in RemoteFolder(url).read_list()] == uploaded, "the first run's are untouched"


def runs(url: str, name: str) -> list[str]:
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    return sorted({part for key in stored() if (part := key.removeprefix(f"{prefix}/").split("/")[0]).startswith(name)})
