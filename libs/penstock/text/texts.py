"""Texts as they come in: bytes of another encoding are lone surrogates in the arguments of a program."""


def is_utf8(text: str) -> bool:
    """Whether a text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
