"""Configurations of verl: scripts with overrides (`python -m verl.trainer.main_ppo KEY=VALUE ...`), or YAML files."""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.importing.environment import ANY_REFERENCE, REFERENCE, hide, map_texts, reveal
from offbeat.deploy.config.importing.fitting import finish
from offbeat.deploy.config.importing.report import Imported, KeyReport, Outcome
from offbeat.deploy.config.importing.rules import (
    ABSENT,
    ALL_CHECKPOINTS,
    UNKNOWN,
    Key,
    Tree,
    add_defaults,
    apply,
    get,
    leaves,
    put,
    remove,
    translate,
)
from offbeat.deploy.config.importing.verl_keys import LORA_TARGET, MEGATRON_LAYERS, MODEL, RULES
from offbeat.deploy.config.importing.verl_loss import (
    CORRECTION,
    KL_COEF,
    PER_SEQUENCE,
    estimator,
    is_set,
    loss_mode,
    trains_equal_rewards,
)
from offbeat.deploy.config.importing.verl_names import old_name, with_old_names
from offbeat.deploy.config.importing.verl_trainers import (
    ACTOR,
    ARGS,
    NAME,
    RESPONSES,
    ROLLOUT,
    count_prompts,
    count_steps,
    name_trainer,
    takes_behavior_logprobs,
    trainer_defaults,
)
from offbeat.deploy.config.loader import readable
from offbeat.deploy.config.yaml_limits import load_yaml
from offbeat.trainer.config.issue import ConfigIssue

VARIABLE = re.compile(r"\$(?:\{(?P<name>\w+)(?P<default>:?-)?|(?P<bare>\w+))")
ENVIRONMENT = re.compile(r"\$(?:\{(?P<name>[A-Za-z_]\w*)\}|(?P<bare>[A-Za-z_]\w*))")
UNRESOLVED = re.compile(rf"(?!{ANY_REFERENCE.pattern})\$\{{")
"""Interpolations of OmegaConf's that are no references to the environment."""
UNEXPANDED = re.compile(rf"{UNRESOLVED.pattern}|\$[(\d]")
"""In a script: also a shell's expansions."""
SCRIPT_REFERENCE = re.compile(r"\$\{(oc\.env:\w+)\}")
HIDDEN_REFERENCE = re.compile("\ue001(.+?)\ue002")
ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)")
OVERRIDE = re.compile(r"[+~]*(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)
ARITHMETIC = re.compile(r"\$\(\((?P<expression>.+?)\)\)(?!\))")
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
TRAINERS = tuple(
    f"{prefix}{name}"
    for prefix in ("", "fully_async_", "one_step_off_")
    for name in ("ppo_trainer", "ppo_megatron_trainer")
)
"""verl's own files, whose values are its defaults."""
MEGATRON, STRATEGY = "megatron", tuple(f"{ACTOR}.strategy".split("."))
DEFAULTS: dict[str, Any] = {
    "data.max_response_length": 512,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.fsdp_config.dtype": "bfloat16",
    f"{ACTOR}.kl_loss_coef": KL_COEF,
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{MODEL}.lora_alpha": 16,
    f"{MODEL}.target_modules": "all-linear",
    f"{ROLLOUT}.val_kwargs.temperature": 0.0,
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
    f"{ROLLOUT}.val_kwargs.top_k": -1,
    f"{ROLLOUT}.val_kwargs.n": 1,
    "algorithm.lam": 1.0,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "trainer.test_freq": -1,
    "critic.optim.lr": 1e-5,
    "critic.cliprange_value": 0.5,
    "reward_model.model.path": "~/models/FsfairX-LLaMA3-RM-v0.1",
}
"""verl's defaults that differ from ours once translated, by verl's key."""


def import_verl(path: Path) -> Imported:
    """Import a script or YAML file of verl's; raises `ConfigError`."""
    imported = finish(path, *translate_verl(path))
    return imported.with_to_do(
        [*imported.to_do, *_find_unresolved(imported.tree, UNRESOLVED if _is_yaml(path) else UNEXPANDED)]
    )


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def _find_unresolved(tree: Tree, unresolved: re.Pattern[str]) -> Iterator[ConfigIssue]:
    for key, value in leaves(tree, ()):
        if unresolved.search(str(value)):
            yield ConfigIssue(".".join(key), f"{value} is not resolved: write what it stands for")


def translate_verl(path: Path) -> tuple[Tree, list[KeyReport], list[str]]:
    """Return our unvalidated tree, the outcome of each key, and remarks; raises `ConfigError`."""
    if _is_yaml(path):
        source, remarks = _read_file(path)
    else:
        source, remarks = _read_script(path)
    name = source.pop(NAME, "")
    if not source:
        raise ConfigError([ConfigIssue("", "no `key=value` of verl, nor a mapping of keys to values")], str(path))
    try:
        source = _resolve(source)
    except OmegaConfBaseException as error:  # a key or a value that is none of Hydra's
        raise ConfigError([ConfigIssue("", str(error).partition("\n")[0])], str(path)) from error
    named = {**with_old_names(source), NAME: name}
    keys = ((path, Key(old_name(path), value, named)) for path, value in leaves(source, ()))
    tree, reports = translate(keys, _decide)
    return tree, [*reports, *add_defaults(tree, _defaults(named))], remarks


def _read_file(path: Path) -> tuple[Tree, list[str]]:
    """Return a file's keys, and remarks on the files of its defaults list."""
    with readable(path):
        source = load_yaml(path.read_text(encoding="utf-8"))
    tree: Tree = {str(name): value for name, value in source.items()} if isinstance(source, dict) else {}
    entries, _ = tree.pop("defaults", None), tree.pop("hydra", None)
    names = _read_defaults(entries) if isinstance(entries, list) else []
    if any(MEGATRON in name for name in names):
        put(tree, STRATEGY, MEGATRON)
    tree[NAME] = name_trainer(names)
    # A group's file that is not beside this one is verl's own
    unread = [name for name in names if "/" not in name or (path.parent / f"{name}.yaml").is_file()]
    return tree, [f"defaults: the keys of {each} are not read" for each in unread if each not in (*TRAINERS, "_self_")]


def _read_defaults(entries: Sequence[Any]) -> list[str]:
    """Return the names of a defaults list; of `group@package: name`, `group/name`."""
    names: list[str] = []
    for entry in entries:
        groups = entry.items() if isinstance(entry, dict) else ()
        names += [f"{str(group).partition('@')[0]}/{name}" for group, name in groups if isinstance(name, str)]
        names += [entry] if isinstance(entry, str) else []
    return names


def _read_script(path: Path) -> tuple[Tree, list[str]]:
    """Return a script's overrides, over the keys of the file that it names, and remarks."""
    with readable(path):
        script = path.read_text(encoding="utf-8")
    tree, name = read_overrides(script), read_option(script, "config-name").removesuffix(".yaml")
    started = name_trainer(word for words, _ in _commands(script) for word in words)
    if not name:
        tree[NAME] = started
        return tree, []
    folders = (read_option(script, "config-path"), "config", ".", "../config")
    files = [path.parent / folder / f"{name}.yaml" for folder in folders if folder]
    file = next((file for file in files if file.is_file()), None)
    base, remarks = (Tree(), []) if file is None else _read_file(file)
    if file is not None:
        remarks.insert(0, f"--config-name: the keys of {file} are read, too")
    elif name not in TRAINERS:
        remarks.append(f"--config-name: no {name}.yaml beside {path}, nor in a folder config: its keys are not read")
    if MEGATRON in name:
        put(base, STRATEGY, MEGATRON)
    for key, value in leaves(tree, ()):
        remove(base, key)
        parent = next((key[:end] for end in range(1, len(key)) if not isinstance(get(base, key[:end], {}), dict)), None)
        if parent is not None:  # a value, or null, in whose place Hydra puts a table
            remove(base, parent)
        put(base, key, value)
    base[NAME] = started or base.get(NAME, "")
    return base, remarks


def _decide(key: Key) -> Outcome:
    if key.value is None:
        return Outcome("same", note="not set")
    return apply(RULES, key) or Outcome("no counterpart", note=UNKNOWN)


def _resolve(tree: Tree) -> Tree:
    """Resolve `${...}` between keys; the environment's variables, and what can't be resolved, stay as they are."""
    hidden = cast(Tree, hide(tree))
    return cast(Tree, reveal(_resolve_table(OmegaConf.create(hidden), hidden)))


def _resolve_table(config: DictConfig, tree: Tree) -> Tree:
    return {
        name: _resolve_table(config[name], value) if isinstance(value, dict) else _resolve_value(config, name, value)
        for name, value in tree.items()
    }


def _resolve_value(config: DictConfig, name: str, value: Any) -> Any:
    try:
        resolved = config[name]
        return OmegaConf.to_container(resolved, resolve=True) if OmegaConf.is_config(resolved) else resolved
    except OmegaConfBaseException:
        return value


def read_overrides(script: str) -> Tree:
    """Return the dotted keys of a shell script, with its variables expanded."""
    tree = Tree()
    for words, variables in _commands(script):
        for word in words:
            match = OVERRIDE.fullmatch(word)
            if match and "." in match["key"]:
                path = tuple(match["key"].split("."))
                remove(tree, path)  # the last value counts
                put(tree, path, _parse(_expand(match["value"], variables)))
    return tree


def read_option(script: str, name: str) -> str:
    """Return the last value of `--name=value` or `--name value`; empty without one."""
    last = ""
    for words, variables in _commands(script):
        for word, after in zip(words, [*words[1:], ""], strict=False):
            option, equals, value = word.partition("=")
            if option == f"--{name}":
                last = _expand(value if equals else after, variables)
    return last


def _commands(script: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the words of each line, and the variables that were assigned before it."""
    variables = dict[str, str]()
    for line in script.replace("\\\n", " ").splitlines():
        words = list(_words(_calculate(line, variables)))
        words = words[1:] if words[:1] == ["export"] else words
        if len(words) == 1 and (match := ASSIGNMENT.fullmatch(words[0])):
            variables[match["name"]] = _expand(match["value"], variables)
        else:
            yield words, variables


def _words(line: str) -> Iterator[str]:
    """Yield a line's words up to a comment or an open quote: one over several lines is no override."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        for word in lexer:
            if word.startswith("#"):
                return
            yield word
    except ValueError:
        return


def _parse(text: str) -> Any:
    """Read a value as Hydra does, with references as a shell's values; invalid YAML is text."""
    try:
        # YAML would read the braces of a reference in a list as those of a mapping
        return map_texts(_reveal_references, load_yaml(SCRIPT_REFERENCE.sub("\ue001\\1\ue002", text)))
    except yaml.YAMLError:
        return text


def _reveal_references(text: str) -> str:
    return HIDDEN_REFERENCE.sub(r"${\1}", text)


def _expand(text: str, variables: dict[str, str]) -> str:
    """Expand the script's variables and their defaults; name the environment's as OmegaConf does."""
    done = ""
    while match := VARIABLE.search(text):
        done += text[: match.start()]
        end = match.end() if match["bare"] else _closing_brace(text, match.end()) + 1
        value = variables.get(match["bare"] or match["name"])
        if not value and match["default"]:
            value = _expand(text[match.end() : end - 1], variables)
        elif match["name"] and not match["default"] and end != match.end() + 1:
            value = None  # an expansion of another kind
        done += _name_environment(text[match.start() : end]) if value is None else value
        text = text[end:]
    return done + text


def _name_environment(expansion: str) -> str:
    match = ENVIRONMENT.fullmatch(expansion)
    return expansion if match is None else f"{REFERENCE}{match['bare'] or match['name']}}}"


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return len(text) - 1


def _calculate(line: str, variables: dict[str, str]) -> str:
    """Replace `$((...))` of known numbers by its value."""

    def value(match: re.Match[str]) -> str:
        expression = _expand(match["expression"], variables)
        try:
            return str(_evaluate(ast.parse(expression.strip(), mode="eval").body, variables))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return "".join(match.group().split())  # one word

    return ARITHMETIC.sub(value, line)


def _evaluate(node: ast.expr, variables: dict[str, str]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return int(variables.get(name, ""))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_evaluate(left, variables), _evaluate(right, variables))
        case _:
            raise ValueError(f"no arithmetic: {ast.dump(node)}")


def _number(source: Tree, key: str, default: int) -> int:
    value = get(source, key)
    return value if isinstance(value, int) else default


def _defaults(source: Tree) -> Iterator[tuple[str, Any]]:
    """Yield verl's defaults that differ from ours."""
    response = _number(source, "data.max_response_length", 512)
    prompts = count_prompts(source)
    yield "pipeline", "rlvr"
    yield "data.messages_key", "prompt"
    yield "data.prompt_length", 512
    yield "data.ground_truth_key", "reward_model.ground_truth"
    yield "sequence_length", _number(source, "data.max_prompt_length", 512) + response
    yield "rollout_batch_size", prompts * _number(source, f"{ROLLOUT}.n", RESPONSES)
    yield "train_env_manager.group_size", RESPONSES
    yield "adv_estimator", "gae"
    if estimator(source) == "gae":
        yield "whiten_advantages", True
    elif trains_equal_rewards(source):
        yield "zero_variance", "train"  # groups with equal rewards count there
    yield "loss_agg_mode", "seq-mean-token-mean" if loss_mode(source) in PER_SEQUENCE else "token-mean"
    if get(source, f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm":
        yield "loss_agg_length", response
    if takes_behavior_logprobs(source):
        yield "old_logprobs", "behavior"
    elif loss_mode(source) != "gpg" or is_set(source, f"{CORRECTION}.rollout_is"):
        yield "old_logprobs", "recompute"
    yield from trainer_defaults(source)
    if _number(source, "trainer.save_freq", -1) > 0:
        yield "max_ckpt_to_keep", ALL_CHECKPOINTS
    yield f"{ARGS}.adam_beta2", 0.999
    if get(source, STRATEGY) != MEGATRON:
        yield f"{ARGS}.decay_all_weights", True  # Megatron's optimizer spares norms and biases
    if any(is_set(source, f"{MODEL}.{name}") for name in ("lora_rank", "lora.rank", "lora_adapter_path")):
        yield f"{ARGS}.learning_rate", 1e-6
    if is_set(source, f"{MODEL}.lora.rank"):
        yield ".".join(LORA_TARGET), ",".join(MEGATRON_LAYERS.values())
        yield "actor_train.model_args.lora_alpha", 32
    if loss_mode(source) == "cispo":
        yield "cispo_epsilon_low", 0.2
        yield "cispo_epsilon_high", 0.2
    if not get(source, "trainer.total_training_steps") and not count_steps(source):
        yield "data.num_train_epochs", 30
    yield "custom_envs", {"prompt": {"env_type": "prompt", "max_steps": 1, "max_tokens_per_step": response}}
    yield from _translated(source)


def _translated(source: Tree) -> Iterator[tuple[str, Any]]:
    for name, value in DEFAULTS.items():
        path = tuple(name.split("."))
        outcome = apply(RULES, Key(path, value, source)) if get(source, path, ABSENT) is ABSENT else None
        if outcome is not None and outcome.target is not None:
            yield ".".join(outcome.target), outcome.value
