"""Files of `offbeat init`."""

from pathlib import Path

from offbeat.deploy.cli.env_template import class_name, write_template
from offbeat.deploy.config.schema import FILE, run_schema_text

README = """# {title}

An env, trained with Offbeat by reinforcement learning.

| File | |
|---|---|
| `{name}.py` | the task: observations, actions, rewards |
| `test_{name}.py` | its test, with Offbeat's contract of envs |
| `{name}.yaml` | the run: envs, algorithm, policy; `{schema}` gives editors its keys |

```sh
offbeat train {name}.yaml              # a tiny policy on two CPU cores; runs/{name}/ has its report
offbeat play {name}:{cls}         # play it yourself
offbeat play {name}.yaml --agent runs/{name}   # the trained policy
offbeat env check {name}:{cls}    # determinism, timeouts, speed
python -m pytest
```

## Next

- **Your task:** change `reset`, `step` and `system_prompt`; `words` are those of the tiny policy's vocabulary.
- **A real model:** `offbeat train {name}.yaml pretrain=Qwen/Qwen2.5-0.5B-Instruct warm_start=null`, with a larger
  `max_tokens_per_step` and `sequence_length`.
- **Another algorithm:** `adv_estimator`, `pg_variant`, or a function of yours (`adv_estimator: my_module:advantages`).
- **All keys:** `offbeat config show {name}.yaml`; `offbeat config list` has more configurations.
"""
GITIGNORE = "runs/\n__pycache__/\n"
MODELINE = f"# yaml-language-server: $schema={FILE}\n"


def write_project(folder: Path, name: str) -> list[Path]:
    """Write a project to a new folder.

    Raises:
        BadNameError: not snake_case, or a keyword.
        FileExistsError: the folder exists.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already: take another name, or remove it")
    written = write_template(folder, name)
    run = folder / f"{name}.yaml"
    run.write_text(MODELINE + run.read_text(encoding="utf-8"), encoding="utf-8")
    title = name.replace("_", " ").capitalize()
    texts = {
        "README.md": README.format(name=name, cls=class_name(name), title=title, schema=FILE),
        ".gitignore": GITIGNORE,
        FILE: run_schema_text(),
    }
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    return [*written, *(folder / file for file in texts)]
