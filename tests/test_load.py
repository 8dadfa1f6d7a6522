"""The server under load: 64 clients, a tenth of whom leave, and nothing wrong, lost, stuck or left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import engines
import httpx
import pytest
from patience import PATIENCE, wait_until
from servers import NAME, Running

from infinilm import LLM, SamplingParams
from infinilm.load import percentile
from infinilm.load.client import events
from infinilm.load.wire import Address, Response, head_of, request

pytestmark = pytest.mark.usefixtures("one_thread")
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")

NUM_CLIENTS = 64
LEAVING = 0.1  # of all requests
NONSENSE = 0.05
MB = 1 << 20
HEADERS = {"content-type": "application/json"}
CONTROL = ("/chat/completions", {"messages": [{"role": "user", "content": "control"}], "max_tokens": 64})
GREEDY = {"temperature": 0, "ignore_eos": True}
Asked = tuple[str, dict[str, Any]]
Told = dict[int, tuple[str, str]]  # by choice: its text, and why it ended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.write_model(tmp_path_factory.mktemp("tiny"))


# ---- what is asked ----


def jobs(rng: random.Random, count: int = 32) -> list[Asked]:
    """Chats and completions, of one choice and of several, greedy and not, of short prompts and long ones"""
    return [job(rng, number) for number in range(count)]


def job(rng: random.Random, number: int) -> Asked:
    how = {
        "max_tokens": rng.randint(1, 24),
        "temperature": rng.choice([0, 0.8]),
        "seed": number,
        "n": rng.choice([1, 1, 2, 3]),
        "ignore_eos": True,
    }
    text = "".join(rng.choices("etaoin shrdlu", k=rng.choice([5, 50, 300])))
    if number % 2:
        return "/chat/completions", {"messages": [{"role": "user", "content": text}], **how}
    prompt = rng.choice([text, [text, "hello"], engines.prompt(40, number)])
    return "/completions", {"prompt": prompt, "logprobs": rng.choice([None, 2]), **how}


# ---- asking ----


@dataclass
class Caller:
    address: Address
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    async def told(self, asked: Asked, is_stream: bool) -> Told:
        """The answer, which comes whole and in time"""
        path, body = asked
        data = json.dumps({**body, "stream": is_stream}).encode()
        async with asyncio.timeout(PATIENCE), request(self.address, "POST", path, HEADERS, data) as response:
            assert response.status == 200, await response.whole()
            return await streamed(response) if is_stream else whole(json.loads(await response.whole()))

    async def leave(self, asked: Asked) -> None:
        """Ask, and go away: before all is said, before the answer, or in the midst of it"""
        path, body = asked
        is_stream, phase = self.rng.random() < 0.5, self.rng.choice(["head", "body", "asked", "answer"])
        data = json.dumps({**body, "max_tokens": 400, "stream": is_stream}).encode()
        head = head_of(self.address, "POST", path, HEADERS, len(data))
        sent = {"head": head[: len(head) // 2], "body": head + data[: len(data) // 2]}.get(phase, head + data)
        reader, writer = await self.address.connect()
        try:
            writer.write(sent)
            await writer.drain()
            await asyncio.sleep(self.rng.random() * 0.05)
            if phase == "answer" and is_stream:
                async with asyncio.timeout(PATIENCE):
                    await reader.readexactly(self.rng.randint(1, 3000))
        finally:
            writer.transport.abort()
        self.counts[f"left, {phase}"] += 1

    async def talk_nonsense(self) -> None:
        """Ask what is refused"""
        path, body = self.rng.choice(REFUSED)
        async with asyncio.timeout(PATIENCE), request(self.address, "POST", path, HEADERS, body) as response:
            assert response.status == 400, await response.whole()
            assert set(json.loads(await response.whole())["error"]) == {"message", "type", "param", "code"}
        self.counts["nonsense"] += 1


REFUSED: list[tuple[str, bytes]] = [
    ("/chat/completions", b""),
    ("/chat/completions", b"[" * 100_000),
    ("/chat/completions", b'{"messages": [], "temperature": NaN}'),
    ("/completions", b'{"prompt": [-1]}'),
    ("/completions", b'{"prompt": "x", "structured_outputs": {"regex": "("}}'),
    ("/completions", json.dumps({"prompt": "x " * 10_000}).encode()),
]


def choice_told(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""


def whole(answer: dict[str, Any]) -> Told:
    return {one["index"]: (choice_told(one), one["finish_reason"]) for one in answer["choices"]}


async def streamed(response: Response) -> Told:
    told, reasons, last = dict[int, str](), dict[int, str](), b""
    async for last in events(response):
        if last == b"[DONE]":
            continue
        for choice in json.loads(last)["choices"]:
            index = choice["index"]
            told[index] = told.get(index, "") + choice_told(choice)
            if choice["finish_reason"]:
                assert index not in reasons
                reasons[index] = choice["finish_reason"]
    assert last == b"[DONE]" and reasons.keys() == told.keys()
    return {index: (told[index], reasons[index]) for index in sorted(told)}


# ---- the load ----


@dataclass
class Soak:
    """Clients that ask until the end, who each know what they must be told."""

    subject: Subject
    seconds: float
    asked: list[Asked]
    expected: list[Told] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    health: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # bytes by seconds

    @property
    def address(self) -> Address:
        return Address.of(self.subject.url)

    def caller(self, seed: int) -> Caller:
        return Caller(self.address, random.Random(seed), self.counts)

    async def learn(self) -> None:
        """What the server says to each when it is alone"""
        caller = self.caller(0)
        self.expected = [await caller.told(one, is_stream=False) for one in self.asked]

    async def run(self) -> None:
        self.start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(self.client(self.caller(number)))
            group.create_task(self.control(self.caller(0)))
            group.create_task(self.watch())

    def goes_on(self) -> bool:
        return time.monotonic() < self.start + self.seconds

    async def client(self, caller: Caller) -> None:
        while self.goes_on():
            number = caller.rng.randrange(len(self.asked))
            if caller.rng.random() < LEAVING:
                await caller.leave(self.asked[number])
                continue
            if caller.rng.random() < NONSENSE:
                await caller.talk_nonsense()
                continue
            told = await caller.told(self.asked[number], is_stream=caller.rng.random() < 0.5)
            assert told == self.expected[number], self.asked[number]
            self.counts["answered"] += 1

    async def control(self, caller: Caller) -> None:
        """The same bytes, whoever comes and goes"""
        asked = (CONTROL[0], {**CONTROL[1], **GREEDY})
        first = await caller.told(asked, is_stream=True)
        while not self.counts["control"] or self.goes_on():  # once at least, however slow a machine is
            assert await caller.told(asked, is_stream=True) == first
            self.counts["control"] += 1

    async def watch(self) -> None:
        while self.goes_on():
            start = time.monotonic()
            async with request(replace(self.address, prefix=""), "GET", "/health", {}) as response:
                assert response.status == 200, await response.whole()
            self.health.append(time.monotonic() - start)
            self.memory.append((start - self.start, self.subject.memory()))
            await asyncio.sleep(0.05)

    def memory_at(self, share: float) -> int:
        return next(size for seconds, size in self.memory if seconds >= share * self.seconds)


@dataclass(frozen=True)
class Held:
    """What a process holds that it could forget to give back"""

    num_files: int
    num_threads: int
    num_tasks: int

    def is_at_most(self, other: Held) -> bool:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(ours <= theirs for ours, theirs in pairs)


@dataclass(frozen=True)
class Subject:
    """A server in this process, or in one of its own: then it is not disturbed by its clients' Python."""

    url: str
    pid: int
    running: Running | None = None

    def held(self) -> Held:
        num_files, num_threads = (len(os.listdir(f"/proc/{self.pid}/{of}")) for of in ("fd", "task"))
        tasks = asyncio.all_tasks(self.running.process.web.servers[0].get_loop()) if self.running else ()
        return Held(num_files, num_threads, len(tasks))

    def memory(self) -> int:
        """Bytes that are the process's alone, in memory or swapped out"""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        return sum(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))

    def check_idle(self) -> None:
        if self.running is not None:
            self.running.check_idle()


def soak(subject: Subject, seconds: float) -> Soak:
    first = Soak(subject, 2.0, jobs(random.Random(1)))
    asyncio.run(first.learn())
    asyncio.run(first.run())  # threads are started, steps recorded, blocks touched
    subject.check_idle()
    before = settled(subject)
    made = Soak(subject, seconds, first.asked, first.expected)
    asyncio.run(made.run())
    subject.check_idle()
    wait_until(lambda: subject.held().is_at_most(before))
    print(f"{dict(made.counts)}, health p99 {1e3 * percentile(sorted(made.health), 0.99):.1f} ms")
    return made


def settled(subject: Subject) -> Held:
    """What is held once the last connections have been closed"""
    found = [subject.held()]
    while len(found) < 4 or found[-1] != found[-4]:
        time.sleep(0.05)
        found.append(subject.held())
    return found[-1]


@needs_proc
def test_64_clients_of_whom_some_leave_get_what_they_asked_for_and_leave_nothing(server: Running) -> None:
    subject = Subject(server.url, os.getpid(), server)
    made = soak(subject, 4.0)  # `make test-long` goes on for minutes
    assert made.counts["answered"] > NUM_CLIENTS and made.counts["control"] > 0
    assert sum(count for what, count in made.counts.items() if what.startswith("left")) > 0
    assert made.counts["nonsense"] > 0
    assert subject.memory() - made.memory_at(0.2) < 64 * MB


@contextmanager
def alone(model: Path) -> Iterator[Subject]:
    """`infinilm serve` in a process of its own"""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    options = {"port": port, "kv-cache-memory": "256MB", "log-level": "warning"}
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    process = subprocess.Popen([sys.executable, "-m", "infinilm", "serve", str(model), *given])
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or is_well(url))
        yield Subject(url, process.pid)
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0


def is_well(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@needs_proc
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_flat_and_health_is_quick_through_five_minutes_of_load(default_model_path: Path) -> None:
    with alone(default_model_path) as subject:
        made = soak(subject, 300.0)
        assert made.counts["answered"] > 10 * NUM_CLIENTS
        assert subject.memory() - made.memory_at(0.2) < 32 * MB
        assert percentile(sorted(made.health), 0.99) < 0.1


# ---- lm-eval ----

LM_EVAL = Path(__file__).parent.parent / "build/lm-eval/bin/python"
TASK = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
"""


def write_task(folder: Path) -> list[dict[str, Any]]:
    """Ten questions with four answers each"""
    rng = random.Random(3)
    items = [
        {
            "question": "".join(rng.choices("abcdefgh ", k=30)) + "?",
            "choices": ["".join(rng.choices("ijklmnop", k=rng.randint(2, 6))) for _ in range(4)],
            "answer": rng.randrange(4),
        }
        for _ in range(10)
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "choices.yaml").write_text(TASK.format(items=folder / "items.jsonl"))
    return items


def evaluated(server: Running, tokenizer: Path, folder: Path) -> tuple[float, list[list[float]]]:
    """The score that lm-eval finds, and the log-probability of each answer"""
    model = f"model={NAME},base_url={server.url}/v1/completions,tokenizer_backend=huggingface"
    model += f",tokenizer={tokenizer},num_concurrent=4,max_length={engines.MAX_LENGTH}"
    command = [LM_EVAL, "-m", "lm_eval", "--model", "local-completions", "--model_args", model]
    command += [
        "--tasks",
        "choices",
        "--include_path",
        folder,
        "--output_path",
        folder / "out",
        "--log_samples",
    ]
    places = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "PATH": os.environ["PATH"]}
    subprocess.run(command, check=True, env=places, cwd=folder, capture_output=True, timeout=300)
    (results,) = (folder / "out").rglob("results*.json")
    (samples,) = (folder / "out").rglob("samples*.jsonl")
    lines = sorted(
        (json.loads(line) for line in samples.read_text().splitlines()), key=lambda one: one["doc_id"]
    )
    score = json.loads(results.read_text())["results"]["choices"]["acc,none"]
    return score, [[float(answer[0][0]) for answer in one["resps"]] for one in lines]


def plainly(llm: LLM, item: dict[str, Any]) -> list[float]:
    """The log-probability of each answer after its question, by the engine itself"""
    start = len(llm.tokenizer.encode(item["question"]))
    prompts = [llm.tokenizer.encode(f"{item['question']} {choice}") for choice in item["choices"]]
    outputs = llm.generate(
        [{"prompt_token_ids": one} for one in prompts], SamplingParams(max_tokens=1, prompt_logprobs=0)
    )
    return [
        sum(
            known[token].logprob
            for known, token in zip(output.prompt_logprobs[start:], ids[start:], strict=True)
        )
        for output, ids in zip(outputs, prompts, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.skipif(not LM_EVAL.exists(), reason="`make test-long` brings lm-eval")
def test_lm_eval_finds_the_score_of_a_plain_loop(server: Running, folder: Path, tmp_path: Path) -> None:
    items, llm = write_task(tmp_path), LLM(folder, kv_cache_memory="32MB")
    expected = [plainly(llm, item) for item in items]
    score, found = evaluated(server, folder, tmp_path)
    for ours, theirs in zip(expected, found, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    right = [
        max(range(4), key=ours.__getitem__) == item["answer"]
        for ours, item in zip(expected, items, strict=True)
    ]
    assert score == sum(right) / len(items)
