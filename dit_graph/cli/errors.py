"""The one error of the command line, and how errors are told."""


class UsageError(ValueError):
    """What the caller asked for cannot work; the message is the line that they see."""


def one_line(error: BaseException) -> str:
    """An exception's text without its line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
