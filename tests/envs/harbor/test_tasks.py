"""Task folders: what is read, what is refused, and what needs a container."""

from pathlib import Path

import pytest

from offbeat.envs.harbor.dockerfile import BuildCopy, read_dockerfile
from offbeat.envs.harbor.obstacles import find_obstacles
from offbeat.envs.harbor.task import find_tasks, load_task, read_files
from offbeat.envs.harbor.trial import parse_rewards
from tests.envs.harbor.task_folder import TaskFolder, needs_shell


def obstacles(task_folder: TaskFolder) -> tuple[str, ...]:
    return find_obstacles(load_task(task_folder.path))


def test_harbors_template_task_is_read(task_folder: TaskFolder):
    task_folder.write(
        "task.toml",
        'version = "1.0"\nsource = "x"\nartifacts = []\n[task]\nname = "org/x"\n[metadata]\ndifficulty = "hard"\n'
        "[verifier]\ntimeout_sec = 900.0\n[agent]\ntimeout_sec = 800.0\n"
        '[environment]\nbuild_timeout_sec = 600.0\ncpus = 1\nmemory = "2G"\nstorage_mb = 10240\nallow_internet = true\n',
    )
    task = load_task(task_folder.path)
    assert (task.name, task.file.schema_version, task.file.metadata) == ("example", "1.0", {"difficulty": "hard"})
    assert [(step.agent_timeout_s, step.verifier_timeout_s) for step in task.steps] == [(800.0, 900.0)]
    assert obstacles(task_folder) == ()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("task.toml", "[agent\n", r"task\.toml: .*line 1"),
        ("task.toml", "[agent]\ntimeout_sec = 'long'\n", r"task\.toml: agent.timeout_sec: .*got 'long'"),
        ("task.toml", "[[steps]]\nname = '../x'\n", r"task\.toml: steps.0.name: "),
        ("task.toml", "[[steps]]\nname = 'x'\n", r"steps/x/instruction.md: No such file"),
    ],
)
def test_a_broken_task_names_file_and_key(task_folder: TaskFolder, name: str, text: str, message: str):
    task_folder.write(name, text)
    with pytest.raises(ValueError, match=message):
        load_task(task_folder.path)


def test_a_task_without_a_verifier_and_a_folder_without_tasks(task_folder: TaskFolder, tmp_path: Path):
    (task_folder.path / "tests/test.sh").unlink()
    with pytest.raises(ValueError, match=r"tests/test.sh: no such file; it is a task's verifier"):
        load_task(task_folder.path)
    with pytest.raises(ValueError, match=r"has no task: a task is a folder with task\.toml"):
        find_tasks(task_folder.path / "tests")
    with pytest.raises(ValueError, match="no such folder"):
        find_tasks(tmp_path / "nowhere")


def test_a_folder_of_tasks_is_searched_but_not_within_tasks(task_folder: TaskFolder):
    TaskFolder(task_folder.path.parent / "group/other")
    TaskFolder(task_folder.path / "environment/inner")
    assert [task.name for task in find_tasks(task_folder.path.parent)] == ["example", "other"]


def test_a_link_out_of_a_task_is_refused(task_folder: TaskFolder):
    (task_folder.path / "tests/secret").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"tests/secret leads out of"):
        read_files(task_folder.path / "tests")


@pytest.mark.parametrize("name", ["tests", "solution", "instruction.md", "environment", "steps/a/workdir"])
def test_a_part_of_a_task_that_is_a_link_out_of_it_is_refused(task_folder: TaskFolder, tmp_path: Path, name: str):
    if name.startswith("steps"):
        task_folder.write("task.toml", '[[steps]]\nname = "a"\n')
        task_folder.write("steps/a/instruction.md", "do it")
    path, secret = task_folder.path / name, tmp_path / "secret"
    if path.exists():
        path.rename(tmp_path / "moved")
    secret.mkdir()
    (secret / "test.sh").touch()
    path.symlink_to(secret)
    with pytest.raises(ValueError, match=rf"{name} leads out of"):
        load_task(task_folder.path)


@pytest.mark.parametrize("source", ["../../secret", "../../secret/*", "link"])
def test_files_outside_of_the_context_are_not_copied(task_folder: TaskFolder, source: str):
    secret = task_folder.path.parent / "secret"
    secret.mkdir()
    (secret / "key").write_text("k")
    (task_folder.path / "environment/link").symlink_to(secret / "key")
    task_folder.write("environment/Dockerfile", f"FROM ubuntu\nCOPY {source} Dockerfile /app/")
    assert f"its Dockerfile: COPY {source}: leads out of the folder environment/" in obstacles(task_folder)
    (copy,) = read_dockerfile(task_folder.path / "environment/Dockerfile").actions
    assert isinstance(copy, BuildCopy)
    assert [path.name for path in copy.sources] == ["Dockerfile"]


@pytest.mark.parametrize(
    ("lines", "obstacle"),
    [
        ("FROM postgres:16", "its image postgres:16"),
        ("FROM ubuntu\nRUN apt-get update && apt-get install -y jq", "RUN apt-get: needs the network"),
        ("FROM ubuntu\nRUN python3 -m pip install numpy", "RUN pip: needs the network"),
        ("FROM ubuntu\nRUN cd x; git clone https://x", "RUN git clone: needs the network"),
        ("FROM ubuntu AS a\nFROM ubuntu\nCOPY --from=a /x /y", "several stages (FROM)"),
        ("FROM ubuntu\nCOPY missing /app/", "COPY missing: not in the folder environment/"),
        ("FROM ubuntu\nCOPY Dockerfile /usr/local/bin/", "writes below /usr"),
        ("FROM ubuntu\nADD https://x/y.tgz /app/", "ADD https://x/y.tgz"),
        ("FROM ubuntu\nUSER agent", "USER agent: a shell has one user"),
        ('FROM ubuntu\nENTRYPOINT ["server"]', 'ENTRYPOINT ["server"]'),
        ("FROM ubuntu\nRUN --mount=type=cache,target=/x true", "RUN --mount"),
        ("FROM ubuntu\nRUN cat <<EOF > x\nhello\nEOF", "here-document in RUN"),
    ],
)
def test_a_dockerfile_beyond_a_shell_is_named(task_folder: TaskFolder, lines: str, obstacle: str):
    task_folder.write("environment/Dockerfile", lines)
    found = obstacles(task_folder)
    assert any(text.startswith(f"its Dockerfile: {obstacle}") for text in found), found


@pytest.mark.parametrize(
    ("lines", "obstacle"),
    [
        ('[environment]\nos = "windows"', "the system windows"),
        ("[environment]\ngpus = 1", "a GPU"),
        (
            '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["x.org"]',
            "network_mode allowlist: a shell's network can't be limited to hosts",
        ),
        ('[agent]\nnetwork_mode = "allowlist"', "network_mode allowlist: a shell's network can't be limited to hosts"),
        ('[[environment.mcp_servers]]\nname = "x"\nurl = "http://x"', "MCP servers"),
        ('[environment.env]\nKEY = "${KEY}"', "environment.env.KEY: ${KEY} of the host"),
        ('[verifier]\nenvironment_mode = "separate"', "a verifier in an environment of its own"),
        ("[verifier.environment]\ncpus = 1", "a verifier in an environment of its own"),
        ('[agent]\nuser = "agent"', "the user agent: a shell has one user"),
        ('[environment.healthcheck]\ncommand = "true"', "a healthcheck, so a service"),
    ],
)
def test_settings_beyond_a_shell_are_named(task_folder: TaskFolder, lines: str, obstacle: str):
    task_folder.write("task.toml", lines)
    assert obstacles(task_folder) == (obstacle,)


def test_compose_files_images_and_verifiers_beyond_a_shell_are_named(task_folder: TaskFolder):
    task_folder.write("environment/docker-compose.yaml", "")
    task_folder.write("tests/test.sh", "# apt-get\ncurl -LsSf https://astral.sh/uv/install.sh | sh\nuvx sh /tests\n")
    assert obstacles(task_folder) == (
        "environment/docker-compose.yaml: several services",
        "its verifier calls curl (tests/test.sh): needs the network (sandbox: {image: task, network: verifier})",
    )
    image = TaskFolder(task_folder.path.parent / "image")
    (image.path / "environment/Dockerfile").unlink()
    image.write("task.toml", '[environment]\ndocker_image = "org/image:1"\n')
    image.write("tests/test.sh", "rustc /tests/x.rs\n")
    found = obstacles(image)
    assert found[0] == "the image org/image:1"


@needs_shell
def test_tasks_that_need_a_container_are_refused_or_skipped(task_folder: TaskFolder):
    other = TaskFolder(task_folder.path.parent / "other")
    other.write("environment/Dockerfile", "FROM postgres\n")
    root = task_folder.path.parent
    with pytest.raises(
        ValueError, match=r"1 of 2 tasks in .* need a container: other \(its Dockerfile: its image postgres\)"
    ):
        task_folder.env(tasks_dir=root)
    assert [task.name for task in task_folder.env(tasks_dir=root, unsupported="skip").tasks] == ["example"]
    assert [task.name for task in task_folder.env(tasks_dir=root, tasks=("ex*",)).tasks] == ["example"]
    with pytest.raises(ValueError, match=r"has no task 'nope'; it has example, other"):
        task_folder.env(tasks_dir=root, tasks=("nope",))
    with pytest.raises(ValueError, match=r"no task of .* is in split 'held_out': set val_tasks_dir, or `split: any`"):
        task_folder.env(tasks_dir=root, unsupported="skip", split="held_out")


def test_rewards_are_read_as_by_harbor():
    assert parse_rewards(" 0.5\n", is_json=False) == {"reward": 0.5}
    assert parse_rewards('{"a": 1, "b": 0.5}', is_json=True) == {"a": 1.0, "b": 0.5}
    assert parse_rewards("1", is_json=True) == {"reward": 1.0}
    for text in ('{"a": 1e309}', '{"a": "1"}', "nan", ""):
        with pytest.raises(ValueError, match=r"finite|Expecting"):
            parse_rewards(text, is_json=True)
