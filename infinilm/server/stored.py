"""Answers that a later request may name: in memory, bounded in number and bytes. Those that nobody has gone
on from for longest go first."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from infinilm.server.bodies import BodyError
from infinilm.server.responses_bodies import ItemsQuery

MAX_ANSWERS = 10_000
MAX_BYTES = 128 << 20
ITEM_BYTES = 256  # about what it takes to find an item by its id
Owner = bytes | None  # the digest of the key that a caller has given, where the server asks for one
Named = tuple[Owner, str]
Item = dict[str, Any]


class NotStored(Exception):
    """An id of nothing that is there: it never was, was deleted, had to make room, or is of another key."""

    def __init__(self, name: Named) -> None:
        super().__init__(name[1])
        self.id = name[1]


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer as JSON: what was asked, but for the answers before it, what it says, and the rest."""

    name: Named
    previous: str | None
    item_ids: tuple[str, ...]  # of the output
    input: bytes
    output: bytes
    rest: bytes

    @classmethod
    def of(cls, response: Mapping[str, Any], owner: Owner, given: bytes) -> Stored:
        rest = {name: value for name, value in response.items() if name != "output"}
        output, ids = response["output"], tuple(item["id"] for item in response["output"])
        told = (json.dumps(one, separators=(",", ":")).encode() for one in (output, rest))
        return cls((owner, response["id"]), response["previous_response_id"], ids, given, *told)

    @property
    def id(self) -> str:
        return self.name[1]

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.output) + len(self.rest) + ITEM_BYTES * len(self.item_ids)

    @property
    def body(self) -> bytes:
        return self.rest[:-1] + b',"output":' + self.output + b"}"

    def items(self) -> list[Item]:
        return [*parsed(self.input), *parsed(self.output)]

    def item(self, item_id: str) -> Item:
        """The one of the output that has this id"""
        return next(item for item in parsed(self.output) if item["id"] == item_id)


def parsed(items: bytes) -> list[Item]:
    """Items as they were. The parser lets no other thread work, but while it calls a function of Python's."""
    found: list[Item] = json.loads(items, object_pairs_hook=lambda pairs: dict(pairs))
    return found


class Store:
    """Answers by the key of their caller and their id; their items too, which some clients name instead."""

    def __init__(self, max_answers: int = MAX_ANSWERS, max_bytes: int = MAX_BYTES) -> None:
        self.max_answers, self.max_bytes = max_answers, max_bytes
        self.num_bytes = 0
        self._answers: OrderedDict[Named, Stored] = OrderedDict()
        self._holders: dict[Named, Stored] = {}  # by the ids of items

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: Stored) -> None:
        owner, _ = answer.name
        if answer.name in self._answers:  # it had come to its end, and then could not be told
            self.remove(answer.name)
        self._answers[answer.name] = answer
        self._holders |= {(owner, item_id): answer for item_id in answer.item_ids}
        self.num_bytes += answer.num_bytes
        while len(self) > self.max_answers or self.num_bytes > self.max_bytes:
            self.remove(next(iter(self._answers)))

    def remove(self, name: Named) -> None:
        answer = self.get(name)
        del self._answers[name]
        for item_id in answer.item_ids:
            del self._holders[name[0], item_id]
        self.num_bytes -= answer.num_bytes

    def get(self, name: Named) -> Stored:
        if name not in self._answers:
            raise NotStored(name)
        return self._answers[name]

    def holder(self, name: Named) -> Stored:
        """The answer that has an item of this id. It counts as used now: who names items goes on from it."""
        if name not in self._holders:
            raise NotStored(name)
        found = self._holders[name]
        self._answers.move_to_end(found.name)
        return found

    def chain(self, name: Named) -> list[Stored]:
        """An answer after those that it goes on from. All of them count as used now, so that none of a
        conversation goes before the rest of it."""
        found = [self.get(name)]
        while (previous := found[-1].previous) is not None:
            found.append(self.get((name[0], previous)))
        found.reverse()
        for one in found:
            self._answers.move_to_end(one.name)
        return found


def page_of(chain: Sequence[Stored], query: ItemsQuery) -> dict[str, Any]:
    """Some of the items that the last answer of a chain was made of"""
    found = [item for one in chain[:-1] for item in one.items()] + parsed(chain[-1].input)
    if query.order == "desc":
        found.reverse()
    ids: list[str] = [item["id"] for item in found]
    if query.after is not None and query.after not in ids:
        raise BodyError(f"after must be the id of an item, but is {short(query.after)}", "after")
    start = 0 if query.after is None else ids.index(query.after) + 1
    end = start + query.limit
    first, last = (ids[start], ids[:end][-1]) if start < len(ids) else (None, None)
    told = {"first_id": first, "last_id": last, "has_more": end < len(ids)}
    return {"object": "list", "data": found[start:end], **told}
