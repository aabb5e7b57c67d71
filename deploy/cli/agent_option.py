"""The words that belong to `--agent`."""

from offbeat.deploy.cli.usage import exit_usage


def check_temperature(agent: str | None, temperature: float | None) -> None:
    if temperature is not None and agent in ("human", "random"):
        exit_usage(f"--temperature has no effect with --agent {agent}: leave it out, or take a policy")


def split_endpoint(
    command: str, agent: str | None, model: str, words: list[str]
) -> tuple[tuple[str, str] | None, list[str]]:
    """Return URL and model of an `openai` agent, and the other words."""
    urls = [word for word in words if word.startswith(("http://", "https://"))]
    if agent == "openai" and len(urls) != 1:
        exit_usage(
            f"--agent openai needs the endpoint's base URL: offbeat {command} --agent openai http://localhost:8000/v1"
        )
    if agent != "openai" and (urls or model):
        exit_usage("a URL and --model belong to --agent openai")
    return (urls[0], model) if urls else None, [word for word in words if word not in urls]


def split_policy_path(agent: str, words: list[str]) -> tuple[str, list[str]]:
    if agent != "policy":
        return agent, words
    paths = [word for word in words if "=" not in word]
    if len(paths) != 1:
        exit_usage("--agent policy needs a path: offbeat play ENV --agent policy runs/sokoban")
    return paths[0], [word for word in words if "=" in word]
