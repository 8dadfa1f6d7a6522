"""Structured outputs: which tokens may follow, so that a text is what StructuredOutputsParams say.

The work is done by llguidance, which is at home in this file and in those whose names begin like its own.
What it cannot enforce is refused, never loosened, but where a caller asks for that by `loosened`.
"""

from __future__ import annotations

import functools
import json
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import llguidance
import torch
from torch import Tensor

from infinilm.draw import WORD, bits_of
from infinilm.engine.grammar_schema import check_schema, closed, drop_notes
from infinilm.engine.grammar_trial import (
    COMPILE_STACK,
    CPU_SECONDS,
    MEMORY,
    SURVIVED,
    Bytes,
    call_with_stack,
    compile_grammar,
)
from infinilm.engine.request import RequestError
from infinilm.sampling import StructuredOutputsParams
from infinilm.tokenizer import Tokenizer

# Between two parts of JSON: a few blanks, or the end of a line and the indentation of the next. Without such
# a bound a model can write blank lines for ever.
WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,64}"
# No \u: with it a key has several spellings, and one that is not the schema's would take any value.
ESCAPES = 'nrbtf\\"'
MAX_MESSAGE_LENGTH = 300
# These may stand inside other classes too.
ASCII_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
PROGRAM = str(Path(__file__).with_name("grammar_trial.py"))
WALL_SECONDS = 60  # for what takes no CPU time; wide, since a second of it can take long on a busy machine
NUM_TRIED = 64
# Bounds end a trial in other ways. These come from outside, as where a machine runs out of memory.
KILLED = (-signal.SIGKILL, -signal.SIGTERM)


class GrammarCompiler:
    """Makes matchers for one vocabulary, whose view for llguidance is built at the first of them.

    vocab_size is the model's: ids beyond the tokenizer are never allowed. `compile` may be called in any
    thread. It lets go of the GIL while it works: a tenth of a second, or some seconds for what it refuses.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted({i for i in eos_token_ids if 0 <= i < vocab_size})

    def compile(self, wanted: StructuredOutputsParams) -> Matcher:
        """RequestError if there is no such text, or if llguidance cannot tell it from others."""
        if not self._eos_token_ids:
            raise wrong_structure("structured_outputs need a model with an end of text; this one has none")
        kind, grammar = tried_grammar(wanted)
        found = Matcher(self._vocabulary, compiled(self._vocabulary.view, kind, grammar), kind)
        found.check()
        return found

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)


class Matcher:
    """Follows one text token by token. To be used by one thread at a time, which may be any.

    `mask` lets go of the GIL while it works, so that a model can run meanwhile.
    """

    def __init__(self, vocabulary: Vocabulary, matcher: llguidance.LLMatcher, kind: str) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._kind = kind

    @property
    def is_finished(self) -> bool:
        """Nothing but the end of the text may follow."""
        return self._matcher.is_stopped()

    def mask(self) -> Tensor:
        """The tokens that may come next, a bit for each, in new words [ceil(V / 32)] of int32.

        End-of-text tokens are among them where the text may end. RequestError where no token may follow, or
        the step took too much work: then the text cannot be completed.
        """
        words = self.no_token
        with refusals(self._kind):
            self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.nbytes)
        check_state(self._matcher, self._kind)
        words &= self._vocabulary.text_or_end if self._matcher.is_accepting() else self._vocabulary.text
        if not words.any():
            raise wrong_structure(f"structured_outputs.{self._kind}: no token of this model can follow here")
        return words

    @property
    def no_token(self) -> Tensor:
        return torch.zeros_like(self._vocabulary.text)

    def accept(self, token_id: int) -> None:
        """The token that came next, one of those that `mask` allowed."""
        with refusals(self._kind):
            self._matcher.consume_token(token_id)
        check_state(self._matcher, self._kind)

    def copy(self) -> Matcher:
        """Another text of the same kind, from where this one stands: cheaper than to compile again."""
        return Matcher(self._vocabulary, self._matcher.deep_copy(), self._kind)

    def with_masks(self, threads: Executor) -> Masks:
        """A copy whose masks are made in other threads"""
        return Masks(self.copy(), threads)

    def check(self) -> None:
        """Can a text begin, and is all of the grammar enforced?"""
        check_grammar(self._matcher, self._kind)
        self.mask()


class Masks:
    """A matcher whose masks are made in another thread while the model runs.

    Where a text cannot be completed nothing is allowed, so that no token is drawn.
    """

    def __init__(self, matcher: Matcher, threads: Executor) -> None:
        self._matcher = matcher
        self._threads = threads
        self._next: Future[Tensor] | None = None

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_finished

    def prepare(self) -> None:
        """Begin the next mask; a step begins."""
        if self._next is None:
            self._next = self._threads.submit(self._matcher.mask)

    def mask(self) -> Tensor:
        self.prepare()
        try:
            return self._next.result()  # type: ignore[union-attr]
        except RequestError:
            return self._matcher.no_token

    def accept(self, token_id: int) -> None:
        self._next = None
        with suppress(RequestError):  # the next mask says it again
            self._matcher.accept(token_id)


class Vocabulary:
    """A tokenizer as llguidance wants to see it (its TokenizerWrapper), and which of its tokens are text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        specials = tokenizer.special_token_ids.union(eos_token_ids)
        self.special_token_ids = sorted(token_id for token_id in specials if token_id < vocab_size)
        self.eos_token_id = eos_token_ids[0]
        texts = [i for i, token in enumerate(self.tokens) if token and i not in specials]
        num_words = -(-vocab_size // WORD)
        self.text = bits_of(texts, num_words)
        self.text_or_end = bits_of([*texts, *eos_token_ids], num_words)
        # It keeps what it is given, where Python's garbage collection does not see it: this object would hold
        # itself for ever, and with it the tokenizer.
        seen: Any = weakref.proxy(self)
        self.view = llguidance.LLTokenizer(seen, eos_token=eos_token_ids)

    def __call__(self, text: str) -> list[int]:
        """What is forced comes in the tokens the model knows it by, where they spell it and nothing more."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, allow_special=False)
        is_spelled = b"".join(self.tokens[token_id] for token_id in ids) == text.encode()
        return ids if is_spelled else self.view.greedy_tokenize(text)


# --- From parameters to llguidance's grammars ---------------------------------------------------------------


def grammar_of(wanted: StructuredOutputsParams) -> tuple[str, str]:
    """The kind of the grammar, and its text."""
    if wanted.json is not None:
        return "json", grammar_of_schema(str(wanted.json))
    if wanted.regex is not None:
        return "regex", llguidance.LLMatcher.grammar_from_regex(of_ascii(wanted.regex))
    if wanted.choice is not None:
        return "choice", lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, wanted.choice)))
    if wanted.grammar is not None:
        return "grammar", lark(wanted.grammar)
    return "json_object", grammar_of_schema('{"type":"object"}')


def of_ascii(pattern: str) -> str:
    r"""\d and \w of ASCII alone, as in the patterns of schemas: models find digits that few callers read."""
    return re.sub(r"(?s)\\(.)", lambda found: ASCII_CLASSES.get(found[1], found[0]), pattern)


def lark(text: str) -> str:
    """Said to be Lark: by itself, a text that begins with a brace would be taken for something else."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def grammar_of_schema(schema: str) -> str:
    options: Any = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}
    with refusals("json"):
        found = json.loads(schema)
        check_schema(found)
        drop_notes(found)
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(closed(found)), overrides=options)


def json_rule(schema: dict[str, Any]) -> str:
    """The right side of a Lark rule for JSON of this schema, checked and bounded like any other."""
    text = str(StructuredOutputsParams(json=schema).json)
    inner = json.loads(grammar_of_schema(text))["grammars"][0]["json_schema"]
    return f"%json {json.dumps(inner)}"


def check_enforceable(wanted: StructuredOutputsParams) -> None:
    """RequestError if no vocabulary could enforce it; what this model's cannot spell shows in `compile`."""
    if error := refusal_of(wanted):
        raise wrong_structure(error)


@functools.lru_cache(maxsize=NUM_TRIED)
def refusal_of(wanted: StructuredOutputsParams) -> str | None:
    """For a vocabulary of bytes, which can spell all there is"""
    view = llguidance.LLTokenizer(Bytes(), eos_token=[Bytes.eos_token_id])  # type: ignore[arg-type]
    try:
        kind, grammar = tried_grammar(wanted)
        check_grammar(compiled(view, kind, grammar), kind)
    except RequestError as error:
        return str(error)
    return None


def tried_grammar(wanted: StructuredOutputsParams) -> tuple[str, str]:
    """The kind of a grammar and its text, which takes no more than it may to compile"""
    kind, grammar = grammar_of(wanted)
    try_out(kind, grammar)
    return kind, grammar


def compiled(view: llguidance.LLTokenizer, kind: str, grammar: str) -> llguidance.LLMatcher:
    def compile_or_refuse() -> llguidance.LLMatcher:
        with refusals(kind):
            return compile_grammar(view, grammar)

    return call_with_stack(COMPILE_STACK, compile_or_refuse)  # no thread to be had is no fault of a grammar


@functools.lru_cache(maxsize=NUM_TRIED)
def try_out(kind: str, grammar: str) -> None:
    """Compile it where that may fail in any way; what has been tried out need not be again."""
    command = [sys.executable, "-I", "-S", PROGRAM, *map(str, sys.path)]
    quiet: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
    status, told = 0, b""
    with suppress(subprocess.TimeoutExpired):
        trial = subprocess.run(command, input=grammar.encode(), timeout=WALL_SECONDS, **quiet)
        status, told = trial.returncode, trial.stdout
    if status > 0 or status in KILLED:
        raise RuntimeError(
            f"structured_outputs: `python {PROGRAM}` ended with status {status}; it may tell why"
        )
    # Where SIGCHLD is ignored, or somebody else waits for all children, every status is 0.
    if told != SURVIVED:
        bounds = f"more than {CPU_SECONDS} seconds, {MEMORY >> 20} MB or too deep a stack"
        raise refused(kind, f"it takes {bounds} to compile; make it smaller")


# --- What is refused ----------------------------------------------------------------------------------------


def check_grammar(matcher: llguidance.LLMatcher, kind: str) -> None:
    """Is all of it enforced?"""
    check_state(matcher, kind)
    if warnings := matcher.get_grammar_warnings():
        raise refused(kind, "; ".join(warnings))


def check_state(matcher: llguidance.LLMatcher, kind: str) -> None:
    if matcher.is_error():
        raise refused(kind, matcher.get_error())


def refused(kind: str, message: str) -> RequestError:
    reason = " ".join(message.partition("\n<")[0].split())
    if reason == "NoExtensionBias":
        reason = "no text is of this kind"
    reason = reason.replace("Unimplemented keys", "leave out what no grammar holds a text to")
    if len(reason) > MAX_MESSAGE_LENGTH:
        reason = f"{reason[:MAX_MESSAGE_LENGTH]}..."
    return wrong_structure(f"structured_outputs.{kind} cannot be enforced: {reason}")


def wrong_structure(message: str) -> RequestError:
    return RequestError(message, "structured_outputs")


@contextmanager
def refusals(kind: str) -> Iterator[None]:
    """Whatever llguidance throws is about this request, panics included."""
    try:
        yield
    except RequestError:
        raise
    except (ValueError, RuntimeError) as error:
        raise refused(kind, str(error)) from error
    except BaseException as error:
        # A Rust panic derives from BaseException and its type cannot be imported; Ctrl-C must pass.
        if type(error).__name__ != "PanicException":
            raise
        raise refused(kind, f"llguidance failed: {error}") from error
