# SPDX-License-Identifier: Apache-2.0
"""Malformed and hostile requests, each with the answer that it deserves."""

import http.client
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

IMAGES, VIDEOS, SYNC = "/v1/images/generations", "/v1/videos", "/v1/videos/sync"
NOBODY = "/v1/videos/video_" + "0" * 32
_BOUNDARY = "boundary"
_FORM = f"multipart/form-data; boundary={_BOUNDARY}"


@dataclass(frozen=True)
class Malformed:
    """One request.

    Attributes:
        name: What is wrong with it.
        method, path, body, headers: As sent.
        statuses: Those allowed.
        mentions: What the message says: the field, say, and the range.
    """

    name: str
    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    statuses: tuple[int, ...] = (400, 422)
    mentions: tuple[str, ...] = ()

    def send(self, url: str) -> tuple[int, dict[str, Any]]:
        """Status and envelope of the answer.

        Raises:
            ValueError: the answer is no envelope of its status.
        """
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        try:
            connection.request(self.method, self.path, self.body or None, self.headers)
            response = connection.getresponse()
            content = response.read()
            envelope = json.loads(content)
        finally:
            connection.close()
        if set(envelope) != {"object", "message", "type", "param", "code"}:
            raise ValueError(f"{self.name}: {content[:300]!r}")
        return response.status, envelope

    def problem(self, url: str) -> str | None:
        """What is wrong with the answer; None when it is right."""
        status, envelope = self.send(url)
        said = [text for text in self.mentions if text not in envelope["message"]]
        if status in self.statuses and envelope["code"] == status and not said:
            return None
        return f"{self.name}: {status} {envelope['message'][:300]!r}, without {said}"


def _json(name: str, path: str, text: str, *mentions: str, statuses=(400, 422)) -> Malformed:
    headers = {"Content-Type": "application/json"}
    # A lone surrogate has no bytes of its own: JSON spells it.
    return Malformed(name, "POST", path, text.encode(), headers, statuses, mentions)


def _field(field: str, text: str, *mentions: str, paths=(IMAGES, VIDEOS)) -> list[Malformed]:
    """A field with a bad value, spelled in JSON."""
    prompt = "" if field == "prompt" else '"prompt": "x", '
    return [
        _json(f"{path} {field}={text[:40]}", path, f'{{{prompt}"{field}": {text}}}', *mentions)
        for path in paths
    ]


def _form(name: str, parts: str, *mentions: str, statuses=(400, 422)) -> Malformed:
    headers = {"Content-Type": _FORM}
    return Malformed(name, "POST", VIDEOS, parts.encode(), headers, statuses, mentions)


def _part(name: str, value: str, extra: str = "") -> str:
    return (
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n{value}\r\n'
    )


_END = f"--{_BOUNDARY}--\r\n"
_PROMPT = _part("prompt", "x")
_FILE = '; filename="a.bin"\r\nContent-Type: application/octet-stream'
_SIDES = "from 16 to 4096"
_VIDEO = (VIDEOS, SYNC)

CASES: list[Malformed] = [
    # Sizes (failure case 28).
    *_field("size", '"0x0"', "height", "width", _SIDES),
    *_field("size", '"-1x5"', "size", "WIDTHxHEIGHT"),
    *_field("size", '"1e9x1"', "size", "WIDTHxHEIGHT"),
    *_field("size", '"720p"', "size", "WIDTHxHEIGHT"),
    *_field("size", '"100000x10000"', "height", "width", _SIDES),
    *_field("size", '"65x64"', "width", "multiple of 16"),
    *_field("size", '"64X64"', "size"),
    *_field("size", '"64x64x64"', "size"),
    *_field("size", '""', "size"),
    *_field("size", '"６４x６４"', "size"),
    *_field("size", "64", "size"),
    *_field("width", "64", "width and height together"),
    *_field("height", "-64", "height"),
    *_field("width", "true", "width"),
    *_field("size", '"64x64", "width": 64, "height": 64', "not both"),
    # Numbers.
    *_field("num_inference_steps", "0", "num_inference_steps", "greater than 0"),
    *_field("num_inference_steps", "-1", "num_inference_steps", "greater than 0"),
    *_field("num_inference_steps", "1000000000", "num_inference_steps", "from 1 to 1000"),
    *_field("num_inference_steps", "true", "num_inference_steps"),
    *_field("num_inference_steps", "4.5", "num_inference_steps"),
    *_field("num_inference_steps", '"4"', "num_inference_steps"),
    *_field("num_inference_steps", "NaN", "num_inference_steps"),
    *_field("num_inference_steps", "9" * 5000, ""),
    *_field("guidance_scale", "NaN", "guidance_scale", "finite"),
    *_field("guidance_scale", "Infinity", "guidance_scale", "finite"),
    *_field("guidance_scale", "1e999", "guidance_scale", "finite"),
    *_field("guidance_scale", "-1", "guidance_scale", "greater than 0"),
    *_field("guidance_scale", "true", "guidance_scale"),
    *_field("guidance_scale", '"7"', "guidance_scale"),
    *_field("seed", "-1", "seed", "greater than or equal to 0"),
    *_field("seed", "18446744073709551616", "seed", "less than or equal to 9223372036854775807"),
    *_field("seed", "1.5", "seed"),
    *_field("num_frames", "0", "num_frames", "2", paths=_VIDEO),
    *_field("num_frames", "1", "num_frames", "2", paths=_VIDEO),
    *_field("num_frames", "1000000", "num_frames", "from 1 to 1001", paths=_VIDEO),
    *_field("num_frames", "true", "num_frames", paths=_VIDEO),
    *_field("fps", "0", "fps", "greater than 0", paths=_VIDEO),
    *_field("fps", "NaN", "fps", paths=_VIDEO),
    *_field("fps", "121", "fps", "120", paths=_VIDEO),
    *_field("frame_rate", "-24", "frame_rate", "greater than 0", paths=_VIDEO),
    *_field("fps", '24, "frame_rate": 24', "fps", "frame_rate", paths=_VIDEO),
    *_field("seconds", "0", "seconds", paths=_VIDEO),
    *_field("seconds", '"four"', "seconds", paths=_VIDEO),
    *_field("seconds", "3600", "num_frames", "from 1 to 1001", paths=_VIDEO),
    *_field("seconds", '4, "num_frames": 9', "num_frames", "seconds", paths=_VIDEO),
    *_field("n", "0", "n", "greater than or equal to 1", paths=(IMAGES,)),
    *_field("n", "11", "n", "less than or equal to 10", paths=(IMAGES,)),
    *_field("max_sequence_length", "0", "max_sequence_length", paths=(IMAGES,)),
    *_field("height", '4096, "width": 4096, "num_frames": 1001', "at most", paths=_VIDEO),
    # Texts.
    *_field("prompt", "null", "prompt"),
    *_field("prompt", '""', "prompt"),
    *_field("prompt", '"  "', "prompt"),
    *_field("prompt", "[]", "prompt"),
    *_field("prompt", "7", "prompt"),
    *_field("prompt", r'"\ud800"', "prompt", "surrogate"),
    *_field("prompt", '"' + "x" * 2_000_000 + '"', "prompt", "characters"),
    *_field("negative_prompt", "{}", "negative_prompt"),
    *_field("model", '"gpt-image-1"', "model", "stub"),
    *_field("model", '"/etc/passwd"', "model"),
    *_field("model", "[]", "model"),
    *_field("response_format", '"file"', "response_format", paths=(IMAGES,)),
    *_field("format", '"gif"', "format"),
    *_field("format", '"png", "output_format": "png"', "not both", paths=(IMAGES,)),
    *_field("extra_params", "[]", "extra_params"),
    *_field("extra_params", '{"no_such_option": 1}', "no_such_option"),
    *_field("extra_params", '{"flow_shift": NaN}', "flow_shift"),
    *_field("extra_params", '{"flow_shift": "high"}', "flow_shift"),
    *_field("extra_params", '{"use_system_prompt": 1}', "use_system_prompt"),
    *_field("extra_params", '{"output_type": "image"}', "num_frames", paths=_VIDEO),
    *_field("extra_params", r'{"\ud800": 1}', "extra_params"),
    # Unknown fields and OpenAI's that have no effect here (failure case 29).
    *_field("quality", '"hd"', "quality", "unknown field"),
    *_field("style", '"vivid"', "style", "unknown field"),
    *_field("user", '"me"', "user", "unknown field"),
    *_field("num_frames", "9", "num_frames", "unknown field", paths=(IMAGES,)),
    *_field("n", "2", "n", "unknown field", paths=_VIDEO),
    *_field("max_sequence_length", "100", "max_sequence_length", "unknown field", paths=_VIDEO),
    *_field("__class__", "1", "__class__", "unknown field"),
    # References.
    *_field("image_reference", '"/etc/passwd"', "image_reference", "forbidden", paths=_VIDEO),
    *_field("image_reference", '"../../etc/passwd"', "forbidden", paths=_VIDEO),
    *_field("image_reference", '"file:///etc/passwd"', "forbidden", paths=_VIDEO),
    *_field("video_reference", '"file:///dev/zero"', "forbidden", paths=_VIDEO),
    *_field("image_reference", '"ftp://example.com/a.png"', "scheme", paths=_VIDEO),
    *_field("image_reference", '"http://127.0.0.1/a.png"', "image_reference", paths=_VIDEO),
    *_field("image_reference", '"http://169.254.169.254/x"', "image_reference", paths=_VIDEO),
    *_field("image_reference", '"http://[::1]/a.png"', "image_reference", paths=_VIDEO),
    *_field("image_reference", '"http://localhost:1/a.png"', "image_reference", paths=_VIDEO),
    *_field("image_reference", '"http://"', "image_reference", paths=_VIDEO),
    *_field("image_reference", '"data:image/png;base64,AAAA"', "image_reference", paths=_VIDEO),
    *_field("image_reference", '"data:image/png;base64,"', "image_reference", paths=_VIDEO),
    *_field("image_reference", '"data:text/html;base64,PGI+"', "MIME", paths=_VIDEO),
    *_field("image_reference", '"a", "video_reference": "b"', "give one of", paths=_VIDEO),
    *_field("input_reference", '{"file_id": "x"}', "input_reference", paths=_VIDEO),
    *_field("input_reference", "7", "input_reference", paths=_VIDEO),
    # Bodies.
    *(
        _json(f"{path} body {text[:20]!r}", path, text)
        for path in (IMAGES, VIDEOS, SYNC)
        for text in (
            "",
            "{",
            "null",
            "[]",
            '"x"',
            "1",
            "{'prompt': 'x'}",
            "[" * 100_000,
            "\ufeff{}",
        )
    ),
    _json("a field twice", VIDEOS, '{"prompt": "x", "prompt": "y"}', "more than once"),
    Malformed(
        "no UTF-8",
        "POST",
        VIDEOS,
        b'{"prompt": "\xff"}',
        {"Content-Type": "application/json"},
        mentions=("JSON",),
    ),
    *(
        Malformed(f"type {kind!r}", "POST", VIDEOS, b"prompt=x", headers, (415,), ("JSON",))
        for kind in (None, "text/plain", "application/x-www-form-urlencoded", "application/xml")
        for headers in ({"Content-Type": kind} if kind else {},)
    ),
    Malformed(
        "a body that says it is too long",
        "POST",
        VIDEOS,
        headers={"Content-Type": "application/json", "Content-Length": str(2**40)},
        statuses=(413,),
        mentions=("at most",),
    ),
    # Forms.
    _form("a form without prompt", _part("size", "64x64") + _END, "prompt", statuses=(422,)),
    _form("unknown in a form", _PROMPT + _part("quality", "hd") + _END, "quality", "unknown field"),
    _form("twice in a form", _PROMPT + _PROMPT + _END, "prompt", "more than once"),
    _form("text for a number", _PROMPT + _part("num_frames", "many") + _END, "num_frames"),
    _form("a bool in a form", _PROMPT + _part("num_frames", "true") + _END, "num_frames"),
    _form("NaN in a form", _PROMPT + _part("fps", "NaN") + _END, "fps"),
    _form("nothing for a number", _PROMPT + _part("fps", "") + _END, "fps"),
    _form("a file as prompt", _part("prompt", "x", _FILE) + _END, "prompt", "file"),
    _form("a file as unknown", _PROMPT + _part("evil", "x", _FILE) + _END, "evil", "file"),
    _form(
        "text as picture",
        _PROMPT + _part("image_reference", "hello", _FILE) + _END,
        "image_reference",
        "text",
    ),
    _form("an empty file", _PROMPT + _part("input_reference", "", _FILE) + _END, "input_reference"),
    _form(
        "a path in a form", _PROMPT + _part("image_reference", "/etc/passwd") + _END, "forbidden"
    ),
    _form("extra in a form", _PROMPT + _part("extra_params[nope]", "1") + _END, "nope"),
    _form("bad extra in a form", _PROMPT + _part("extra_params", "nope") + _END, "extra_params"),
    _form("no boundary inside", "hello", statuses=(400, 422)),
    _form("cut short", _PROMPT[:-20]),
    _form("a thousand fields", "".join(_part(f"f{i}", "x") for i in range(1000)) + _END),
    _form(
        "three files",
        _PROMPT
        + "".join(
            _part(f"{kind}_reference", "x", _FILE) for kind in ("image", "video", "input", "other")
        )
        + _END,
    ),
    Malformed(
        "multipart without boundary",
        "POST",
        VIDEOS,
        b"x",
        {"Content-Type": "multipart/form-data"},
        (400, 422),
    ),
    # Routes and ids.
    *(
        Malformed(f"{method} {path}", method, path, statuses=(404,))
        for method, path in (
            ("GET", NOBODY),
            ("GET", f"{NOBODY}/content"),
            ("DELETE", NOBODY),
            ("GET", "/v1/videos/../../etc/passwd"),
            ("GET", "/v1/videos/..%2f..%2fetc%2fpasswd"),
            ("GET", "/v1/videos/%2e%2e/content"),
            ("DELETE", "/v1/videos/%00"),
            ("GET", "/v1/videos/video_" + "F" * 32),
            ("GET", "/v1/videos/video_" + "x" * 5000),
            ("GET", "/v1/images/image_" + "0" * 32 + "/0/content"),
            ("GET", "/v1/images/image_" + "0" * 32 + "/-1/content"),
            ("GET", "/v1/images/..%2fjobs.sqlite3/0/content"),
            ("GET", "/"),
            ("GET", "/docs"),
            ("GET", "/v1/videos/"),
            ("GET", f"{VIDEOS}?after=video_" + "0" * 32),
        )
    ),
    *(
        Malformed(f"query {path}", "GET", path, statuses=(422,), mentions=(name,))
        for path, name in (
            (f"{VIDEOS}?limit=0", "limit"),
            (f"{VIDEOS}?limit=101", "limit"),
            (f"{VIDEOS}?limit=many", "limit"),
            (f"{VIDEOS}?order=up", "order"),
            (f"{VIDEOS}?page=2", "page"),
            (f"{NOBODY}/content?variant=thumbnail", "variant"),
            (f"{NOBODY}?x=1", "x"),
            ("/health?x=1", "x"),
        )
    ),
    *(
        Malformed(f"{method} {path}", method, path, statuses=(405,))
        for method, path in (
            ("PUT", VIDEOS),
            ("PATCH", NOBODY),
            ("DELETE", "/health"),
            ("GET", IMAGES),
            ("BREW", VIDEOS),
            ("POST", "/metrics"),
        )
    ),
]
