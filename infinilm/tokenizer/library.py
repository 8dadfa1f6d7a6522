"""What is asked of the `tokenizers` library about a vocabulary, whichever file it came from."""

import copy
import json
from collections.abc import Collection, Iterable
from reprlib import repr as short
from typing import Any

import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from infinilm.tokenizer.error import TokenizerError, errors_of

# Far above any vocabulary in use: nothing of ours is to be sized by an id of four thousand million.
MAX_VOCAB_SIZE = 1 << 24


def try_out(library: tokenizers.Tokenizer, source: str) -> None:
    """Encode once, so that a file whose parts do not fit together is refused now and not in a request."""
    library.no_truncation()
    library.no_padding()
    with errors_of(source):
        _check_added_tokens(library)
        found = library.encode("try out").ids
    if any(library.id_to_token(token_id) is None for token_id in found):  # a frame names its ids itself
        end = vocab_size(library) - 1
        raise TokenizerError(f"{source}: encodes to token id {max(found)}, but its vocabulary ends at {end}")


def _check_added_tokens(library: tokenizers.Tokenizer) -> None:
    """Those that the library would look for without end: what its normalizer leaves nothing of, and white
    space that takes more of it, in a run of which each is read from every place on."""
    normalizer = library.normalizer
    for token_id, token in library.get_added_tokens_decoder().items():
        is_rewritten = token.normalized and normalizer is not None
        text = normalizer.normalize_str(token.content) if is_rewritten else token.content
        if not text or (text.isspace() and (token.lstrip or token.rstrip)):
            rule = "but must be more than the normalizer removes, and than white space that takes more of it"
            raise ValueError(f"added token {token_id} is {short(token.content)}, {rule}")


def vocab_size(library: tokenizers.Tokenizer) -> int:
    size = max([_model_size(library), *(i + 1 for i in library.get_added_tokens_decoder())])
    if size > MAX_VOCAB_SIZE:
        raise TokenizerError(f"vocabulary: token id {size - 1} found, but ids must be below {MAX_VOCAB_SIZE}")
    return size


def _model_size(library: tokenizers.Tokenizer) -> int:
    """One more than the last id of the model's own tokens"""
    model, count = library.model, library.get_vocab_size(with_added_tokens=False)
    # As many ids as tokens, from 0 on: none is left for a larger one. The table itself would be copied.
    if all(model.id_to_token(token_id) is not None for token_id in range(count)):
        return count
    return max(library.get_vocab(with_added_tokens=False).values(), default=-1) + 1


def with_special_tokens_as_text(library: tokenizers.Tokenizer, is_start: bool = True) -> tokenizers.Tokenizer:
    """A second front of the same model, shared and not copied, that reads special tokens as plain text: of a
    whole text, or of a stretch inside of one."""
    plain = tokenizers.Tokenizer(library.model)
    plain.normalizer = library.normalizer
    plain.pre_tokenizer = library.pre_tokenizer if is_start else _inside(library.pre_tokenizer)
    plain.post_processor = library.post_processor
    # All of them and in order, since the library numbers added tokens itself.
    plain.add_tokens([token for _, token in sorted(library.get_added_tokens_decoder().items())])
    plain.encode_special_tokens = True
    return plain


def _inside(step: pre_tokenizers.PreTokenizer | None) -> pre_tokenizers.PreTokenizer | None:
    """The same step, which puts no space before what it is given where it puts one before a text's beginning
    alone."""
    if step is None:
        return None
    inner = copy.deepcopy(step)
    inner.__setstate__(json.dumps(_without_first_space(json.loads(step.__getstate__()))).encode())
    return inner


def _without_first_space(state: Any) -> Any:
    match state:
        case {"type": "Metaspace", "prepend_scheme": "first"}:
            return {**state, "prepend_scheme": "never"}
        case {"type": "Sequence", "pretokenizers": members}:
            return {**state, "pretokenizers": [_without_first_space(member) for member in members]}
    return state


def mark_special(library: tokenizers.Tokenizer, roles: Collection[str], others: Iterable[str]) -> None:
    """What has a role is special whatever else is said of it; others unless they are added tokens already."""
    added = {token.content: token for token in library.get_added_tokens_decoder().values()}
    new = [text for text in {*roles, *others} - added.keys() if library.token_to_id(text) is not None]
    again = [added[text] for text in roles if text in added and not added[text].special]
    for token in again:
        token.special = True
    library.add_special_tokens([*again, *(AddedToken(text, normalized=False) for text in new)])
