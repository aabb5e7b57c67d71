# pyright: basic
"""Calls between two untrusting processes, as JSON lines over pipes.

Invariant: only plain values and handles of local objects cross, so the other side chooses values, never how they are
compared. Standard library only, as this source also runs in the sandbox.
"""

import builtins
import collections
import importlib
import json
import operator
import os
import select
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

MAX_MESSAGE_BYTES = 16 << 20
MAX_ITEMS = 100_000
"""Longest iteration over a remote object."""
MAX_DIMENSIONS = 8
"""Of the program's arrays."""
SEQUENCES: dict[str, Any] = {"l": list, "t": tuple, "s": set, "f": frozenset, "q": collections.deque}
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor")
"""Operators of objects of the program, with another as the result."""
FIELDS = {
    "decimal.Decimal": ("__str__",),
    "fractions.Fraction": ("numerator", "denominator"),
    "datetime.date": ("year", "month", "day"),
    "datetime.time": ("hour", "minute", "second", "microsecond"),
    "datetime.datetime": ("year", "month", "day", "hour", "minute", "second", "microsecond"),
    "datetime.timedelta": ("days", "seconds", "microseconds"),
}
"""Arguments of the constructors of plain values."""
NUMPY_TYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)
HIDDEN_ERRORS = ("StopIteration", "StopAsyncIteration", "GeneratorExit")
"""Errors that would end a caller's loop as if complete."""
NOT_OF_RESULTS = ("call", "getitem", "iter", "len")
"""Of an object that an operator with a plain value returned: their answers would decide `(f(x) - y).max() < 1e-6`."""
PREDICATES = frozenset({"endswith", "isdisjoint", "issubset", "issuperset", "is_integer", "startswith"}) | {
    name for name in dir(str) if name.startswith("is")
}
"""Methods of plain values that decide about them: an object of the program has none, as its answer would pass a test."""


class Remote:
    """Object of the other side, without truth and equality.

    Invariant: it decides no test, and what operators tell it serves no later answer. A plain value comes from it only by its
    attributes, items, length, text and calls; operators return objects, those with a plain value (`f(x) - 3`) objects of
    attributes and text alone.
    """

    def __init__(self, peer: "Peer", number: int) -> None:
        self.__dict__.update(_peer=peer, _number=number, _is_result=False)

    def _ask(self, action: str, *args: Any, **kwargs: Any) -> Any:
        if self._is_result and action in NOT_OF_RESULTS:
            self._refuse(f"the result of an operator with a plain value has attributes alone: no {action}")
        return self._peer.request(action, self._number, *args, kwargs=kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in PREDICATES:
            raise AttributeError(f"an object of the program is no plain value: it has no {name}")
        value = self._ask("getattr", name)
        return value._mark(is_result=self._is_result) if isinstance(value, Remote) else value

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __contains__(self, item: Any) -> bool:
        is_object = isinstance(item, Remote)
        return any(item is each if is_object or isinstance(each, Remote) else item == each for each in self)

    def __len__(self) -> int:
        return self._ask("len")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("iter"))

    def __str__(self) -> str:
        return self._ask("str")

    def __repr__(self) -> str:
        return self._ask("repr")

    def __neg__(self) -> "Remote":
        return self._object("neg", self._ask("operator", "neg"), is_result=self._is_result)

    def _apply(self, name: str, other: Any, *, is_reflected: bool) -> "Remote":
        is_plain = not isinstance(other, Remote)
        self._peer.has_told_operands |= is_plain
        result = self._ask("reflected" if is_reflected else "operator", name, other)
        return self._object(name, result, is_result=self._is_result or is_plain or other._is_result)

    def _object(self, name: str, result: Any, *, is_result: bool) -> "Remote":
        if not isinstance(result, Remote):
            self._refuse(f"{name.rstrip('_')} of an object of the program must return another")
        return result._mark(is_result=is_result)

    def _mark(self, *, is_result: bool) -> "Remote":
        self.__dict__["_is_result"] |= is_result
        return self

    def _undefined(self, *_: Any) -> Any:
        self._refuse("an object of the program is no plain value: it can't be compared or tested for truth")

    def _refuse(self, reason: str) -> None:
        """Raise TypeError. The program answers no more if it was sent an operand, which may be an expected value."""
        self._peer.is_refused = self._peer.has_told_operands
        raise TypeError(reason)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __abs__ = __round__ = __float__ = __int__ = (
        _undefined
    )
    __hash__ = object.__hash__


def _operator(name: str, *, is_reflected: bool = False) -> Callable[[Remote, Any], Remote]:
    return lambda self, other: self._apply(name, other, is_reflected=is_reflected)


for _name in ARITHMETIC:
    _bare = _name.rstrip("_")
    setattr(Remote, f"__{_bare}__", _operator(_name))
    setattr(Remote, f"__r{_bare}__", _operator(_name, is_reflected=True))
    setattr(Remote, f"__i{_bare}__", _operator(f"i{_bare}"))


class Peer:
    def __init__(self, read_fd: int, write_fd: int, *, exposes_all: bool) -> None:
        """exposes_all: the other side may do more than call given objects."""
        self._read_fd, self._write_fd = read_fd, write_fd
        self._exposes_all = exposes_all
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        """Of objects, by `id`."""
        self._remotes: dict[int, Remote] = {}
        self._buffer = b""
        self.deadline: float | None = None
        self.max_bytes = MAX_MESSAGE_BYTES
        """Length of the other side's messages, to one read."""
        self.takes_requests = True
        """False: no request changes anything here, and arrays are lists, so that a comparison broadcasts nothing."""
        self.has_told_operands = False
        """True once an operator sent the other side a plain value."""
        self.is_refused = False
        """True: no request is made any more."""
        self.namespace: dict[str, Any] = {}

    def request(self, action: str, *args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        """Return the other side's answer, answering its requests.

        Raises EOFError if it ended, TimeoutError past `deadline`, Exception for its own errors, by name.
        """
        if self.is_refused:
            raise PermissionError("an object of the program stood for a plain value, after an operator")
        self._send(["request", action, self.encode(args), self.encode(kwargs or {})])
        while True:
            kind, *body = self.receive()
            if kind == "value":
                return self.decode(body[0])
            if kind == "changed" and action == "call":
                if self.takes_requests:
                    for argument, value in zip((*args, *(kwargs or {}).values()), self.decode(body[0]), strict=True):
                        _assign(argument, value)
                return None
            if kind == "error":
                raise _error_of(*body)
            if not self.takes_requests:
                raise PermissionError("the program made a request")
            self._answer(*body)

    def serve(self) -> None:
        while True:
            try:
                _, *body = self.receive()
            except EOFError:
                return
            self._answer(*body)

    def hello(self) -> None:
        self._send(["hello"])

    def receive(self) -> list[Any]:
        while b"\n" not in self._buffer:
            if len(self._buffer) > self.max_bytes:
                raise ValueError("a message that is too long")
            self._wait(self._read_fd, select.POLLIN)
            chunk = os.read(self._read_fd, 1 << 16)
            if not chunk:
                raise EOFError("the program ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        self._check_time()
        return json.loads(line)

    def _wait(self, descriptor: int, event: int) -> None:
        self._check_time()
        if self.deadline is not None:
            poll = select.poll()
            poll.register(descriptor, event)
            poll.poll(max(0.0, self.deadline - time.monotonic()) * 1000)
            self._check_time()

    def _check_time(self) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise TimeoutError("out of time")

    def _send(self, message: list[Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            self._wait(self._write_fd, select.POLLOUT)
            try:
                # A pipe that is ready takes PIPE_BUF bytes without blocking
                data = data[os.write(self._write_fd, data[: select.PIPE_BUF]) :]
            except BrokenPipeError:
                raise EOFError("the program ended") from None

    def _answer(self, action: str, args: Any, kwargs: Any) -> None:
        try:
            arguments, named = self.decode(args), self.decode(kwargs)
            reply = ["value", self.encode(self._act(action, arguments, named))]
            if action == "call" and reply[1] is None:
                after = self.encode([*arguments, *named.values()])
                if after["l"] != [*args["t"], *(value for _, value in kwargs["d"])]:
                    reply = ["changed", after]
        except BaseException as error:
            reply = ["error", type(error).__name__, str(error)[:1000]]
        self._send(reply)

    def _act(self, action: str, args: Any, kwargs: Any) -> Any:
        if action == "names":
            return sorted(name for name in self.namespace if not name.startswith("__"))
        if action == "global":
            value = self.namespace[args[0]]
            return {"module": value.__name__} if isinstance(value, types.ModuleType) else {"value": value}
        target, *rest = self._objects[args[0]], *args[1:]
        if action == "call":
            return target(*rest, **kwargs)
        if not self._exposes_all:
            raise PermissionError(action)
        if action == "operator":
            return getattr(operator, rest[0])(target, *rest[1:])
        if action == "reflected":
            return getattr(operator, rest[0])(rest[1], target)
        if action == "iter":
            return [item for item, _ in zip(target, range(MAX_ITEMS))]  # noqa: B905
        builtin: dict[str, Any] = {
            "len": len,
            "str": str,
            "repr": repr,
            "getattr": getattr,
        }
        builtin |= {"setattr": setattr, "getitem": operator.getitem, "setitem": operator.setitem}
        return builtin[action](target, *rest)

    def encode(self, value: Any) -> Any:
        """Encode for JSON: scalars unchanged, else {kind: content}."""
        if isinstance(value, int) and value.bit_length() > 64:
            return {"i": hex(value)}  # digits take quadratic time, and are limited
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Remote):
            return {"own": value._number}
        for kind, base in SEQUENCES.items():
            if isinstance(value, base):
                return {kind: [self.encode(item) for item in value]}
        if isinstance(value, dict):
            return {"d": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if isinstance(value, (bytes, bytearray)):
            return {"b": bytes(value).hex()}
        if isinstance(value, complex):
            return {"c": [value.real, value.imag]}
        if isinstance(value, range):
            return {"r": [value.start, value.stop, value.step]}
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if name in FIELDS and getattr(value, "tzinfo", None) is None:
            fields = [getattr(value, field) for field in FIELDS[name]]
            return {"o": [name, *(self.encode(field() if callable(field) else field) for field in fields)]}
        if name.startswith("numpy.") and str(getattr(value, "dtype", "")) in NUMPY_TYPES:
            return {"n": [str(value.dtype), list(value.shape), value.ravel().tolist()]}
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return {"handle": self._numbers[id(value)]}

    def decode(self, coded: Any) -> Any:
        self._check_time()  # numbers of equal hashes take quadratic time
        if not isinstance(coded, dict):
            return coded
        ((kind, content),) = coded.items()
        if kind in SEQUENCES:
            return SEQUENCES[kind](self.decode(item) for item in content)
        if kind == "d":
            return {self.decode(key): self.decode(item) for key, item in content}
        if kind == "b":
            return bytes.fromhex(content)
        if kind == "c":
            return complex(*content)
        if kind == "r":
            return range(*content)
        if kind == "i":
            return int(content, 16)
        if kind == "o":
            return _construct(content[0], [self.decode(field) for field in content[1:]])
        if kind == "n":
            value = _numpy_value(*content)
            if not self._exposes_all:
                _check_shape(value.shape)
            return value if self.takes_requests else value.tolist()
        return self._remotes.setdefault(content, Remote(self, content)) if kind == "handle" else self._objects[content]


def _construct(name: str, fields: list[Any]) -> Any:
    module, _, name_there = name.partition(".")
    expected = str if FIELDS[name] == ("__str__",) else int
    if not all(type(field) is expected for field in fields):  # a text's exponent may take any time
        raise TypeError(f"no fields of {name}")
    return getattr(importlib.import_module(module), name_there)(*fields)


def _numpy_value(dtype: str, shape: list[int], items: list[Any]) -> Any:
    if dtype not in NUMPY_TYPES:
        raise TypeError(f"no numbers: {dtype}")
    array = importlib.import_module("numpy").array(items, dtype).reshape(shape)
    return array if shape else array[()]


def _check_shape(shape: tuple[int, ...]) -> None:
    """Raise ValueError for an array of more than its elements: of many lists, or equal to all that it is broadcast with."""
    if len(shape) > MAX_DIMENSIONS or (len(shape) > 1 and 0 in shape):
        raise ValueError(f"an array of the shape {shape}")


def _assign(target: Any, value: Any) -> None:
    """Give a container the elements that the other side left in its copy."""
    if type(target).__name__ == type(value).__name__ == "ndarray":
        target[...] = value
    elif isinstance(target, list) and isinstance(value, list):
        target[:] = value
    elif isinstance(target, (dict, set)) and isinstance(value, (dict, set)):
        target.clear()
        target.update(value)
    elif isinstance(target, collections.deque) and isinstance(value, collections.deque):
        target.clear()
        target.extend(value)


def _error_of(name: str, text: str) -> Exception:
    error = getattr(builtins, name, None)
    if isinstance(error, type) and issubclass(error, Exception) and name not in HIDDEN_ERRORS:
        try:
            return error(text)
        except TypeError:  # UnicodeError and others have arguments of their own
            pass
    return RuntimeError(f"{name}: {text}")


def serve_program(source: str, read_fd: int, write_fd: int) -> None:
    """Run a program, then answer calls of its definitions."""
    peer = Peer(read_fd, write_fd, exposes_all=True)
    peer.namespace.update(__name__="__main__", __builtins__=builtins)
    peer.hello()
    exec(compile(source, "main.py", "exec"), peer.namespace)
    peer.serve()


def connect(read_fd: int, write_fd: int, timeout_s: float, startup_timeout_s: float) -> Peer:
    """Return a started program's peer, with `timeout_s` left."""
    peer = Peer(read_fd, write_fd, exposes_all=False)
    peer.deadline = time.monotonic() + startup_timeout_s
    if peer.receive() != ["hello"]:
        raise ValueError("no program")
    peer.deadline = time.monotonic() + timeout_s
    return peer
