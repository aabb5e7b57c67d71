import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from offbeat.services.errors import MeshError
from offbeat.services.redis.url_file import create_url_file, read_url_file
from tests.paths import ROOT

ADDRESS = "redis://127.0.0.1:6390/0"


def test_a_new_file_has_a_password_and_is_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / "redis" / "url"
    url = create_url_file(path, ADDRESS)
    password = urlsplit(url).password
    assert password is not None
    assert len(password) >= 32
    assert url == f"redis://:{password}@127.0.0.1:6390/0"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [each.name for each in path.parent.iterdir()] == ["url"]
    assert create_url_file(path, ADDRESS) == read_url_file(path) == url


def test_another_port_keeps_the_password(tmp_path: Path):
    path = tmp_path / "url"
    before = create_url_file(path, ADDRESS)
    after = create_url_file(path, "redis://127.0.0.1:7000/0")
    assert after == before.replace("6390", "7000") == read_url_file(path)
    assert path.stat().st_mode & 0o777 == 0o600


CREATE = f"""
import sys
from pathlib import Path
from offbeat.services.redis.url_file import create_url_file
sys.stdin.readline()
print(create_url_file(Path(sys.argv[1]), {ADDRESS!r}))
"""


@pytest.mark.slow
def test_processes_that_create_it_at_once_agree(tmp_path: Path):
    command = [sys.executable, "-c", CREATE, str(tmp_path / "url")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, cwd=ROOT, text=True, **pipes) for _ in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    urls = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert urls == {read_url_file(tmp_path / "url")}


def test_a_file_without_a_url_is_refused(tmp_path: Path):
    (tmp_path / "url").write_text("hunter2\n")
    with pytest.raises(MeshError, match=r"url: expected redis://HOST:PORT"):
        create_url_file(tmp_path / "url", ADDRESS)
