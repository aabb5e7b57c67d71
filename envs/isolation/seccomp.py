"""Irrevocable seccomp filter of system calls that computations do not need.

Blocked: sockets, other processes, mounts and namespaces, unlimited memory (memfd, System V), other programs' System V and
POSIX queues, io_uring, keys, BPF, modules, clocks, all but harmless ioctls; with `one_process` new processes (not threads);
without mounts file operations beyond Landlock (`Files`).
"""

import ctypes
import errno
import struct
from typing import NamedTuple

from offbeat.envs.isolation.syscalls import KernelError, call, machine

ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, ARGUMENT_SIZE = 0, 4, 16, 8
"""Offsets in struct seccomp_data; of the argument's low half."""
CLONE_THREAD, NEW_NAMESPACES = 0x00010000, 0x7E020080
X32 = 0x40000000
"""Bit of x86-64's second ABI."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
"""Column below, AUDIT_ARCH constant, number of seccomp(2)."""

# name: number on x86-64, on 64-bit ARM; None where there is no such call
BLOCKED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "tkill": (200, 130),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "lsm_set_self_attr": (460, 460),
    "modify_ldt": (154, None),
    "vhangup": (153, 58),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
}
METADATA: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "connect": (42, 203),
    "bind": (49, 200),
}
"""Calls on paths or open files that Landlock does not govern."""
TRUNCATE, OPEN, OPENAT, OPENAT2, O_TRUNC = (76, 45), (2, None), (257, 56), (437, 437), 0x200
SOCKETPAIR, FCNTL, IOCTL = (53, 199), (72, 25), (16, 29)
SOCKET_TYPE, STREAM = 0xF, 1
BLOCKED_FCNTL = {"F_SETOWN": 8, "F_SETSIG": 10, "F_SETOWN_EX": 15, "F_SETLEASE": 1024, "F_NOTIFY": 1026}
"""Signals to the user's processes; leases, which delay others' opening."""
ALLOWED_IOCTL = {
    "TCGETS": 0x5401,
    "TCGETS2": 0x802C542A,
    "TIOCGWINSZ": 0x5413,
    "FIONREAD": 0x541B,
    "FIONBIO": 0x5421,
    "FIONCLEX": 0x5450,
    "FIOCLEX": 0x5451,
}
NEW_PROCESS: dict[str, tuple[int | None, int | None]] = {"fork": (57, None), "vfork": (58, None)}
CLONE, CLONE3, PRCTL = (56, 220), (435, 435), (157, 167)
SELF_ONLY: dict[str, tuple[int, int]] = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
"""Calls by process id, allowed only for this process."""
ZERO_IS_SELF = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
PR_SET_PDEATHSIG = 1


class Files(NamedTuple):
    """Confinement to the program's own files by another layer."""

    metadata: bool
    """Modes, owners, times, attributes, and sockets by path."""
    truncation: bool
    """By path; Landlock before version 3 does not confine it."""


def restrict(*, one_process: bool, own_pid: int | None, files: Files) -> None:
    """Make the calls above fail with EPERM in this process and its children.

    own_pid: only target of signals and limits; None if a namespace confines them.

    Raises `KernelError` without seccomp filters, or on neither x86-64 nor 64-bit ARM.
    """
    if machine not in ARCHITECTURES:
        raise KernelError(errno.ENOSYS, f"no list of system calls for {machine}")
    _, _, number = ARCHITECTURES[machine]
    code = b"".join(_program(one_process=one_process, own_pid=own_pid, files=files))
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions))
    call(number, 1, 0, ctypes.create_string_buffer(program, len(program)))


def _program(*, one_process: bool, own_pid: int | None, files: Files) -> list[bytes]:
    column, architecture, _ = ARCHITECTURES[machine]
    code = [
        _instruction(LOAD, ARCHITECTURE),
        _instruction(EQUAL, architecture, 1, 0),
        _instruction(RETURN, KILL),
        _instruction(LOAD, NUMBER),
    ]
    if machine == "x86_64":
        code += [_instruction(AT_LEAST, X32, 0, 1), _refuse(errno.ENOSYS)]
    blocked = [*BLOCKED.values(), *(NEW_PROCESS.values() if one_process else ())]
    blocked += () if files.metadata else METADATA.values()
    blocked += () if files.truncation else [TRUNCATE]
    for numbers in blocked:
        if (number := numbers[column]) is not None:
            code += [_instruction(EQUAL, number, 0, 1), _refuse()]
    # glibc falls back to clone, whose flags can be seen
    code += [_instruction(EQUAL, CLONE3[column], 0, 1), _refuse(errno.ENOSYS)]
    code += _test_argument(CLONE[column], [_instruction(ANY_BIT, NEW_NAMESPACES, 0, 1), _refuse()])
    if one_process:
        code += _test_argument(CLONE[column], [_instruction(ANY_BIT, CLONE_THREAD, 1, 0), _refuse()])
    code += _test_argument(PRCTL[column], [_instruction(EQUAL, PR_SET_PDEATHSIG, 0, 1), _refuse()])
    for command in BLOCKED_FCNTL.values():
        code += _test_argument(FCNTL[column], [_instruction(EQUAL, command, 0, 1), _refuse()], 1)
    allowed = [_instruction(EQUAL, request, len(ALLOWED_IOCTL) - i) for i, request in enumerate(ALLOWED_IOCTL.values())]
    code += _test_argument(IOCTL[column], [*allowed, _refuse()], 1)
    code += _file_tests(column, files)
    if own_pid is not None:
        for name, numbers in SELF_ONLY.items():
            zero = [_instruction(EQUAL, 0, 2, 0)] if name in ZERO_IS_SELF else []
            code += _test_argument(numbers[column], [*zero, _instruction(EQUAL, own_pid, 1, 0), _refuse()])
    return [*code, _instruction(RETURN, ALLOW)]


def _file_tests(column: int, files: Files) -> list[bytes]:
    code: list[bytes] = []
    if not files.metadata:  # a pair of datagram sockets can also send to a path
        stream = [_instruction(AND, SOCKET_TYPE), _instruction(EQUAL, STREAM, 1, 0), _refuse()]
        code += _test_argument(SOCKETPAIR[column], stream, 1)
    if not files.truncation:  # O_RDONLY | O_TRUNC truncates what may only be read
        code += [_instruction(EQUAL, OPENAT2[column], 0, 1), _refuse(errno.ENOSYS)]
        truncates = [_instruction(AND, O_TRUNC | 3), _instruction(EQUAL, O_TRUNC, 0, 1), _refuse()]
        for numbers, argument in ((OPEN, 1), (OPENAT, 2)):
            if (number := numbers[column]) is not None:
                code += _test_argument(number, truncates, argument)
    return code


def _test_argument(number: int, tests: list[bytes], argument: int = 0) -> list[bytes]:
    """Test a call's argument, then reload its number."""
    inner = [_instruction(LOAD, FIRST_ARGUMENT + ARGUMENT_SIZE * argument), *tests, _instruction(LOAD, NUMBER)]
    return [_instruction(EQUAL, number, 0, len(inner)), *inner]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(number: int = errno.EPERM) -> bytes:
    return _instruction(RETURN, ERRNO | number)
