"""A taskset of verifiers whose tasks need a tool: what does tea cost."""

import verifiers.v1 as vf


class PriceTools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def price(self, thing: str) -> str:
        """What a thing costs."""
        return str(len(thing))


class PriceTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, _config):
        return [PriceTools(vf.ToolsetConfig())]

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "3")


class Prices(vf.Taskset[PriceTask, vf.TasksetConfig]):
    def load(self):
        return [PriceTask(vf.TaskData(prompt=f"What does tea cost in shop {i}?")) for i in range(2)]


__all__ = ["Prices"]

if __name__ == "__main__":
    PriceTools.run()
