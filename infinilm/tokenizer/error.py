"""What goes wrong with tokenizers."""

from collections.abc import Iterator
from contextlib import contextmanager


class TokenizerError(ValueError):
    """A tokenizer file, a chat template or an input to them that cannot be used, and why."""


class TooLong(TokenizerError):
    """A text that is sure to have more tokens than may be, which is known before it is encoded."""

    def __init__(self, least: int, most: int) -> None:
        limit = f"the model and its cache take {most} at most"
        super().__init__(f"the prompt has at least {least} tokens, but {limit}")
        self.least = least


@contextmanager
def errors_of(subject: str) -> Iterator[None]:
    """Whatever the Rust library or a template throws becomes TokenizerError, panics included. A system that
    has no file, process or memory left is not their fault."""
    try:
        yield
    except (TokenizerError, OSError, MemoryError):
        raise
    except Exception as error:
        raise TokenizerError(f"{subject}: {error}") from error
    except BaseException as error:
        # A Rust panic derives from BaseException and its type cannot be imported; Ctrl-C must pass.
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{subject}: the tokenizers library failed: {error}") from error
