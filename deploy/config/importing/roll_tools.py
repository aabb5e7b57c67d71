"""ROLL's `tool_wrapper` as `env_type: tools`."""

import math
from typing import Any, cast

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import Key, Tree, get, get_table

WRAPPER_KEYS = ("tool_reward", "tool_success_reward", "max_tool_uses")
"""Of `wrapper_args`, with the names that `tools` has."""
UNKNOWN_URL = "http://set-the-address-of-SEARCH_URL/retrieve"
NOTE = "env_type: tools around the env, whose settings are env_config.env_config"


def tools(key: Key) -> Outcome:
    """Convert the list of tools; `wrap_envs` puts them around the env."""
    configs = get_table({"w": key.value}, "w").get("tool_configs") or []
    if not isinstance(configs, list) or not all(isinstance(each, dict) for each in cast(list[Any], configs)):
        return Outcome("no counterpart", note="tool_configs is no list of mappings with a tool_id")
    found: list[dict[str, Any]] = []
    dropped: list[str] = []
    for each in cast(list[dict[str, Any]], configs):
        name, args = each.get("tool_id"), dict(each.get("tool_args") or {})
        if name not in CONVERTERS:
            return Outcome(
                "no counterpart", note=f"no tool {name}: there are {', '.join(CONVERTERS)} (docs/environments.md)"
            )
        found.append({"tool_id": name, **CONVERTERS[name](args)})
        dropped += [f"{name}.{rest}" for rest, value in args.items() if value is not None]
    if not found:
        return Outcome("no effect", note="no tools")
    arguments = get_table({"w": key.value}, "w.wrapper_args")
    dropped += [f"wrapper_args.{name}" for name in arguments if name not in WRAPPER_KEYS]
    note = f"{NOTE}; without {', '.join(dropped)}" if dropped else NOTE
    if any(each.get("url") == UNKNOWN_URL for each in found):
        note += "; set the search's url, which ROLL reads from its variable SEARCH_URL"
    return Outcome("renamed", (*key.path[:2], "env_config", "tools"), found, note)


def wrap_envs(tree: Tree, source: Tree) -> None:
    """Make `tools` the env of tags whose tools were converted."""
    for tag in get_table(source, "custom_envs"):
        table = get_table(tree, ("custom_envs", str(tag)))
        settings = dict(table.get("env_config") or {})
        if not isinstance(get(source, ("custom_envs", tag, "tool_wrapper")), dict) or "tools" not in settings:
            continue
        found = settings.pop("tools")
        arguments = get_table(source, ("custom_envs", tag, "tool_wrapper", "wrapper_args"))
        given = {name: arguments[name] for name in WRAPPER_KEYS if name in arguments}
        wrapped = {"env_type": table["env_type"], **({"env_config": settings} if settings else {})}
        table |= {"env_type": "tools", "env_config": {**wrapped, "tools": found, **given}}


def _python(args: dict[str, Any]) -> dict[str, Any]:
    """Take what has a counterpart out of `args`; our sandbox is the only one."""
    timeout_s = args.pop("timeout", None) or 5
    for name in ("sandbox_type", "keep_error_last_line"):
        args.pop(name, None)
    patterns, instruction = args.pop("patterns", None), args.pop("tool_instruction", None)
    if patterns and len(patterns) > 1:
        args["patterns"], patterns = patterns, None
    return {
        **({"pattern": patterns[0]} if patterns else {}),
        **({"instruction": instruction} if instruction else {}),
        "limits": {"timeout_s": timeout_s, "cpu_s": math.ceil(timeout_s)},
    }


def _search(args: dict[str, Any]) -> dict[str, Any]:
    """Take what has a counterpart out of `args`; without an address it is that of ROLL's variable SEARCH_URL."""
    url = args.pop("search_url", None) or UNKNOWN_URL
    return {"url": url, "top_k": args.pop("topk", None) or 3, "timeout_s": args.pop("timeout", None) or 5}


def _mcp(args: dict[str, Any]) -> dict[str, Any]:
    names = args.pop("tool_names_subset", None)
    return {"url": args.pop("server_url", ""), **({"functions": names} if names else {})}


CONVERTERS = {"python_code": _python, "search": _search, "mcp": _mcp}
