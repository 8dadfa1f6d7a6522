"""The body of OpenAI's responses: items in, tools of an agent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, FailFast, Field, TypeAdapter

from infinilm.server.bodies import (
    MAX_AGENT_TOOLS,
    Body,
    Content,
    Function,
    Grammar,
    Inner,
    Limit,
    Sampled,
    Variables,
    of_kinds,
)


class MessageItem(Inner):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class FunctionCallItem(Inner):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(Inner):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CallOutputItem(Inner):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content


class Thought(Inner):
    text: str


class ReasoningItem(Inner):
    type: Literal["reasoning"]
    content: Annotated[list[Thought], FailFast()] = []
    summary: Annotated[list[Thought], FailFast()] = []


class ItemReference(Inner):
    """An item of an answer that was stored, in its place"""

    type: Literal["item_reference"]
    id: str


ITEM_KINDS = (
    *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("reasoning", "item_reference"),
)
Item = Annotated[
    MessageItem | FunctionCallItem | CustomCallItem | CallOutputItem | ReasoningItem | ItemReference,
    Field(discriminator="type"),
]
STORED_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[Item])


def known_items(given: Any) -> Any:
    """Without those of servers that do more than ours"""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        raise ValueError("must be a text or a list of items")
    items = [
        {**one, "type": one.get("type") or untold_kind(one)} if isinstance(one, dict) else one
        for one in given
    ]
    return of_kinds(items, ITEM_KINDS)


def untold_kind(item: dict[str, Any]) -> str:
    """OpenAI's items have a type, but for messages and for what has nothing but an id."""
    return "item_reference" if item.keys() | {"type"} == {"type", "id"} else "message"


Items = Annotated[
    list[Item],
    FailFast(),
    Field(min_length=1),
    BeforeValidator(known_items, json_schema_input_type=str | list[Item]),
]


class PlainFunction(Function):
    type: Literal["function"]


class CustomFormat(Grammar):
    type: Literal["text", "grammar"]


class CustomTool(Inner):
    type: Literal["custom"]
    name: str
    description: str = ""
    format: CustomFormat | None = None


OneTool = Annotated[PlainFunction | CustomTool, Field(discriminator="type")]
ONE_TOOL_KINDS = ("function", "custom")


class Namespace(Inner):
    type: Literal["namespace"]
    name: str
    description: str = ""
    tools: Annotated[
        list[OneTool],
        FailFast(),
        Field(max_length=MAX_AGENT_TOOLS),
        BeforeValidator(lambda given: of_kinds(given, ONE_TOOL_KINDS)),
    ]


AgentTool = Annotated[PlainFunction | CustomTool | Namespace, Field(discriminator="type")]
AgentTools = Annotated[
    list[AgentTool],
    FailFast(),
    Field(max_length=MAX_AGENT_TOOLS),
    BeforeValidator(lambda given: of_kinds(given, (*ONE_TOOL_KINDS, "namespace"))),
]


class ChosenTool(Inner):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(Inner):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[ChosenTool],
        FailFast(),
        Field(min_length=1, max_length=MAX_AGENT_TOOLS),
        BeforeValidator(lambda given: of_kinds(given, ONE_TOOL_KINDS)),
    ]


class TextFormat(Inner):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextConfig(Inner):
    format: TextFormat = TextFormat()


class ReasoningConfig(Inner):
    effort: str | None = None
    summary: str | None = None  # changes nothing here: thoughts are told as they are


def without_logprobs(given: list[Any]) -> list[Any]:
    """What else may be included is not in our answers either way."""
    if "message.output_text.logprobs" in given:
        raise ValueError("must be without 'message.output_text.logprobs', which /v1/chat/completions tells")
    return given


Includes = Annotated[list[Any], AfterValidator(without_logprobs)]


class ResponsesBody(Sampled):
    """POST /v1/responses"""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    idle = {
        "background": (False,),
        "context_management": ([],),
        "logprobs": (False,),
        "n": (1,),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    refused = {
        "background": "ask for a stream",
        "chat_template": "the model's own is rendered",
        "context_management": "send what the model is to read",
        "conversation": "use previous_response_id, or send all of it as input",
        "logprobs": "ask /v1/chat/completions for them",
        "max_completion_tokens": "use max_output_tokens",
        "max_tokens": "use max_output_tokens",
        "messages": "use input",
        "moderation": "leave it out",
        "n": "ask several times",
        "prompt": "send its text as instructions and input",
        "response_format": "use text.format",
        "stop": "ask /v1/chat/completions",
        "structured_outputs": "use text.format",
        "top_logprobs": "ask /v1/chat/completions for them",
        "truncation": "shorten the input yourself",
    }

    input: Items
    instructions: str = ""
    tools: AgentTools = []
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedTools = "auto"
    parallel_tool_calls: bool | None = None
    text: TextConfig = TextConfig()
    max_output_tokens: Limit | None = None
    reasoning: ReasoningConfig = ReasoningConfig()
    chat_template_kwargs: Variables = {}
    metadata: dict[str, Any] = {}
    prompt_cache_key: str | None = None
    include: Includes = []
    store: bool = True
    previous_response_id: str | None = None


class ResponseQuery(Body):
    """GET /v1/responses/{response_id}"""

    model_config = ConfigDict(extra="ignore")
    idle = {"stream": ("false",)}
    refused = {"stream": "leave it out: the answer is complete"}


class ItemsQuery(Body):
    """GET /v1/responses/{response_id}/input_items"""

    model_config = ConfigDict(strict=False, extra="ignore")

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
