"""Tries a grammar out: a program of its own, which `grammar.py` starts for each that it has not seen.

llguidance bounds most of its work but not all: some grammars would take minutes or gigabytes, and rules
nested by the thousand use up the stack, which ends the process. Here that is all that ends. The grammar comes
on stdin; SURVIVED on stdout says that it was compiled or refused. Only llguidance and the standard library
are used.
"""

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import TypeVar

if __name__ == "__main__":
    # Where grammar.py finds its packages: -I -S knows the standard library alone.
    sys.path.extend(sys.argv[1:])
    # All that is used here is in one library: what the package imports besides takes most of a trial's time.
    sys.modules["llguidance"] = package = ModuleType("llguidance")
    package.__path__ = [f"{place}/llguidance" for place in sys.path]
    try:
        from llguidance import _lib

        sys.modules["llguidance"] = _lib
    except ImportError:  # it has another name there
        del sys.modules["llguidance"]

import llguidance

CPU_SECONDS = 3
MEMORY = 512 << 20
# What is compiled here must do with less than where it is compiled for good, its steps with less than any
# thread has.
TRIAL_STACK = 8 << 20
COMPILE_STACK = 16 << 20
STEP_STACK = 1 << 20
NUM_STEPS = 16
# Lower than llguidance's own: a state of the lexer takes up to 2 kB.
LIMITS = llguidance.LLParserLimits(max_lexer_states=20_000, max_grammar_size=100_000, verbose_errors=False)
SURVIVED = b"survived"
STACK_SIZE = threading.Lock()  # there is one for all threads that begin
# A fork waits for whoever holds it, or its child would have the lock for ever, and the size.
os.register_at_fork(
    before=STACK_SIZE.acquire, after_in_parent=STACK_SIZE.release, after_in_child=STACK_SIZE.release
)

Result = TypeVar("Result")


class Bytes:
    """A vocabulary of single bytes and an end of text, as llguidance wants to see it."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    special_token_ids = [256]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def call_with_stack(size: int, function: Callable[[], Result]) -> Result:
    """In a thread of its own: how large the stacks of others are, ulimit and the C library decide."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    with STACK_SIZE:
        before = threading.stack_size(size)
        try:
            threading.Thread(target=run).start()
        finally:
            threading.stack_size(before)
    return outcome.result()


def compile_grammar(view: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(view, grammar, log_level=0, limits=LIMITS)


def take_steps(matcher: llguidance.LLMatcher) -> None:
    """The first tokens of some text, as a model would choose them."""
    for step in range(NUM_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if matcher.is_stopped() or not allowed:
            return
        matcher.consume_token(allowed[step * 7 % len(allowed)])


def limit_resources() -> None:
    if sys.platform == "linux":  # other kernels do not bound it
        with open("/proc/self/statm") as file:
            address_space = int(file.read().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, address_space + MEMORY)
    _lower(resource.RLIMIT_CORE, 0)
    # The parent may have it ignored or blocked, which a child inherits; its default is to end the process.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # CPU time, so that a busy machine refuses nobody


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def main() -> None:
    grammar = sys.stdin.buffer.read().decode()
    limit_resources()
    view = llguidance.LLTokenizer(Bytes(), eos_token=[256])  # type: ignore[arg-type]
    matcher = call_with_stack(TRIAL_STACK, lambda: compile_grammar(view, grammar))
    if not matcher.is_error():
        call_with_stack(STEP_STACK, lambda: take_steps(matcher))
    sys.stdout.buffer.write(SURVIVED)


if __name__ == "__main__":
    main()
