# SPDX-License-Identifier: Apache-2.0
"""Decoded pixels of any accepted kind to uint8 RGB: arrays, tensors, PIL images; alpha on white."""

import sys

from tensorrt_llm.visual_gen.media_policy import (
    MediaError,
    MediaPolicy,
    bad_media,
    check_size,
    shorten,
)

# EXIF orientation (tag 0x0112) -> member of PIL.Image.Transpose that makes the picture upright.
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
_SIDEWAYS = (5, 6, 7, 8)
ORIENTATION_TAG = 0x0112
_PLAIN_MODES = ("1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV")
_ALPHA_MODES = ("LA", "PA", "RGBA")
_WIDE_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
_CHANNELS = (1, 3, 4)
_CHANNELS_FIRST = tuple((count,) for count in _CHANNELS)


def is_pil_image(value: object) -> bool:
    """Whether this is a PIL image, without importing Pillow where nobody has."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def is_array(value: object) -> bool:
    """Whether this is a NumPy array or a tensor of torch's kind."""
    numpy = sys.modules.get("numpy")
    return (numpy is not None and isinstance(value, numpy.ndarray)) or _is_tensor(value)


def _is_tensor(value: object) -> bool:
    return all(hasattr(value, name) for name in ("detach", "cpu", "numpy", "shape", "dtype"))


def rgb_of_array(value, rank: int, policy: MediaPolicy, label: str, max_pixels: int):
    """Pixels of a channels-last array or tensor.

    Args:
        value: uint8 0..255 or floating point 0..1; [H, W] (``rank`` 3 alone) or [..., H, W, C]
            with C = 1 (grey), 3 (RGB) or 4 (RGB and alpha).
        rank: 3 for a picture, 4 for a clip.
        policy: Limits on the size.
        label: For errors.
        max_pixels: Limit on one picture.

    Returns:
        (uint8 array [..., H, W, 3] of its own memory, what was applied).

    Raises:
        MediaError: another shape or dtype, floats that aren't finite or outside 0..1, a size
            outside the limits.
    """
    import numpy as np

    shape = tuple(value.shape)
    channels = 1 if len(shape) == 2 == rank - 1 else shape[-1] if len(shape) == rank else None
    if channels not in _CHANNELS or shape[0] == 0:
        lead = "[T, H, W, C]" if rank == 4 else "[H, W] or [H, W, C]"
        remedy = "reshape it to that, with the channels last"
        if shape[-3:-2] in _CHANNELS_FIRST:
            remedy = "channels come last: permute them"
        raise bad_media(
            "Pixels of another shape",
            label,
            expected=f"{lead} with C = 1, 3 or 4",
            found=shape,
            remedy=remedy,
        )
    height, width = shape[rank - 3 : rank - 1]
    check_size(height, width, policy, label, max_pixels=max_pixels)
    if _is_tensor(value):
        value = value.detach().cpu()
        # NumPy knows no bfloat16; float32 holds every narrower float exactly.
        value = (value.float() if value.is_floating_point() else value).numpy()
    applied: list[str] = []
    if np.issubdtype(value.dtype, np.floating):
        # min and max carry a NaN through, and comparisons with it are False.
        low, high = value.min(), value.max()
        if not (low >= 0 and high <= 1):
            raise bad_media(
                "Floating-point pixels outside their range",
                label,
                expected="0 to 1, all finite",
                found=f"{low:g} to {high:g}",
                remedy="scale them to 0..1, or convert to uint8",
            )
        value = np.rint(value * np.float32(255)).astype(np.uint8)
        applied.append("float 0..1 to 8 bits")
    elif value.dtype != np.uint8:
        raise bad_media(
            "Pixels of another dtype",
            label,
            expected="uint8 or floating point",
            found=value.dtype,
            remedy="convert them to uint8",
        )
    value = value.reshape(*shape[: rank - 1], channels)
    if channels == 4:
        value, changed = over_white(value)
        return value, (*applied, "alpha over white") if changed else tuple(applied)
    if channels == 1:
        applied.append("grey to RGB")
        value = np.repeat(value, 3, axis=-1)
    return np.array(value, np.uint8, order="C"), tuple(applied)


def over_white(rgba):
    """Composite uint8 [..., 4] on white: round((c * a + 255 * (255 - a)) / 255).

    Returns:
        (uint8 array [..., 3], whether anything was transparent).
    """
    import numpy as np

    rgb, alpha = np.array(rgba[..., :3], order="C"), rgba[..., 3:]
    changed = bool((alpha < 255).any())
    if changed:
        for colour, opacity in zip(rgb, alpha, strict=True):  # rows or frames: little memory
            # White is what remains of the light: 255 - round((255 - c) * a / 255), in 16 bits.
            shade = (255 - colour).astype(np.uint16) * opacity
            colour[...] = 255 - (shade + 127) // 255
    return rgb, changed


def rgb_of_pil(image, policy: MediaPolicy, label: str):
    """Pixels of a PIL image: the current frame, upright by its EXIF orientation.

    Args:
        image: Any PIL image, loaded or not.
        policy: Limits on the size.
        label: For errors.

    Returns:
        (uint8 array [H, W, 3] of its own memory, what was applied, height and width as stored).

    Raises:
        MediaError: a size outside the limits, a time outside its limit, data that can't be
            decoded, or a mode without a known range (32-bit integers, floats) or meaning (LAB).
    """
    from PIL import Image

    check_size(image.height, image.width, policy, label, max_pixels=policy.max_image_pixels)
    # Pillow turns a TIFF upright while it loads it, and then drops the tag.
    tiff = image.format == "TIFF"
    orientation = _orientation(image) if tiff else 1
    image.load()
    if not tiff:
        orientation = _orientation(image)
    method = None if tiff else _UPRIGHT.get(orientation)
    pixels, applied = _rgb_of_mode(image, label)
    if orientation in _UPRIGHT:
        applied.insert(0, f"EXIF orientation {orientation}")
    if method is not None:
        import numpy as np

        turned = Image.fromarray(pixels).transpose(Image.Transpose[method])
        pixels = np.array(turned)
    height, width = pixels.shape[:2]
    stored = (width, height) if orientation in _SIDEWAYS else (height, width)
    return pixels, tuple(applied), stored


def _orientation(image) -> int:
    """The EXIF orientation; 1 (upright) without one, or where the metadata is broken."""
    try:
        return image.getexif().get(ORIENTATION_TAG, 1)
    except MediaError:  # the time is over
        raise
    except Exception:  # broken metadata raises nearly anything, and viewers ignore it
        return 1


def _rgb_of_mode(image, label: str):
    """Pixels of a loaded PIL image by its mode, not yet turned; and what was applied."""
    import numpy as np

    mode = image.mode
    if mode in _WIDE_MODES:
        wide = np.asarray(image).astype(np.uint32)
        grey = ((wide * 255 + 32767) // 65535).astype(np.uint8)
        applied = ["16-bit grey to 8 bits"]
        if isinstance(clear := image.info.get("transparency"), int):
            grey[wide == clear] = 255
            applied.append("alpha over white")
        return np.repeat(grey[..., None], 3, axis=-1), applied
    if mode not in _PLAIN_MODES + _ALPHA_MODES:
        raise bad_media(
            "Pixels of a kind without a known range",
            label,
            expected="8-bit grey, palette, RGB, RGBA or CMYK, or 16-bit grey",
            found=f"Pillow mode {shorten(mode, 20)}",
            remedy="convert it to 8-bit RGB first",
        )
    applied = [] if mode in ("RGB", "RGBA") else [f"{mode} to RGB"]
    if image.has_transparency_data:
        pixels, changed = over_white(np.asarray(image.convert("RGBA")))
        return pixels, [*applied, "alpha over white"] if changed else applied
    return np.array(image.convert("RGB")), applied
