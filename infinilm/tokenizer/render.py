"""Renders chat templates as transformers does: a program of its own, which `chat.py` starts and talks to.

A request is a line of JSON on stdin, {"template": ..., "variables": ...}; the answer has "text" or "error". A
template comes with the model and may ask for anything: jinja2 keeps it from running code, the kernel from
taking too much time or memory. Only jinja2 and the standard library are used here.
"""

import functools
import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any

if __name__ == "__main__":
    sys.path.extend(sys.argv[1:])  # where chat.py finds its packages; -I -S knows the standard library alone

import jinja2
import jinja2.ext
import jinja2.sandbox

CPU_SECONDS = 1
MEMORY = 256 << 20
MAX_ANSWER = 16 << 20  # bytes: four times what a million tokens are written with
MAX_OWN_TEXT = 1 << 20  # bytes that a template may add to four times what it was given: all has to be encoded
MAX_MESSAGE = 2000  # characters of an error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here only what stands in it counts."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line_number)


def chat_environment() -> jinja2.Environment:
    """The one place a template environment is made: templates come with the model and are not trusted."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes <, >, & and ' for HTML, which no model was trained on.
    options: Any = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class Refusal(jinja2.TemplateError):
    """A template's own word on a conversation it has no form for."""


def _raise_template_error(message: str) -> None:
    raise Refusal(message)


@functools.lru_cache(maxsize=1)
def _compiled(template: str) -> jinja2.Template:
    return chat_environment().from_string(template)


def answer(request: bytes) -> bytes:
    """The line that answers a request: the text, or what is wrong with the template."""
    try:
        content = json.loads(request)
        text = _compiled(content["template"]).render(content["variables"])
        line = json.dumps({"text": text}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except MemoryError:
        return _error(f"needs more than {MEMORY >> 20} MB of memory")
    except RecursionError:
        return _error("nests or calls itself too deeply")
    except Refusal as error:
        return _error(_reason(str(error)[:MAX_MESSAGE]))
    except Exception as error:
        return _error(str(error)[:MAX_MESSAGE] or type(error).__name__)
    limit = min(MAX_ANSWER, MAX_OWN_TEXT + 4 * len(request))
    if len(line) >= limit:
        return _error(f"writes {len(line)} bytes, but for this conversation {limit} is the limit")
    return line


def _reason(refusal: str) -> str:
    # Gemma was trained without a system role. What it was to say is said by the user.
    advice = (
        "; put its text at the beginning of the first user message" if "system" in refusal.lower() else ""
    )
    return f"refuses this conversation: {refusal}{advice}"


def _error(message: str) -> bytes:
    return json.dumps({"error": message}).encode()


# --- The process --------------------------------------------------------------------------------------------


def limit_resources() -> None:
    """From here on there is memory for one template, and the timer of `serve` ends the process."""
    if sys.platform == "linux":  # other kernels do not bound it
        _lower(resource.RLIMIT_AS, _address_space() + MEMORY)
    _lower(resource.RLIMIT_CORE, 0)
    # The parent may have it ignored or blocked, which a child inherits; its default is to end the process.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def serve() -> None:
    """Answer until stdin ends, which it does with the parent."""
    while request := sys.stdin.buffer.readline():
        # The timer counts CPU time, so that a busy machine refuses nobody. At its end the kernel ends the
        # process; a handler in Python would wait for 10**(10**8) to return.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        line = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    answer(b'{"template": "{{ messages | tojson }}", "variables": {"messages": []}}')  # loads what waits
    limit_resources()
    serve()
