"""Example agent of twenty lines, which uses only OpenAI's client and the env's URL."""

from functools import cache
from typing import Any

from openai import OpenAI

from offbeat.services.rollout.agents.task import AgentTask


@cache
def client(base_url: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key="of each episode")


def play(task: AgentTask) -> None:
    """Ask the policy for the next word and step the env with it until the episode ends."""
    policy = client(task.base_url).with_options(api_key=task.api_key)
    told: list[Any] = [{"role": "system", "content": task.system_prompt}, {"role": "user", "content": task.observation}]
    done = False
    while not done:
        said = policy.chat.completions.create(model=task.model, messages=told).choices[0].message.content or ""
        reply = task.step(said)
        told += [{"role": "assistant", "content": said}, {"role": "user", "content": reply.observation}]
        done = reply.done
