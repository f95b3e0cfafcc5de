# SPDX-License-Identifier: Apache-2.0
"""URLs, against a server of this test on the loopback interface."""

import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from tensorrt_llm.visual_gen import media_fetch
from tensorrt_llm.visual_gen.media_fetch import fetch, is_public
from tensorrt_llm.visual_gen.media_policy import MediaError, MediaPolicy
from tensorrt_llm.visual_gen.media_refs import load_image, load_video
from tests.support.hostile_media import png
from tests.support.media_files import moving, pattern
from tests.support.media_server import MediaServer, serving

OPEN = MediaPolicy(allow_private_addresses=True, fetch_timeout=5.0)
IMPATIENT = MediaPolicy(allow_private_addresses=True, fetch_timeout=0.3)
SECRET = "s3cr3t"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[MediaServer]:
    with serving() as server:
        yield server


@pytest.fixture
def server(shared_server) -> MediaServer:
    shared_server.seen.clear()
    return shared_server


def url(server: MediaServer, path: str, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{server.server_port}/{path}"


def get(server: MediaServer, path: str, policy: MediaPolicy = OPEN, limit: int = 10**6) -> bytes:
    return fetch(url(server, path), policy, "image_reference", limit)


def test_pictures_and_clips_are_loaded_from_urls(server):
    result = load_image(url(server, "picture.jpg"), policy=OPEN)  # a URL's suffix promises nothing
    assert np.array_equal(result.pixels, pattern())
    assert load_video(url(server, "clip"), num_frames=3, policy=OPEN).frames.shape == (
        3,
        *moving(1).shape[1:],
    )


@pytest.mark.parametrize(
    "path", ["picture", "chunked", "until-closed", "negative-length", "picture?a=b c&d=ü"]
)
def test_every_kind_of_body_arrives_whole(server, path):
    assert get(server, path) == png()
    assert server.seen[-1][0].isascii() and " " not in server.seen[-1][0]


def test_the_request_names_the_host_and_asks_for_plain_bytes(server):
    get(server, "picture")
    headers = server.seen[-1][1]
    assert headers["Host"] == f"127.0.0.1:{server.server_port}"
    assert headers["Accept-Encoding"] == "identity"
    assert not {"Cookie", "Authorization", "Referer"} & set(headers)


def test_the_size_is_limited_exactly_and_before_the_body_where_it_is_declared(server):
    size = len(png())
    for path in ("picture", "chunked", "until-closed"):
        assert len(get(server, path, limit=size)) == size
        with pytest.raises(MediaError, match=f"too large.*at most {size - 1} bytes"):
            get(server, path, limit=size - 1)
    for path in ("declared-length", "chunked-without-end"):
        with pytest.raises(MediaError, match="too large"):
            get(server, path)


def test_the_smaller_of_both_limits_holds(server):
    for limits in ({"max_download_bytes": 100}, {"max_image_bytes": 100}):
        with pytest.raises(MediaError, match="at most 100 bytes"):
            load_image(url(server, "picture"), policy=OPEN.model_copy(update=limits))


@pytest.mark.parametrize("path", ["slow-body", "slow-headers", "slow-chunks", "silence"])
def test_slow_answers_end_at_the_time_limit_however_they_are_slow(server, path):
    start = time.monotonic()
    with pytest.raises(MediaError, match="Fetching takes too long.*0.3 seconds.*fetch_timeout"):
        get(server, path, IMPATIENT)
    assert 0.25 < time.monotonic() - start < 1


def test_a_name_that_takes_long_to_resolve_ends_at_the_time_limit(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: time.sleep(1))
    start = time.monotonic()
    with pytest.raises(MediaError, match="Fetching takes too long"):
        fetch("http://slow.example/a.png", IMPATIENT, "image_reference", 100)
    assert time.monotonic() - start < 0.9


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "200 OK, found 404 Not Found"),
        ("broken", "200 OK, found 599 unknown"),
        ("nothing", "200 OK, found 204 No Content"),
        ("half", "cut short.*expected"),
        ("compressed", "compressed answer.*found gzip"),
        ("noise", "no proper answer.*found BadStatusLine"),
        ("many-headers", "no proper answer"),
        ("loop", "Too many redirects.*at most 3"),
        ("redirect-to-nowhere", "200 OK, found 302"),
        ("to?url=ftp://example.com/a", "Not a URL that can be fetched.*found scheme 'ftp'"),
        ("to?url=file:///etc/passwd", "Not a URL that can be fetched.*found scheme 'file'"),
        ("to?url=http://[::1", "no proper URL|Not a proper URL"),
    ],
)
def test_each_bad_answer_has_its_message(server, path, message):
    with pytest.raises(MediaError, match=message):
        get(server, path)


def test_content_decides_and_not_its_declared_type(server):
    with pytest.raises(MediaError, match="found markup"):
        load_image(url(server, "page"), policy=OPEN)
    with pytest.raises(MediaError, match="found mp4 video"):
        load_image(url(server, "clip"), policy=OPEN)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed_up_to_their_number(server, status):
    assert get(server, f"to?status={status}&url=/picture") == png()
    assert get(server, f"to?url={url(server, 'to?url=../picture')}") == png()
    none = OPEN.model_copy(update={"max_redirects": 0})
    assert get(server, "picture", none) == png()
    with pytest.raises(MediaError, match="Too many redirects"):
        get(server, "to?url=/picture", none)


def test_a_private_address_is_refused_without_a_connection(server):
    for host in ("127.0.0.1", "localhost", "2130706433", "0x7f.1"):
        with pytest.raises(MediaError, match="isn't public.*found 127.0.0.1"):
            fetch(url(server, "picture", host), MediaPolicy(), "image_reference", 1000)
    assert server.seen == []


def test_each_redirect_is_checked_again(server, monkeypatch):
    # The first address counts as public here, as a real first host would; the second doesn't.
    monkeypatch.setattr(media_fetch, "is_public", lambda address: address == "127.0.0.1")
    target = url(server, "picture", "127.0.0.2")
    with pytest.raises(MediaError, match="isn't public.*found 127.0.0.2"):
        get(server, f"to?url={target}", MediaPolicy())
    assert len(server.seen) == 1


def test_a_name_is_resolved_once_and_that_address_is_connected_to(server, monkeypatch):
    answers = ["127.0.0.1", "127.0.0.2"]  # a rebinding name: another answer on the next question
    asked: list[str] = []
    real = socket.getaddrinfo

    def rebinding(host, port, **options):
        asked.append(host)
        return real(answers[len(asked) - 1], port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    monkeypatch.setattr(media_fetch, "is_public", lambda address: address == "127.0.0.1")
    data = fetch(url(server, "picture", "rebind.test"), MediaPolicy(), "image_reference", 10**6)
    assert data == png() and asked == ["rebind.test"]
    assert server.seen[-1][1]["Host"] == f"rebind.test:{server.server_port}"


def test_one_private_address_among_public_ones_is_enough_to_refuse(monkeypatch):
    def two(host, port, **options):
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in ("93.184.216.34", "10.0.0.1")
        ]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    with pytest.raises(MediaError, match="isn't public.*found 10.0.0.1"):
        fetch("http://both.test/a.png", MediaPolicy(), "image_reference", 100)


def test_an_address_that_is_dead_or_silent_leaves_time_for_the_next(server, monkeypatch):
    def answer(*addresses) -> None:
        infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: infos)

    live = ("127.0.0.1", server.server_port)
    with socket.socket() as closed, socket.socket() as full, ExitStack() as waiting:
        closed.bind(("127.0.0.1", 0))
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # more than its queue holds: further connections get no answer
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        for dead in (closed.getsockname(), full.getsockname()):
            answer(dead, live)
            policy = IMPATIENT.model_copy(update={"fetch_timeout": 0.8})
            assert get(server, "picture", policy) == png()
        answer(closed.getsockname())
        with pytest.raises(MediaError, match="can't be reached.*Connection refused"):
            get(server, "picture")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::808:808", True),
        ("2002:808:808::1", True),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("100.64.0.1", False),
        ("127.0.0.53", False),
        ("169.254.169.254", False),
        ("172.31.0.1", False),
        ("192.0.2.1", False),
        ("192.168.0.1", False),
        ("198.18.0.1", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::127.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::1", False),
        ("2001:db8::1", False),
        ("fc00::1", False),
        ("fd12::1", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fec0::1", False),
        ("ff02::1", False),
    ],
)
def test_which_addresses_are_public(address, public):
    assert is_public(address) is public


def test_no_message_shows_a_query_a_fragment_or_a_password(server):
    paths = ("missing", "half", "noise", "compressed", "loop")
    bad = [url(server, f"{path}?token={SECRET}#{SECRET}") for path in paths]
    bad += [
        f"http://{SECRET}:{SECRET}@127.0.0.1/a.png",
        f"http://{SECRET}@127.0.0.1/a.png?{SECRET}",
        f"http://[::1/a.png?{SECRET}",
    ]
    for reference in bad:
        with pytest.raises(MediaError) as caught:
            fetch(reference, OPEN, "image_reference", 1000)
        error: BaseException | None = caught.value
        while error is not None:
            assert SECRET not in str(error), reference
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    arguments = [*command.split(), "-subj", "/CN=localhost", "-keyout", str(path)]
    arguments += ["-addext", "subjectAltName=DNS:localhost", "-out", f"{path}.crt"]
    try:
        subprocess.run(arguments, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the openssl command to make a certificate")
    return path


def test_tls_checks_the_certificate_against_the_name_and_sends_it(certificate, monkeypatch):
    names: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{certificate}.crt", certificate)
    context.sni_callback = lambda sock, name, _: names.append(name)
    with serving(lambda sock: context.wrap_socket(sock, server_side=True)) as server:
        target = url(server, "picture", "localhost").replace("http", "https", 1)
        with pytest.raises(MediaError, match="can't be reached.*self-signed certificate"):
            fetch(target, OPEN, "image_reference", 10**6)
        monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
        assert fetch(target, OPEN, "image_reference", 10**6) == png()
        assert names[-1] == "localhost"
        with pytest.raises(MediaError, match="can't be reached.*127.0.0.1"):
            fetch(target.replace("localhost", "127.0.0.1"), OPEN, "image_reference", 10**6)
        down = target.replace("picture", f"to?url={url(server, 'picture')}")
        with pytest.raises(MediaError, match="redirect from https to http"):
            fetch(down, OPEN, "image_reference", 10**6)
