import subprocess
import sys

import pytest

from offbeat.deploy.local.ray_head import make_environment


@pytest.mark.slow
def test_rays_processes_collect_garbage_seldom_from_their_first_import(monkeypatch: pytest.MonkeyPatch):
    """Ray's daemons start its workers: a process of a process. Paths of the user's remain."""
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    show = "import gc, sys; print(gc.get_threshold()[0], '/of/the/user' in sys.path)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {show!r}], check=True)"
    done = subprocess.run(
        [sys.executable, "-c", start], env=make_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "20000 True\n"
