"""Warm-start demonstrations: search the right category, buy one of the first results."""

import numpy as np

from offbeat.envs.prompts import fill_template
from offbeat.envs.webshop.env import WebShopEnv
from offbeat.envs.webshop.pages import (
    BUY,
    ItemPage,
    ResultsPage,
    SearchPage,
)

CARE = 0.3
"""Probability of choosing the goal's option."""


def careless_shopping(
    env: WebShopEnv,
    rng: np.random.Generator,
    *,
    max_turns: int = 6,
    system_prompt: str | None = None,
    agent_template: str = "{observation}",
) -> list[dict[str, str]]:
    """Return an episode as a rollout's chat messages, determined by `rng`.

    Category search, random result, each option as in the goal with probability `CARE` (else any or none), `Buy Now`.
    """
    observation, _ = env.reset(seed=int(rng.integers(2**31)))
    messages = [{"role": "system", "content": env.system_prompt if system_prompt is None else system_prompt}]
    for turn in range(max_turns):
        content = fill_template(agent_template, observation=observation, step=turn + 1, actions_left=max_turns - turn)
        answer = _choose(env, rng)
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        observation, _, terminated, truncated, _ = env.step(answer)
        if terminated or truncated:
            break
    return messages


def _choose(env: WebShopEnv, rng: np.random.Generator) -> str:
    match env.page:
        case SearchPage():
            words = [env.goal.product.query, *(a for a in env.goal.attributes if rng.random() < CARE)]
            return f"search[ {' '.join(words)} ]"
        case ResultsPage() as page:
            products = page.shown
            return f"click[ {products[int(rng.integers(len(products)))].asin if products else 'Back to Search'} ]"
        case ItemPage() as page:
            for name, values in page.product.options.items():
                if name not in page.chosen and rng.random() < 0.5 + CARE / 2:
                    matching = [value for value in values if value in env.goal.options]
                    is_careful = matching and rng.random() < CARE / (0.5 + CARE / 2)
                    return f"click[ {matching[0] if is_careful else values[int(rng.integers(len(values)))]} ]"
            return f"click[ {BUY} ]"
