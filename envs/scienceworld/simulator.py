"""Simulators of ScienceWorld, in one Java process (JVM) per Python process.

Invariants: the JVM ends with its last simulator, and with this process however that ends; equal calls give equal
results, whatever other simulators do. For the latter

- a simulator has a class loader of its own, as ScienceWorld keeps its generator, object ids and simplifications in
  singletons, and a connection of its own, as py4j caches methods by the name of their class per connection;
- all objects have the same identity hash code, as ScienceWorld iterates over hash sets of objects.
"""

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from offbeat.envs.optional_imports import require

PYTHON_INTERFACE = "scienceworld.runtime.pythonapi.PythonInterface"
JVM_OPTIONS = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",  # all objects have the same
    "-XX:TieredStopAtLevel=1",  # halves the CPU time that a class loader's code takes until it is compiled
    "-XX:+UseSerialGC",
    "-XX:+DisplayVMOutputToStderr",
)
END_WAIT_S = 5.0
"""Wait for a process that has closed its connections."""
SPLITS = {"train": "getVariationsTrain", "held_out": "getVariationsDev", "test": "getVariationsTest"}

T = TypeVar("T")


class SimulatorError(RuntimeError):
    """Failure of the simulator or of its JVM."""


class Jvm:
    """Java process with py4j's gateway, one per process of Python by `acquire` and `release`."""

    _lock = threading.Lock()
    _shared: "Jvm | None" = None

    def __init__(self, java: str) -> None:
        """Start the process; raises SimulatorError with its output if it fails, ValueError without the package."""
        self._gateways = require("py4j.java_gateway", "scienceworld")
        self.jar = Path(require("scienceworld.constants", "scienceworld").JAR_PATH)
        self.num_users = 0
        self.idle: list[Simulator] = []
        """Closed ones, which the next ones continue: a class loader costs a second of CPU time."""
        with tempfile.TemporaryFile("w+") as stderr:
            try:
                self._port, self._token, self._process = self._gateways.launch_gateway(
                    javaopts=list(JVM_OPTIONS),
                    java_path=java,
                    die_on_exit=True,
                    enable_auth=True,
                    redirect_stderr=stderr,
                    return_proc=True,
                    cwd=self.jar.parent,  # where it looks for its list of object types
                )
            except (OSError, ValueError) as error:  # ValueError: what it printed first is no port
                stderr.seek(0)
                raise SimulatorError(f"{java} did not start: {stderr.read().strip() or error}") from error

    @classmethod
    def acquire(cls) -> "Jvm":
        with cls._lock:
            if cls._shared is None or cls._shared.exit_code is not None:
                cls._shared = cls(find_java())
            cls._shared.num_users += 1
            return cls._shared

    def release(self) -> None:
        with self._lock:
            self.num_users -= 1
            if self.num_users:
                return
            if Jvm._shared is self:
                Jvm._shared = None
        for each in self.idle:
            each.disconnect()
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def describe_end(self) -> str:
        try:
            return f"ended with exit code {self._process.wait(timeout=END_WAIT_S)}"
        except subprocess.TimeoutExpired:
            return "is out of reach"

    def connect(self) -> Any:
        """Return a connection, whose Java objects live until they are detached."""
        parameters = self._gateways.GatewayParameters(
            port=self._port, auth_token=self._token, enable_memory_management=False
        )
        return self._gateways.JavaGateway(gateway_parameters=parameters)


class Simulator:
    """ScienceWorld's `PythonInterface`; one caller at a time.

    All methods raise SimulatorError if the simulator fails.
    """

    def __init__(self, jvm: Jvm) -> None:
        """See `start`."""
        self.jvm = jvm
        self._errors = require("py4j.protocol", "scienceworld")
        self._gateway = jvm.connect()
        self._is_connected = True
        self._variations: dict[tuple[str, str], list[int]] = {}
        self._interface = self._call("start", self._load_interface)

    @classmethod
    def start(cls) -> "Simulator":
        """Return a simulator of this process's JVM; raises ValueError without Java or the package."""
        jvm = Jvm.acquire()
        with suppress(IndexError):
            return jvm.idle.pop()
        try:
            return cls(jvm)
        except BaseException:
            jvm.release()
            raise

    def load(self, task: str, variation: int, simplifications: Sequence[str]) -> None:
        """Start an episode."""
        arguments = (task, variation, ",".join(simplifications), False)
        error = self._call(f"load{arguments}", lambda: self._interface.load(*arguments))
        if error:
            raise SimulatorError(f"ScienceWorld: {error}")

    def step(self, action: str) -> tuple[str, float, bool]:
        """Return observation, score (up to 1; negative: failed), and whether the episode is over."""
        return self._call(
            f"step({action!r})",
            lambda: (
                str(self._interface.step(action)),
                float(self._interface.getScore()),
                bool(self._interface.getCompleted()),
            ),
        )

    def task_description(self) -> str:
        return self._call("getTaskDescription()", lambda: str(self._interface.getTaskDescription()))

    def valid_actions(self) -> list[str]:
        """Return the actions that apply now, sorted."""
        return self._list("getValidActionObjectCombinations")

    def variations(self, task: str, split: str) -> list[int]:
        """Return the variations of ScienceWorld's own split (half train, a quarter each dev and test), or of all."""
        if (task, split) not in self._variations:
            # only the task of the split, so that a running episode continues
            self._call("taskStr", lambda: getattr(self._interface, "taskStr_$eq")(task))
            methods = (SPLITS[split],) if split in SPLITS else tuple(SPLITS.values())
            self._variations[task, split] = [number for method in methods for number in self._list(method)]
        return self._variations[task, split]

    def close(self) -> None:
        """Leave the simulator to the next one; with the last one in use the JVM ends."""
        if self._is_connected:
            self.jvm.idle.append(self)
        else:
            self.disconnect()
        self.jvm.release()

    def disconnect(self) -> None:
        self._gateway.close(keep_callback_server=True)

    def _load_interface(self) -> Any:
        java = self._gateway.jvm.java
        urls = self._gateway.new_array(java.net.URL, 1)
        urls[0] = java.net.URL(self.jvm.jar.as_uri())
        return java.net.URLClassLoader(urls).loadClass(PYTHON_INTERFACE).newInstance()

    def _list(self, method: str) -> list[Any]:
        def read() -> list[Any]:
            values = getattr(self._interface, method)()
            try:
                return list(values)
            finally:
                self._gateway.detach(values)

        return self._call(f"{method}()", read)

    def _call(self, name: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except self._errors.Py4JJavaError as error:  # `load` starts from nothing again
            raise SimulatorError(f"ScienceWorld failed in {name}: {error.java_exception}") from error
        except self._errors.Py4JError as error:
            self._is_connected = False
            raise SimulatorError(f"ScienceWorld's Java process {self.jvm.describe_end()} in {name}") from error


def find_java() -> str:
    """Return the path of `java`, of JAVA_HOME or else on PATH; raises ValueError if there is none."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin") if home else None)
    if java is None:
        place = f"JAVA_HOME={home} has no bin/java" if home else "no `java` is on PATH"
        raise ValueError(
            f"ScienceWorld needs Java 8 or newer, and {place}: install one (Debian: apt-get install default-jre-headless)"
        )
    return java
