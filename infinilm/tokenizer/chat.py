"""Chat templates: conversations checked, and rendered by a process of its own that can be ended.

What a template asks for (loops in loops, powers of powers, strings that double) cannot be told from honest
work beforehand, nor interrupted from within Python. So `render.py` is a program, started at the first render
and kept. The kernel bounds its CPU time and memory. If it ends, that is an error; the next starts another.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from reprlib import repr as short
from typing import Any

from infinilm.tokenizer.error import TokenizerError, errors_of

PROGRAM = str(Path(__file__).with_name("render.py"))
WALL_SECONDS = 60  # for what takes no CPU time; wide, since a second of it can take long on a busy machine
MAX_TEMPLATE = 1 << 20  # characters
MAX_LINE = 16 << 20  # bytes, of a request and of an answer

ESCAPES = re.compile(r"(?=((\\u[0-9a-f]{4})(?:\\u[0-9a-f]{4})?))")  # of JSON: one, and it with the next
# Not where none is the same as '', as in Ministral 3's, which then asks for the length of either.
ASKS_FOR_NONE = re.compile(
    r"""\bcontent(['"]\])? is (not )?none\b(?! or \S*\bcontent(['"]\])? == (''|""))""", re.IGNORECASE
)
# What transformers takes besides variables: the value that asks for nothing, and the way out for others
OPTIONS: dict[str, tuple[Any, str]] = {
    "tokenize": (False, "a text is written here, of which encode_chat gives the tokens"),
    "return_tensors": (None, "a text is written here, of which encode_chat gives the tokens"),
    "return_dict": (False, "a text is written here, of which encode_chat gives the tokens"),
    "chat_template": (None, "give it to LLM"),
    "continue_final_message": (False, "write what the answer begins with after the text"),
}
TEXT_KINDS = ("text", "input_text", "output_text", "refusal")  # parts of a content that are read
IMAGE_KINDS = ("image_url", "input_image")
# OpenAI's words, by which Codex takes an image out of a conversation: it would be refused for ever.
NO_IMAGE = "The image data you provided does not represent a valid image to a model that reads text alone"
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # what messages call them; the first counts


class Renderer:
    """One template, rendered as transformers renders it, by one process that threads take in turns."""

    def __init__(self, template: str) -> None:
        if len(template) > MAX_TEMPLATE:
            found = f"has {len(template)} characters, but at most {MAX_TEMPLATE} are taken"
            raise TokenizerError(f"chat template: {found}")
        self.template = template
        self._lock = threading.Lock()
        self._process: _Process | None = None
        _RENDERERS.add(self)

    def __reduce__(self) -> tuple[type["Renderer"], tuple[str]]:
        return Renderer, (self.template,)

    def render(self, variables: dict[str, Any]) -> str:
        """The text that the template writes, its variables carried over as JSON."""
        request = _line({"template": self.template, "variables": variables})
        with self._lock:
            answer = json.loads(self._ask(request))
        if "error" in answer:
            raise TokenizerError(f"chat template: {answer['error']}")
        return str(answer["text"])

    def let_go(self) -> None:
        """In a forked child: leave the process to the parent, and a lock that no thread here will open."""
        if self._process:
            self._process.abandon()
        self._lock, self._process = threading.Lock(), None

    def _ask(self, request: bytes) -> bytes:
        if self._process is None or not self._process.is_running():
            self._process = _Process()
        return self._process.ask(request)


class _Process:
    """render.py, running: ended with this object, and by itself when the process that started it is gone."""

    def __init__(self) -> None:
        self._socket, its_end = socket.socketpair()
        self._socket.settimeout(WALL_SECONDS)
        self._answers = self._socket.makefile("rb")
        with its_end:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", PROGRAM, *map(str, sys.path)],
                stdin=its_end.fileno(),
                stdout=its_end.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the program at the terminal
            )
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, self._socket, self._answers)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes) -> bytes:
        """The line it answers with. Without a whole one, also for an interrupt here, it has to end."""
        line = b""
        try:
            with suppress(ConnectionError):  # it ended: then there is no line either
                self._socket.sendall(request)
                line = self._answers.readline(MAX_LINE)
            if not line.endswith(b"\n"):
                raise self._how_it_ended()
        except TimeoutError:
            raise TokenizerError(f"chat template: takes more than {WALL_SECONDS} seconds") from None
        finally:
            if not line.endswith(b"\n"):
                self._end()
        return line

    def _how_it_ended(self) -> Exception:
        """By its timer, or by what is not the template's fault: it was killed, or could not start."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(WALL_SECONDS)
        status = self._process.returncode
        if status == -signal.SIGPROF:
            return TokenizerError("chat template: takes more than 1 second of CPU time")
        return ChildProcessError(
            f"chat template: the process that renders it ended with status {status}; `python {PROGRAM}` may "
            "tell why"
        )

    def abandon(self) -> None:
        """In a forked child: close what is the parent's without ending it."""
        self._process.returncode = 0  # no child of this process, so nothing to wait for or to warn about
        if self._end.alive:
            os.close(self._socket.detach())


def _end(owner: int, process: subprocess.Popen[bytes], *streams: Any) -> None:
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for stream in streams:
        stream.close()


# A forked child has to let go of all: with its copies of the sockets, processes would outlive the parent.
_RENDERERS: weakref.WeakSet[Renderer] = weakref.WeakSet()


def _let_go_of_all() -> None:
    for renderer in list(_RENDERERS):
        renderer.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


def _line(request: object) -> bytes:
    text = json.dumps(request, ensure_ascii=False, default=_refuse)
    line = text.encode("utf-8", "surrogatepass") + b"\n"
    if len(line) > MAX_LINE:
        rule = f"a conversation has at most {MAX_LINE >> 20} MB as JSON"
        raise TokenizerError(f"{rule}, but this one has {len(line) >> 20} MB")
    return line


def _refuse(value: object) -> None:
    found = type(value).__name__
    raise TokenizerError(f"messages and template variables must be what JSON can hold, but one is a {found}")


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Messages whose contents are texts, also those that came in parts"""
    if not isinstance(messages, list | tuple) or not messages:
        raise TokenizerError(
            f"messages must be a list of at least one message, but got {str(messages)[:60]!r}"
        )
    return [read_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def read_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise TokenizerError(f"{name} must be a dict, but is a {type(message).__name__}")
    if isinstance(content := message.get("content"), list):
        with errors_of(f"{name}['content']"):
            message = {**message, "content": joined_text(content)}
    for key in ("role", "content"):
        found = type(message.get(key)).__name__
        if not isinstance(message.get(key), str) and not is_silent(message, key):
            raise TokenizerError(f"{name}[{key!r}] must be a string, but is a {found}")
    return message


def joined_text(content: Any) -> str | None:
    """A content that may come in parts, as one text"""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("must be a text or a list of parts")
    return "\n".join(map(part_text, content))


def part_text(part: Any) -> str:
    """What the APIs call text has its text under the same key, but for refusals."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in IMAGE_KINDS:
        raise ValueError(f"a part must be text, but is of type {kind!r}: {NO_IMAGE}")
    text = part.get("refusal" if kind == "refusal" else "text") if kind in TEXT_KINDS else None
    if not isinstance(text, str):
        wanted = "{'type': 'text', 'text': ...}, for the model reads nothing else"
        raise ValueError(f"a part must be {wanted}, but is {short(part)}")
    return text


def without_options(variables: dict[str, Any]) -> dict[str, Any]:
    """What is left for a template, which would pass over the rest in silence"""
    for name, (nothing, way_out) in OPTIONS.items():
        if name in variables and variables[name] is not nothing:
            found = repr(variables[name])[:60]
            raise TokenizerError(f"apply_chat_template does not take {name}={found}: {way_out}")
    return {name: value for name, value in variables.items() if name not in OPTIONS}


def is_silent(message: dict[str, Any], key: str = "content") -> bool:
    """An assistant that only calls tools has no content."""
    return key == "content" and message.get("role") == "assistant" and message.get("content") is None


def with_content(messages: Sequence[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Templates add contents to other text, which None does not let them; but DeepSeek's know calls by it."""
    nothing = None if ASKS_FOR_NONE.search(template) else ""
    return [{**message, "content": nothing} if is_silent(message) else message for message in messages]


def with_thoughts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Under both names that templates read, as transformers gives them: GPT-OSS's reads the second."""
    found = []
    for message in messages:
        thoughts = [message[key] for key in THOUGHTS if message.get(key) is not None]
        if thoughts:
            message = {"thinking": thoughts[0], **message, "reasoning_content": thoughts[0]}
        found.append(message)
    return found


def unused_character(text: str) -> str:
    """One that a text has neither as it is nor as JSON in ASCII writes it"""
    first = chr(0xE000)
    if first not in text and _in_ascii(first) not in text:  # as nearly always, in a hundredth of the time
        return first
    used = {*text, *(escape for found in ESCAPES.findall(text) for escape in found)}
    for character in map(chr, range(0xE001, 0x110000)):
        if character not in used and _in_ascii(character) not in used:
            return character
    raise TokenizerError("the conversation has every character there is, and leaves none to mark words with")


def without_marker(text: str, marker: str) -> str:
    """The text as it would be, also where its template writes JSON in ASCII"""
    return text.replace(marker, "").replace(_in_ascii(marker), "")


def _in_ascii(character: str) -> str:
    return json.dumps(character)[1:-1]


def break_up(value: Any, pattern: re.Pattern[str], marker: str) -> Any:
    """The same data with a marker inside every match of pattern, so that nothing matches any more."""
    try:
        return _broken_up(value, pattern, marker)
    except RecursionError:
        raise TokenizerError("messages must not be nested as deeply as this one") from None


def _broken_up(value: Any, pattern: re.Pattern[str], marker: str) -> Any:
    match value:
        case str():
            return pattern.sub(lambda match: match[0][0] + marker + match[0][1:], value)
        case dict():
            pairs = [_broken_up(pair, pattern, marker) for pair in value.items()]  # keys are written too
            return dict(pairs)
        case list() | tuple():
            return [_broken_up(item, pattern, marker) for item in value]
    return value
