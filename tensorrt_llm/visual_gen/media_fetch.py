# SPDX-License-Identifier: Apache-2.0
"""One GET of untrusted origin: bounded in time, size, redirects, and in the addresses it reaches.

Each host name is resolved once, every address it gives is checked, and the connection goes to one
of those very addresses, with the name kept for the Host header, for SNI and for the certificate. A
name that resolves to something else a moment later (DNS rebinding) therefore gains nothing. Each
redirect goes through the same. Proxies of the environment aren't used: behind one, the address
that is reached could not be checked.
"""

import http.client
import io
import ipaddress
import socket
import ssl
import threading
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from tensorrt_llm.visual_gen.media_policy import Deadline, MediaPolicy, bad_media, shorten

_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_CHUNK = 64 * 1024
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052
_HEADERS = {"Accept": "*/*", "User-Agent": "tensorrt-llm-cosmos3", "Connection": "close"}


def describe_url(url: str) -> str:
    """A URL for an error message: without user, password, query and fragment."""
    try:
        parts = urlsplit(url)
    except ValueError:  # a broken IPv6 address, say
        return "URL"
    return shorten(f"URL {parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")


def fetch(url: str, policy: MediaPolicy, field: str, max_bytes: int) -> bytes:
    """The body of an http(s) URL.

    Args:
        url: Absolute, scheme http or https.
        policy: ``fetch_timeout``, ``max_redirects``, ``allow_private_addresses``.
        field: The request field, for errors.
        max_bytes: Most bytes of the body.

    Raises:
        MediaError: a URL of another form, an address that isn't public, no answer in time, a
            status other than 200, too many redirects, a body that is too long, cut short or
            compressed.
    """
    deadline = None
    for _ in range(policy.max_redirects + 1):
        label = f"{field}, {describe_url(url)}"
        parts = _split(url, label)
        if deadline is None:
            deadline = Deadline(policy.fetch_timeout, label, "fetching", "fetch_timeout")
        with _connect(parts, policy, deadline, label) as connection:
            try:
                result = _get(connection, parts, label, max_bytes)
            except TimeoutError:
                raise deadline.error() from None
            except (OSError, http.client.HTTPException) as error:
                # Not chained: such errors quote the request line, with the query in it.
                raise bad_media(
                    "The URL gave no proper answer",
                    label,
                    expected="an HTTP answer",
                    found=type(error).__name__,
                    remedy="try the URL in a browser, or download the file and pass its bytes",
                ) from None
        if isinstance(result, bytes):
            return result
        try:
            url = urljoin(url, result)
        except ValueError:
            raise bad_media(
                "A redirect to no proper URL",
                label,
                expected="a Location that is a URL",
                found="another text",
                remedy="pass the URL of the file itself",
            ) from None
        if parts.scheme == "https" and url.lower().startswith("http:"):
            raise bad_media(
                "A redirect from https to http",
                label,
                expected="https throughout",
                found="http",
                remedy="pass a URL that stays on https, or the bytes",
            )
    raise bad_media(
        "Too many redirects",
        label,
        expected=f"at most {policy.max_redirects} (MediaPolicy.max_redirects)",
        found="another one",
        remedy="pass the URL that they lead to",
    )


def _split(url: str, label: str) -> SplitResult:
    """The parts of a URL that may be fetched; raises ValueError for any other."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
        if host:
            host.encode("idna")
    except ValueError:  # UnicodeError is one
        raise bad_media(
            "Not a proper URL",
            label,
            expected="http(s)://host/path",
            found="something else",
            remedy="correct the URL; special characters have to be percent-encoded",
        ) from None
    if parts.scheme not in _PORTS or not host:
        raise bad_media(
            "Not a URL that can be fetched",
            label,
            expected="http:// or https:// and a host",
            found="no host" if parts.scheme in _PORTS else f"scheme {shorten(parts.scheme, 50)!r}",
            remedy=("begin the URL with https:// and a host name, or pass a path or the bytes"),
        )
    if "@" in parts.netloc:
        raise bad_media(
            "A URL with a user name or password",
            label,
            expected="a URL without credentials",
            found="one with credentials",
            remedy="fetch it yourself and pass the bytes",
        )
    return parts


def _resolve(host: str, port: int, deadline: Deadline, label: str) -> list[tuple]:
    """getaddrinfo within the deadline: it has no time limit of its own, so it runs beside."""
    answer: list[list[tuple]] = []

    def look_up() -> None:
        try:
            answer.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError):
            answer.append([])

    thread = threading.Thread(target=look_up, daemon=True, name="media-resolve")
    thread.start()
    thread.join(max(0.0, deadline.left()))
    deadline.check()
    if not answer or not answer[0]:
        raise bad_media(
            "The host name is unknown",
            label,
            expected="a name with an address",
            found="none",
            remedy="correct the host name, or see to the DNS of this machine",
        )
    return answer[0]


def is_public(text: str) -> bool:
    """Whether an IP address belongs to the public internet.

    IPv6 forms that carry an IPv4 address (mapped, 6to4, Teredo, NAT64) are judged by that too.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    inner: list[ipaddress.IPv4Address | None] = []
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(str(address.ipv4_mapped))
        inner = [address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        if address not in _GLOBAL_UNICAST:
            return False
    if address.is_multicast or address.is_reserved or not address.is_global:
        return False
    return all(is_public(str(embedded)) for embedded in inner if embedded is not None)


class _Connection:
    """A connected socket under a deadline, with the two methods that ``http.client`` calls."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._socket, self._deadline = sock, deadline

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(_time_left(self._deadline))
        self._socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self._socket, self._deadline), _CHUNK)

    def close(self) -> None:
        """Does nothing: http.client calls it before the body is read. ``__exit__`` closes."""

    def __enter__(self) -> "_Connection":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()


class _DeadlineReader(io.RawIOBase):
    """Reads of a socket, each limited by what is left of the time: slow bytes don't extend it."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._socket, self._deadline = sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        self._socket.settimeout(_time_left(self._deadline))
        return self._socket.recv_into(buffer)


def _time_left(deadline: Deadline) -> float:
    """Seconds left. A TimeoutError at none, as from a socket: http.client hides a ValueError."""
    if (left := deadline.left()) <= 0:
        raise TimeoutError
    return left


def _connect(parts: SplitResult, policy: MediaPolicy, deadline: Deadline, label: str):
    """A connection to one of the addresses that the host's name gives, all of them checked."""
    port = parts.port or _PORTS[parts.scheme]
    addresses = _resolve(parts.hostname, port, deadline, label)
    if not policy.allow_private_addresses:
        for *_, (address, *_) in addresses:
            if not is_public(address):
                raise bad_media(
                    "The URL leads to an address that isn't public",
                    label,
                    expected="a public address",
                    found=address,
                    remedy="pass the bytes, or a policy with allow_private_addresses=True",
                )
    failure: OSError | None = None
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        sock = socket.socket(family, kind, protocol)
        try:
            # A share of the time for each, so that a dead address leaves some for the next.
            sock.settimeout(_time_left(deadline) / (len(addresses) - index))
            sock.connect(address)
            if parts.scheme == "https":
                context = ssl.create_default_context()
                sock = context.wrap_socket(sock, server_hostname=parts.hostname)
            return _Connection(sock, deadline)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            failure = error
    deadline.check()
    found = getattr(failure, "verify_message", None) or getattr(failure, "strerror", None)
    raise bad_media(
        "The URL can't be reached",
        label,
        expected="a server that answers",
        found=found or type(failure).__name__,
        remedy="check that the server runs and is reachable from this machine",
    ) from failure


def _get(connection: _Connection, parts: SplitResult, label: str, max_bytes: int) -> bytes | str:
    """One request: the body of an answer 200, or the target of a redirect."""
    client = http.client.HTTPConnection(parts.hostname, parts.port)
    client.sock = connection
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
    if parts.query:
        target += "?" + quote(parts.query, safe="/?%:@!$&'()*+,;=~")
    name = parts.hostname.encode("idna").decode() if ":" not in parts.hostname else None
    host = name or f"[{parts.hostname}]"
    if parts.port not in (None, _PORTS[parts.scheme]):
        host += f":{parts.port}"
    client.request("GET", target, headers={"Host": host, **_HEADERS})
    response = client.getresponse()
    if response.status in _REDIRECTS and (location := response.getheader("Location")):
        return location
    if response.status != 200:
        phrase = http.client.responses.get(response.status, "unknown")
        raise bad_media(
            "The URL gave no file",
            label,
            expected="200 OK",
            found=f"{response.status} {phrase}",
            remedy="open the URL in a browser; pass one that needs no login, or the bytes",
        )
    if (coding := response.getheader("Content-Encoding", "identity")).lower() != "identity":
        raise bad_media(
            "A compressed answer that wasn't asked for",
            label,
            expected="no Content-Encoding",
            found=shorten(coding, 50),
            remedy="pass a URL whose server sends the file as it is, or the bytes",
        )
    too_long = bad_media(
        "The file is too large",
        label,
        expected=f"at most {max_bytes} bytes",
        found="more",
        remedy="give a smaller file, or raise the limits of MediaPolicy (max_download_bytes)",
    )
    if response.length is not None and response.length > max_bytes:
        raise too_long
    expected, body = response.length, bytearray()
    while chunk := response.read(_CHUNK):
        body += chunk
        if len(body) > max_bytes:
            raise too_long
    if expected is not None and len(body) != expected:
        raise bad_media(
            "The answer was cut short",
            label,
            expected=f"{expected} bytes",
            found=len(body),
            remedy="try again, or download the file and pass its bytes",
        )
    return bytes(body)
