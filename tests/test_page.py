"""The chat page in a real Chromium, beside a server that answers as it is told."""

import json
import os
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from browser import PROGRAM, Browser, Tab
from patience import wait_until
from servers import Running, running

from infinilm.server.pages import HEADERS, page_files

ROOT = Path(__file__).parent.parent
SCREENSHOTS = Path(os.environ.get("INFINILM_SCREENSHOTS", ROOT / "tests" / "output"))
NAME = "team/tiny-chat"
TIMINGS = {"prompt_n": 300, "cache_n": 128, "predicted_n": 512, "predicted_per_second": 42.25}

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium")

# A step of an answer: text to send, or something to wait for.
Step = str | Callable[[], object]


def event(**fields: Any) -> str:
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    return f"data: {json.dumps(chunk | fields)}\n\n"


def delta(finish_reason: str | None = None, **fields: str) -> str:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish_reason}])


def progress(total: int, cache: int, processed: int) -> str:
    seen = {"total": total, "cache": cache, "processed": processed}
    return event(choices=[{"index": 0, "delta": {}, "finish_reason": None}], prompt_progress=seen)


def end(finish_reason: str = "stop") -> list[Step]:
    usage = {"prompt_tokens": 300, "completion_tokens": 512, "total_tokens": 812}
    return [delta(finish_reason), event(choices=[], usage=usage, timings=TIMINGS), "data: [DONE]\n\n"]


def answer(*texts: str) -> list[Step]:
    return [delta(role="assistant", content=""), *(delta(content=text) for text in texts), *end()]


def error_body(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "error", "param": None, "code": None}}).encode()


class Server(ThreadingHTTPServer):
    """Serves the page, and answers each conversation with the next of `answers`: steps, or a refusal."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        self.files = page_files()
        self.answers: list[list[Step] | tuple[int, dict[str, str], bytes]] = []
        self.bodies: list[dict[str, Any]] = []
        self.key: str | None = None
        self.model = NAME
        self.is_loading = False
        self.reader_left = Event()

    def said(self) -> list[tuple[str, str]]:
        """The conversation of the last request"""
        return [(message["role"], message["content"]) for message in self.bodies[-1]["messages"]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path in self.server.files:
            content, kind = self.server.files[self.path]
            self.reply(200, {**HEADERS, "Content-Type": kind}, content)
        elif self.path == "/v1/models" and self.is_allowed():
            defaults = {"temperature": 0.7}
            model = {"id": self.server.model, "object": "model", "max_model_len": 8192}
            models = [model | {"default_sampling": defaults}]
            self.reply(200, {}, json.dumps({"object": "list", "data": models}).encode())
        elif self.path != "/v1/models":
            self.reply(404, {}, error_body("no such page"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_allowed():
            return
        self.server.bodies.append(body)
        answered = self.server.answers.pop(0) if self.server.answers else answer("Fine.")
        if isinstance(answered, tuple):
            self.reply(*answered)
        else:
            self.stream(answered)

    def is_allowed(self) -> bool:
        if self.server.is_loading:
            self.reply(503, {"Retry-After": "1"}, error_body("the model is being loaded"))
        elif self.server.key and self.header("Authorization") != f"Bearer {self.server.key}":
            self.reply(401, {}, error_body("a key is needed"))
        else:
            return True
        return False

    def header(self, name: str) -> str:
        """Its bytes as UTF-8, which the library takes for Latin-1"""
        return str(self.headers.get(name, "")).encode("latin-1").decode()

    def reply(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def stream(self, steps: list[Step]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for step in steps:
                if isinstance(step, str):
                    self.wfile.write(step.encode())
                else:
                    self.wait(step)
        except OSError:
            self.server.reader_left.set()

    def wait(self, step: Callable[[], object]) -> None:
        """With comments, as a server sends them to see whether the reader is still there"""
        while not step():
            self.wfile.write(b": still here\n\n")


class Gate(Event):
    """A step that holds an answer until the test opens it"""

    def __call__(self) -> bool:
        return self.wait(0.05)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"), tmp_path_factory.mktemp("downloads"))
    yield browser
    browser.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def address(server: Server) -> str:
    return server.url


@pytest.fixture
def tab(browser: Browser, address: str) -> Iterator[Tab]:
    """The page, opened. Whatever a test does, no script may fail, and no other server be asked."""
    tab = Tab(browser, address)
    tab.open()
    tab.wait("document.getElementById('model').value !== ''")
    yield tab
    assert tab.problems() == []
    assert [url for url in tab.requests() if not url.startswith((address, f"blob:{address}"))] == []
    tab.close()


def ask(tab: Tab, text: str) -> None:
    """Type a message and send it."""
    tab.js("document.getElementById('prompt').focus()")
    tab.type(text)
    tab.press("Enter")


def wait_for_answers(tab: Tab, number: int) -> None:
    whole = "[...document.querySelectorAll('article.assistant .below')].length"
    tab.wait(f"{whole} === {number}")


def choose(tab: Tab, action: str) -> None:
    tab.click("#more")
    tab.click(f"#{action}")


SAMPLE = """## Primes below *n*

The **sieve of Eratosthenes** crosses out multiples; see [the article](https://en.wikipedia.org/wiki/Sieve_of_Eratosthenes).

```python
def primes(n: int) -> list[int]:
    is_prime = [True] * n
    for i in range(2, int(n**0.5) + 1):
        if is_prime[i]:
            is_prime[i * i :: i] = [False] * len(is_prime[i * i :: i])
    return [i for i in range(2, n) if is_prime[i]]
```

| method | time | memory |
| :-- | --: | --: |
| sieve | O(n log log n) | n bytes |
| trial division | O(n√n) | none |

1. Start at `i * i`: smaller multiples are gone.
2. Stop at the root of `n`.
   - beyond it nothing is left
   - ~~not~~ even one

> Simple things first.
"""


def test_an_answer_is_shown_as_it_comes_with_its_speed_below(tab: Tab, server: Server) -> None:
    gate = Gate()
    server.answers = [
        [delta(role="assistant", content=""), delta(content="First **half**"), gate, *answer("!")]
    ]
    ask(tab, "Hello")
    tab.wait("document.querySelector('.assistant strong')?.innerText === 'half'")
    assert tab.count(".assistant .stats") == 0
    gate.set()
    wait_for_answers(tab, 1)
    assert tab.text(".assistant .body") == "First half!"
    assert "42.3 tokens/s · first token after" in tab.text(".assistant .stats")
    assert server.bodies[0] == {
        "model": "team/tiny-chat",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }


def test_markdown_becomes_elements(tab: Tab, server: Server) -> None:
    server.answers = [answer(*(SAMPLE[i : i + 7] for i in range(0, len(SAMPLE), 7)))]
    ask(tab, "How do I find primes?")
    wait_for_answers(tab, 1)
    assert tab.text(".body h3") == "Primes below n"
    assert tab.text(".body figcaption span") == "python"
    assert tab.text(".body pre").startswith("def primes(n: int) -> list[int]:\n    is_prime")
    assert tab.texts(".body th") == ["method", "time", "memory"] and tab.count(".body tbody tr") == 2
    assert tab.count(".body > ol > li") == 2 and tab.count(".body ol ul li") == 2
    assert tab.text(".body del") == "not" and tab.text(".body blockquote") == "Simple things first."
    assert tab.js("document.querySelector('.body a').href").startswith("https://en.wikipedia.org/")
    assert tab.js("document.querySelector('.body a').rel") == "noopener noreferrer nofollow"


TRICKY = [
    "text\n-5 degrees\nmore",
    "text\na | b\n--|--\n1 | 2\n| 3\n\nafter",
    "- a\n\n- b\n  1. c\n\n     d\n- [x] e\nf\n---\ng",
    "***x** y* __z__ a_b_c **open `**` [l](http://a.b/(c)) https://d.e/f). <https://g.h> \\*",
    "> a\n> - b\n>   > c\nd\n#no\n# yes #\n####### no",
    "````md\n```\n````\n~~~\nnever closed\n\n",
    "1) a\n2) b\n\n\ntext  \nbreak\r\nend\n***",
]


def test_a_text_that_grew_letter_by_letter_looks_as_when_it_is_shown_at_once(tab: Tab) -> None:
    shown = """(async (text) => {
      const { MarkdownView } = await import("/markdown.js");
      const [grown, whole] = [document.createElement("div"), document.createElement("div")];
      const view = new MarkdownView(grown);
      for (let end = 0; end <= text.length; end++) view.update(text.slice(0, end));
      new MarkdownView(whole).update(text);
      return [grown.innerHTML, whole.innerHTML];
    })"""
    for text in [SAMPLE, HOSTILE, *TRICKY, SAMPLE + "\n".join(TRICKY)]:
        grown, whole = tab.js(f"{shown}({json.dumps(text)})")
        assert grown == whole


@pytest.mark.parametrize(
    "text, strong",
    [
        ("**注意：**这里", "注意："),
        ("这是**「强调」**文字", "「强调」"),
        ("**Done!**🎉", "Done!"),
        ('**"강조"**는', '"강조"'),
    ],
)
def test_emphasis_ends_beside_letters_without_spaces_and_emoji(
    tab: Tab, server: Server, text: str, strong: str
) -> None:
    server.answers = [answer(text)]
    ask(tab, "Hello")
    wait_for_answers(tab, 1)
    assert tab.text(".assistant strong") == strong
    assert tab.text(".assistant .body") == text.replace("**", "")


def test_a_link_ends_where_a_chinese_sentence_goes_on(tab: Tab, server: Server) -> None:
    server.answers = [answer("请访问https://example.com/a，然后点击。")]
    ask(tab, "Hello")
    wait_for_answers(tab, 1)
    assert tab.text(".assistant a") == "https://example.com/a"


def test_hebrew_and_arabic_are_read_from_the_right_and_code_from_the_left(tab: Tab, server: Server) -> None:
    server.answers = [answer("שלום, עולם!\n\n- פריט\n\n  ```\n  x\n  ```\n\nEnglish.")]
    tab.type("مرحبا، كيف حالك؟")
    direction = "getComputedStyle(document.querySelector('{}')).direction"
    assert tab.js(direction.format("#prompt")) == "rtl"
    tab.press("Enter")
    wait_for_answers(tab, 1)
    for selector in (".user .body", "#title", "#conversations button", ".assistant p", ".assistant ul"):
        assert tab.js(direction.format(selector)) == "rtl", selector
    for selector in ("#prompt", ".assistant pre", ".assistant p:last-child"):
        assert tab.js(direction.format(selector)) == "ltr", selector


HOSTILE = """<script>window.wasRun = true</script><img src=x onerror="window.wasRun = true">
<b>bold?</b> &lt;i&gt; **<u>under</u>**

[go](javascript:window.wasRun=true) [go](JaVaScRiPt:alert(1)) [go](data:text/html,<script>alert(1)</script>)
[go](vbscript:x) [go](//evil.example/x) ![picture](https://evil.example/pixel.png) <javascript:alert(1)>

```html <b onclick="x">
<script>alert(1)</script>
```

| <i>a</i> | b |
|---|---|
| <svg onload=alert(1)> | `<br>` |
"""


def test_html_in_an_answer_stays_text_and_no_script_of_it_runs(tab: Tab, server: Server) -> None:
    server.answers = [answer(*HOSTILE)]
    ask(tab, "<img src=x onerror='window.wasRun = true'>")
    wait_for_answers(tab, 1)
    assert tab.count("#messages :is(script, img, b, i, u, svg[onload], [onclick], [onerror], style)") == 0
    assert "<script>window.wasRun = true</script>" in tab.text(".assistant .body")
    assert tab.text(".user .body") == "<img src=x onerror='window.wasRun = true'>"
    assert tab.js("window.wasRun") is None


def test_links_to_scripts_and_data_are_no_links_and_pictures_are_not_loaded(tab: Tab, server: Server) -> None:
    server.answers = [answer(HOSTILE)]
    ask(tab, "Links?")
    wait_for_answers(tab, 1)
    links = tab.js("[...document.querySelectorAll('#messages a')].map((link) => link.href)")
    assert links == ["https://evil.example/pixel.png"]  # to click on, if the reader wants to
    assert "[go](javascript:window.wasRun=true)" in tab.text(".assistant .body")


def test_code_is_copied_as_it_was_written(tab: Tab, server: Server) -> None:
    server.answers = [answer("```sh\necho '<a>'\n\tmake  all\n```")]
    ask(tab, "Code?")
    wait_for_answers(tab, 1)
    tab.click(".copy")
    tab.wait("document.querySelector('.copy').innerText === 'Copied'")
    assert tab.js("navigator.clipboard.readText()") == "echo '<a>'\n\tmake  all"


def test_the_focus_stays_where_it_was_without_a_clipboard_to_write_to(tab: Tab, server: Server) -> None:
    ask(tab, "Hello")
    wait_for_answers(tab, 1)
    tab.js("Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # as over plain HTTP
    tab.js("document.querySelector('.assistant [aria-label=Copy]').focus()")
    tab.press("Enter")
    tab.wait("document.querySelector('.assistant [aria-label=Copy] use').href.baseVal === '#i-done'")
    assert tab.js("document.activeElement.ariaLabel") == "Copy"


def test_a_long_prompt_shows_how_far_it_was_read(tab: Tab, server: Server) -> None:
    gate, later = Gate(), Gate()
    server.answers = [[progress(8000, 2000, 3000), gate, progress(8000, 2000, 6000), later, *answer("Read.")]]
    ask(tab, "A long story")
    tab.wait("document.querySelector('progress')?.value === 3000")
    assert tab.js("document.querySelector('progress').max") == 8000
    assert tab.text(".waiting") == "Reading the prompt: 3,000 of 8,000 tokens · 2,000 from the cache"
    tab.screenshot(SCREENSHOTS / "progress.png")
    gate.set()
    tab.wait("document.querySelector('progress')?.value === 6000")
    later.set()
    wait_for_answers(tab, 1)
    assert tab.count("progress") == 0


def test_stop_keeps_what_came_and_tells_the_server(tab: Tab, server: Server) -> None:
    server.answers = [[delta(role="assistant", content=""), delta(content="Never"), Gate(), *answer("more")]]
    ask(tab, "Go on")
    tab.wait("document.querySelector('.assistant .body')?.innerText === 'Never'")
    tab.click("#stop")
    wait_for_answers(tab, 1)
    assert tab.text(".assistant .body") == "Never" and tab.text(".remark") == "Stopped."
    assert tab.js("document.getElementById('status').textContent") == "The answer was stopped."
    assert server.reader_left.wait(30)
    ask(tab, "And now?")
    wait_for_answers(tab, 2)
    assert server.said() == [("user", "Go on"), ("assistant", "Never"), ("user", "And now?")]


@pytest.mark.parametrize("key, code", [("Escape", 27), ("Enter", 13), ("Enter", 229)])
def test_keys_of_an_input_method_neither_send_nor_stop_nor_end_an_edit(
    tab: Tab, server: Server, key: str, code: int
) -> None:
    press = f"""document.activeElement.dispatchEvent(new KeyboardEvent("keydown",
        {{key: "{key}", keyCode: {code}, isComposing: {str(code != 229).lower()}, bubbles: true}}))"""
    ask(tab, "Hello")
    wait_for_answers(tab, 1)
    tab.click(".user [aria-label=Edit]")
    tab.js(press)
    assert tab.count(".editor") == 1
    tab.press("Escape")
    gate = Gate()
    server.answers = [[delta(content="Half"), gate, *end()]]
    ask(tab, "Go on")
    tab.wait("document.querySelector('article:nth-child(4) .body')?.innerText === 'Half'")
    tab.type("かん")
    tab.js(press)
    gate.set()
    wait_for_answers(tab, 2)
    assert tab.count(".remark") == 0 and tab.js("document.getElementById('prompt').value") == "かん"
    tab.js(press)
    assert len(server.bodies) == 2


def test_regenerate_asks_again_for_the_same_conversation(tab: Tab, server: Server) -> None:
    server.answers = [answer("One."), answer("Two.")]
    ask(tab, "A number")
    wait_for_answers(tab, 1)
    tab.click("[aria-label=Regenerate]")
    tab.wait("document.querySelector('.assistant .body')?.innerText === 'Two.'")
    wait_for_answers(tab, 1)
    assert server.said() == [("user", "A number")]
    ask(tab, "Another")
    wait_for_answers(tab, 2)
    assert server.said() == [("user", "A number"), ("assistant", "Two."), ("user", "Another")]


def test_an_answer_that_could_not_be_made_again_is_still_there(tab: Tab, server: Server) -> None:
    server.answers = [answer("One."), (429, {"Retry-After": "0"}, error_body("too many at once"))]
    ask(tab, "A number")
    wait_for_answers(tab, 1)
    tab.click("[aria-label=Regenerate]")
    tab.wait("document.querySelector('.error')?.innerText.startsWith('too many at once')")
    assert tab.text(".assistant .body") == "One."


def test_an_answer_stays_whose_next_one_was_stopped_before_it_began(tab: Tab, server: Server) -> None:
    server.answers = [answer("First."), [Gate(), *answer("Second.")]]
    ask(tab, "Hello")
    wait_for_answers(tab, 1)
    tab.click(".assistant [aria-label=Regenerate]")
    tab.wait("!document.getElementById('stop').hidden")
    tab.press("Escape")
    wait_for_answers(tab, 1)
    assert tab.text(".assistant .body") == "First." and tab.count(".remark") == 0
    tab.reload()
    assert tab.text(".assistant .body") == "First."


def test_an_answer_is_kept_until_the_one_in_its_place_begins(tab: Tab, server: Server) -> None:
    gate = Gate()
    server.answers = [answer("First."), [progress(10, 0, 5), gate, *answer("Second.")]]
    ask(tab, "Hello")
    wait_for_answers(tab, 1)
    tab.click(".assistant [aria-label=Regenerate]")
    tab.wait("document.querySelector('progress')?.value === 5")
    kept = (
        "JSON.parse(localStorage['infinilm.conversation.' + location.hash.slice(1)]).messages.at(-1).content"
    )
    tab.js("dispatchEvent(new Event('pagehide'))")
    assert tab.js(kept) == "First."
    gate.set()
    tab.wait(f"{kept} === 'Second.'")


def test_an_edited_message_is_sent_with_what_stood_before_it_alone(tab: Tab, server: Server) -> None:
    server.answers = [answer("One."), answer("Two."), answer("Three.")]
    for number, text in enumerate(["First", "Second"], start=1):
        ask(tab, text)
        wait_for_answers(tab, number)
    tab.click("article:nth-child(3) [aria-label=Edit]")
    assert "What follows is replaced." in tab.text(".editor")
    tab.type(", but better")
    tab.press("Enter")
    tab.wait("document.querySelector('article:nth-child(4) .body')?.innerText === 'Three.'")
    wait_for_answers(tab, 2)
    assert server.said() == [("user", "First"), ("assistant", "One."), ("user", "Second, but better")]


def test_an_edited_answer_goes_into_the_next_request(tab: Tab, server: Server) -> None:
    server.answers = [answer("One."), answer("Two.")]
    ask(tab, "First")
    wait_for_answers(tab, 1)
    tab.click(".assistant [aria-label=Edit]")
    tab.type(" Mine.")
    tab.click(".editor .strong")
    ask(tab, "Next")
    wait_for_answers(tab, 2)
    assert server.said() == [("user", "First"), ("assistant", "One. Mine."), ("user", "Next")]


def test_system_prompt_and_sampling_go_with_the_request(tab: Tab, server: Server) -> None:
    tab.click("#tune")
    values = {"system": "Be brief.", "temperature": "0.3", "top_p": "0.9", "top_k": "40", "min_p": "0.05"}
    for name, value in (values | {"max_tokens": "200", "seed": "7"}).items():
        tab.js(f"document.getElementById('{name}').focus()")
        tab.type(value)
    assert tab.js("temperature.placeholder") == "0.7"
    tab.screenshot(SCREENSHOTS / "settings.png")
    tab.press("Escape")
    ask(tab, "Hello")
    wait_for_answers(tab, 1)
    sampling = {"temperature": 0.3, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 200, "seed": 7}
    assert {name: server.bodies[0].get(name) for name in sampling} == sampling
    assert server.said() == [("system", "Be brief."), ("user", "Hello")]


def test_a_number_out_of_range_is_neither_kept_nor_shown_as_if_it_were(tab: Tab, server: Server) -> None:
    tab.click("#tune")
    tab.js("temperature.focus()")
    tab.type("9")
    tab.press("Escape")
    tab.wait("!settings.open && temperature.value === ''")
    ask(tab, "Hello")
    wait_for_answers(tab, 1)
    assert "temperature" not in server.bodies[0]


def test_settings_are_closed_by_their_button_by_enter_and_by_a_click_beside_them(tab: Tab) -> None:
    tab.click("#tune")
    tab.click("#settings [aria-label=Close]")
    tab.wait("!settings.open")
    tab.click("#tune")
    tab.js("temperature.focus()")
    tab.type("0.5")
    tab.press("Enter")
    tab.wait("!settings.open")
    tab.click("#tune")
    tab.click("#title")
    tab.wait("!settings.open")


def test_reasoning_is_folded_and_not_sent_back(tab: Tab, server: Server) -> None:
    gate = Gate()
    thought = [delta(reasoning_content="Let me "), delta(reasoning="see.")]
    server.answers = [[delta(role="assistant"), *thought, gate, *answer("Four.")], answer("Five.")]
    ask(tab, "2 + 2?")
    tab.wait("document.querySelector('.reasoning .body')?.textContent === 'Let me see.'")
    assert tab.text(".waiting") == "Thinking"
    gate.set()
    wait_for_answers(tab, 1)
    assert tab.js("document.querySelector('.reasoning').open") is False
    assert tab.text(".assistant > .body") == "Four."
    ask(tab, "2 + 3?")
    wait_for_answers(tab, 2)
    assert server.said() == [("user", "2 + 2?"), ("assistant", "Four."), ("user", "2 + 3?")]


def test_conversations_survive_a_reload_and_can_be_renamed_and_deleted(tab: Tab, server: Server) -> None:
    server.answers = [answer("**One**."), answer("Two.")]
    ask(tab, "First question")
    wait_for_answers(tab, 1)
    tab.click("#new")
    ask(tab, "Second question")
    wait_for_answers(tab, 1)
    tab.reload()
    assert tab.texts("#conversations button") == ["Second question", "First question"]
    assert tab.text(".assistant .body") == "Two."
    tab.click("#conversations li:last-child button")
    assert tab.text(".assistant strong") == "One"
    assert "42.3 tokens/s" in tab.text(".assistant .stats")
    choose(tab, "rename")
    tab.js("document.getElementById('answer').select()")
    tab.type("<b>Mine</b>")
    tab.press("Enter")
    tab.wait("document.getElementById('title').innerText === '<b>Mine</b>'")
    choose(tab, "delete")
    tab.click("#ask .strong")
    tab.wait("document.querySelectorAll('#conversations li').length === 1")
    tab.reload()
    assert tab.texts("#conversations button") == ["Second question"]


def test_the_conversation_that_was_asked_about_is_deleted_though_the_reader_went_back(
    tab: Tab, server: Server
) -> None:
    for question in ("Keep me", "Delete me"):
        tab.click("#new")
        ask(tab, question)
        wait_for_answers(tab, 1)
    choose(tab, "delete")
    assert "“Delete me” will be gone" in tab.text("#ask")
    tab.js("history.go(-2)")
    tab.wait("title.innerText === 'Keep me'")
    tab.click("#ask .strong")
    tab.wait("document.querySelectorAll('#conversations li').length === 1")
    assert tab.texts("#conversations button") == ["Keep me"] and tab.text("#title") == "Keep me"


def test_who_goes_back_is_not_caught_by_a_conversation_that_is_gone(tab: Tab, server: Server) -> None:
    for question in ("Keep me", "Delete me"):
        tab.click("#new")
        ask(tab, question)
        wait_for_answers(tab, 1)
    choose(tab, "delete")
    tab.click("#ask .strong")
    tab.wait("title.innerText === 'Keep me'")
    for title in ("New conversation", "New conversation", "Keep me"):
        tab.js("window.isBack = false; addEventListener('popstate', () => { isBack = true }, {once: true})")
        tab.js("history.back()")
        tab.wait("isBack")
        assert tab.text("#title") == title


def test_a_renamed_conversation_gives_the_focus_back_to_its_menu(tab: Tab, server: Server) -> None:
    ask(tab, "Hello")
    wait_for_answers(tab, 1)
    tab.js("more.focus()")
    for key in ("Enter", "Tab", "Tab", "Tab", "Enter"):
        tab.press(key)
    tab.wait("ask.open")
    tab.type("!")
    tab.press("Enter")
    tab.wait("title.innerText === 'Hello!'")
    assert tab.js("document.activeElement.id") == "more"


def test_what_another_tab_writes_leaves_the_reader_where_he_is(tab: Tab, server: Server) -> None:
    server.answers = [answer("\n\n".join(f"Paragraph {i}" for i in range(100)))]
    ask(tab, "A long story")
    wait_for_answers(tab, 1)
    tab.js("scroller.scrollTop = 300")
    tab.wait("!latest.hidden")
    other = Tab(tab.browser, tab.url)
    other.open()
    ask(other, "Another story")
    tab.wait("document.querySelectorAll('#conversations li').length === 2")
    assert tab.js("scroller.scrollTop") == 300
    other.click("#conversations li:last-child button")
    ask(other, "And then?")
    tab.wait("document.querySelectorAll('article').length === 4")
    assert tab.js("scroller.scrollTop") == 300
    tab.browser.call("Target.closeTarget", targetId=other.target)


def test_an_answer_goes_on_while_another_conversation_is_read(tab: Tab, server: Server) -> None:
    gate = Gate()
    server.answers = [[delta(role="assistant", content=""), delta(content="Half"), gate, *answer(" done.")]]
    ask(tab, "Slow")
    tab.wait("document.querySelector('.assistant .body')?.innerText === 'Half'")
    tab.click("#new")
    assert tab.count("article") == 0
    ask(tab, "Me too")
    assert "still being written in another conversation" in tab.text("#notice") and len(server.bodies) == 1
    tab.click("#notice button")
    tab.click(".ideas button")
    assert "still being written in another conversation" in tab.text("#notice") and len(server.bodies) == 1
    tab.click("#conversations button")
    assert tab.text(".assistant .body") == "Half"
    gate.set()
    wait_for_answers(tab, 1)
    assert tab.text(".assistant .body") == "Half done."


def fill_storage(tab: Tab) -> None:
    tab.js("""for (let size = 1 << 23; size; size >>= 1)
                try { localStorage['x' + size] = 'x'.repeat(size) } catch {}""")


def test_storage_that_is_full_is_said_and_the_conversation_goes_on(tab: Tab, server: Server) -> None:
    fill_storage(tab)
    ask(tab, "Is there room?")
    wait_for_answers(tab, 1)
    assert "no room to keep this conversation" in tab.text("#notice")
    assert tab.text(".assistant .body") == "Fine."


def test_room_that_was_made_takes_the_notice_away(tab: Tab, server: Server) -> None:
    fill_storage(tab)
    ask(tab, "Is there room?")
    tab.wait("notice.innerText.includes('no room')")
    wait_for_answers(tab, 1)
    tab.js("for (const key of Object.keys(localStorage)) if (key[0] === 'x') localStorage.removeItem(key)")
    ask(tab, "And now?")
    wait_for_answers(tab, 2)
    assert tab.js("notice.hidden")


def test_what_is_broken_in_storage_is_passed_over(tab: Tab, server: Server) -> None:
    tab.js("""const broken = ['{', 'null', '[]', '{"id": "3", "messages": [{"role": "user"}]}'];
              broken.forEach((text, i) => { localStorage['infinilm.conversation.' + i] = text })""")
    tab.reload()
    ask(tab, "Still alive?")
    wait_for_answers(tab, 1)
    assert tab.texts("#conversations button") == ["Still alive?"]


def test_a_conversation_is_exported_as_json_and_as_markdown(tab: Tab, server: Server) -> None:
    server.answers = [answer("It is **4**.")]
    ask(tab, "What is 2 + 2?")
    wait_for_answers(tab, 1)
    choose(tab, "export-json")
    choose(tab, "export-markdown")
    as_json, as_markdown = (tab.browser.downloads / f"What-is-2-2.{ending}" for ending in ("json", "md"))
    wait_until(lambda: as_json.exists() and as_markdown.exists())
    messages = json.loads(as_json.read_text())["messages"]
    assert [message["content"] for message in messages] == ["What is 2 + 2?", "It is **4**."]
    lines = ["# What is 2 + 2?", "## You", "What is 2 + 2?", "## Answer", "It is **4**."]
    assert as_markdown.read_text() == "\n\n".join(lines) + "\n"


def test_titles_and_names_of_files_cut_no_letter_in_two(tab: Tab, server: Server) -> None:
    ask(tab, "x" + "😀" * 50)
    wait_for_answers(tab, 1)
    assert tab.text("#title") == "x" + "😀" * 29 + "…"
    tab.click("#new")
    ask(tab, "नमस्ते दुनिया")
    wait_for_answers(tab, 1)
    choose(tab, "export-json")
    wait_until((tab.browser.downloads / "नमस्ते-दुनिया.json").exists)


def test_a_server_with_a_key_is_asked_again_with_it_until_the_tab_is_closed(tab: Tab, server: Server) -> None:
    server.key = "secret"
    tab.reload()
    tab.wait("ask.open")
    tab.type("wrong")
    tab.press("Enter")
    tab.wait("ask.open && ask.innerText.includes('not accepted')")
    tab.type("secret")
    tab.screenshot(SCREENSHOTS / "key.png")
    tab.press("Enter")
    tab.wait("model.value === 'team/tiny-chat'")
    tab.reload()
    ask(tab, "Hello")
    wait_for_answers(tab, 1)
    assert tab.js("ask.open") is False
    assert "secret" not in tab.js("JSON.stringify(localStorage)")


def test_a_key_goes_as_the_bytes_that_other_clients_send(tab: Tab, server: Server) -> None:
    server.key = "clé-ключ"
    tab.reload()
    tab.wait("ask.open")
    tab.type("ключ")
    tab.press("Enter")
    tab.wait("ask.open && ask.innerText.includes('not accepted')")
    tab.type("clé-ключ")
    tab.press("Enter")
    tab.wait("model.value === 'team/tiny-chat'")


def test_a_key_asked_for_in_the_middle_sends_the_message_afterwards(tab: Tab, server: Server) -> None:
    tab.wait("model.value")
    server.key = "secret"
    ask(tab, "Hello")
    tab.wait("ask.open")
    tab.type("secret")
    tab.press("Enter")
    wait_for_answers(tab, 1)
    assert tab.text(".assistant .body") == "Fine."


def test_a_busy_server_is_tried_again_when_it_says(tab: Tab, server: Server) -> None:
    server.answers = [(429, {"Retry-After": "2"}, error_body("16 requests wait already")), answer("Now.")]
    ask(tab, "Hello")
    tab.wait("document.querySelector('.error')?.innerText.includes('16 requests wait already')")
    assert "Try again in" in tab.text(".error button") and tab.count(".error button:disabled") == 1
    tab.screenshot(SCREENSHOTS / "busy.png")
    tab.wait("document.querySelector('.error button').innerText === 'Try again'")
    tab.click(".error button")
    tab.wait("document.querySelector('.assistant .body')?.innerText === 'Now.'")
    assert server.said() == [("user", "Hello")]


def test_a_server_that_came_back_with_another_model_is_asked_for_that_one(tab: Tab, server: Server) -> None:
    server.model = "team/other-chat"
    server.answers = [(404, {}, error_body("there is no model 'team/tiny-chat' here")), answer("Now.")]
    ask(tab, "Hello")
    tab.wait("document.querySelector('.error')?.innerText.includes('there is no model')")
    tab.click(".error button")
    wait_for_answers(tab, 1)
    assert server.bodies[-1]["model"] == "team/other-chat"


def test_a_model_that_is_loading_is_waited_for(tab: Tab, server: Server) -> None:
    server.is_loading = True
    tab.reload()
    tab.wait("notice.innerText.includes('being loaded')")
    server.is_loading = False
    tab.wait("model.value === 'team/tiny-chat'")
    assert tab.js("notice.hidden")


def test_a_notice_that_says_the_same_again_is_read_aloud_once(tab: Tab, server: Server) -> None:
    server.is_loading = True
    tab.reload()
    tab.wait("notice.innerText.includes('being loaded')")
    tab.js("""window.isSaidAgain = false;
              const watcher = new MutationObserver(() => { isSaidAgain = true });
              watcher.observe(notice, {subtree: true, childList: true})""")
    asked = len(tab.requests())
    wait_until(lambda: len(tab.requests()) > asked + 1)
    assert not tab.js("isSaidAgain")
    server.is_loading = False
    tab.wait("model.value === 'team/tiny-chat'")


@pytest.mark.parametrize(
    "last, said",
    [
        (f"data: {error_body('the engine died').decode()}\n\n", "the engine died"),
        ("", "The connection ended before the answer did."),
        ("data: {broken\n\n", "The server sent something that is not JSON."),
    ],
)
def test_an_answer_that_breaks_off_says_why(tab: Tab, server: Server, last: str, said: str) -> None:
    server.answers = [[delta(role="assistant", content=""), ": comment\n\n", delta(content="Half an"), last]]
    ask(tab, "Hello")
    wait_for_answers(tab, 1)
    assert tab.text(".assistant .body") == "Half an" and tab.text(".error").startswith(said)


def test_a_refused_request_shows_what_the_server_said(tab: Tab, server: Server) -> None:
    server.answers = [(400, {}, error_body("prompt has 9000 tokens, but the model takes at most 8192"))]
    ask(tab, "Long")
    wait_for_answers(tab, 1)
    assert "9000 tokens, but the model takes at most 8192" in tab.text(".error")


def test_the_keyboard_alone_sends_stops_edits_and_reaches_every_button(tab: Tab, server: Server) -> None:
    server.answers = [answer("One."), [delta(content="Two"), Gate(), *end()], answer("Three.")]
    focused = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.id"
    assert tab.js(focused) == "prompt"
    tab.type("one")
    tab.press("Enter", is_shifted=True)
    tab.type("two")
    tab.press("Enter")
    wait_for_answers(tab, 1)
    assert server.said() == [("user", "one\ntwo")]
    tab.type("again")
    tab.press("Enter")
    tab.wait("document.querySelector('article:nth-child(4) .body')?.innerText === 'Two'")
    tab.press("Escape")
    wait_for_answers(tab, 2)
    reached = set()
    for _ in range(40):
        tab.press("Tab")
        reached.add(tab.js(focused))
        style = tab.js("getComputedStyle(document.activeElement).outlineStyle")
        assert style != "none" or tab.js(focused) in ("prompt", ""), tab.js(focused)
    assert {"new", "Settings", "This conversation", "Copy", "Edit", "Regenerate", "prompt"} <= reached
    tab.js("document.querySelector('article:nth-child(3) [aria-label=Edit]').focus()")
    tab.press("Enter")
    tab.type("!")
    tab.press("Enter")
    tab.wait("document.querySelector('article:nth-child(4) .body')?.innerText === 'Three.'")
    assert server.said()[-1] == ("user", "again!")
    assert tab.js("document.getElementById('prompt').value") == ""


def test_the_list_of_conversations_keeps_the_focus_when_an_answer_ends(tab: Tab, server: Server) -> None:
    gate = Gate()
    server.answers = [answer("One."), [delta(content="Two"), gate, *end()]]
    ask(tab, "First")
    wait_for_answers(tab, 1)
    tab.click("#new")
    ask(tab, "Second")
    tab.wait("document.querySelector('.assistant .body')?.innerText === 'Two'")
    tab.js("document.querySelector('#conversations li:last-child button').focus()")
    gate.set()
    wait_for_answers(tab, 1)
    assert tab.js("document.activeElement.innerText") == "First"


def test_every_control_has_a_name_and_answers_are_announced(tab: Tab, server: Server) -> None:
    ask(tab, "Hello")
    wait_for_answers(tab, 1)
    nameless = """[...document.querySelectorAll("button, input, textarea, select")].filter((control) =>
        !control.innerText && !control.textContent.trim() && !control.ariaLabel && !control.labels?.length
        && !control.getAttribute("aria-labelledby")).map((control) => control.outerHTML)"""
    assert tab.js(nameless) == []
    assert tab.js("messages.getAttribute('aria-live')") == "polite"
    assert tab.js("document.getElementById('status').textContent") == "The answer is complete."


def test_a_phone_of_360_pixels_needs_no_scrolling_to_the_side(tab: Tab, server: Server) -> None:
    tab.resize(360, 740, is_phone=True)
    tab.reload()
    tab.wait("model.value")
    tab.screenshot(SCREENSHOTS / "phone-welcome.png")
    wide = "\n\n`" + "x" * 200 + "` https://example.com/" + "y" * 200 + "\n\n```\n" + "z " * 200 + "\n```"
    server.answers = [answer(SAMPLE + wide)]
    ask(tab, "How do I find primes? " + "w" * 100)
    wait_for_answers(tab, 1)
    for selector in ("html", "body", "#scroller", "#messages"):
        node = f"document.querySelector('{selector}')"
        assert tab.js(f"{node}.scrollWidth") <= tab.js(f"{node}.clientWidth") <= 360, selector
    beyond = """[...document.querySelectorAll("main *")].filter((node) => !node.closest("pre,.table,.hidden")
        && node.getBoundingClientRect().right > 360.5).map((node) => node.outerHTML)"""
    assert tab.js(beyond) == []
    assert tab.js("getComputedStyle(document.querySelector('pre')).overflowX") == "auto"
    tab.js("scroller.scrollTop = 0")
    tab.screenshot(SCREENSHOTS / "phone.png")
    tab.click("#menu")
    tab.wait("sidebar.getBoundingClientRect().x === 0")
    tab.screenshot(SCREENSHOTS / "phone-menu.png")
    tab.click("#conversations button")
    tab.wait("sidebar.inert")


def test_a_low_window_shows_the_beginning_of_the_welcome(tab: Tab) -> None:
    tab.resize(640, 400)  # as at twice the size
    tab.reload()
    tab.wait("model.value && scroller.scrollHeight > scroller.clientHeight")
    assert tab.js("scroller.scrollTop") == 0


def test_on_paper_a_conversation_is_whole_and_dark_on_white(tab: Tab, server: Server) -> None:
    tab.prefer("light")
    tab.click("#theme")
    server.answers = [answer("```\n" + "word " * 100 + "\n```")]
    ask(tab, "\n".join(f"line {i}" for i in range(200)))
    wait_for_answers(tab, 1)
    tab.call("Emulation.setEmulatedMedia", media="print")
    for selector in (".user .body", "pre"):
        node = f"document.querySelector('{selector}')"
        assert tab.js(
            f"{node}.scrollHeight <= {node}.clientHeight && {node}.scrollWidth <= {node}.clientWidth"
        )
    assert tab.js("getComputedStyle(document.body).color") == "rgb(32, 37, 31)"


def test_dark_and_light_follow_the_system_until_the_reader_chooses(tab: Tab, server: Server) -> None:
    color = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g)"
    brightness = f"{color}.slice(0, 3).reduce((sum, part) => sum + Number(part), 0)"
    tab.prefer("light")
    assert tab.js(brightness) > 600
    tab.prefer("dark")
    assert tab.js(brightness) < 150
    tab.click("#theme")
    assert tab.js(brightness) > 600
    tab.reload()
    assert tab.js(brightness) > 600


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(tab: Tab, server: Server, scheme: str) -> None:
    tab.prefer(scheme)
    tab.wait("model.value")
    tab.screenshot(SCREENSHOTS / f"welcome-{scheme}.png")
    server.answers = [answer("Of course, **what** would you like to know?"), answer(SAMPLE)]
    ask(tab, "Good morning! I have a question.")
    wait_for_answers(tab, 1)
    ask(tab, "How do I find all primes below n?")
    wait_for_answers(tab, 2)
    tab.screenshot(SCREENSHOTS / f"{scheme}.png")
    texts = [
        ".assistant .body p",
        ".user .body",
        ".stats",
        "figcaption span",
        "pre code",
        "a",
        "#model",
        "th",
    ]
    for selector in texts:
        assert tab.js(CONTRAST.replace("SELECTOR", selector)) >= 4.5, selector


# The contrast of WCAG between an element's text and the nearest background behind it
CONTRAST = """(() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => parts(color).slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
      .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  let node = document.querySelector("SELECTOR");
  const text = light(getComputedStyle(node).color);
  const isClear = (color) => parts(color).length === 4 && parts(color)[3] === 0;
  while (isClear(getComputedStyle(node).backgroundColor)) node = node.parentElement;
  const behind = light(getComputedStyle(node).backgroundColor);
  return (Math.max(text, behind) + 0.05) / (Math.min(text, behind) + 0.05);
})()"""


PART = "## Part N\n\nSome *words* with `code` in them.\n\n- one\n- two\n\n```\nx = N\n```\n\n"


def long_answer(kind: str) -> str:
    """Some 200 KB"""
    return {
        "mixed": "".join(PART.replace("N", str(i)) for i in range(2600)),
        "one paragraph": "word **bold** [ * _ ` " * 9500,
        "one list": "".join(f"- item *{i}*\n" for i in range(14000)),
        "one table": "| a | b |\n|--|--|\n" + "".join(f"| item {i} | *{i}* |\n" for i in range(9000)),
        "one block of code": "```\n" + "".join(f"x[{i}] = {i}\n" for i in range(12000)),
        "open brackets": "[" * 100_000 + "*_" * 50_000,
        "deep": "> " * 50_000 + "- " * 50_000,
    }[kind]


def pause() -> bool:
    time.sleep(0.005)
    return True


def pieces_of(text: str) -> list[Step]:
    pieces = [delta(content=text[i : i + 2000]) for i in range(0, len(text), 2000)]
    return [step for piece in pieces for step in (piece, pause)]


@pytest.mark.parametrize("kind", ["mixed", "one list", "one table", "one block of code"])
def test_a_long_answer_is_drawn_by_what_is_new_in_it(tab: Tab, server: Server, kind: str) -> None:
    gate, text = Gate(), long_answer(kind)
    server.answers = [[*pieces_of(text[:10_000]), gate, *pieces_of(text[10_000:40_000]), *end()]]
    ask(tab, "A long story")
    first = "document.querySelector('.assistant :is(li, td, code)')?.firstChild"
    tab.wait(f"document.querySelector('.assistant .body')?.textContent.length > 1000 && Boolean({first})")
    tab.js(f"window.before = {first}")
    gate.set()
    wait_for_answers(tab, 1)
    assert tab.js(f"window.before === {first}")


@pytest.mark.parametrize("kind", ["mixed", "one paragraph", "open brackets", "deep"])
def test_a_long_answer_leaves_the_page_free_for_its_reader(tab: Tab, server: Server, kind: str) -> None:
    gate, text = Gate(), long_answer(kind)
    server.answers = [[*pieces_of(text), gate, *end()]]
    tab.js("""window.longest = 0; window.before = performance.now();
              setInterval(() => { const now = performance.now();
                                  longest = Math.max(longest, now - before); before = now; }, 10)""")
    ask(tab, "A long story")
    tab.wait("document.querySelector('.assistant .body')?.textContent.length > 1000")
    tab.type("typed meanwhile")
    assert tab.js("document.getElementById('prompt').value") == "typed meanwhile"
    gate.set()
    wait_for_answers(tab, 1)
    assert tab.js("JSON.parse(Object.values(localStorage)[0]).messages[1].content.length") == len(text)
    assert tab.js("longest") < 5000  # milliseconds; what takes time by the square of the length takes minutes


def test_the_readers_place_is_kept_while_an_answer_grows(tab: Tab, server: Server) -> None:
    gate, lines = Gate(), "A line.\n\n" * 60
    server.answers = [[delta(content=lines), gate, *answer(lines)]]
    ask(tab, "Lines")
    at_end = "scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 2"
    tab.wait(f"document.querySelectorAll('.assistant p').length === 60 && {at_end}")
    tab.js("scroller.scrollTop = 100")
    tab.wait("!latest.hidden")
    gate.set()
    wait_for_answers(tab, 1)
    assert tab.js("scroller.scrollTop") == 100
    tab.click("#latest")
    tab.wait(at_end)


def test_the_least_scrolling_up_holds_and_a_taller_message_box_hides_nothing(
    tab: Tab, server: Server
) -> None:
    gate, lines = Gate(), "A line.\n\n" * 60
    server.answers = [[delta(content=lines), gate, *answer(lines)]]
    ask(tab, "Lines")
    at_end = "scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 2"
    tab.wait(f"document.querySelectorAll('.assistant p').length === 60 && {at_end}")
    before = tab.js("scroller.scrollTop")
    tab.js("scroller.scrollTop -= 20")
    tab.wait("!latest.hidden")
    gate.set()
    wait_for_answers(tab, 1)
    assert tab.js("scroller.scrollTop") == before - 20
    tab.click("#latest")
    tab.wait(at_end)
    tab.type("a\nb\nc\nd\ne")
    tab.wait(at_end)


def test_what_is_shown_of_a_conversation_is_not_drawn_anew_for_a_message(tab: Tab, server: Server) -> None:
    ask(tab, "First")
    wait_for_answers(tab, 1)
    tab.js("window.before = [...messages.children]")
    tab.click(".user [aria-label=Edit]")
    tab.press("Escape")
    ask(tab, "Second")
    wait_for_answers(tab, 2)
    tab.click("article:last-child [aria-label=Regenerate]")
    wait_for_answers(tab, 2)
    assert tab.js("before.every((node, i) => node === messages.children[i])")
    tab.click("article:nth-child(1) [aria-label=Edit]")
    ask(tab, "Third")
    wait_for_answers(tab, 3)
    assert tab.count(".editor") == 0 and tab.text("article") == "First"


def test_nothing_leads_to_an_end_that_is_seen_already(tab: Tab, server: Server) -> None:
    server.answers = [answer("A line.\n\n" * 60), answer("Short.")]
    ask(tab, "Lines")
    wait_for_answers(tab, 1)
    tab.js("scroller.scrollTop = 0")
    tab.wait("!latest.hidden")
    tab.js("document.querySelector('.assistant [aria-label=Regenerate]').click()")
    tab.wait("document.querySelector('.assistant .body')?.innerText === 'Short.'")
    assert tab.js("latest.hidden")


def test_every_file_of_the_page_is_served_and_needs_nothing_inline() -> None:
    files = page_files()
    assert {"/", "/page.js", "/page.css", "/icon.svg"} <= files.keys()
    page = files["/"][0].decode()
    assert " style=" not in page and "<style" not in page and " onclick=" not in page
    assert not any(b"innerHTML" in content for path, (content, _) in files.items() if path.endswith(".js"))


# ---- the real server ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(default_model_path: Path, one_thread: None) -> Iterator[Running]:
    with running(default_model_path, engine={"kv_cache_memory": "64MB", "max_model_len": 1024}) as made:
        yield made


def test_the_real_server_answers_a_conversation_and_stops_where_it_is_told(
    browser: Browser, real: Running
) -> None:
    tab = Tab(browser, f"{real.url}/")
    tab.open()
    tab.click("#tune")
    tab.js("document.getElementById('temperature').focus()")
    tab.type("0")
    tab.press("Escape")
    for number, question in enumerate(("What is the capital of France?", "And of Italy?"), start=1):
        ask(tab, question)
        wait_for_answers(tab, number)
    assert "Paris" in tab.text(".assistant .body") and "tokens/s · first token after" in tab.text(
        ".assistant .stats"
    )
    ask(tab, "Write a very long story about the sea.")
    tab.wait("document.querySelectorAll('article.assistant .body')[2]?.innerText.length > 20")
    tab.press("Escape")
    wait_for_answers(tab, 3)
    real.check_idle()
    assert real.llm.stats().cached_tokens >= 16  # what the turns before had read
    tab.screenshot(SCREENSHOTS / "real.png")
    assert tab.problems() == [] and all(url.startswith(real.url) for url in tab.requests())
    tab.close()
