"""`infinilm chat`: a conversation, and the commands on it."""

from __future__ import annotations

import argparse
import json
import select
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.cli.generate import answer
from infinilm.cli.options import (
    add_answer_options,
    check_input,
    load,
    one_line,
    reading_input,
    sampling_params,
)
from infinilm.progress import is_dumb

if TYPE_CHECKING:
    from infinilm.llm import LLM


CHAT_HELP = (
    "/reset forgets the conversation, /system TEXT sets its first message, /save FILE writes it, "
    "//TEXT says /TEXT, /exit leaves"
)
# Lines of a paste that reach the terminal less than this after one another are one message.
PASTE_GAP = 0.03


def add(commands: Any) -> None:
    """`infinilm chat`"""
    command = commands.add_parser("chat", help="talk with a model", epilog=CHAT_HELP)
    add_answer_options(command, "a system message to begin with")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    check_input()
    edit_lines()
    sampling_params(options)
    llm, chat = load(options), Chat(options.system)
    if llm.tokenizer.chat_template is None:
        raise ValueError("the model has no chat template; infinilm generate completes plain text by it")
    print(CHAT_HELP, file=sys.stderr)
    while (text := ask()) is not None:
        if is_command(text):
            if not chat.obey(text):
                return
        elif text.strip():
            chat.turn(llm, text.removeprefix("/") if text.startswith("//") else text, options)


def edit_lines() -> None:
    """Give input() a history and line editing, and have it take a paste as a whole, where it can."""
    with suppress(ImportError):
        import readline

        if "libedit" not in (readline.__doc__ or "") and not is_dumb():
            readline.parse_and_bind("set enable-bracketed-paste on")


def is_command(text: str) -> bool:
    return text.startswith("/") and not text.startswith("//")


def ask() -> str | None:
    """What the user says next, None at the end: a line, and those pasted along with it."""
    lines: list[str] = []
    is_asked = sys.stdin.isatty()
    is_shown = is_asked and sys.stdout.isatty()  # else input() would write its prompt among the answers
    if is_asked and not is_shown:
        print("> ", end="", file=sys.stderr, flush=True)
    with reading_input(), suppress(EOFError):
        lines.append(input("> " if is_shown else ""))
        while not is_command(lines[0]) and is_more_pasted():
            lines.append(input())
    if lines:
        return "\n".join(lines)
    if is_asked:
        print(file=sys.stdout if is_shown else sys.stderr)  # the shell goes on below the prompt
    return None


def is_more_pasted() -> bool:
    return sys.stdin.isatty() and bool(select.select([sys.stdin], [], [], PASTE_GAP)[0])


class Chat:
    """A conversation and the commands on it."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def turn(self, llm: LLM, text: str, options: argparse.Namespace) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            token_ids = llm.tokenizer.encode_chat(asked, max_tokens=llm.engine.max_length)
            reply = answer(llm, token_ids, options)
        except KeyboardInterrupt:
            print("\n(stopped; the turn is forgotten)", file=sys.stderr)
            return
        except (ValueError, ArithmeticError) as error:  # logits that are no numbers too
            print(f"infinilm: {one_line(error)}; /reset begins anew", file=sys.stderr)
            return
        self.messages = [*asked, {"role": "assistant", "content": reply}]

    def obey(self, line: str) -> bool:
        """Carry out a command; False to leave."""
        command, _, argument = line.partition(" ")
        if command in ("/exit", "/quit"):
            return False
        if command == "/reset":
            self.reset()
        elif command == "/system":
            self.system = argument or None
            self.reset()
        elif command == "/save" and argument:
            self.save(argument.strip())
        else:
            print(CHAT_HELP, file=sys.stderr)
        return True

    def save(self, path: str) -> None:
        text = json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n"
        try:
            # What UTF-8 cannot write, half a surrogate pair, becomes an escape that JSON knows.
            Path(path).expanduser().write_text(text, encoding="utf-8", errors="backslashreplace")
        except (OSError, ValueError, RuntimeError) as error:  # of a disk, a NUL in the name, no such home
            reason = error.strerror if isinstance(error, OSError) else error
            print(f"infinilm: cannot write {path}: {reason}", file=sys.stderr)
