"""Chat templates end: whatever one asks for, it is text or a TokenizerError, and the next one renders."""

import os
import pickle
import re
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import is_gone, wait_until

from infinilm.tokenizer import TokenizerError, chat
from infinilm.tokenizer.chat import Renderer

HONEST = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
VARIABLES = {"messages": [{"role": "user", "content": "é"}]}
RENDERED = "<user>é"

LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"
GROWING = (
    "{% set n = namespace(x=START) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
)

TOO_LONG = {
    "loops in loops": LOOP * 4 + END * 4,
    "a power of a power": "{{ 10 ** (10 ** 8) }}",
    "twice itself": "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a filter over much text": "{{ ('www.' * 10**6) | urlize }}",
    "slow to compile": "{{ " + "1 + " * 100_000 + "1 }}",
}

TOO_LARGE = {
    "string times number": "{{ 'a' * 3 * 10**9 }}",
    "list times number": "{{ [0] * 10**9 }}",
    "a string that doubles": GROWING.replace("START", "'a'"),
    "a list that doubles": GROWING.replace("START", "[1]"),
    "indented json": "{{ messages | tojson(indent=10**9) }}",
    "separated json": "{{ range(99999) | list | tojson(separators=('a' * 10**6, '')) }}",
    "printf": "{{ '%9999999999d' | format(1) }}",
    "printf of a float": "{{ '%.999999999f' % 1.5 }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format by mapping": "{{ '{a:>9999999999}'.format_map({'a': 1}) }}",
    "center": "{{ 'a' | center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ '1'.zfill(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "indent": "{{ 'a\nb' | indent(10**10) }}",
    "replace": "{{ ('a' * 10**5) | replace('a', 'a' * 10**5) }}",
    "translate": "{{ 'abc'.translate({97: 'a' * 10**9}) }}",
    "join": "{{ range(99999) | join('a' * 10**5) }}",
    "batch": "{{ range(5) | batch(10**9, 0) | list }}",
    "map": "{{ range(99999) | map('string') | map('center', 10**6) | list }}",
}

TOO_DEEP = {
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "lists": "{{ " + "[" * 100_000 + " }}",
    "negations": "{{ " + "not " * 100_000 + "1 }}",
    "conditions": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
}

WRONG = {
    "its own message": (
        "{{ raise_exception('roles must <alternate>') }}",
        "chat template: refuses this conversation: roles must <alternate>$",
    ),
    "no system role": (
        "{{ raise_exception('System role not supported') }}",
        "System role not supported; put its text at the beginning of the first user message$",
    ),
    "a long message": (
        "{{ raise_exception('a' * 10**6) }}",
        "chat template: refuses this conversation: a{2000}$",
    ),
    "a long range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "a long number": ("{{ 10 ** 5000 }}", "4300 digits"),
    "loops nested": (LOOP * 30 + END * 30, "too many statically nested blocks"),
    "a tag that is none": ("{% nonsense %}", "unknown tag 'nonsense'"),
    "a way out of the sandbox": ("{{ ''.__class__.__mro__ }}", "'__class__' of 'str' object is unsafe"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "much text": (
        "{{ 'a' * 2**21 }}",
        "writes 2097164 bytes, but for this conversation 10489[0-9]{2} is the limit",
    ),
    "a large template": ("a" * (2**20 + 1), "has 1048577 characters, but at most 1048576 are taken"),
}


@pytest.fixture(autouse=True)
def _parent_stays_small():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    # KB: five copies of the largest conversation here and some, far below the 256 MB of the child
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 160 << 10


def error_of(renderer: Renderer, variables: dict[str, Any] = VARIABLES) -> str:
    with pytest.raises(TokenizerError) as error:
        renderer.render(variables)
    return str(error.value)


def worker_of(renderer: Renderer) -> psutil.Process:
    assert renderer._process is not None
    return psutil.Process(renderer._process._process.pid)


def retarget(renderer: Renderer, template: str) -> None:
    """Another template for the same process."""
    renderer.template = template


def test_templates_that_never_end_are_errors_after_a_second_of_cpu_time():
    def error_and_next(template: str) -> tuple[str, str]:
        renderer = Renderer(template)
        error = error_of(renderer)
        retarget(renderer, HONEST)
        return error, renderer.render(VARIABLES)

    with ThreadPoolExecutor() as pool:
        found = dict(zip(TOO_LONG, pool.map(error_and_next, TOO_LONG.values()), strict=True))
    expected = ("chat template: takes more than 1 second of CPU time", RENDERED)
    assert found == dict.fromkeys(TOO_LONG, expected)


@pytest.fixture(scope="module")
def shared() -> Renderer:
    """One process for many templates, so that each also proves that the one before did no harm."""
    return Renderer(HONEST)


@pytest.mark.parametrize("template", TOO_LARGE.values(), ids=TOO_LARGE)
def test_templates_that_need_much_memory_are_errors(shared, template):
    retarget(shared, template)
    assert error_of(shared) == "chat template: needs more than 256 MB of memory"
    retarget(shared, HONEST)
    assert shared.render(VARIABLES) == RENDERED


@pytest.mark.parametrize("template", TOO_DEEP.values(), ids=TOO_DEEP)
def test_templates_that_nest_deeply_are_errors(shared, template):
    retarget(shared, template)
    assert error_of(shared) == "chat template: nests or calls itself too deeply"
    retarget(shared, HONEST)
    assert shared.render(VARIABLES) == RENDERED


@pytest.mark.parametrize("template, found", WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_a_template_is_said(template, found):
    with pytest.raises(TokenizerError, match=found):
        Renderer(template).render(VARIABLES)


# --- What is carried over -----------------------------------------------------------------------------------


def test_a_long_conversation_may_be_written_four_times_over(shared):
    retarget(shared, "{{ x }}{{ x }}{{ x }}{{ x }}")
    assert shared.render({"x": "a" * 10**6}) == "a" * 4 * 10**6
    assert "but for this conversation 16777216 is the limit" in error_of(shared, {"x": "a" * 5 * 10**6})


@pytest.mark.parametrize("text", ["", "\n\r\u2028\0", "é你😀", "a\ud800b", "a" * 10**6], ids=len)
def test_text_comes_back_as_it_was(shared, text):
    retarget(shared, "{{ x }}")
    assert shared.render({"x": text}) == text


def test_what_json_cannot_hold_is_refused_by_its_type(shared):
    assert "must be what JSON can hold, but one is a set" in error_of(shared, {"x": {1}})


def test_a_conversation_that_is_too_large_is_refused_with_both_sizes(shared):
    assert "at most 16 MB as JSON, but this one has 20 MB" in error_of(shared, {"x": "a" * (20 << 20)})


def test_messages_nested_too_deeply_are_refused():
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(TokenizerError, match="must not be nested as deeply"):
        chat.break_up([{"extra": nested}], re.compile("a"), "b")


def test_a_text_of_all_characters_is_refused():
    with pytest.raises(TokenizerError, match="every character there is"):
        chat.unused_character("".join(map(chr, range(0xE000, 0x110000))))


# --- The process --------------------------------------------------------------------------------------------


def test_one_process_renders_again_and_again():
    renderer = Renderer(HONEST)
    assert len({(renderer.render(VARIABLES), worker_of(renderer).pid) for _ in range(20)}) == 1


def test_a_process_that_died_is_replaced():
    renderer = Renderer(HONEST)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV):
        renderer.render(VARIABLES)
        worker = worker_of(renderer)
        worker.send_signal(number)
        worker.wait(60)
        assert renderer.render(VARIABLES) == RENDERED


def test_a_process_that_sleeps_is_ended(monkeypatch):
    monkeypatch.setattr(chat, "WALL_SECONDS", 0.1)
    renderer = Renderer(HONEST)
    renderer._process = chat._Process()
    worker = worker_of(renderer)
    worker.suspend()
    assert error_of(renderer) == "chat template: takes more than 0.1 seconds"
    assert not worker.is_running()  # and is no zombie either


def test_a_process_that_cannot_start_is_no_fault_of_the_template(monkeypatch):
    monkeypatch.setattr(chat, "PROGRAM", "/no/such/render.py")
    told = "ended with status 2; `python /no/such/render.py` may tell why"
    with pytest.raises(ChildProcessError, match=told):
        Renderer(HONEST).render(VARIABLES)


def test_threads_take_turns():
    renderer = Renderer("{{ x }}")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda x: renderer.render({"x": x}), range(200))) == [str(x) for x in range(200)]


def test_an_interrupt_leaves_no_half_exchange_behind(monkeypatch):
    renderer = Renderer("{{ x }}")
    renderer.render({"x": 1})

    def interrupt(limit: int) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(renderer._process._answers, "readline", interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt):
        renderer.render({"x": 2})
    assert renderer.render({"x": 3}) == "3"


def test_a_renderer_ends_its_process_when_it_goes():
    renderer = Renderer(HONEST)
    renderer.render(VARIABLES)
    worker = worker_of(renderer)
    del renderer
    assert not worker.is_running()


def test_a_renderer_is_copied_without_its_process():
    renderer = Renderer(HONEST)
    renderer.render(VARIABLES)
    assert pickle.loads(pickle.dumps(renderer)).render(VARIABLES) == RENDERED


def test_the_process_has_no_files_but_its_socket_and_cannot_be_interrupted_from_the_terminal():
    with open(__file__) as inheritable:
        os.set_inheritable(inheritable.fileno(), True)
        renderer = Renderer(HONEST)
        renderer.render(VARIABLES)
        worker = worker_of(renderer)
        assert set(os.listdir(f"/proc/{worker.pid}/fd")) == {"0", "1", "2"}
        assert os.getsid(worker.pid) == worker.pid


# --- The process that asks: it forks, it exits, it is killed ------------------------------------------------

# Without the rest of the package, which imports torch
ASKING = f"""
import os, sys, time, types
sys.modules["infinilm.tokenizer"] = package = types.ModuleType("infinilm.tokenizer")
package.__path__ = [{str(Path(chat.__file__).parent)!r}]
from infinilm.tokenizer import chat
from infinilm.tokenizer.chat import Renderer
renderer = Renderer("{{{{ x }}}}")
assert renderer.render({{"x": 1}}) == "1"
pid = renderer._process._process.pid
print(pid, flush=True)
"""

FORKS = """
chat.PROGRAM, program = "no such program", chat.PROGRAM
failed = Renderer("{{ x }}")
try:
    failed.render({})
except ChildProcessError:
    chat.PROGRAM = program
renderer._lock.acquire()  # as if another thread were rendering
child = os.fork()
if child == 0:
    ours = renderer.render({"x": "child"})
    sys.exit(ours != "child" or failed.render({"x": 3}) != "3" or renderer._process._process.pid == pid)
renderer._lock.release()
assert os.waitpid(child, 0)[1] == 0
assert renderer.render({"x": 2}) == "2" and renderer._process._process.pid == pid
"""


def run(code: str, ending: str = "") -> int:
    """Run a program that asks for a render, then ends; the pid of the process that rendered for it."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", ASKING + code + ending]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL if ending else 0, "")
    return int(done.stdout)


def wait_until_gone(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        wait_until(lambda: is_gone(process))


KILLED = "os.kill(os.getpid(), 9)"


def test_a_forked_child_has_a_process_of_its_own_and_leaves_the_parents_alone():
    wait_until_gone(run(FORKS))


@pytest.mark.parametrize("ending", ["", KILLED], ids=["exits", "is killed"])
def test_the_process_ends_with_the_one_that_asked(ending):
    wait_until_gone(run("", ending))


def test_the_process_ends_with_the_one_that_asked_though_a_forked_child_lives_on():
    code = (
        ASKING + "child = os.fork()\nif child == 0:\n    time.sleep(600)\nprint(child, flush=True)\n" + KILLED
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        worker, child = int(asking.stdout.readline()), int(asking.stdout.readline())
        try:
            wait_until_gone(worker)
            assert psutil.pid_exists(child)
        finally:
            os.kill(child, signal.SIGKILL)
