"""The part of a Dockerfile that a shell can carry out: folders, variables, copied files, commands without network."""

import json
import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from offbeat.envs.sandbox.shell import command_env

PLAIN_IMAGE = re.compile(
    r"(docker\.io/)?(library/)?(ubuntu|debian|python|bash|buildpack-deps)(:[\w.-]+)?(@sha256:\w+)?"
    r"|ghcr\.io/laude-institute/t-bench/(ubuntu-24-04|python-3-13)(:[\w.-]+)?"
)
"""Images of a system alone, in whose place this machine's commands serve."""
NETWORK = re.compile(
    r"(?:^|[\s;&|(`])(apt-get|apt|apk|yum|dnf|pip3?|pipx|uvx?|conda|mamba|npm|npx|yarn|pnpm|cargo|gem|curl|wget"
    r"|git\s+clone|go\s+(?:get|install)|docker)\b(?!\s*\(\))"
)
SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sandbox", "sbin", "sys", "usr")
"""Folders that a shell can't write."""
WITHOUT_EFFECT = ("CMD", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL")
ARCHIVE = re.compile(r"\.(tar|tgz|tar\.\w+)$")
FLAG = re.compile(r"--(\w+)(?:=(\S+))?\s+")


class BuildCopy(NamedTuple):
    sources: tuple[Path, ...]
    target: str
    """Absolute; a folder if it ends with a slash."""
    mode: int | None


class BuildCommand(NamedTuple):
    command: tuple[str, ...]
    workdir: str
    env: dict[str, str]


class Build(NamedTuple):
    actions: tuple[BuildCopy | BuildCommand, ...]
    workdir: str
    env: dict[str, str]
    folders: tuple[str, ...]
    """Below the root, in which it writes."""
    obstacles: tuple[str, ...]
    """What neither a shell nor a container of another image can do."""
    images: tuple[str, ...] = ()
    """Images that this machine's commands can't replace."""


class _BuildReader:
    def __init__(self, context: Path) -> None:
        self.context = context
        self.workdir, self.num_images = "/", 0
        self.env: dict[str, str] = {}
        self.args: dict[str, str] = {}
        self.actions: list[BuildCopy | BuildCommand] = []
        self.paths: list[str] = []
        self.obstacles: list[str] = []
        self.images: list[str] = []

    def add(self, name: str, text: str) -> None:
        flags = dict[str, str]()
        while match := FLAG.match(text):
            flags[match[1]] = match[2] or ""
            text = text[match.end() :]
        match name:
            case "FROM":
                self._start(self._expand(text))
            case "WORKDIR":
                self.workdir = self._absolute(self._expand(text.strip("'\"")))
                self.paths.append(self.workdir)
            case "ENV" | "ARG":
                self._set(self.env if name == "ENV" else self.args, text)
            case "COPY" | "ADD":
                self._copy(name, text, flags)
            case "RUN":
                self._run(text, flags)
            case "VOLUME":
                self.paths += [self._absolute(self._expand(path)) for path in _words(text)]
            case "USER":
                if text.strip() not in ("root", "0", "root:root", "0:0"):
                    self.obstacles.append(f"USER {text.strip()}: a shell has one user")
            case _ if name in WITHOUT_EFFECT:
                pass
            case _:
                self.obstacles.append(f"{name} {text}"[:80])

    def build(self) -> Build:
        folders = tuple(dict.fromkeys(f"/{PurePosixPath(path).parts[1]}" for path in self.paths if path != "/"))
        self.obstacles += [f"writes below {path}" for path in folders if path[1:] in SYSTEM]
        return Build(tuple(self.actions), self.workdir, self.env, folders, tuple(self.obstacles), tuple(self.images))

    def _start(self, text: str) -> None:
        image = text.split()[0]
        self.num_images += 1
        if self.num_images == 2:
            self.obstacles.append("several stages (FROM)")
        if not PLAIN_IMAGE.fullmatch(image):
            self.images.append(image)

    def _set(self, variables: dict[str, str], text: str) -> None:
        words = shlex.split(text)
        if words and "=" not in words[0]:
            words = [f"{words[0]}={text.split(maxsplit=1)[1] if len(words) > 1 else ''}"]
        for word in words:
            name, _, value = word.partition("=")
            variables[name] = self._expand(value)

    def _copy(self, name: str, text: str, flags: dict[str, str]) -> None:
        *sources, target = _words(self._expand(text))
        absolute = self._absolute(target)
        self.paths.append(absolute if target.endswith("/") or len(sources) > 1 else str(PurePosixPath(absolute).parent))
        is_folder = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
        if "from" in flags:
            self.obstacles.append(f"{name} --from={flags['from']}: another image's files")
            return
        paths: list[Path] = []
        for source in sources:
            if "://" in source or source.startswith("git@") or (name == "ADD" and ARCHIVE.search(source)):
                self.obstacles.append(f"ADD {source}")
                continue
            pattern = source.strip("/") or "."
            found = sorted(self.context.glob(pattern)) if re.search(r"[*?\[]", pattern) else [self.context / pattern]
            if not found or not all(path.exists() for path in found):
                self.obstacles.append(f"{name} {source}: not in the folder environment/")
            if any(path.exists() and not path.resolve().is_relative_to(self.context.resolve()) for path in found):
                self.obstacles.append(f"{name} {source}: leads out of the folder environment/")
                continue
            paths += found
        mode = int(flags["chmod"], 8) if flags.get("chmod", "").isdigit() else None
        self.actions.append(BuildCopy(tuple(paths), f"{absolute.rstrip('/')}/" if is_folder else absolute, mode))

    def _run(self, text: str, flags: dict[str, str]) -> None:
        if flags:
            self.obstacles.append(f"RUN --{next(iter(flags))}")
        elif match := NETWORK.search(text):
            self.obstacles.append(f"RUN {match[1]}: needs the network")
        else:
            command = tuple(_words(text)) if text.startswith("[") else ("/bin/sh", "-c", text)
            self.actions.append(BuildCommand(command, self.workdir, {**self.args, **self.env}))

    def _absolute(self, path: str) -> str:
        return str(PurePosixPath(self.workdir, path))

    def _expand(self, text: str) -> str:
        values = {**command_env(), "HOME": "/root", **self.args, **self.env}
        return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: values.get(match[1] or match[2], ""), text)


@lru_cache(maxsize=1024)
def read_dockerfile(path: Path) -> Build:
    """Read a Dockerfile; without one, the build is empty."""
    builder = _BuildReader(path.parent)
    if path.is_file():
        for name, text in _instructions(path.read_text()):
            try:
                builder.add(name, text)
            except ValueError as error:
                builder.obstacles.append(f"{name} {text}: {error}"[:120])
    return builder.build()


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = iter(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for first in lines:
        line = first
        while line.rstrip().endswith("\\"):
            line = f"{line.rstrip()[:-1]}\n{next(lines, '')}"
        if not line.strip():
            continue
        name, _, rest = line.strip().partition(" ")
        if re.search(r"<<-?['\"]?\w", rest):
            yield "here-document in", line.strip()
            return
        joined = rest.strip() if name.upper() == "RUN" else " ".join(rest.split())
        yield name.upper(), joined.replace("\n", " ")


def _words(text: str) -> list[str]:
    if text.startswith("["):
        return [str(word) for word in json.loads(text)]
    return shlex.split(text)
