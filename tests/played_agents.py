"""Foreign agents: one as people write them, others that ask by the standard library alone, to start fast."""

import asyncio
import base64
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from offbeat.services.rollout.agents.task import AgentTask
from tests.waiting import wait_until

SCRIPT = """
import json, os
from openai import OpenAI
from offbeat.services.rollout.agents.task import AgentTask

task, client = AgentTask.of(json.loads(os.environ["OFFBEAT_TASK"])), OpenAI()
messages, done = [{"role": "system", "content": task.system_prompt}, {"role": "user", "content": task.observation}], False
while not done:
    answer = client.chat.completions.create(model=task.model, messages=messages).choices[0].message.content
    reply = task.step(answer)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": reply.observation}]
    done = reply.done
print("noise")
print(json.dumps({"metrics": {"scripted": True}}))
"""


def plays(task: AgentTask) -> None:
    """Answers each observation as the policy does."""
    messages = [{"role": "system", "content": task.system_prompt}, {"role": "user", "content": task.observation}]
    done = False
    while not done:
        answer = _ask(task, messages)
        reply = task.step(answer)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": reply.observation}]
        done = reply.done


async def releases_containers(_: AgentTask) -> None:
    """Takes until there is a gate."""
    _mark("")
    try:
        await asyncio.sleep(1000)
    finally:
        _mark("cancelled")
        await wait_until(Path(os.environ["OFFBEAT_TEST_MARKER"]).with_suffix(".gate").exists)
        _mark("released")


def _mark(text: str) -> None:
    """Write the marker at once: an agent may be killed, and a test may read, at any time."""
    marker = Path(os.environ["OFFBEAT_TEST_MARKER"])
    written = marker.with_suffix(".written")
    written.write_text(text)
    written.rename(marker)


def answers(task: AgentTask) -> str:
    """One answer, which the env scores."""
    return _ask(task, _told(task))


def asks(task: AgentTask) -> None:
    """An answer that no env gets."""
    _ask(task, _told(task))


def answers_messages(task: AgentTask) -> None:
    """An answer to a dataset's row, for rewards."""
    _ask(task, task.messages)


def rates_itself(task: AgentTask) -> float:
    _ask(task, _told(task))
    task.step("Left")
    return 7.5


def shows_images(task: AgentTask) -> float:
    """A text, then two images in one conversation, then another image in place of the first."""
    from openai import OpenAI

    client, answers = OpenAI(base_url=task.base_url, api_key=task.api_key), list[str]()

    def answer(messages: list[Any]) -> Any:
        content = client.chat.completions.create(model=task.model, messages=messages).choices[0].message.content or ""
        answers.append(content)
        return {"role": "assistant", "content": content}

    messages: list[Any] = [{"role": "user", "content": "w1 w2"}]
    first = answer(messages)
    for seed in (1, 2):
        messages = [*messages, first if seed == 1 else answer(messages), _picture(seed)]
    answer(messages)
    answer([messages[0], first, _picture(3)])
    return float(sum(map(ord, "".join(answers))) % 5)


def _picture(seed: int) -> Any:
    from PIL import Image

    pixels = bytes((seed * 40 + i * i) % 256 for i in range(64 * 32 * 3))
    out = io.BytesIO()
    Image.frombytes("RGB", (64, 32), pixels).save(out, format="JPEG")
    url = f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "w3"}],
    }


def silent(_: AgentTask) -> float:
    return 1.0


def raises(task: AgentTask) -> None:
    _ask(task, _told(task))
    raise RuntimeError("lost the thread")


def raises_at_once(_: AgentTask) -> None:
    raise ConnectionError("no service")


def nonsense(task: AgentTask) -> Any:
    _ask(task, _told(task))
    return {"points": 3}


def hangs_with_child(_: AgentTask) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    _mark(json.dumps([os.getpid(), child.pid]))
    time.sleep(1000)


def leaves_daemon(task: AgentTask) -> float:
    daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    _mark(str(daemon.pid))
    return float(task.seed)


def hangs_with_daemon(task: AgentTask) -> None:
    leaves_daemon(task)
    time.sleep(1000)


def crashes_with_daemon(task: AgentTask) -> None:
    leaves_daemon(task)
    os._exit(3)


def _ask(task: AgentTask, messages: list[dict[str, str]]) -> str:
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": task.model, "messages": messages}).encode()
    with urlopen(Request(f"{task.base_url}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def _told(task: AgentTask) -> list[dict[str, str]]:
    return [{"role": "user", "content": task.observation}]
