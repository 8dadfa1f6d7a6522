"""Whether a document answers a query: how a model is asked, and how its answer becomes a score.

A reranker's own chat template has messages of a query and of a document. Other models are asked in words.
Each document has a prompt of its own, in which it comes late, so that all of them share what is before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infinilm.models.pooling import PoolingError
from infinilm.tokenizer import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from infinilm.models.llama import LlamaForCausalLM

# Of a template: `message.role == "query"` and the like
HAS_QUERY = re.compile(r"role\W+(?:\w+\W+)?query\b")


@dataclass(frozen=True)
class Question:
    """The words in which a model is asked, and those that it answers with."""

    content: str
    yes: tuple[str, ...]
    no: tuple[str, ...]
    instruction: str | None = None  # unless the caller has another
    frame: tuple[str, str] | None = None  # what stands around it; without, the user of a chat says it


# Of the ways to ask, one that small models answer well
ASKED = Question(
    'Does the text answer "{query}"?\n\nText: {document}\n\nAnswer yes or no.', ("yes", "Yes"), ("no", "No")
)
PLAIN = "{question}\n\nAnswer:\n"  # for models without a chat template

# What Qwen3-Reranker was trained on
QWEN3 = Question(
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    ("yes",),
    ("no",),
    "Given a web search query, retrieve relevant passages that answer the query",
    (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
)


class Judge:
    """A model that scores documents: from 0 to 1, unless its files have it otherwise."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: Tokenizer, max_tokens: int) -> None:
        self.model, self.tokenizer, self.max_tokens = model, tokenizer, max_tokens
        self.question, self.pooling = model.question, model.pooling
        self.has_own_template = HAS_QUERY.search(tokenizer.chat_template or "") is not None

    def prompt(
        self, query: str, document: str, instruction: str | None = None, limit: int | None = None
    ) -> list[int]:
        """The tokens that ask, at most so many; what their last state is worth, `score` tells. It may take
        long."""
        self.check(instruction)
        ids = self._asked(query, document, instruction, self.max_tokens if limit is None else None)
        if limit is None or len(ids) <= limit:
            return ids
        return self._asked_in(limit, query, document, instruction)

    def _asked_in(self, limit: int, query: str, document: str, instruction: str | None) -> list[int]:
        """The whole question of as much of the document's beginning as there is room for. It is asked anew:
        tokens at the end of a document may be one with what follows it."""
        num_bare = len(self._asked(query, "", instruction))
        if num_bare >= limit:
            told = f"{limit} tokens have no room for one: the question alone has {num_bare}"
            raise PoolingError(f"truncate_prompt_tokens cuts documents, but {told}")
        document_ids = self.tokenizer.encode(document, add_special_tokens=False, allow_special=False)
        room = limit - num_bare
        while True:
            ids = self._asked(query, self._text(document_ids[:room]), instruction)
            if len(ids) <= limit:
                return ids
            room = max(0, room - (len(ids) - limit))

    def _text(self, token_ids: list[int]) -> str:
        """Without the half of a character at its end"""
        return "".join(map(Detokenizer(self.tokenizer).add, token_ids))

    def _asked(
        self, query: str, document: str, instruction: str | None, max_tokens: int | None = None
    ) -> list[int]:
        instruction = instruction or self.pooling.instruction
        if self.has_own_template:
            given = [("system", instruction), ("query", query), ("document", document)]
            return self._chat([(role, text) for role, text in given if text is not None], max_tokens)
        question = self.question
        content = question.content.format(
            query=query, document=document, instruction=instruction or question.instruction
        )
        if question.frame is not None:
            return self._framed(content, *question.frame, max_tokens)
        if self.tokenizer.chat_template is None:
            whole = PLAIN.format(question=content)
            return self.tokenizer.encode(whole, allow_special=False, max_tokens=max_tokens)
        return self._chat([("user", content)], max_tokens)

    def _chat(self, messages: list[tuple[str, str]], max_tokens: int | None) -> list[int]:
        conversation = [{"role": role, "content": content} for role, content in messages]
        return self.tokenizer.encode_chat(conversation, max_tokens=max_tokens, enable_thinking=False)

    def _framed(self, content: str, before: str, after: str, max_tokens: int | None) -> list[int]:
        """Special tokens are those of the frame alone."""
        encode = self.tokenizer.encode
        inner = encode(content, add_special_tokens=False, allow_special=False, max_tokens=max_tokens)
        return [*encode(before, add_special_tokens=False), *inner, *encode(after, add_special_tokens=False)]

    @torch.inference_mode()
    def score(self, state: Tensor) -> float:
        """What the last state [E] of a prompt says. An answer in words is a probability, as in Qwen's own
        example, whatever the files ask of a head."""
        is_raw = self.model.score is not None and self.pooling.has_raw_scores
        margin = self._margin(state.to(self.model.model.norm.weight))
        return float(margin if is_raw else torch.sigmoid(margin))

    def _margin(self, state: Tensor) -> Tensor:
        """By how much yes is more likely than no; sums are float32."""
        if self.model.score is not None:
            margin, *others = self.model.score(state).float()
            return margin - others[0] if others else margin  # type: ignore[no-any-return]
        logits = self.model.logits(state).float()
        yes, no = self.answers
        return logits[yes].logsumexp(0) - (logits[no].logsumexp(0) if no else 0.0)

    @cached_property
    def answers(self) -> tuple[list[int], list[int]]:
        """The tokens that say yes, and those that say no"""
        if self.pooling.answers is not None:
            yes, no = self.pooling.answers
            return [yes], [] if no is None else [no]
        return self._firsts(self.question.yes), self._firsts(self.question.no)

    def _firsts(self, words: tuple[str, ...]) -> list[int]:
        """The tokens that words begin with, each once"""
        firsts = [self.tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
        return list(dict.fromkeys(firsts))

    # ---- what is checked -----------------------------------------------------------------------------------

    def check(self, instruction: str | None = None) -> None:
        """PoolingError where the model cannot score, or takes no instruction"""
        takes_one = self.has_own_template or self.question.instruction is not None
        if instruction is not None and not takes_one:
            raise PoolingError("instruction is for rerankers that take one, and this model is none")
        model, pooling = self.model, self.pooling
        if pooling.is_embedder or (model.score is None and not model.has_head):
            raise PoolingError("the model is for embeddings, whose products compare texts; it has no scores")
        is_reranker = model.score is not None or pooling.answers is not None
        if is_reranker and not self.has_own_template and self.question.frame is None:
            raise PoolingError(
                "the model is a reranker, but its files do not say how it is asked: give a chat_template "
                "with messages whose role is query and document"
            )
        if model.score is None:
            self._check_answers()
        else:
            self._check_labels(model.score.weight.shape[0])

    def _check_labels(self, count: int) -> None:
        if count != 1 and (count, self.pooling.labels) != (2, ("yes", "no")):
            raise PoolingError(f"the model gives a text {count} scores, of which none is known to rank it")

    def _check_answers(self) -> None:
        yes, no = self.answers
        if set(yes) & set(no):
            raise PoolingError("the model's tokens do not tell yes from no, so that it cannot rank")
        if not all(0 <= token_id < self.model.config.vocab_size for token_id in yes + no):
            raise PoolingError(f"the model's LogitScore names tokens {yes + no}, which it does not have")
