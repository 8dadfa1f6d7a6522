"""Keywords that callers know from vLLM, transformers and llama-cpp-python, and what they are here.

A value that asks for what is done anyway is taken, as scripts have it; any other is refused with the way out.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Target = TypeVar("Target")

NEEDLESS = "it is not needed here"
ONE_PROCESS = "one process with one device runs the model; infinilm.models.parallel splits one by hand"
ALL_KINDS = "every model generates, embeds and scores as far as it can"
THREADS = "infinicore.set_num_threads sets them, or INFINICORE_NUM_THREADS in the environment"
IN_FILES = "the config.json of the model's folder says it"
NO_BEAMS = "there is no beam search; n gives several samples"
STRUCTURED = "structured_outputs=StructuredOutputsParams(json=..., regex=..., choice=...) does it"
NO_SCORES = "token ids are returned; calling the model gives logits"

# What is here instead, then the values that ask for nothing
Table = Mapping[str, tuple[Any, ...]]
ENGINE: Table = {
    "gpu_memory_utilization": ("kv_cache_memory bounds what keys and values take",),
    "swap_space": ("kv_cache_memory bounds what keys and values take",),
    "n_ctx": ("it is max_model_len here",),
    "torch_dtype": ("it is dtype here",),
    "device_map": ("it is device here",),
    "n_gpu_layers": ("device says where all layers are",),
    "quantization": ("files say how they are quantised; quantize does it while loading", None),
    "load_in_8bit": ("quantize='q8_0' does it", False),
    "load_in_4bit": ("quantize='q4_0' does it", False),
    "load_format": ("files say what they are", "auto"),
    "tokenizer": ("it is the one in the model's files", None),
    "generation_config": ("sampling_params of a call replace what the model's files recommend", "auto"),
    "tensor_parallel_size": (ONE_PROCESS, 1),
    "pipeline_parallel_size": (ONE_PROCESS, 1),
    "data_parallel_size": (ONE_PROCESS, 1),
    "download_dir": ("HF_HOME in the environment says where downloads are kept", None),
    "task": (ALL_KINDS, "auto", "generate"),
    "runner": (ALL_KINDS, "auto", "generate"),
    "trust_remote_code": (NEEDLESS, False, True),  # no file brings code that runs
    "enforce_eager": (NEEDLESS, False),
    "enable_chunked_prefill": (NEEDLESS, None, True),
    "tokenizer_mode": (NEEDLESS, "auto"),
    "disable_log_stats": (NEEDLESS, False, True),  # there are none
    "disable_log_requests": (NEEDLESS, False, True),
    "revision": ("the newest is taken; of another give the folder that it was downloaded to", None),
    "hf_token": ("HF_TOKEN in the environment, or `hf auth login`", None),
    "n_threads": (THREADS, None),
    "num_threads": (THREADS, None),
    "max_logprobs": (NEEDLESS,),
    "verbose": (NEEDLESS, False),
    "distributed_executor_backend": (ONE_PROCESS, None, "uni"),
    "enable_expert_parallel": (ONE_PROCESS, False),
    "disable_custom_all_reduce": (ONE_PROCESS, False, True),
    "cpu_offload_gb": ("device says where all layers are", 0),
    "num_gpu_blocks_override": ("kv_cache_memory bounds what keys and values take", None),
    "scheduling_policy": ("requests have a priority; of equals the first goes first", "fcfs", "priority"),
    "async_scheduling": (NEEDLESS, None, False, True),
    "enable_sleep_mode": (NEEDLESS, False),
    "max_seq_len_to_capture": (NEEDLESS,),
    "compilation_config": (NEEDLESS, None),
    "hf_overrides": (IN_FILES, None),
    "rope_scaling": (IN_FILES, None),
    "rope_theta": (IN_FILES, None),
    "override_generation_config": (
        "sampling_params of a call replace what the model's files recommend",
        None,
    ),
    "guided_decoding_backend": ("llguidance it is", "auto", "guidance"),
    "limit_mm_per_prompt": ("prompts are texts", None),
    "max_cpu_loras": ("max_loras are kept", None),
    "tokenizer_revision": ("it is the one in the model's files", None),
    "skip_tokenizer_init": ("detokenize=False among sampling_params gives token ids alone", False),
}
SAMPLING: Table = {
    "max_new_tokens": ("it is max_tokens here",),
    "max_completion_tokens": ("it is max_tokens here",),
    "n_predict": ("it is max_tokens here",),
    "num_predict": ("it is max_tokens here",),
    "num_return_sequences": ("it is n here",),
    "temp": ("it is temperature here",),
    "stop_strings": ("it is stop here", None),
    "stop_sequences": ("it is stop here", None),
    "repeat_penalty": ("it is repetition_penalty here",),
    "guided_decoding": ("it is structured_outputs here", None),
    "guided_json": (STRUCTURED, None),
    "guided_regex": (STRUCTURED, None),
    "guided_choice": (STRUCTURED, None),
    "guided_grammar": (STRUCTURED, None),
    "response_format": (STRUCTURED, None),
    "do_sample": ("temperature=0 is without, any other with sampling",),
    "best_of": (
        "n gives that many, of which cumulative_logprob tells the best if there are logprobs",
        None,
        1,
    ),
    "use_beam_search": (NO_BEAMS, False),
    "num_beams": (NO_BEAMS, 1),
    "length_penalty": (NO_BEAMS, 1.0),
    "early_stopping": (NO_BEAMS, False),
    "logits_processors": (
        "logit_bias, allowed_token_ids, bad_words or structured_outputs may do instead",
        None,
    ),
    "truncate_prompt_tokens": ("cut the prompt's token ids before generate", None),
    "spaces_between_special_tokens": (NEEDLESS, False, True),
    "extra_args": (NEEDLESS, None),
    "flat_logprobs": ("logprobs are a dict for each token", False),
    "stream": ("LLM.stream gives tokens as they come", False),
    "output_kind": ("LLM.stream gives what is new, generate of AsyncLLM all so far",),
}
GENERATE: Table = {
    "max_length": ("max_new_tokens counts what follows the prompt", None),
    "streamer": ("callback gets each step's tokens", None),
    "stopping_criteria": ("callback may return True to stop", None),
    "stop_strings": ("LLM.generate stops at strings", None),
    "generation_config": ("give its values by name", None),
    "num_beams": ("there is no beam search", 1),
    "num_return_sequences": ("repeat the prompt among input_ids", 1),
    "return_dict_in_generate": (NO_SCORES, False),
    "output_scores": (NO_SCORES, False),
    "use_cache": ("keys and values are always kept", True),
}


def knowing(table: Table) -> Callable[[Target], Target]:
    """A function, or a dataclass, that knows the names in a table beside its own"""

    def with_advice(target: Any) -> Any:
        if isinstance(target, type):
            target.__init__ = advised(target.__name__, target.__init__, table)  # type: ignore[misc]
            return target
        return advised(target.__name__, target, table)

    return with_advice


def advised(where: str, function: Callable[..., Any], table: Table) -> Callable[..., Any]:
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    def asks(name: str, value: Any) -> bool:
        if name in known:
            return True
        advice, *idle = table.get(name) or (guess(name, known),)
        if is_one_of(value, idle):
            return False
        raise TypeError("; ".join(filter(None, [f"{where} does not know {name!r}", advice])))

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        return function(*args, **{name: value for name, value in given.items() if asks(name, value)})

    return checked


def is_one_of(value: Any, idle: Sequence[Any]) -> bool:
    """Also in its type: True is not 1 here."""
    return any(type(value) is type(one) and value == one for one in idle)


def guess(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else ""
