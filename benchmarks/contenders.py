"""infinilm and its peers: how each does a task.

Nothing heavy is imported before a contender is known, so that its memory is its own.

A contender opens a task (room for its streams), fills it (reads the prompts), rewinds (forgets all but the
prompts and decodes one token) and decodes. What a task times is `fill` or `decode` alone, or, if it is
served, prompts and answers with the time of every token. Prompts are random token ids, and end-of-text is
ignored. A contender also tells its logits after every token of a text.
"""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

CHUNK = 512  # tokens of a prompt that llama.cpp is given at once


@dataclass(frozen=True)
class Task:
    """Decode num_tokens after a prompt, in each of num_streams; 0 tokens: read the prompt.

    If it is served, both are timed, from the first prompt to the last token.
    """

    name: str
    prompt: int
    num_streams: int = 1
    num_tokens: int = 0
    is_served: bool = False

    @property
    def is_prefill(self) -> bool:
        return self.num_tokens == 0

    @property
    def num_counted(self) -> int:
        """The tokens that are timed."""
        prompt = self.prompt if self.is_prefill or self.is_served else 0
        return self.num_streams * (prompt + self.num_tokens)


@dataclass(frozen=True)
class Times:
    """Of a task that was served: its seconds, those of each stream to its first token, and between tokens."""

    seconds: float
    first: list[float]
    gaps: list[float]


class Contender(Protocol):
    note: str  # what its numbers depend on

    def open(self, task: Task) -> None: ...

    def fill(self) -> None: ...

    def rewind(self) -> None: ...

    def decode(self) -> None: ...

    def serve(self) -> Times:
        """The task as a whole"""

    def logits(self, token_ids: list[int]) -> Any:
        """After each token: float32 [tokens, vocabulary], in numpy"""


class Infinilm:
    def __init__(
        self, path: str, num_threads: int, activations: str | None = None, dtype: str | None = None
    ) -> None:
        import torch

        import infinicore
        from infinilm.startup import load_model

        infinicore.set_num_threads(num_threads)
        torch.set_num_threads(num_threads)
        self.model, self.tokenizer = load_model(path, activations=activations, dtype=dtype, device="cpu")
        self.note = f"level {infinicore._native.isa()}, activations {activations or 'by default'}"
        self.engine: Any = None
        self.task = Task("none", 0)
        self.streams: Any = None
        self.seed = 0

    def open(self, task: Task) -> None:
        from infinilm.bench import Lockstep, random_prompts
        from infinilm.config import EngineConfig
        from infinilm.engine.engine import Engine

        if task == self.task and not task.is_served:  # in the cache that it has
            self.streams.begin()
            return
        self.task, self.streams = task, None  # the last task's cache is not to be there beside the next one's
        if task.is_served:  # by one engine, which keeps what it has recorded
            if self.engine is None or self.engine.config.max_num_seqs < task.num_streams:
                config = EngineConfig(max_num_seqs=max(64, task.num_streams))
                self.engine = Engine(self.model, self.tokenizer, config)
            return
        prompts = random_prompts(self.model.config.vocab_size, task.prompt, task.num_streams, seed=0)
        self.streams = Lockstep(self.model, prompts, task.num_tokens + 2)

    def fill(self) -> None:
        self.streams.step()

    def rewind(self) -> None:
        for _ in range(3):  # after which the step is recorded
            self.streams.rewind(self.task.prompt + 1)
            self.streams.step()

    def decode(self) -> None:
        from infinilm.bench import decode

        decode(self.streams.runner, self.streams.streams, self.task.num_tokens)

    def serve(self) -> Times:
        from infinilm.bench import Requests, answer_all

        task = self.task
        self.seed += 1  # other prompts each time, none of which the cache knows
        requests = Requests(task.num_streams, task.prompt, task.num_tokens, task.num_streams)
        return Times(**vars(answer_all(self.engine, requests, self.seed)))

    def logits(self, token_ids: list[int]) -> Any:
        import torch

        from infinilm.cache import DynamicCache

        with torch.inference_mode():
            held = DynamicCache(dtype=self.model.cache_dtype)
            found = self.model(torch.tensor([token_ids]), past_key_values=held, logits_to_keep=0)
            return found[0].float().numpy()


class LlamaCpp:
    """llama.cpp through its C interface, which alone decodes several streams at once."""

    def __init__(self, path: str, num_threads: int) -> None:
        import llama_cpp  # type: ignore[import-not-found,unused-ignore]

        self.api: Any = llama_cpp
        self.num_threads = num_threads
        self.api.llama_backend_init()
        self.model = self.api.llama_model_load_from_file(path.encode(), self.api.llama_model_default_params())
        features = self.api.llama_print_system_info().decode().strip(" |")
        self.note = f"llama-cpp-python {self.api.__version__}, built with {features}"
        self.context: Any = None
        self.batch: Any = None
        self.rng = random.Random(1)

    def open(self, task: Task) -> None:
        if self.context:
            self.api.llama_batch_free(self.batch)
            self.api.llama_free(self.context)
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch = task.num_streams * (task.prompt + task.num_tokens + 32), CHUNK
        params.n_threads = params.n_threads_batch = self.num_threads
        params.n_seq_max, params.kv_unified = task.num_streams, True
        self.task, self.context = task, self.api.llama_init_from_model(self.model, params)
        self.batch = self.api.llama_batch_init(CHUNK, 0, task.num_streams)

    def run(self, places: list[tuple[int, int]], token_ids: list[int] | None = None) -> None:
        """A token at each (stream, position), and its logits; a random one, if none are given, of which the
        last in each stream has logits."""
        batch, last, is_random = self.batch, dict(places), token_ids is None
        batch.n_tokens = len(places)
        drawn = token_ids or [self.rng.randrange(32000) for _ in places]
        for i, (stream, position) in enumerate(places):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = drawn[i], position, 1
            batch.seq_id[i][0], batch.logits[i] = stream, last[stream] == position or not is_random
        if self.api.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self.api.llama_synchronize(self.context)

    def fill(self) -> None:
        for stream in range(self.task.num_streams):
            places = [(stream, position) for position in range(self.task.prompt)]
            for begin in range(0, len(places), CHUNK):
                self.run(places[begin : begin + CHUNK])

    def rewind(self) -> None:
        memory = self.api.llama_get_memory(self.context)
        for stream in range(self.task.num_streams):
            self.api.llama_memory_seq_rm(memory, stream, self.task.prompt, -1)
        self.step(self.task.prompt)

    def decode(self) -> None:
        for i in range(self.task.num_tokens):
            self.step(self.task.prompt + 1 + i)

    def step(self, position: int) -> None:
        self.run([(stream, position) for stream in range(self.task.num_streams)])

    def serve(self) -> Times:
        """Prompts one after the other, as many at once as a batch has room for, then all streams in step"""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), False)
        task, start, first, gaps = self.task, time.perf_counter(), dict[int, float](), list[float]()
        places = [(stream, position) for stream in range(task.num_streams) for position in range(task.prompt)]
        for begin in range(0, len(places), CHUNK):
            part = places[begin : begin + CHUNK]
            self.run(part)
            now = time.perf_counter() - start
            first |= {stream: now for stream, position in part if position == task.prompt - 1}
        last = first
        for i in range(task.num_tokens - 1):
            self.step(task.prompt + i)
            now = time.perf_counter() - start
            gaps += [now - moment for moment in last.values()]
            last = dict.fromkeys(last, now)
        return Times(now, list(first.values()), gaps)

    def logits(self, token_ids: list[int]) -> Any:
        import numpy as np

        self.open(Task("logits", len(token_ids)))
        vocab_size, parts = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model)), []
        for begin in range(0, len(token_ids), CHUNK):
            part = token_ids[begin : begin + CHUNK]
            self.run([(0, begin + i) for i in range(len(part))], part)
            found = self.api.llama_get_logits(self.context)
            parts.append(np.ctypeslib.as_array(found, (len(part), vocab_size)).copy())
        return np.concatenate(parts)


class Transformers:
    """The file's weights made dense, in the dtype that the CPU is faster at."""

    def __init__(self, path: str, num_threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(num_threads)
        self.mode = torch.inference_mode()  # of this whole process, as long as it is held
        self.mode.__enter__()
        dtype = torch.bfloat16 if has_bfloat16() else torch.float32
        file = Path(path)
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model: Any = load(file.parent, gguf_file=file.name, dtype=dtype)
        self.note = f"transformers {transformers.__version__}, {str(dtype).removeprefix('torch.')}"

    def open(self, task: Task) -> None:
        import torch

        self.task = task
        self.cache: Any = None
        self.prompt = torch.randint(0, self.model.config.vocab_size, (task.num_streams, task.prompt))

    def fill(self) -> None:
        self.run(self.prompt)

    def rewind(self) -> None:
        if num_decoded := self.cache.get_seq_length() - self.task.prompt:
            self.cache.crop(-num_decoded)
        self.run(self.next_ids)

    def decode(self) -> None:
        for _ in range(self.task.num_tokens):
            self.run(self.next_ids)

    def run(self, token_ids: Any) -> None:
        output = self.model(token_ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache, self.next_ids = output.past_key_values, output.logits[:, -1:].argmax(-1)

    def serve(self) -> Times:
        raise NotImplementedError("transformers is not asked to serve")

    def logits(self, token_ids: list[int]) -> Any:
        import torch

        return self.model(torch.tensor([token_ids])).logits[0].float().numpy()


def has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 itself; without, transformers is faster in float32."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "avx512_bf16" in flags or " bf16" in flags


# By name: the module whose import is not counted as loading, and how a model is loaded.
EXACT = "infinilm float32"
CONTENDERS: dict[str, tuple[str, Callable[[str, int], Contender]]] = {
    "infinilm": ("infinilm.bench", Infinilm),
    "infinilm int16": ("infinilm.bench", partial(Infinilm, activations="int16")),
    "infinilm int8": ("infinilm.bench", partial(Infinilm, activations="int8")),
    EXACT: ("infinilm.bench", partial(Infinilm, dtype="float32")),
    "llama.cpp": ("llama_cpp", LlamaCpp),
    "transformers": ("transformers.models.llama.modeling_llama", Transformers),
}


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(CONTENDERS[name][0].partition(".")[0]) is not None
