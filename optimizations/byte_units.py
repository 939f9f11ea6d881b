"""Convert numbers of bytes to text and back. Units are binary (1 KB = 1024 B), as in the papers."""

from __future__ import annotations

_UNITS = ("B", "KB", "MB", "GB", "TB")


def format_bytes(count: float) -> str:
    """Return bytes with a binary unit and one decimal, as in the papers: 8192 -> "8.0 KB"; below 1 KB "16 B"."""
    scaled = float(count)
    for unit in _UNITS:
        if abs(scaled) < 1024 or unit == _UNITS[-1]:
            break
        scaled /= 1024
    return f"{scaled:.0f} {unit}" if unit == "B" else f"{scaled:.1f} {unit}"


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a text of `format_bytes`, as exact as the printed digits: "8.0 KB" -> 8192.

    Raises:
        ValueError: the text is not a number followed by one of B, KB, MB, GB, TB.
    """
    number, _, unit = text.partition(" ")
    if unit not in _UNITS:
        raise ValueError(f"{text!r} is not a byte count; expected a number and one of {', '.join(_UNITS)}")
    return round(float(number) * 1024 ** _UNITS.index(unit))
