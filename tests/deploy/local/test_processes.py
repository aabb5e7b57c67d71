import asyncio
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from offbeat.deploy.config.loader import load_run
from offbeat.deploy.local import mesh as mesh_module
from offbeat.deploy.local import processes
from tests.paths import QUICKSTART
from tests.waiting import wait_until, wait_until_sync

pytestmark = pytest.mark.slow

PROCESS_TREE = """
    import subprocess, sys, time
    from offbeat.deploy.local.processes import adopt_orphans, descendants, terminate_descendants

    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}]); input()"
    adopt_orphans()
    spared = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    child = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "up\\n"
    child.stdin.close()
    child.wait()
    orphans = descendants(excluding=[spared.pid])
    assert len(orphans) == 1, orphans
    assert terminate_descendants(0.3, excluding=[spared.pid]) == 1
    assert descendants(excluding=[spared.pid]) == []
    assert spared.poll() is None
    assert terminate_descendants(5.0) == 0
    assert spared.poll() is not None
    print("done")
"""


def test_orphans_remain_descendants_and_stubborn_ones_are_killed():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROCESS_TREE)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.endswith("done\n"), done.stderr


def test_unrelated_processes_are_not_signalled():
    unrelated = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        code = "from offbeat.deploy.local.processes import terminate_descendants; terminate_descendants(0.1)"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        wait_until_sync(lambda: unrelated.poll() is None)
        assert unrelated.poll() is None
    finally:
        unrelated.kill()
        unrelated.wait()


TRACKED = """
    import os, subprocess, sys
    from offbeat.deploy.local.processes import adopt_orphans, descendants, terminate_descendants

    hold = (
        "import time; from multiprocessing import shared_memory; "
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "memory = shared_memory.SharedMemory(create=True, size=64); print(memory.name, flush=True); time.sleep(100)"
    )
    child = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    name = child.stdout.readline().strip()
    assert os.path.exists("/dev/shm/" + name)
    suspended = [process for process in descendants() if "resource_tracker" in str(process.cmdline())][:int(sys.argv[1])]
    for tracker in suspended:
        adopt_orphans()  # so that it remains a descendant after its parent's death
        tracker.suspend()
    assert terminate_descendants(0.2) == 1 + len(suspended)
    assert not os.path.exists("/dev/shm/" + name)
    print("done")
"""


@pytest.mark.parametrize("suspended", [0, 1])
def test_shared_memory_of_killed_processes_is_removed(suspended: int):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TRACKED), str(suspended)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.endswith("done\n"), done.stderr


UNTRACKED = """
    import os, subprocess, sys
    import psutil
    from offbeat.deploy.local.processes import (
        adopt_orphans, descendants, remove_orphaned_shared_memory, find_shared_memory, find_orphaned_shared_memory
    )

    hold = (
        "import multiprocessing, time; lock = multiprocessing.get_context('spawn').Lock(); "
        "print(lock._semlock.name, flush=True); time.sleep(100)"
    )
    adopt_orphans()
    child = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    name = "/dev/shm/sem." + child.stdout.readline().strip().removeprefix("/")
    held = find_shared_memory()
    assert [str(path) for path in held] == [name]
    assert held.isdisjoint(find_orphaned_shared_memory())
    killed = descendants()[::-1]  # the resource tracker first: it removes the semaphore once its process is gone
    for process in killed:
        process.kill()
    assert not psutil.wait_procs(killed, timeout=30)[1]
    assert held <= find_orphaned_shared_memory()
    remove_orphaned_shared_memory(held)
    assert not os.path.exists(name)
    print("done")
"""


def test_semaphores_are_removed_when_their_tracker_was_killed():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(UNTRACKED)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.endswith("done\n"), done.stderr


DIED_EARLY = """
    import asyncio, multiprocessing, os, subprocess, sys, time
    from pathlib import Path
    from offbeat.deploy.config.loader import load_run
    from offbeat.deploy.local.processes import adopt_orphans, descendants
    from offbeat.deploy.local.mesh import LocalMesh

    async def watch(mesh, child, name):
        watching = asyncio.create_task(mesh.watch_shared_memory())
        while name not in map(str, mesh._shared_memory):
            await asyncio.sleep(0.01)
        for process in reversed(descendants()):  # the resource tracker first
            process.kill()
        child.wait()
        watching.cancel()

    hold = (
        "import multiprocessing, time; lock = multiprocessing.get_context('spawn').Lock(); "
        "print(lock._semlock.name, flush=True); time.sleep(100)"
    )
    adopt_orphans()
    child = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    name = "/dev/shm/sem." + child.stdout.readline().strip().removeprefix("/")
    config = load_run(Path("deploy/configs/quickstart.yaml")).model_copy(update={"output_dir": Path(sys.argv[1])})
    mesh = LocalMesh(config, started_at=time.time())
    asyncio.run(watch(mesh, child, name))
    assert os.path.exists(name)
    asyncio.run(mesh.stop())
    assert not os.path.exists(name)
    print("done")
"""


def test_semaphores_of_processes_that_died_early_are_removed_by_stop(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DIED_EARLY), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.endswith("done\n"), done.stderr


EXITS_GRACEFULLY = """
import pathlib, signal, sys, time
def stop(*_):
    pathlib.Path(sys.argv[1]).write_text("graceful")
    sys.exit()
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
time.sleep(100)
"""
PARENT = """
import signal, subprocess, sys
from offbeat.services.process import bind_to_thread
subprocess.run(bind_to_thread([sys.executable, *sys.argv[1:]], by=signal.SIGTERM))
"""


def test_child_receives_the_chosen_signal_when_its_parent_is_killed(tmp_path: Path):
    result = tmp_path / "result"
    command = [sys.executable, "-c", PARENT, "-c", EXITS_GRACEFULLY, str(result)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        parent.kill()
    wait_until_sync(lambda: result.exists() and result.read_text() == "graceful")


MAPPED = """
    import mmap, sys
    with open(sys.argv[1], "r+b") as file:
        held = mmap.mmap(file.fileno(), 0)
    print("mapped", flush=True)
    sys.stdin.read()
"""


async def test_maps_of_processes_are_read_only_while_a_file_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    listed, scanned = 0, 0

    def list_files() -> set[Path]:
        nonlocal listed
        listed += 1
        return processes.list_shared_memory()

    def find() -> set[Path]:
        nonlocal scanned
        scanned += 1
        return processes.find_shared_memory()

    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(mesh_module, "SHARED_MEMORY_SCAN_INTERVAL_S", 0.0)
    monkeypatch.setattr(mesh_module, "list_shared_memory", list_files)
    monkeypatch.setattr(mesh_module, "find_shared_memory", find)
    config = load_run(QUICKSTART).model_copy(update={"output_dir": tmp_path / "run"})
    mesh = mesh_module.LocalMesh(config, started_at=time.time())
    watching = asyncio.create_task(mesh.watch_shared_memory())
    await wait_until(lambda: listed > 10)
    assert scanned == 0
    path = tmp_path / "psm_0"
    path.write_bytes(bytes(4096))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(MAPPED), str(path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"mapped\n"
        before = listed
        await wait_until(lambda: listed > before + 10)
        assert scanned == 2, "once when it was new, and once more"
        newer = tmp_path / "psm_1"
        newer.hardlink_to(path)  # a file of a process that is known, named once it is mapped
        await wait_until(lambda: newer in mesh._shared_memory)
        before = listed
        await wait_until(lambda: listed > before + 10)
        assert (mesh._shared_memory, scanned) == ({path, newer}, 4)
    finally:
        watching.cancel()
        await child.communicate(b"")
