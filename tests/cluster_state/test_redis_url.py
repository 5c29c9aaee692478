"""Redis URLs: what they say, what is refused, and that no password is told."""

import pytest

from kvferry.cluster_state import redis_client
from kvferry.cluster_state.redis_url import has_password, read, shown
from kvferry.protocol.errors import ConfigError

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "server", "seen"),
    [
        ("redis://h", {"host": "h", "port": 6379}, "redis://h"),
        ("redis://h:7/3", {"host": "h", "port": 7, "db": 3}, "redis://h:7/3"),
        ("redis://[::1]:7", {"host": "::1", "port": 7}, "redis://[::1]:7"),
        ("redis://:p%2Fq@h", {"host": "h", "port": 6379, "password": "p/q"}, "redis://:***@h"),
        ("redis://u:p@h", {"host": "h", "port": 6379, "username": "u", "password": "p"}, "redis://u:***@h"),
        ("redis://h?db=2&password=p", {"host": "h", "port": 6379, "db": 2, "password": "p"}, "redis://h"),
        ("unix:///run/s?db=2", {"path": "/run/s", "db": 2}, "unix:///run/s"),
        ("unix://u:p@/run/s", {"path": "/run/s", "username": "u", "password": "p"}, "unix://u:***@/run/s"),
    ],
)
def test_one_server(url, server, seen):
    found = read(url)
    assert (found.server, found.shown, found.tls, found.sentinels) == (server, seen, False, ())
    assert has_password(url) == ("password" in server)


def test_tls_verifies_unless_told_not_to(tmp_path):
    ca = tmp_path / "ca.pem"
    ca.touch()
    assert read(f"rediss://h?ssl_ca_certs={ca}").server["ssl_check_hostname"]
    assert read("rediss://h").tls
    assert not read("rediss://h?ssl_cert_reqs=none").server["ssl_check_hostname"]
    assert not read("rediss://h?ssl_check_hostname=false").server["ssl_check_hostname"]


def test_sentinels():
    found = read("redis+sentinel://u:p@a:1,b,[::1]:4/kv/2?sentinel_username=v&sentinel_password=q")
    assert found.sentinels == (("a", 1), ("b", 26379), ("::1", 4))
    assert (found.service, found.server) == ("kv", {"username": "u", "password": "p", "db": 2})
    assert found.sentinel == {"username": "v", "password": "q"}
    assert read("redis+sentinel://a").service == "mymaster"
    encrypted = read("rediss+sentinel://a/kv?ssl_cert_reqs=none")
    assert encrypted.sentinel["ssl_cert_reqs"] == encrypted.server["ssl_cert_reqs"] == "none"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nonsense", "must begin with"),
        ("gopher://x", "must begin with"),
        ("unix://h", "unix:///path"),
        ("redis://[bad", "not a URL"),
        (f"redis://:{SECRET}/x@h:1/0", "%2F"),
        (f"redis://:x/{SECRET}@h:1/0", "%2F"),
        (f"redis://:{SECRET}#x@h", "%23"),
        (f"redis://:x?{SECRET}@h", "parameters"),
        (f"redis://:x?{SECRET}=1@h", "parameters"),
        (f"redis://:{SECRET}@h:99999", "port"),
        (f"redis://:{SECRET}@h:x", "port"),
        (f"redis://:{SECRET}@h/x", "number"),
        (f"redis://h?password={SECRET}&db=x", "db has an invalid"),
        (f"redis://h?password={SECRET}&socket_timeout=9", "'socket_timeout' is not one"),
        (f"redis://h?password={SECRET}&ssl_ca_certs=/x", "/x"),
        ("rediss://h?ssl_ca_certs=/no/such", "/no/such"),
        ("rediss://h?ssl_cert_reqs=maybe", "ssl_cert_reqs"),
        ("rediss://h?ssl_check_hostname=perhaps", "ssl_check_hostname"),
        ("redis://h?ssl_check_hostname=true", "rediss"),
        ("redis://h?sentinel_password=x", "not one of its parameters"),
        ("redis://h?db=-1", "db has an invalid"),
        ("redis://h?protocol=4", "protocol has an invalid"),
        ("redis://h?protocol=", "protocol has an invalid"),
        ("redis://h?client_name=a%20b", "client_name has an invalid"),
        ("redis+sentinel:///kv", "no Sentinel"),
        (f"redis+sentinel://u:123/{SECRET}@a", "%2F"),
        (f"redis+sentinel://u:123/{SECRET}@a/0", "%2F"),
        (f"redis+sentinel://u:123/{SECRET}@a/kv", "%2F"),
        (f"redis+sentinel://:{SECRET}@a:1,b:x/kv", "port"),
    ],
)
def test_what_is_refused_is_refused_in_one_line_without_the_password(url, why):
    with pytest.raises(ConfigError, match="redis_url") as caught:
        read(url)
    assert why in caught.value.message
    assert SECRET not in caught.value.message
    assert SECRET not in shown(url)


def test_what_is_read_does_not_print_its_password():
    assert SECRET not in repr(read(f"redis://u:{SECRET}@h"))
    assert SECRET not in repr(read(f"redis+sentinel://u:{SECRET}@h/kv?sentinel_password={SECRET}"))


def test_a_password_file_must_be_there_and_be_the_only_password(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        redis_client.connected("redis://h", 1.0, str(tmp_path / "none"))
    (tmp_path / "password").write_text("p\n")
    with pytest.raises(ConfigError, match="already"):
        redis_client.connected("redis://:q@h", 1.0, str(tmp_path / "password"))
