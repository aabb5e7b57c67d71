"""Whether the first prompt of each env fits the context: plays one reset of each tag with the run's own tokenizer.

The chat template's own tokens are left out, so what is counted is the least that a prompt has; a run that passes here may
still find a longer task, whose episode then ends by `max_length`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from deploy.config import RunConfig
from deploy.preparation import NoWordsError, words_of
from deploy.problems import Problem
from envs import registry
from envs.prompting import fill_template
from services.rollout.config import CustomEnv

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class BrokenTokenizerError(Exception):
    """A `tokenizer.json` that can't be read."""


def first_prompt_problems(config: RunConfig) -> list[Problem]:
    """Tags whose env can't be reset, or whose first prompt leaves no room for an answer."""
    try:
        tokenizer = _tokenizer(config)
    except (NoWordsError, BrokenTokenizerError) as error:
        return [Problem("pretrain", str(error))]
    problems: list[Problem] = []
    for tag, env in config.custom_envs.items():
        try:
            texts = _first_texts(env, config.seed)
        except Exception as error:
            # The user's own code: whatever it raises is what is wrong.
            message = f"{env.env_type} can't be reset: {type(error).__name__}: {error}"
            problems.append(Problem(f"custom_envs.{tag}.env_type", message))
            continue
        if tokenizer is None:
            continue
        length = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
        if length >= config.sequence_length:
            message = (
                f"{config.sequence_length} tokens leave no room for an answer: the first prompt of {tag} has at least "
                f"{length}; take more than {length + env.max_tokens_per_step}"
            )
            problems.append(Problem("sequence_length", message))
    return problems


def _tokenizer(config: RunConfig) -> "Tokenizer | None":
    """The run's tokenizer, without the weight of transformers; None for a folder without `tokenizer.json`."""
    if config.pretrain == "tiny":
        from trainer.policies.tiny import build_tokenizer

        return build_tokenizer(words_of(config))
    path = Path(config.pretrain) / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        # tokenizers raises plain `Exception`s.
        raise BrokenTokenizerError(f"{path} is no tokenizer: {error}") from error


def _first_texts(env: CustomEnv, seed: int) -> tuple[str, str]:
    made = registry.make(env.env_type, env.env_config)
    try:
        observation, _ = made.reset(seed=seed)
        default = getattr(made.unwrapped, "system_prompt", "")
        system = default if env.agent_system_template is None else env.agent_system_template
        user = fill_template(env.agent_template, observation=str(observation), step=1, actions_left=env.max_steps)
        return system, user
    finally:
        made.close()
