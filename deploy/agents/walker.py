"""Example agent with OpenAI's client and the env's URL."""

from functools import cache
from typing import Any

from openai import BadRequestError, OpenAI

from offbeat.services.rollout.agents.task import AgentTask


@cache
def client(base_url: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key="set by with_options")


def play(task: AgentTask) -> None:
    policy = client(task.base_url).with_options(api_key=task.api_key)
    messages: list[Any] = [
        {"role": "system", "content": task.system_prompt},
        {"role": "user", "content": task.observation},
    ]
    done = False
    while not done:
        try:
            completion = policy.chat.completions.create(model=task.model, messages=messages)
        except BadRequestError as error:
            if error.code == "context_length_exceeded":
                return  # what was sampled so far is the episode
            raise
        answer = completion.choices[0].message.content or ""
        reply = task.step(answer)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": reply.observation}]
        done = reply.done
