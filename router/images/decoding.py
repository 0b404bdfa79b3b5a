"""Pixels of a sent image, with bounds (Pillow; only in the process that prepares images)."""

from __future__ import annotations

import io
import warnings

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
WHITE = (255, 255, 255, 255)
SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N", "I")


class BadImage(ValueError):
    """An image that cannot be taken, in words for the client."""


def decode(data: bytes, most_pixels: int) -> Image.Image:
    """First frame in RGB, turned upright, with white where it is transparent.

    Raises:
        BadImage: it is in no known format, broken, or too large.
    """
    Image.MAX_IMAGE_PIXELS = most_pixels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > most_pixels:  # before any pixel is made
                raise BadImage(f"has {width} x {height} pixels, more than the {most_pixels} allowed")
            image.seek(0)
            image.load()
            return _in_colours(ImageOps.exif_transpose(image))
        except BadImage:
            raise
        except UnidentifiedImageError:
            raise BadImage("is in none of the formats PNG, JPEG, WebP and GIF") from None
        except Image.DecompressionBombError:
            raise BadImage(f"has more than the {most_pixels} pixels allowed") from None
        except Exception as error:  # whatever broken data does to a decoder
            raise BadImage(f"cannot be decoded: {str(error)[:100]}") from error


def _in_colours(image: Image.Image) -> Image.Image:
    if image.mode in SIXTEEN_BITS:  # their upper eight bits
        image = image.point(lambda value: value / 256).convert("L")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        own = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", own.size, WHITE), own)
    return image.convert("RGB")
