"""Texts made fit to be shown in a message, on one line and not too long."""


def shorten(text: str, limit: int) -> str:
    """Beginning and end of a text of more than `limit` characters: a prompt's question comes last, as an error does."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [.. {len(text) - 2 * half} characters ..] {text[-half:]}"


def one_line(text: str) -> str:
    """Each run of blanks and line breaks as one blank; lone surrogates, which a terminal refuses, as `?`."""
    return " ".join(text.encode("utf-8", "replace").decode().split())
