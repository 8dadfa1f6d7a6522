"""The bodies of chats, completions and tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from infinilm.sampling import MAX_STOPS
from infinilm.server.bodies import (
    Body,
    Content,
    Count,
    Function,
    Grammar,
    Inner,
    Limit,
    Prompts,
    Sampled,
    Variables,
    Whole,
)

MAX_LOGPROBS = 20
MAX_N = 128
MAX_TOOLS = 128

Stop = str | Annotated[list[Any], Field(max_length=MAX_STOPS)]


class Typed(Inner):
    """What stands under the key that its type is, for a function or a custom tool"""

    model_config = ConfigDict(validate_default=True)

    type: Literal["function", "custom"] = "function"

    @field_validator("function", "custom", check_fields=False)
    @classmethod
    def is_there_by_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("type") == info.field_name:
            raise PydanticCustomError("missing", "given")
        return value

    @property
    def inner(self) -> Any:
        return getattr(self, self.type)


class CalledFunction(Inner):
    name: str
    arguments: str


class CalledCustom(Inner):
    name: str
    input: str


class ToolCall(Typed):
    id: str | None = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class Message(Inner):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    tool_calls: Annotated[list[ToolCall], FailFast()] = []
    function_call: CalledFunction | None = None  # as it was before tool_calls


class CustomFormat(Inner):
    type: Literal["text", "grammar"]
    grammar: Grammar | None = None


class Custom(Inner):
    name: str
    description: str = ""
    format: CustomFormat | None = None


class OfferedTool(Typed):
    type: Literal["function", "custom"]
    function: Function | None = None
    custom: Custom | None = None


class ToolName(Inner):
    name: str


class NamedTool(Typed):
    function: ToolName | None = None
    custom: ToolName | None = None


class AllowedTools(Inner):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], FailFast(), Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Inner):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


# vLLM's fields that ask for nothing where they have the value that vLLM gives them.
UNASKED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "length_penalty": (1.0, 1),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}


# What structured_outputs was before
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class StreamOptions(Inner):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: in each chunk
    include_obfuscation: bool = False  # which pads chunks; ours have their own lengths


class Generation(Sampled):
    """What chats and completions have in common; from skip_special_tokens on the fields are vLLM's."""

    refused = dict.fromkeys(GUIDED, "use structured_outputs")

    n: Annotated[Whole, Field(ge=1, le=MAX_N)] = 1
    stop: Stop | None = None
    max_tokens: Whole | None = None
    stream_options: StreamOptions = StreamOptions()
    response_format: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    # These change nothing here.
    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    timings_per_token: Any = None
    user: Any = None


class ChatBody(Generation):
    """POST /v1/chat/completions"""

    idle = {
        **UNASKED,
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "continue_final_message": (False,),
        "echo": (False,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "include_reasoning": (True,),
        "modalities": (["text"],),
    }
    refused = {**Generation.refused, "functions": "use tools", "function_call": "use tool_choice"}

    messages: Annotated[list[Message], FailFast()]
    max_completion_tokens: Limit | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[OfferedTool], FailFast(), Field(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Variables = {}
    reasoning_effort: str | None = None
    # These change nothing here.
    prediction: Any = None
    verbosity: Any = None


class CompletionBody(Generation):
    """POST /v1/completions"""

    idle = {**UNASKED, "add_special_tokens": (True,), "suffix": ("",)}

    prompt: Prompts
    best_of: Count | None = None
    echo: bool = False
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt or messages"""

    idle = {"continue_final_message": (False,)}

    prompt: str | None = None
    messages: Annotated[list[Message], FailFast()] = []
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    tools: Annotated[list[OfferedTool], FailFast(), Field(max_length=MAX_TOOLS)] = []
    chat_template_kwargs: Variables = {}


class DetokenizeBody(Body):
    """POST /detokenize"""

    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]
