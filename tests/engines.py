"""A tiny model whose engine is quick, mixes of requests for it, and what must hold after every step."""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import gguf_files
import tokenizers
import torch
from torch import Tensor

from infinilm import EngineConfig, LoRARequest, RequestOutput, SamplingParams, load_model
from infinilm.engine.engine import Engine
from infinilm.engine.request import Request
from infinilm.models.llama import LlamaForCausalLM
from infinilm.tokenizer import Tokenizer

DEVICE = os.environ.get("INFINILM_TEST_DEVICE", "cpu")  # pytest --device
PLACED: dict[str, Any] = {} if DEVICE == "cpu" else {"device": DEVICE, "dtype": "float32"}
HIDDEN, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS = 32, 16, 2, 1, 2
SPECIALS = ["</s>", "<pad>"]
VOCAB_SIZE = len(SPECIALS) + 256
MAX_LENGTH = 512
LONG_LENGTH = 100_000  # of a model that takes long prompts
CONFIG = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_LENGTH,
    "eos_token_id": 0,
    "bos_token_id": None,
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"


# ---- the model ---------------------------------------------------------------------------------------------


def write_model(folder: Path, **config: Any) -> Path:
    """A model of random weights whose tokens are bytes; `load_model` takes the folder."""
    seed = config.pop("seed", 5)
    template = config.pop("chat_template", CHAT_TEMPLATE)
    config = {**CONFIG, **config}
    weights = random_weights(seed, config["head_dim"], config["vocab_size"])
    gguf_files.write_folder(folder, weights, **config)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(SPECIALS)
    library.save(str(folder / "tokenizer.json"))
    names = {"eos_token": SPECIALS[0], "pad_token": SPECIALS[1]}
    names |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def random_weights(seed: int, head_dim: int, num_rows: int) -> dict[str, Tensor]:
    """Large enough that tokens differ and depend on what came long before"""
    generator = torch.Generator().manual_seed(seed)
    inner, kv = CONFIG["intermediate_size"], NUM_KV_HEADS * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (num_rows, HIDDEN)}
    for layer in range(NUM_LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (NUM_HEADS * head_dim, HIDDEN),
                "self_attn.k_proj": (kv, HIDDEN),
                "self_attn.v_proj": (kv, HIDDEN),
                "self_attn.o_proj": (HIDDEN, NUM_HEADS * head_dim),
                "mlp.gate_proj": (inner, HIDDEN),
                "mlp.up_proj": (inner, HIDDEN),
                "mlp.down_proj": (HIDDEN, inner),
            }.items()
        }
    weights = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}
    norms = [
        f"model.layers.{i}.{n}_layernorm" for i in range(NUM_LAYERS) for n in ("input", "post_attention")
    ]
    return weights | {f"{name}.weight": torch.ones(HIDDEN) for name in [*norms, "model.norm"]}


@dataclass(frozen=True)
class Tiny:
    """The parts of an engine, which each test puts together anew."""

    folder: Path
    model: LlamaForCausalLM
    tokenizer: Tokenizer

    @classmethod
    def at(cls, folder: Path, **config: Any) -> Tiny:
        return cls(write_model(folder, **config), *load_model(folder, **PLACED))

    def engine(
        self, num_blocks: int | None = None, draft: Tiny | None = None, is_ahead: bool = False, **options: Any
    ) -> Engine:
        """One with so many blocks, or as many as its streams can fill. It runs ahead if told so, on any
        device: tests count what a step has done."""
        options = {"block_size": 16, "max_num_seqs": 8, "max_model_len": MAX_LENGTH, **options}
        block = (
            2 * NUM_KV_HEADS * HEAD_DIM * options["block_size"] * 4 * NUM_LAYERS * (1 if draft is None else 2)
        )
        memory = 1 << 30 if num_blocks is None else num_blocks * block
        config = EngineConfig(kv_cache_memory=memory, **options)
        engine = Engine(self.model, self.tokenizer, config, draft and draft.model)
        engine.runner.is_ahead = is_ahead and engine.drafter is None
        engine.scheduler.reads_beside &= not is_ahead  # prompts and answers share a step, as on a GPU
        return engine


# ---- requests ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A request, the step before which it comes, and the one before which it is given up."""

    prompt: Sequence[int]
    params: SamplingParams
    priority: int = 0
    arrival: int = 0
    end: int | None = None
    salt: str | None = None
    lora: LoRARequest | None = None


def prompt(length: int, seed: int = 0) -> list[int]:
    """The beginning of a random text"""
    rng = random.Random(seed)
    return [rng.randrange(len(SPECIALS), VOCAB_SIZE) for _ in range(length)]


def random_prompt(rng: random.Random, max_length: int) -> list[int]:
    """Prompts share beginnings: each follows one of a few long ones for a while."""
    length = rng.randint(1, max_length)
    num_shared = rng.choice([length, rng.randint(0, length)])
    return prompt(num_shared, rng.randrange(3)) + [
        rng.randrange(VOCAB_SIZE) for _ in range(length - num_shared)
    ]


def random_params(rng: random.Random, max_tokens: int, is_free: bool = False) -> SamplingParams:
    """Each of the ways to choose and to stop in some of the requests; a free one may choose any token."""

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.25 else otherwise

    letters = "etaoin"
    num_tokens = rng.randint(1, max_tokens)
    return SamplingParams(
        n=sometimes(rng.randint(2, 3), 1),
        max_tokens=num_tokens,
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_p=sometimes(0.8, 1.0),
        top_k=sometimes(20, 0),
        min_p=sometimes(0.05, 0.0),
        seed=rng.randrange(1 << 40),
        presence_penalty=sometimes(0.5, 0.0),
        frequency_penalty=sometimes(-0.5, 0.0),
        repetition_penalty=sometimes(1.3, 1.0),
        logprobs=sometimes(rng.randint(0, 4), None),
        prompt_logprobs=sometimes(rng.randint(0, 2), None),
        min_tokens=sometimes(min(3, num_tokens), 0),
        stop=sometimes([rng.choice(letters), "\ufffd" * 3, "th"], ()),
        stop_token_ids=sometimes([rng.randrange(VOCAB_SIZE) for _ in range(8)], ()),
        ignore_eos=sometimes(True, False),
        bad_words=() if is_free else sometimes(["x", "yz"], ()),
        logit_bias=sometimes({rng.randrange(VOCAB_SIZE): 3.0, 40: -100.0}, ()),
        allowed_token_ids=None if is_free else sometimes(range(20, 120), None),
    )


def random_jobs(
    rng: random.Random, count: int, max_prompt: int, max_tokens: int, arrive_within: int
) -> list[Job]:
    return [
        Job(
            random_prompt(rng, max_prompt),
            random_params(rng, max_tokens),
            priority=rng.choice([0, 0, 0, -1, 1]),
            arrival=(arrival := rng.randint(0, arrive_within)),
            end=arrival + rng.randint(0, 8) if rng.random() < 0.1 else None,
            salt=rng.choice([None, None, "other"]),
        )
        for _ in range(count)
    ]


def run(
    engine: Engine, jobs: Sequence[Job], preempt_every: int = 0, rng: random.Random | None = None
) -> list[Request]:
    """Let the jobs come and go as they say, each stream be interrupted a few times, and check every step."""
    requests = [
        engine.make(job.prompt, job.params, priority=job.priority, cache_salt=job.salt, lora_request=job.lora)
        for job in jobs
    ]
    step = 0
    while engine.has_work or step <= max(job.arrival for job in jobs):
        for job, request in zip(jobs, requests, strict=True):
            if job.arrival == step:
                engine.enqueue(request)
            if job.end == step:
                engine.abort(request.request_id)
        if rng is not None and step % preempt_every == 0:
            preempt_one(engine, rng)
        engine.step()
        check_blocks(engine)
        step += 1
    return requests


def preempt_one(engine: Engine, rng: random.Random) -> None:
    often = [s for s in engine.scheduler.running if s.request.metrics.num_preemptions >= 3]
    if choices := [stream for stream in engine.scheduler.running if stream not in often]:
        engine.scheduler.preempt(rng.choice(choices))


def finish(engine: Engine, *requests: Request) -> list[RequestOutput]:
    for request in requests:
        engine.enqueue(request)
    while engine.has_work:
        engine.step()
        check_blocks(engine)
    return [request.output() for request in requests]


def generated(
    engine: Engine,
    prompt: Any,
    cache_salt: str | None = None,
    lora: LoRARequest | None = None,
    **params: Any,
) -> RequestOutput:
    """What follows a prompt, greedily unless told otherwise"""
    settings = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
    (output,) = finish(engine, engine.make(prompt, settings, cache_salt=cache_salt, lora_request=lora))
    return output


def said(output: RequestOutput) -> Any:
    """All that an output tells, but what its way through the engine was. On a GPU numbers are rounded by the
    company they are in: there it is tokens and texts."""
    if DEVICE == "cpu":
        return output.prompt_token_ids, output.outputs, output.prompt_logprobs, output.finished
    outputs = [replace(each, cumulative_logprob=None, logprobs=None) for each in output.outputs]
    return output.prompt_token_ids, outputs, output.finished


def is_same(found: Tensor, wanted: Tensor) -> bool:
    """Bit by bit, but for how a GPU rounds"""
    return torch.equal(found, wanted) if DEVICE == "cpu" else torch.allclose(found, wanted, 1e-4, 1e-5)


def is_beginning(part: RequestOutput, whole: RequestOutput) -> bool:
    pairs = zip(part.outputs, whole.outputs, strict=True)
    return all(ours.token_ids == theirs.token_ids[: len(ours.token_ids)] for ours, theirs in pairs)


def alone(tiny: Tiny, job: Job, **options: Any) -> RequestOutput:
    engine = tiny.engine(**options)
    (output,) = finish(engine, engine.make(job.prompt, job.params, lora_request=job.lora))
    return output


def check_outputs(tiny: Tiny, jobs: list[Job], requests: list[Request], **options: Any) -> None:
    """Each says what it says alone, or the beginning of it if it was given up."""
    check_against([alone(tiny, job, **options) for job in jobs], jobs, requests)


def check_against(wanted: list[RequestOutput], jobs: list[Job], requests: list[Request]) -> None:
    for whole, job, request in zip(wanted, jobs, requests, strict=True):
        output = request.output()
        if any(completion.finish_reason == "abort" for completion in output.outputs):
            assert job.end is not None and is_beginning(output, whole)
        else:
            assert said(output) == said(whole)


def interrupted(num_lines: int, call: Callable[[], Any], *files: str) -> bool:
    """Ctrl-C before one of the lines of these files that a call runs; False where it has ended by then."""
    left = num_lines

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        left -= event == "line" and left > 0
        if event == "line" and left == 0:
            left = -1
            raise KeyboardInterrupt
        return trace if frame.f_code.co_filename.endswith(files) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


# ---- what must hold between two steps ----------------------------------------------------------------------


def check_blocks(engine: Engine) -> None:
    blocks, scheduler = engine.blocks, engine.scheduler
    held = Counter(block for stream in scheduler.running for block in stream.block_ids)
    assert [held[block] for block in range(blocks.num_blocks)] == blocks.num_holders
    free = [*blocks.empty, *blocks.reusable]
    assert sorted([*free, *held]) == list(range(blocks.num_blocks))  # each once
    assert not blocks.contents.keys() & set(blocks.empty) and blocks.contents.keys() >= set(blocks.reusable)
    assert all(blocks.contents[block].digest == digest for digest, block in blocks.found.items())
    assert not any(stream.block_ids for stream in scheduler.waiting)
    num_guesses = (engine.config.speculative_config or {}).get("num_speculative_tokens", 0)
    for stream in scheduler.running:
        assert blocks.num_for(stream.num_computed) <= len(stream.block_ids)
        length = len(stream) + stream.num_unread
        assert len(stream.block_ids) <= blocks.num_for(length + num_guesses)
        assert stream.num_computed < length <= engine.max_length
        assert stream.num_unread <= engine.runner.is_ahead
        num_full = stream.num_computed // blocks.size  # what is still written lies behind them
        assert all(held[block] == 1 for block in stream.block_ids[num_full:])
        assert len(set(stream.block_ids)) == len(stream.block_ids)
    check_requests(engine)


def check_requests(engine: Engine) -> None:
    scheduler = engine.scheduler
    live = {id(c) for r in engine.requests.values() for c in r.completions if c.finish_reason is None}
    assert live == {id(stream) for stream in [*scheduler.waiting, *scheduler.running]}
    assert len(scheduler.running) <= scheduler.max_num_seqs
    for streams in (scheduler.waiting, scheduler.running):
        assert [s.order for s in streams] == sorted(s.order for s in streams)


def check_idle(engine: Engine) -> None:
    """Nothing is left of requests that have ended."""
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert not engine.requests and not engine.scheduler.running and not engine.scheduler.waiting
