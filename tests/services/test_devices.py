"""Device numbers are parsed without evaluation, and a device has one holder of a role."""

import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.services.devices import (
    DeviceClaim,
    EngineDevices,
    NoDeviceError,
    parent_visible,
    parse_device_mapping,
    visible_devices,
)
from tests.waiting import wait_until_sync


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("list(range(0,8))", tuple(range(8))),
        ("list(range(0, 4)) + list(range(6,8))", (0, 1, 2, 3, 6, 7)),
        ("list(range(2))+[5]", (0, 1, 5)),
        ("[0,1]", (0, 1)),
        ("list(range(6, 0, -2))", (2, 4, 6)),
        ([3, 1], (1, 3)),
    ],
)
def test_mappings_are_read_as_roll_writes_them(text: object, devices: tuple[int, ...]) -> None:
    assert parse_device_mapping(text) == devices


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("__import__('os').getpid()", "is not a list of device numbers"),
        ("list(map(int, '12'))", "is not a list of device numbers"),
        ("list(range(10**9))", "is not an integer"),
        ("list(range(0, 1000000000))", "at most 65,536"),
        ("[0, 1", "not an expression"),
        ("(" * 10_000, "not an expression"),
        ("[0.5]", "is not an integer"),
        ([0, True], "integers from 0 on"),
        ("[-1]", "integers from 0 on"),
        ([1, 1], "device 1 is named twice"),
        ([], "names no device"),
    ],
)
def test_other_expressions_are_refused(value: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_device_mapping(value)


SLOTS = (EngineDevices("a", (0, 1)), EngineDevices("a", (2, 3)), EngineDevices("b", (0, 1)))


def test_engines_of_a_node_take_different_slots(tmp_path: Path) -> None:
    first, second = (DeviceClaim(SLOTS, "a", "engine", tmp_path) for _ in range(2))
    assert {first.slot.devices, second.slot.devices} == {(0, 1), (2, 3)}
    with pytest.raises(NoDeviceError, match=r"its slots are \[0, 1\], \[2, 3\]"):
        DeviceClaim(SLOTS, "a", "engine", tmp_path)
    assert DeviceClaim(SLOTS, "b", "engine", tmp_path).slot == SLOTS[2]
    first.release()
    assert DeviceClaim(SLOTS, "a", "engine", tmp_path).slot == first.slot


def test_overlapping_slots_of_two_runs_exclude_each_other(tmp_path: Path) -> None:
    held = DeviceClaim([EngineDevices("a", (1, 2))], "a", "engine", tmp_path)
    with pytest.raises(NoDeviceError):
        DeviceClaim([EngineDevices("a", (0, 1))], "a", "engine", tmp_path)
    DeviceClaim([EngineDevices("a", (0,))], "a", "engine", tmp_path)  # the refused claim has left nothing
    held.release()


def test_a_folder_or_file_that_another_user_made_is_not_written_to(tmp_path: Path) -> None:
    """The folder's name in /tmp is known: a link there would empty a file of this user."""
    victim, folder = tmp_path / "precious", tmp_path / "claims"
    victim.write_text("precious")
    folder.mkdir(mode=0o700)
    (folder / "a-engine-0").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        DeviceClaim([EngineDevices("a", (0,))], "a", "engine", folder)
    folder.chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for place in (folder, tmp_path / "link"):
        with pytest.raises(NoDeviceError, match="this user alone"):
            DeviceClaim([EngineDevices("b", (0,))], "b", "engine", place)
    assert victim.read_text() == "precious"


def test_a_killed_holder_frees_its_devices(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from offbeat.services.devices import *; slots = [EngineDevices('a', (0,))]; "
        f"claim = DeviceClaim(slots, 'a', 'engine', Path({str(tmp_path)!r})); print('held', flush=True); "
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(NoDeviceError):
            DeviceClaim([EngineDevices("a", (0,))], "a", "engine", tmp_path)
        holder.kill()
        holder.wait()
    DeviceClaim([EngineDevices("a", (0,))], "a", "engine", tmp_path).release()


def test_a_restricted_node_numbers_what_it_shows() -> None:
    assert visible_devices((0, 2), None) == "0,2"
    assert visible_devices((0, 2), "4,5,7") == "4,7"
    assert visible_devices((1,), "GPU-a, GPU-b") == "GPU-b"
    with subprocess.Popen(["sleep", "30"], env={"CUDA_VISIBLE_DEVICES": "4,5"}) as process:
        try:
            wait_until_sync(lambda: parent_visible(process.pid) == "4,5")
        finally:
            process.kill()
