"""Agent for Harbor (0.25, Python 3.12) that runs outside the environment: a fenced command per answer, until `submit`.

It records the policy's tokens as Harbor's `RolloutDetail`, from an endpoint that returns token ids, as Offbeat's and
vLLM's do.
"""

from typing import Any

from offbeat.envs.dataset.env import last_group
from offbeat.envs.harbor.config import FENCED
from offbeat.envs.harbor.env import NO_COMMAND, SUBMIT, format_output
from offbeat.envs.optional_imports import require
from offbeat.envs.parsing import WHOLE_PATTERN
from offbeat.envs.sandbox.shell import CommandResult

base: Any = require("harbor.agents.base", "harbor")
llms: Any = require("harbor.llms.lite_llm", "harbor")
chats: Any = require("harbor.llms.chat", "harbor")

PROMPT = (
    "Solve the task in a Linux terminal. Answer with one command in a fenced block (```bash); each runs in a new bash. "
    "When the task is done, answer with the command submit .\n\n"
)
COMMAND_TIMEOUT_S = 60
MAX_OUTPUT_CHARS = 10_000


class ShellAgent(base.BaseAgent):
    """Agent of one conversation; keyword arguments: `max_turns`, `whole_answer`."""

    def __init__(self, *args: Any, max_turns: int = 30, whole_answer: bool = False, **kwargs: Any) -> None:
        """whole_answer: an answer is a command, without a fence or the explaining prompt."""
        super().__init__(*args, **kwargs)
        self._max_turns = max_turns
        self._pattern, self._prompt = (WHOLE_PATTERN, "") if whole_answer else (FENCED, PROMPT)

    @staticmethod
    def name() -> str:
        return "offbeat-shell"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None: ...

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        llm = llms.LiteLLM(
            model_name=self.model_name,
            api_base=self._get_env("OPENAI_BASE_URL"),
            api_key=self._get_env("OPENAI_API_KEY"),
            collect_rollout_details=True,
        )
        chat = chats.Chat(llm)
        message = self._prompt + instruction
        for _ in range(self._max_turns):
            answer = (await chat.chat(message)).content or ""
            context.rollout_details = chat.rollout_details
            context.n_input_tokens, context.n_output_tokens = chat.total_input_tokens, chat.total_output_tokens
            command = last_group(self._pattern, answer)
            if command is None:
                message = NO_COMMAND
                continue
            if command == SUBMIT:
                return
            message = await _execute(environment, command)


async def _execute(environment: Any, command: str) -> str:
    try:
        result = await environment.exec(command, timeout_sec=COMMAND_TIMEOUT_S)
    except RuntimeError as error:
        return f"[{error}]"
    text = ((result.stdout or "") + (result.stderr or "")).rstrip()[-MAX_OUTPUT_CHARS:]
    return format_output(CommandResult(text, result.return_code, timed_out=False), COMMAND_TIMEOUT_S)
