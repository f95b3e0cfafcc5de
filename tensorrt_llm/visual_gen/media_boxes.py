# SPDX-License-Identifier: Apache-2.0
"""What a video container declares about itself, checked before FFmpeg acts on it.

An MP4 of 650 bytes can declare 40 million samples of one size; FFmpeg then builds an index of
1.4 GB before anything of ours sees the stream. So the tables from which an index is built are
read here first. FFmpeg acts on a box wherever it stands; therefore every box that isn't known to
be needed, with all it holds, and every track that isn't video are shown to it as free space.

Sources: ISO/IEC 14496-12 (boxes), RFC 8794 (EBML sizes), the RIFF header of AVI.
"""

import io
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from tensorrt_llm.visual_gen.media_policy import Deadline, MediaError, MediaPolicy, bad_media
from tensorrt_llm.visual_gen.media_source import MediaSource

# The boxes that describe an hour of video take a few MiB; they are read into memory.
_MAX_HEADER_BYTES = 64 * 2**20
_MAX_BOXES = 200_000
# Each edit may repeat the whole index.
_MAX_EDITS = 16
# Box type -> the children that FFmpeg sees. Types that aren't a key are leaves.
_KEPT = {
    b"moov": {b"mvhd", b"trak", b"mvex"},
    b"trak": {b"tkhd", b"edts", b"mdia"},
    b"edts": {b"elst"},
    b"mdia": {b"mdhd", b"hdlr", b"minf"},
    b"minf": {b"vmhd", b"stbl"},
    b"stbl": {
        *(b"stsd", b"stts", b"ctts", b"cslg", b"stsc", b"stsz", b"stz2", b"stco", b"co64"),
        *(b"stss", b"stps", b"sdtp"),
    },
    b"mvex": {b"mehd", b"trex"},
    b"moof": {b"mfhd", b"traf"},
    b"traf": {b"tfhd", b"tfdt", b"trun"},
}
_TOP = {b"ftyp", b"styp", b"sidx", b"moov", b"moof", b"mdat"}
# Types that may stand nowhere but where the walk meets them, not even inside a leaf.
_DECISIVE = re.compile(rb"hdlr|stsz|stz2|stsc|trun|elst")
# Where the number of samples (of edits) stands in the body of a box.
_COUNT_OFFSET = {b"stsz": 8, b"stz2": 8, b"trun": 4, b"elst": 4}


def checked_container(
    source: MediaSource, policy: MediaPolicy, deadline: Deadline
) -> "CheckedFile":
    """Check a container's own structure; give the file as FFmpeg may see it.

    Args:
        source: Of one of ``VIDEO_FORMATS``.
        policy: ``max_video_frames``.
        deadline: Reads of the result raise after it.

    Returns:
        A view of ``source.file``, from its start.

    Raises:
        MediaError: the file ends before its declared end, declares more frames than allowed, or
            is built in a way that no writer uses.
    """
    patches: list[tuple[int, bytes]] = []
    if source.format == "mp4":
        patches = _Mp4(source, policy, deadline).patches
    else:
        end_of = _matroska_end if source.format == "matroska" else _avi_end
        declared = end_of(source.file)
        if declared is not None and declared > source.size:
            raise _cut_short(source.label, declared, source.size)
    return CheckedFile(source.file, patches, deadline)


class CheckedFile:
    """A file under a deadline, shown with other bytes in some places; what PyAV reads from.

    Args:
        file: The file underneath.
        patches: (offset, bytes) to show instead, in rising order, without overlap.
        deadline: Reads after it raise.
    """

    def __init__(
        self, file: BinaryIO, patches: list[tuple[int, bytes]], deadline: Deadline
    ) -> None:
        file.seek(0)
        self._file, self._patches, self._deadline = file, patches, deadline
        self._offsets = [offset for offset, _ in patches]

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        self._deadline.check()
        start = self._file.tell()
        data = self._file.read(size)
        shown: bytearray | None = None
        first = max(0, bisect_right(self._offsets, start) - 1)
        last = bisect_left(self._offsets, start + len(data))
        for offset, patch in self._patches[first:last]:
            low, high = max(start, offset), min(start + len(data), offset + len(patch))
            if low < high:
                shown = shown or bytearray(data)
                shown[low - start : high - start] = patch[low - offset : high - offset]
        return data if shown is None else bytes(shown)


class _Box(NamedTuple):
    kind: bytes
    start: int
    body: int
    end: int


class _Mp4:
    """Walks the boxes of an MP4 or MOV; ``patches`` is what FFmpeg has to see instead."""

    def __init__(self, source: MediaSource, policy: MediaPolicy, deadline: Deadline) -> None:
        self.patches: list[tuple[int, bytes]] = []
        self._label, self._limit = source.label, policy.max_video_frames
        self._boxes = self._samples = self._decisive = 0
        self._video_tracks: set[bytes] = set()
        file, position, headers = source.file, 0, 0
        while position + 8 <= source.size:  # fewer bytes are padding
            deadline.check()
            file.seek(position)
            box = self._box(file.read(16), 0, source.size - position)
            if position + box.end > source.size:
                raise _cut_short(self._label, position + box.end, source.size)
            if box.kind not in _TOP:
                self.patches.append((position + 4, b"free"))
            elif box.kind in _KEPT:
                headers += box.end
                if headers > _MAX_HEADER_BYTES:
                    raise self._odd(f"more than {_MAX_HEADER_BYTES} bytes of header")
                file.seek(position)
                data = bytearray(file.read(box.end))
                self._walk(data, box)
                self.patches.append((position, bytes(data)))
            position += box.end

    def _box(self, data: bytes | bytearray, start: int, end: int) -> _Box:
        """The box at ``start`` of ``data``; one of size 0 reaches to ``end``."""
        size, header = int.from_bytes(data[start : start + 4], "big"), 8
        if size == 1:
            size, header = int.from_bytes(data[start + 8 : start + 16], "big"), 16
        elif size == 0:
            size = end - start
        self._boxes += 1
        if not header <= size or start + header > end or self._boxes > _MAX_BOXES:
            raise self._odd("a box of an impossible size, or too many boxes")
        return _Box(bytes(data[start + 4 : start + 8]), start, start + header, start + size)

    def _walk(self, data: bytearray, top: _Box) -> None:
        """Hide in ``data`` what isn't needed and count the rest."""
        self._decisive = 0
        self._walk_children(data, top)
        if len(_DECISIVE.findall(data)) != self._decisive:
            raise self._odd("sample tables outside their usual place")

    def _walk_children(self, data: bytearray, parent: _Box) -> None:
        for box in self._children(data, parent):
            if (
                box.kind not in _KEPT[parent.kind]
                or (box.kind == b"trak" and not self._is_video_track(data, box))
                or (box.kind == b"traf" and not self._is_video_fragment(data, box))
            ):
                data[box.start + 4 : box.start + 8] = b"free"
                data[box.body : box.end] = bytes(box.end - box.body)
            elif box.kind in _KEPT:
                self._walk_children(data, box)
            else:
                self._count(data, box)

    def _children(self, data: bytearray, parent: _Box) -> Iterator[_Box]:
        position = parent.body
        while position + 8 <= parent.end:
            box = self._box(data, position, parent.end)
            if box.end > parent.end:
                raise self._odd("a box that reaches beyond the one it is in")
            yield box
            position = box.end

    def _is_video_track(self, data: bytearray, track: _Box) -> bool:
        """Whether a track holds video; remembers its number."""
        handlers = [
            bytes(data[box.body + 8 : box.body + 12])
            for media in self._children(data, track)
            if media.kind == b"mdia"
            for box in self._children(data, media)
            if box.kind == b"hdlr"
        ]
        if handlers != [b"vide"]:
            return False
        for box in self._children(data, track):
            if box.kind == b"tkhd":
                number = box.body + (20 if data[box.body] == 1 else 12)
                self._video_tracks.add(bytes(data[number : number + 4]))
        return True

    def _is_video_fragment(self, data: bytearray, fragment: _Box) -> bool:
        numbers = [
            bytes(data[box.body + 4 : box.body + 8])
            for box in self._children(data, fragment)
            if box.kind == b"tfhd"
        ]
        return len(numbers) == 1 and numbers[0] in self._video_tracks

    def _count(self, data: bytearray, box: _Box) -> None:
        if _DECISIVE.fullmatch(box.kind) is None:
            return
        self._decisive += 1
        offset = _COUNT_OFFSET.get(box.kind)
        if offset is None:
            return
        number = int.from_bytes(data[box.body + offset : box.body + offset + 4], "big")
        if box.kind == b"elst":
            if number > _MAX_EDITS:
                raise self._odd(f"an edit list of {number} entries")
            return
        self._samples += number
        if self._samples > self._limit:
            raise bad_media(
                "The video has too many frames",
                self._label,
                expected=f"at most {self._limit} (MediaPolicy.max_video_frames)",
                found=f"{self._samples} declared",
                remedy="cut the clip, or raise MediaPolicy.max_video_frames",
            )

    def _odd(self, found: str) -> MediaError:
        return bad_media(
            "The video's header is broken or unusual",
            self._label,
            expected="a plain MP4 or MOV",
            found=found,
            remedy="write it again with a video tool (ffmpeg -i in.mp4 -c copy out.mp4)",
        )


def _cut_short(label: str, declared: int, size: int) -> MediaError:
    return bad_media(
        "The video is cut short",
        label,
        expected=f"{declared} bytes, as its header says",
        found=f"{size} bytes",
        remedy="copy or download it again",
    )


def _matroska_end(file: BinaryIO) -> int | None:
    """Where the first segment of a Matroska file ends; None where that isn't told (a stream)."""
    file.seek(0)
    head = file.read(4096)
    _, header_size, position = _ebml_element(head, 0)
    segment = position + (header_size or 0)
    identifier, size, position = _ebml_element(head, segment)
    return None if identifier != b"\x18\x53\x80\x67" or size is None else position + size


def _ebml_element(data: bytes, position: int) -> tuple[bytes, int | None, int]:
    """Identifier, size (None: unknown) and start of the content of an EBML element."""
    id_length = _vint_length(data[position : position + 1])
    start = position + id_length
    length = _vint_length(data[start : start + 1])
    bits = 7 * length
    size = int.from_bytes(data[start : start + length], "big") & ((1 << bits) - 1)
    unknown = size == (1 << bits) - 1
    return data[position:start], None if unknown else size, start + length


def _vint_length(byte: bytes) -> int:
    return 9 - byte[0].bit_length() if byte and byte[0] else 8


def _avi_end(file: BinaryIO) -> int | None:
    """Where the first RIFF chunk of an AVI file ends; None where its writer didn't finish."""
    file.seek(4)
    size = int.from_bytes(file.read(4), "little")
    return 8 + size if size else None
