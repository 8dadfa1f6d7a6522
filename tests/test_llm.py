"""LLM, load_model and generate say what is wrong with their arguments; calls are in nobody's way."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from engines import MAX_LENGTH, PLACED, SPECIALS, VOCAB_SIZE, check_idle, generated, prompt, said, write_model
from gguf_files import integer, real, text, whole_file
from warm import RunPython

from infinilm import LLM, RequestError, SamplingParams, StructuredOutputsParams, load_model
from infinilm.config import EngineConfig
from infinilm.engine.request import Completion

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=5)
SAMPLED = SamplingParams(seed=1, ignore_eos=True, max_tokens=9, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path, one_thread: None) -> LLM:
    return LLM(folder, kv_cache_memory="4MB", block_size=16, **PLACED)


# ---- loading -----------------------------------------------------------------------------------------------


def test_what_a_models_files_recommend_applies_where_a_call_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, file = write_model(tmp_path / "folder"), whole_file()
    told = {"temperature": 0.7, "top_k": 1, "min_p": None, "top_p": 0, "eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(told))
    for key, value in (
        ("temp", real(0.6)),
        ("top_p", real(0.95)),
        ("top_k", integer(1)),
        ("min_p", text("0")),
    ):
        file.set(f"general.sampling.{key}", value)
    (path := tmp_path / "model.gguf").write_bytes(file.encode())
    for model, wanted in ((folder, {"temperature": 0.7}), (path, {"temperature": 0.6, "top_p": 0.95})):
        llm = LLM(model, kv_cache_memory="1MB", **PLACED)
        assert llm.get_default_sampling_params() == SamplingParams(top_k=1, **wanted)
        (found,), (greedy,) = llm.generate([3, 4]), llm.generate([3, 4], SamplingParams(temperature=0))
        assert found.outputs[0].token_ids == greedy.outputs[0].token_ids
    assert "top_p must be" in caplog.text and "min_p must be" in caplog.text


@pytest.mark.parametrize("model", [123, "", [], b"model.gguf"])
def test_a_model_is_named_by_text_or_path(model: Any) -> None:
    with pytest.raises(ValueError, match="model must be a path, a Hugging Face id"):
        load_model(model)


def test_a_dtype_of_auto_is_that_of_the_files(folder: Path) -> None:
    named, plain = (load_model(folder, **{**PLACED, "dtype": dtype})[0] for dtype in ("auto", None))
    assert [weight.dtype for weight in named.parameters()] == [weight.dtype for weight in plain.parameters()]


def test_a_template_that_is_given_is_the_one_for_tools_as_well(tmp_path: Path) -> None:
    folder = write_model(tmp_path, chat_template={"default": "plain", "tool_use": "tools"})
    asked = [{"role": "user", "content": "What time is it?"}]
    for given, wanted in (({}, "tools"), ({"chat_template": "given"}, "given")):
        llm = LLM(folder, kv_cache_memory="1MB", **given, **PLACED)
        (found,) = llm.chat(asked, SamplingParams(max_tokens=1), tools=[{"type": "function"}])
        assert llm.tokenizer.decode(found.prompt_token_ids) == wanted


def test_an_llm_that_nobody_holds_takes_its_tokenizer_along_without_the_garbage_collector(
    tmp_path: Path,
) -> None:
    """And with it the process of its templates"""
    gc.disable()
    try:
        llm = LLM(write_model(tmp_path, chat_template="plain"), kv_cache_memory="1MB", **PLACED)
        llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=1))
        tokenizer = weakref.ref(llm.tokenizer)
        del llm
        assert tokenizer() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "wanted", [{"choice": [" yes", " no"]}, {"regex": " (yes|no)"}], ids=["choice", "regex"]
)
def test_a_structure_keeps_the_space_it_begins_with(tmp_path: Path, wanted: Any) -> None:
    """Vocabularies such as Llama 2's begin a text with a space that is not shown."""
    llm = LLM(with_first_space_dropped(write_model(tmp_path)), kv_cache_memory="1MB", **PLACED)
    params = SamplingParams(max_tokens=9, seed=1, structured_outputs=StructuredOutputsParams(**wanted))
    (found,) = llm.chat([{"role": "user", "content": "Is it?"}], params)
    assert found.outputs[0].text in (" yes", " no")


def test_a_token_with_logprobs_keeps_its_space(tmp_path: Path) -> None:
    llm = LLM(with_first_space_dropped(write_model(tmp_path)), kv_cache_memory="1MB", **PLACED)
    space = len(SPECIALS) + ord(" ")
    params = SamplingParams(max_tokens=2, logprobs=0, logit_bias={space: 100.0})
    (found,) = llm.generate([[len(SPECIALS) + ord("a")]], params)
    (output,) = found.outputs
    assert output.logprobs is not None and output.text == "  "
    assert [top[space].decoded_token for top in output.logprobs] == [" ", " "]


def with_first_space_dropped(folder: Path) -> Path:
    ids = {token: i for i, token in enumerate([*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))])}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [], byte_fallback=True))
    steps = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    library.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(SPECIALS)
    library.save(str(folder / "tokenizer.json"))
    return folder


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}: holds neither config.json nor a .gguf file"):
        load_model(tmp_path)


@pytest.mark.parametrize("device", ["gpu", "cuda:999", "cpu:x", "meta", "vulkan", 1.5, ["cpu"]])
def test_a_device_that_cannot_be_used_is_named_before_anything_is_read(device: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^device .* cannot be used here: .{,250}; take 'cpu', .{,30}$"):
        load_model(tmp_path, device=device)


def test_a_setting_that_does_not_exist_is_a_type_error_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="max_sequences"):
        LLM(tmp_path, max_sequences=5)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("gpu_memory_utilization", "kv_cache_memory"),
        ("torch_dtype", "it is dtype here"),
        ("trust_remote_code", "not needed"),
        ("tensor_parallel_size", "one process"),
        ("max_model_length", "did you mean max_model_len"),
        ("n_threads", "infinicore.set_num_threads"),
        ("revision", "the folder that it was downloaded to"),
        ("distributed_executor_backend", "one process"),
        ("hf_overrides", "config.json"),
    ],
)
def test_a_setting_that_others_have_is_refused_with_ours(tmp_path: Path, name: str, way_out: str) -> None:
    with pytest.raises(TypeError, match=f"{name}'; .*{way_out}"):
        LLM(tmp_path, **{name: 2})


def test_a_setting_of_others_that_asks_for_nothing_is_taken() -> None:
    """As scripts for vLLM have them"""
    idle = {"tensor_parallel_size": 1, "trust_remote_code": True, "load_format": "auto"}
    assert EngineConfig(**idle, max_num_seqs=3) == EngineConfig(max_num_seqs=3)
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        EngineConfig(tensor_parallel_size=True)  # type: ignore[call-arg]


def test_a_second_argument_without_a_name_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="report must be called .*, but is 'float16'; options go by name"):
        LLM(tmp_path, "float16")  # type: ignore[arg-type]


def test_the_names_of_tokens_and_texts_serve_what_is_generated(llm: LLM) -> None:
    """As examples for vLLM have it"""
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    )
    params = replace(
        GREEDY, stop_token_ids=(tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<pad>"))
    )
    (by_text,) = llm.generate(text, params)
    (by_ids,) = llm.generate({"prompt_token_ids": tokenizer(text).input_ids}, params)
    (chatted,) = llm.chat([{"role": "user", "content": "a"}], params)
    assert said(by_text) == said(by_ids) == said(chatted)


# ---- the user's mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        b"x",
        bytearray(b"x"),
        memoryview(b"x"),
        5,
        1.5,
        {"a": 1},
        {},
        [["a", "b"]],
        [None],
        ["a", b"b"],
        ["a", 1],
        [[1], 2],
        [[1.5]],
        [[None]],
    ]
    + [{"prompt": b"x"}, {"prompt": None}, {"prompt": 5}, {"prompt_token_ids": [True]}, [torch.tensor([1])]]
    + [{"prompt": "a", "prompt_token_ids": [1]}, {"prompt": "a", "extra": 1}, [[]], "", [[2**70]], [[-1]]]
    + [[[VOCAB_SIZE]], [[5] * MAX_LENGTH], "\ud800", {"prompt_token_ids": "12"}],
)
def test_prompts_that_are_none_are_request_errors(prompts: Any, llm: LLM) -> None:
    with pytest.raises(RequestError) as error:
        llm.generate(prompts, GREEDY)
    assert len(str(error.value)) < 300
    check_idle(llm.engine)


def test_of_several_prompts_none_is_run_if_one_is_wrong(llm: LLM) -> None:
    with pytest.raises(RequestError, match=f"token id {VOCAB_SIZE}; the model's are 0 to {VOCAB_SIZE - 1}"):
        llm.generate([[1, 2], [VOCAB_SIZE]], GREEDY)
    check_idle(llm.engine)


@pytest.mark.parametrize(
    "prompts", [[5, 6], [[5, 6]], {"prompt_token_ids": [5, 6]}, ((5, 6),), iter([[5, 6]])]
)
def test_prompts_may_be_ids_in_any_shape(prompts: Any, llm: LLM) -> None:
    (output,) = llm.generate(prompts, GREEDY)
    assert output.prompt_token_ids == [5, 6] and output.prompt is None and output.finished


def test_prompts_may_be_texts_from_any_iterable(llm: LLM) -> None:
    texts = ("One, two,", "Red, green,")
    outputs = llm.generate((text for text in texts), GREEDY)
    assert [output.prompt for output in outputs] == list(texts)
    assert list(map(said, outputs)) == [said(llm.generate({"prompt": text}, GREEDY)[0]) for text in texts]


def test_no_prompts_have_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == llm.chat([], GREEDY) == []


@pytest.mark.parametrize(
    "messages", [None, "hi", 3, {"role": "user", "content": "x"}, [None], ["hi"], [["hi"]], [[]]]
)
def test_messages_that_are_none_are_request_errors(messages: Any, llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.chat(messages, GREEDY)


def test_a_conversation_is_answered_as_its_template_has_it(llm: LLM) -> None:
    one, two = ([{"role": "user", "content": text}] for text in ("a", "b"))
    (output,) = llm.chat(one, GREEDY)
    assert output.prompt == "user:a\n"
    assert said(output) == said(llm.generate("user:a\n", GREEDY)[0])
    assert [said(each) for each in llm.chat([one, two], GREEDY)][0] == said(output)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_tokens": 3}, "chat does not know max_tokens.*give it to sampling_params"),
        ({"chat_template": "{{ 1 }}"}, "chat does not know chat_template.*give it to LLM"),
        (
            {"continue_final_message": True},
            "chat does not know continue_final_message.*apply_chat_template.*generate",
        ),
        ({"chat_template_kwargs": {"temperature": 0.0}}, "chat does not know temperature"),
        ({"max_new_tokens": 3}, "chat does not know max_new_tokens.*sampling_params has it, as max_tokens"),
        ({"response_format": {"type": "json_object"}}, "chat does not know response_format.*structured_out"),
        ({"stream": True}, "chat does not know stream.*LLM.stream gives tokens"),
        ({"chat_template_kwargs": {"self": 1}}, "chat does not know self"),
        ({"chat_template_kwargs": ["date"]}, r"chat_template_kwargs must be a dict.*but are \['date'\]"),
        ({"chat_template_kwargs": {1: 2}}, r"chat_template_kwargs must be a dict.*but are \{1: 2\}"),
    ],
)
def test_what_is_no_variable_of_a_template_is_refused(
    keywords: dict[str, Any], message: str, llm: LLM
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, **keywords)


def test_keywords_of_chat_that_ask_for_nothing_are_taken(llm: LLM) -> None:
    """As scripts for vLLM have them"""
    messages = [{"role": "user", "content": "a"}]
    idle = {"chat_template": None, "continue_final_message": False, "stream": False, "guided_json": None}
    assert said(llm.chat(messages, GREEDY, **idle)[0]) == said(llm.chat(messages, GREEDY)[0])


def test_chats_with_other_salts_share_nothing(llm: LLM) -> None:
    messages = [{"role": "user", "content": "abcdefgh" * 12}]
    found = [llm.chat(messages, GREEDY, cache_salt=salt, priority=1)[0] for salt in ("anne", "bob", "anne")]
    assert [output.num_cached_tokens > 0 for output in found] == [False, False, True]
    assert len({tuple(output.outputs[0].token_ids) for output in found}) == 1


@pytest.mark.parametrize("params", [5, {"max_tokens": 3}, "greedy", [GREEDY, GREEDY], [None], True])
def test_sampling_params_are_of_their_class_and_one_for_each_prompt(params: Any, llm: LLM) -> None:
    for call in (
        lambda: llm.generate("a", params),
        lambda: llm.chat([{"role": "user", "content": "a"}], params),
        lambda: next(llm.stream([1], params)),
    ):
        with pytest.raises(RequestError, match="sampling_params must be"):
            call()


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [VOCAB_SIZE]},
        {"allowed_token_ids": [1, 1 << 30]},
        {"logit_bias": {VOCAB_SIZE: 1.0}},
    ],
    ids=str,
)
def test_token_ids_of_settings_are_the_models(params: dict[str, Any], llm: LLM) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(params))} has token id .*; the model's are 0 to 257"):
        llm.generate("a", SamplingParams(**params))


@pytest.mark.parametrize(
    ("keyword", "way_out"),
    [
        ({"temperature": 0.0}, "sampling_params has it"),
        ({"max_new_tokens": 3}, "sampling_params has it, as max_tokens"),
        ({"prompt_token_ids": [[1, 2]]}, "prompts may be lists of token ids"),
        ({"messages": []}, "chat answers messages"),
        ({"use_tdqm": False}, "did you mean use_tqdm"),
    ],
    ids=str,
)
def test_keywords_that_generate_has_elsewhere_are_refused_with_ours(
    keyword: dict[str, Any], way_out: str, llm: LLM
) -> None:
    with pytest.raises(TypeError, match=f"generate does not know '{next(iter(keyword))}'; {way_out}"):
        llm.generate("a", **keyword)


@pytest.mark.parametrize(
    ("call", "keyword", "way_out"),
    [
        ("stream", {"temperature": 0.0}, "sampling_params has it"),
        ("stream", {"sampling_params": GREEDY}, "it is params here"),
        ("stream", {"max_new_tokens": 3}, "sampling_params has it, as max_tokens"),
        ("embed", {"pooling_params": 3}, "states are pooled as the model's files say"),
        ("score", {"text_1": "a"}, "it is queries here"),
    ],
    ids=str,
)
def test_keywords_that_other_calls_have_elsewhere_are_refused_with_ours(
    call: str, keyword: dict[str, Any], way_out: str, llm: LLM
) -> None:
    with pytest.raises(TypeError, match=f"{call} does not know '{next(iter(keyword))}'; {way_out}"):
        getattr(llm, call)("a", **keyword)


@pytest.mark.parametrize("priority", ["high", 1.5, True, [1, 2]])
def test_priorities_are_whole_numbers_one_for_each_prompt(priority: Any, llm: LLM) -> None:
    with pytest.raises(RequestError, match="priority must be"):
        llm.generate("a", GREEDY, priority=priority)


@pytest.mark.parametrize("salt", [5, b"x", ["a"]])
def test_a_salt_is_a_text(salt: Any, llm: LLM) -> None:
    with pytest.raises(RequestError, match="cache_salt must be a string, but is"):
        llm.generate("a", GREEDY, cache_salt=salt)


@pytest.mark.parametrize("token_ids", [[1.5], ["a"], [[1]], [None], [2**70], [], None, [-1]])
def test_streams_begin_with_a_text_or_token_ids(token_ids: Any, llm: LLM) -> None:
    with pytest.raises(RequestError):
        next(llm.stream(token_ids, GREEDY))


def test_a_stream_is_one_continuation(llm: LLM) -> None:
    with pytest.raises(RequestError, match="stream gives one continuation, but n is 2"):
        next(llm.stream("a", SamplingParams(n=2)))


def test_a_wrong_setting_names_itself_and_is_no_request() -> None:
    with pytest.raises(ValueError, match="temperature must be"):
        SamplingParams(temperature=-1)


# ---- many --------------------------------------------------------------------------------------------------


def test_more_prompts_than_may_wait_are_all_answered_in_their_order(folder: Path, llm: LLM) -> None:
    limits = {"max_num_seqs": 2, "max_queue": 3, "max_queue_tokens": 40}
    small = LLM(folder, kv_cache_memory="1MB", block_size=16, **limits, **PLACED)
    prompts = [prompt(1 + i % 30, i) for i in range(40)]
    outputs = small.generate(prompts, SAMPLED)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [said(each) for each in outputs] == [said(each) for each in llm.generate(prompts, SAMPLED)]


def test_each_prompt_may_have_settings_of_its_own(llm: LLM) -> None:
    settings = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=i + 1) for i in range(4)]
    outputs = llm.generate(["a", "b", "c", "d"], settings)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4]


def test_max_tokens_none_goes_as_far_as_the_model(llm: LLM) -> None:
    params = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0.0)
    (output,) = llm.generate([[5] * (MAX_LENGTH - 7)], params)
    assert len(output.outputs[0].token_ids) == 7 and output.outputs[0].finish_reason == "length"
    assert len(list(llm.stream([5] * (MAX_LENGTH - 7), params))) == 7


# ---- streams -----------------------------------------------------------------------------------------------


def test_a_stream_gives_the_tokens_and_text_of_generate(llm: LLM) -> None:
    (whole,) = llm.generate("abc", SAMPLED)
    pieces = list(llm.stream("abc", SAMPLED))
    assert [token for token, _ in pieces] == whole.outputs[0].token_ids
    assert "".join(text for _, text in pieces) == whole.outputs[0].text


def test_a_stream_that_nobody_reads_on_is_forgotten(llm: LLM) -> None:
    stream = llm.stream("abc", SAMPLED)
    next(stream)
    assert llm.engine.has_work
    stream.close()
    check_idle(llm.engine)


def test_prompts_are_answered_between_the_tokens_of_a_stream(llm: LLM) -> None:
    wanted = list(llm.stream("abc", SAMPLED)), said(llm.generate("xyz", GREEDY)[0])
    tokens = []
    for token, _ in llm.stream("abc", SAMPLED):
        tokens.append(token)
        assert said(llm.generate("xyz", GREEDY)[0]) == wanted[1]
    assert tokens == [token for token, _ in wanted[0]]
    first, second = llm.stream("abc", SAMPLED), llm.stream("abc", SAMPLED)
    assert [a == b for (a, _), (b, _) in zip(first, second, strict=True)] == [True] * len(tokens)
    check_idle(llm.engine)


def test_threads_get_what_each_would_get_alone(llm: LLM) -> None:
    prompts = [prompt(10 + i, i) for i in range(4)]
    wanted = [said(llm.generate([ids], SAMPLED)[0]) for ids in prompts]
    found: dict[int, Any] = {}

    def ask(i: int) -> None:
        found[i] = [said(llm.generate([prompts[i]], SAMPLED)[0]) for _ in range(5)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == [[each] * 5 for each in wanted]
    check_idle(llm.engine)


# ---- what goes wrong ---------------------------------------------------------------------------------------


def test_an_error_in_a_step_reaches_the_caller_and_leaves_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = said(llm.generate("abc", GREEDY)[0])

    def fail(work: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "launch", fail)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc", "def"], GREEDY)
    check_idle(llm.engine)
    assert said(llm.generate("abc", GREEDY)[0]) == wanted


@pytest.mark.parametrize("place", ["_launch", "_finish", "_update", "_accept"])
def test_a_stream_goes_on_where_a_call_beside_it_was_interrupted(
    place: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=30)
    alone = [token for token, _ in llm.stream(prompt(40, 1), params)]
    stream = llm.stream(prompt(40, 1), params)
    got = [next(stream)[0] for _ in range(5)]
    run, count = getattr(llm.engine, place), 0

    def interrupted(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return run(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine, place, interrupted)
        llm.generate([prompt(30, 2), prompt(35, 3)], params)
    if place == "_accept":  # whose tokens are half there
        with pytest.raises(RuntimeError, match="interrupted in the midst of a token"):
            list(stream)
    else:
        assert got + [token for token, _ in stream] == alone
    check_idle(llm.engine)


def test_what_nobody_waits_for_is_forgotten_though_its_end_was_interrupted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream(prompt(40, 1), GREEDY)
    next(stream)

    def interrupted(block_ids: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine.blocks, "give_back", interrupted)
        stream.close()
    llm.generate("abc", GREEDY)
    check_idle(llm.engine)


def test_a_stream_shows_all_of_its_text_though_another_thread_draws_the_last_token(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads while the token is there and its end is not."""
    (text,) = (output.outputs[0].text for output in llm.generate("abc", GREEDY))
    params = replace(GREEDY, stop=(text[-1] + "never",))  # whose beginning is held back until the end
    is_drawn, is_read = threading.Event(), threading.Event()
    other = threading.Thread(target=llm.generate, args=("other", GREEDY))
    run_steps, finish = llm._steps, Completion.finish

    def steps(requests: Any) -> Any:
        for ended in run_steps(requests):
            if requests[0].params is params and requests[0].completions[0].num_drawn == GREEDY.max_tokens - 1:
                other.start()
                assert is_drawn.wait(60)
            yield ended

    def finish_later(completion: Completion, *reason: Any) -> None:
        if completion.params is params:
            is_drawn.set()
            is_read.wait(0.5)
        finish(completion, *reason)

    monkeypatch.setattr(llm, "_steps", steps)
    monkeypatch.setattr(Completion, "finish", finish_later)
    pieces = []
    for _, piece in llm.stream("abc", params):
        pieces.append(piece)
        if len(pieces) == GREEDY.max_tokens:
            is_read.set()
    other.join()
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be positive, but is 0"),
        ({"input_ids": [5, 6]}, TypeError, r"lists of token ids, but are \[5, 6\]"),
        ({"input_ids": "abc"}, TypeError, "lists of token ids, but are 'abc'"),
        ({"input_ids": [[5], []]}, ValueError, "every prompt at least one token"),
        ({"input_ids": torch.ones(1, 2)}, ValueError, "of integers and not empty, but are .* torch.float32"),
        ({"attention_mask": torch.ones(1, 2)}, ValueError, "lists of ids have no padding"),
        ({"pad_token_id": "x"}, TypeError, "pad_token_id must be an integer"),
        ({"eos_token_id": 0.5}, TypeError, "eos_token_id must be an integer"),
    ],
)
def test_generate_says_what_is_wrong(
    arguments: dict[str, Any], error: type[Exception], message: str, llm: LLM
) -> None:
    with pytest.raises(error, match=message):
        llm.model.generate(**{"input_ids": [[5, 6]], **arguments})


def test_generate_takes_numbers_of_numpy_and_torch_and_fills_with_what_it_is_told(llm: LLM) -> None:
    prompts = np.array([[5, 6], [7, 8]])
    wanted = llm.model.generate(prompts.tolist(), 4, eos_token_id=[]).cpu()
    ends = (wanted[0, 2].numpy()[()], wanted[0, 2:3], wanted[0, 2])
    for end in ends:
        row, _ = llm.model.generate(prompts, 4, eos_token_id=end, pad_token_id=-1).tolist()
        assert row == [5, 6, int(wanted[0, 2]), -1, -1, -1]


# As if another thread of the parent were in the midst of a step. CUDA does not live on in a fork.
FORKED_MIDWAY = """
import os, signal, sys
from infinilm import LLM, SamplingParams

params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=9)
llm = LLM(sys.argv[1], kv_cache_memory="1MB", device="cpu")
begun = llm.stream("abc", params)
next(begun)
llm._lock.acquire()
if os.fork() == 0:
    signal.alarm(60)
    llm.save_prefixes(sys.argv[2])
    own = llm.stream("abc", params)  # it has the id that the parent's has
    tokens = [next(own)]
    begun.close()
    os._exit(len(tokens + list(own)))
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_in_a_fork_what_its_parent_was_at_holds_up_nothing(
    folder: Path, tmp_path: Path, run_python: RunPython
) -> None:
    child = run_python(FORKED_MIDWAY, str(folder), str(tmp_path / "prefixes"))
    assert child.stdout == "9\n", child.stderr


def test_an_llm_answers_as_its_engine_does(llm: LLM) -> None:
    (output,) = llm.generate([prompt(20)], GREEDY)
    assert said(output) == said(generated(llm.engine, prompt(20), max_tokens=5))
