"""Programs that try to get out. Each is first run without the sandbox, where it must succeed, unless the
machine itself forbids it, as Yama does ptrace: no attack is a straw man."""

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbeat.envs.sandbox import IsolationError, run_python
from offbeat.envs.sandbox.run import Layer
from tests.envs.sandbox.attacks import CALL, CONTAINER, FULL, NO_FILTERS, attack, held
from tests.envs.sandbox.needs import needs_sandbox

pytestmark = [needs_sandbox, pytest.mark.slow]


SECRET = "the answer is 42"


SERVERS = {
    "TCP": "import socket; s = socket.create_connection(('127.0.0.1', {port}), timeout=50); s.recv(3)",
    "UDP": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "a Unix socket's path": "import socket; socket.socket(socket.AF_UNIX).connect({path!r})",
    "a Unix socket's name": "import socket; socket.socket(socket.AF_UNIX).connect(chr(0) + {name!r})",
}


READS = {
    "by its path": "open({secret!r}).read()",
    "by a symbolic link": "import os; os.symlink({secret!r}, {link!r}); open({link!r}).read()",
    "by a hard link": "import os; os.link({secret!r}, {link!r}); open({link!r}).read()",
    "from another process' root": "open('/proc/{victim}/root{secret}').read()",
    "from its parent's root": "import os; open(f'/proc/{{os.getppid()}}/root{secret}').read()",
    "from another process' environment": "assert b'VICTIM' in open('/proc/{victim}/environ', 'rb').read()",
    "by climbing": "import os; os.chdir('/'); [os.chdir('..') for n in range(50)]; open('.' + {secret!r}).read()",
    "a list of accounts": "open('/etc/passwd').read()",
    "of this project": "open({project!r}).read()",
}


WRITES = {
    "into /tmp": "open('/tmp/{name}', 'w').write('x')",
    "into /dev/shm": "open('/dev/shm/{name}', 'w').write('x')",
    "beside a secret": "open({secret!r} + '.new', 'w').write('x')",
    "over a secret": "open({secret!r}, 'a').write('')",
    "a secret away": "import os; os.remove({secret!r})",
}


PROCESSES = {
    "a signal": "import os; os.kill({victim}, 0)",
    "ptrace": CALL + "check(libc.ptrace(16, {victim}, 0, 0) == 0)",
    "its memory": CALL
    + "b = ctypes.create_string_buffer(8); io = (ctypes.c_void_p * 2)(ctypes.addressof(b), 8); "
    + "at = int(open('/proc/{victim}/maps').readline().split('-')[0], 16); there = (ctypes.c_void_p * 2)(at, 8); "
    + "check(libc.process_vm_readv({victim}, io, 1, there, 1, 0) == 8)",
    "its limits": "import resource; resource.prlimit({victim}, resource.RLIMIT_NOFILE, (64, 64))",
    "its priority": "import os; os.setpriority(os.PRIO_PROCESS, {victim}, 1)",
    "a look at it": "open('/proc/{victim}/cmdline').read()",
    "a handle on it": "import os; os.pidfd_open({victim})",
}


@pytest.fixture
def victim() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "600"], env={"VICTIM": SECRET})
    yield process.pid
    assert process.poll() is None, "the attack killed a process that is not its own"
    process.kill()
    process.wait()


TRIES = """
import os
home = os.getcwd()
for how, code in {attacks!r}.items():
    try:
        exec(code, {{}})
        print(how, "-> SUCCEEDED")
    except BaseException as error:
        print(how, "->", type(error).__name__, str(error).replace(chr(10), " "))
    os.chdir(home)
"""


REFUSALS = (
    "PermissionError",
    "FileNotFoundError",
    "ProcessLookupError",
    "AssertionError",
    "OSError",
    "ConnectionRefused",
    "ValueError",
)


def assert_succeed_outside(attacks: dict[str, str]) -> None:
    code = TRIES.format(attacks=attacks)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    outcomes = dict(line.split(" -> ") for line in done.stdout.split("\n")[:-1])
    possible = {how: outcome for how, outcome in outcomes.items() if not outcome.startswith("PermissionError")}
    assert possible == dict.fromkeys(possible, "SUCCEEDED"), "not an attack at all"


def assert_refused(attacks: dict[str, str], layers: tuple[Layer, ...], abi: int | None = None) -> None:
    output = attack(TRIES.format(attacks=attacks), layers, abi=abi).split("\n")
    assert len(output) == len(attacks), output
    for line in output:
        assert line.split(" -> ")[1].startswith(REFUSALS), line


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[dict[str, object]]:
    """Servers of every kind that a program might reach."""
    name = f"offbeat-{os.getpid()}"
    tcp = socket.create_server(("127.0.0.1", 0))
    path, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    path.bind(str(tmp_path / "s"))
    abstract.bind("\0" + name)
    for server in (path, abstract):
        server.listen()
    with tcp, path, abstract:

        def answer() -> None:
            while True:
                try:
                    connection, _ = tcp.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"yes")

        threading.Thread(target=answer, daemon=True).start()
        yield {"port": tcp.getsockname()[1], "path": str(tmp_path / "s"), "name": name}
        tcp.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("layers", [FULL, CONTAINER, NO_FILTERS], ids="+".join)
def test_no_server_of_any_kind_is_reached(layers: tuple[Layer, ...], listener: dict[str, object]):
    attacks = {how: code.format(**listener) for how, code in SERVERS.items()}
    assert_succeed_outside(attacks)
    assert_refused(attacks, layers)


@pytest.mark.parametrize("layers", [FULL, CONTAINER, NO_FILTERS], ids="+".join)
def test_no_file_is_read_but_its_own_and_the_libraries(layers: tuple[Layer, ...], victim: int, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text(SECRET)

    def attacks(folder: str) -> dict[str, str]:
        names = {"secret": str(secret), "victim": victim, "project": __file__}
        return {how: code.format(link=f"{folder}{how}", **names) for how, code in READS.items()}

    assert_succeed_outside(attacks(f"{tmp_path}/"))
    assert_refused(attacks(""), layers)


@pytest.mark.parametrize("layers", [FULL, CONTAINER, NO_FILTERS], ids="+".join)
def test_no_file_is_written_but_its_own(layers: tuple[Layer, ...], tmp_path: Path):
    secret, name = tmp_path / "secret", f"offbeat-attack-{os.getpid()}"
    outside = {how: code.format(secret=str(secret), name=name) for how, code in WRITES.items()}
    secret.write_text(SECRET)
    assert_succeed_outside(outside)
    left = (tmp_path / "secret.new", Path("/tmp", name), Path("/dev/shm", name))
    for path in left:
        path.unlink()
    secret.write_text(SECRET)
    into_library = {"into the interpreter": "open(__import__('os').__file__, 'a').write('')"}
    own = {} if layers == CONTAINER else {how: outside.pop(how) for how in ("into /tmp", "into /dev/shm")}
    assert_refused(outside | into_library, layers)
    attack(TRIES.format(attacks=own), layers)
    assert secret.read_text() == SECRET
    assert not [path for path in left if path.exists()], "the files it wrote were its own"


@pytest.mark.parametrize("layers", [FULL, CONTAINER, NO_FILTERS], ids="+".join)
def test_other_processes_are_out_of_reach(layers: tuple[Layer, ...], victim: int):
    attacks = {attack_name: code.format(victim=victim) for attack_name, code in PROCESSES.items()}
    assert_succeed_outside(attacks)
    assert_refused(attacks, layers)


@pytest.mark.parametrize("layers", [FULL, CONTAINER], ids="+".join)
def test_dropped_privileges_cannot_be_regained(layers: tuple[Layer, ...]):
    namespaces = {"users": 0x10000000, "mounts": 0x20000, "processes": 0x20000000}
    attacks = {f"new {kind}": CALL + f"assert libc.unshare({flag}) == 0" for kind, flag in namespaces.items()}
    attacks["root"] = "import os; os.setuid(0); open('/etc/shadow').read()"
    attacks["a mount"] = CALL + "assert libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0"
    attacks["no death with the supervisor"] = CALL + "assert libc.prctl(1, 0, 0, 0, 0) == 0"
    attacks["another root"] = "import os; os.chroot('.')"
    attacks["more memory"] = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))"
    assert_refused(attacks, layers)


METADATA = {
    "chmod": "import os; os.chmod({secret!r}, 0o777)",
    "fchmod": "import os; os.fchmod(os.open({secret!r}, os.O_RDONLY), 0o777)",
    "lchown": "import os; os.lchown({secret!r}, os.getuid(), os.getgid())",
    "chown": "import os; os.chown({secret!r}, os.getuid(), os.getgid())",
    "utimensat": "import os; os.utime({secret!r}, (1, 1))",
    "utimes": CALL + "check(libc.utimes({secret!r}.encode(), None) == 0)",
    "setxattr": "import os; os.setxattr({secret!r}, 'user.x', b'1')",
    "removexattr": "import os; os.removexattr({secret!r}, 'user.y')",
    "truncate": "import os; os.truncate({secret!r}, 0)",
    "O_RDONLY and O_TRUNC": "import os; os.open({secret!r}, os.O_RDONLY | os.O_TRUNC)",
    "its flags": "import fcntl, os, struct\nf = os.open({secret!r}, os.O_RDONLY)\n"
    "fcntl.ioctl(f, 0x40086602, fcntl.ioctl(f, 0x80086601, bytes(8)))",
    "its lease": "import fcntl, os; fcntl.fcntl(os.open({secret!r}, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "a datagram to a path": "import socket; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', {path!r})",
    "a datagram from a pair": "import socket\n"
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', {path!r})",
    "SIGIO": "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, {victim})\n"
    "fcntl.fcntl(r, fcntl.F_SETSIG, 23)\n"
    "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x')",
    "SIGIO by ioctl": "import fcntl, socket, struct\n"
    "fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', {victim}))",
    "shared memory": CALL
    + "libc.shmat.restype = ctypes.c_void_p; check(libc.shmat({segment}, None, 0) != (1 << 64) - 1)",
}
"""What Landlock governs late or not at all."""


READABLE = {"O_RDONLY and O_TRUNC": METADATA["O_RDONLY and O_TRUNC"], "truncate": METADATA["truncate"]}


@pytest.fixture
def segment() -> Iterator[int]:
    """System V shared memory of another program."""
    libc = ctypes.CDLL(None)
    number = libc.shmget(0, 4096, 0o1600)
    yield number
    libc.shmctl(number, 0, None)


@pytest.mark.parametrize("abi", [None, 1, 2], ids=["", "Landlock 1", "Landlock 2"])
@pytest.mark.parametrize("layers", [FULL, CONTAINER, NO_FILTERS], ids="+".join)
def test_what_landlock_leaves_out_is_refused(
    layers: tuple[Layer, ...], abi: int | None, victim: int, segment: int, tmp_path: Path
):
    secret, path = tmp_path / "secret", str(tmp_path / "datagrams")
    secret.write_text(SECRET)
    os.setxattr(secret, "user.y", b"1")
    library = str(Path(os.__file__).with_name("LICENSE.txt"))
    names = {"secret": str(secret), "path": path, "victim": victim, "segment": segment}
    attacks = {how: code.format(**names) for how, code in METADATA.items()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(path)
        assert_succeed_outside(attacks)
        secret.write_text(SECRET)
        os.setxattr(secret, "user.y", b"1")
        before = secret.stat()
        server.setblocking(False)
        while received(server):
            pass
        # What may be read, Landlock 1 and 2 let a program empty
        readable = {f"{how} of a library": code.format(secret=library) for how, code in READABLE.items()}
        assert_refused(attacks | readable, layers, abi)
        assert not received(server)
    after = secret.stat()
    assert (after.st_mode, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_mode,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )
    assert secret.read_text() == SECRET


def received(server: socket.socket) -> bool:
    try:
        return bool(server.recv(8))
    except BlockingIOError:
        return False


@pytest.mark.parametrize("abi", [None, 1], ids=["", "Landlock 1"])
@pytest.mark.parametrize("layers", [FULL, CONTAINER], ids="+".join)
def test_ordinary_programs_work_in_every_set_of_layers(layers: tuple[Layer, ...], abi: int | None):
    code = """
import asyncio, os, tempfile
async def answer(): return 42
with tempfile.TemporaryDirectory() as folder:
    with open(folder + "/x", "w") as file: file.write("1")
    with open(folder + "/x", "w") as file: file.write("23")
    os.truncate(folder + "/x", 1) if {truncates} else None
    os.chmod(folder + "/x", 0o600) if {mounts} else None
    print(asyncio.run(answer()), open(folder + "/x").read()[0])
"""
    program = code.format(mounts="mounts" in layers, truncates="mounts" in layers or abi is None)
    outcome = run_python(program, layers=held(layers), max_landlock_abi=abi)
    assert (outcome.stdout, outcome.error) == ("42 2\n", "")


def test_landlock_without_filters_of_calls_is_not_enough():
    with pytest.raises(IsolationError, match=r"files that are not theirs .*Landlock with seccomp"):
        run_python("", layers=("namespaces", "landlock"))


def open_files(run: Callable[[str], str]) -> str:
    """Numbers above 2 that are open, as the program sees them."""
    return run("import os\nfor n in range(3, 256):\n try: os.fstat(n)\n except OSError: continue\n print(n)")


def test_no_open_file_of_ours_is_inherited(tmp_path: Path):
    with (tmp_path / "open").open("w") as ours:
        os.set_inheritable(ours.fileno(), True)
        outside = open_files(
            lambda code: subprocess.run(
                [sys.executable, "-c", code], check=True, capture_output=True, close_fds=False
            ).stdout.decode()
        )
        assert str(ours.fileno()) in outside.split()
        for layers in (FULL, CONTAINER):
            assert open_files(lambda code, layers=layers: attack(code, layers)) == ""
