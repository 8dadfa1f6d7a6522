"""What goes wrong with tokenizers, and the spelling of byte tokens that both sources share."""

import re

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenizerError(ValueError):
    """A tokenizer file, a chat template or an input to them that cannot be used, and why."""
