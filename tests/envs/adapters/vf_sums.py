"""A taskset of verifiers, as its authors write one: add two numbers, and say nothing more."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.split()[-1:] == [str(self.data.answer)])

    @vf.reward(weight=0.5)
    async def is_short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 10)

    @vf.metric
    async def num_words(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply.split()))


class SumsConfig(vf.TasksetConfig):
    size: int = 40


class SumTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for i in range(self.config.size):
            a, b = i % 7, i // 7
            data = SumData(prompt=f"{a} + {b} = ?", system_prompt="Add.", answer=a + b)
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
