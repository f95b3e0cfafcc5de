# SPDX-License-Identifier: Apache-2.0
"""Which file formats a reference may have, told by content, file name and MIME type."""

# Format of ours -> Pillow plugin. A JPEG with further pictures (MPO) opens through JPEG's.
IMAGE_FORMATS = {
    "jpeg": "JPEG",
    "png": "PNG",
    "webp": "WEBP",
    "gif": "GIF",
    "bmp": "BMP",
    "tiff": "TIFF",
    "avif": "AVIF",
}
# Format of ours -> FFmpeg demuxer. All three declare their streams before the data, so that the
# limits reach the decoders which FFmpeg itself runs while it opens a file. (MPEG-TS does not.)
VIDEO_FORMATS = {"mp4": "mov", "matroska": "matroska", "avi": "avi"}
FORMATS = {"image": IMAGE_FORMATS, "video": VIDEO_FORMATS}
ACCEPTED = {
    "image": "a JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF image",
    "video": "an MP4, MOV, Matroska, WebM or AVI video",
}

_SUFFIXES = {
    "jpeg": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "png": (".png", ".apng"),
    "webp": (".webp",),
    "gif": (".gif",),
    "bmp": (".bmp", ".dib"),
    "tiff": (".tif", ".tiff"),
    "avif": (".avif",),
    "mp4": (".mp4", ".m4v", ".mov", ".qt", ".3gp", ".3g2"),
    "matroska": (".mkv", ".webm"),
    "avi": (".avi",),
}
_MIME_TYPES = {
    "jpeg": ("image/jpeg", "image/jpg", "image/pjpeg"),
    "png": ("image/png", "image/apng", "image/vnd.mozilla.apng"),
    "webp": ("image/webp",),
    "gif": ("image/gif",),
    "bmp": ("image/bmp", "image/x-bmp", "image/x-ms-bmp"),
    "tiff": ("image/tiff",),
    "avif": ("image/avif",),
    "mp4": ("video/mp4", "video/quicktime", "video/x-m4v", "video/3gpp", "video/3gpp2"),
    "matroska": ("video/webm", "video/matroska", "video/x-matroska"),
    "avi": ("video/avi", "video/x-msvideo", "video/msvideo", "video/vnd.avi"),
}
_FORMAT_OF_SUFFIX = {s: name for name, suffixes in _SUFFIXES.items() for s in suffixes}
_FORMAT_OF_MIME = {m: name for name, types in _MIME_TYPES.items() for m in types}

# Starts of files; the last group is only for telling the caller what was found.
_MAGIC = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"II*\x00", "tiff"),
    (b"MM\x00*", "tiff"),
    (b"\x1aE\xdf\xa3", "matroska"),
    (b"BM", "bmp"),
    (b"#EXTM3U", "an HLS playlist"),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"OggS", "an Ogg stream"),
    (b"FLV", "a Flash video"),
    (b"ID3", "an MP3 file"),
    (b"\x00\x00\x01\xba", "an MPEG program stream"),
    (b"8BPS", "a Photoshop document"),
    (b"<", "markup (HTML, SVG or XML)"),
)
_RIFF = {b"WEBP": "webp", b"AVI ": "avi", b"WAVE": "a WAV file"}
HEAD_BYTES = 512


def sniff(head: bytes) -> str:
    """The format that the first ``HEAD_BYTES`` of a file show.

    Returns:
        A key of ``IMAGE_FORMATS`` or ``VIDEO_FORMATS``; or, for anything else, a description of
        it for an error message.
    """
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12], "an unknown RIFF file")
    if head[4:8] == b"ftyp":
        brands = {head[8:12], *(head[i : i + 4] for i in range(16, _box_end(head), 4))}
        if brands & {b"avif", b"avis"}:
            return "avif"
        return "a HEIF picture" if brands & {b"heic", b"heix", b"mif1", b"msf1"} else "mp4"
    if head[4:8] in (b"moov", b"mdat", b"free", b"skip", b"wide"):
        return "mp4"
    if head[:1] == b"G" and head[188:189] == b"G":
        return "an MPEG transport stream"
    return "text" if head.isascii() else "unknown binary data"


def _box_end(head: bytes) -> int:
    return min(int.from_bytes(head[:4], "big"), len(head) - 3)


def format_of_suffix(suffix: str) -> str | None:
    """The format that a file name's suffix (".jpg") promises, or None where it promises none."""
    return _FORMAT_OF_SUFFIX.get(suffix.lower())


def format_of_mime(mime: str) -> str | None:
    """The format that a MIME type promises, or None for one that isn't accepted."""
    return _FORMAT_OF_MIME.get(mime.lower())


def kind_of(name: str) -> str | None:
    """ "image" or "video" for a format of ours, None for anything else."""
    return next((kind for kind, formats in FORMATS.items() if name in formats), None)
