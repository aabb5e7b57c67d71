"""A taskset of verifiers that never ends."""

import itertools

import verifiers.v1 as vf


class Endless(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield vf.Task(vf.TaskData(prompt=str(number)))


__all__ = ["Endless"]
