from pathlib import Path

import pytest

from offbeat.deploy.token_file import TOKEN_FILE, find_token


@pytest.fixture
def deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    TOKEN_FILE.parent.mkdir(parents=True)
    TOKEN_FILE.write_text("secret\n")
    return TOKEN_FILE


@pytest.mark.usefixtures("deployed")
@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost:9000", "http://[::1]:8000/"])
def test_the_token_of_this_machines_mesh_is_found(url: str):
    assert find_token(url) == "secret"


@pytest.mark.usefixtures("deployed")
@pytest.mark.parametrize("url", ["http://127.0.0.1.example:8000", "https://head:8000", "nonsense", "http://[bad"])
def test_no_other_machine_gets_it(url: str):
    assert find_token(url) is None


def test_no_token_is_found_without_a_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deployed: Path):
    deployed.write_text("")
    assert find_token("http://127.0.0.1:8000") is None
    monkeypatch.chdir(tmp_path / "runs")
    assert find_token("http://127.0.0.1:8000") is None
