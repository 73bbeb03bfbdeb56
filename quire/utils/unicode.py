"""Text that is not Unicode, refused where it comes in."""

from __future__ import annotations

from quire.errors import InvalidUnicode


def check_unicode(text: str, parameter: str) -> None:
    """Half of a surrogate pair stands for no character, and nothing after this could write it down.

    Raises: InvalidUnicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidUnicode(
            f"{parameter} contains an unpaired surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, "
            "which stands for nothing; remove it or replace it with U+FFFD",
            parameter=parameter,
        ) from None
