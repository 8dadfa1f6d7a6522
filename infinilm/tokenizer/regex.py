"""How long a regular expression may search: an upper bound that holds for every text.

The library's engine tries one way after another, and (a+)+$ has more ways than there is time. So the ways of
each piece of a pattern are counted, as if everything could match everything.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

RUN = 1000  # what may repeat without end is counted as repeating this often
MAX_EFFORT = 100 * RUN  # a repeat may be tried at every length, but no two of them at every pair of lengths

_ESCAPE = r"\\(?:[pP]\{\^?\w+\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDsSwWhHnrtvfae]|[^\w])"
_POSIX = r"\[:\^?(?:alnum|alpha|blank|cntrl|digit|graph|lower|print|punct|space|upper|xdigit|word):\]"
_TOKEN = re.compile(
    rf"""
      (?P<open>    \( (?: \?[im]*(?:-[im]+)?: | \?[=!>] | \?<[=!] | (?![?*]) ) )
    | (?P<close>   \) )
    | (?P<bar>     \| )
    | (?P<repeat>  [*+?] [+?]? | \{{\d+\}} (?!\?) | \{{(?:\d+,\d*|,\d+)\}} \?? )
    | (?P<set>     \[ )
    | (?P<anchor>  [\^$] | \\[bBAzZ] )
    | (?P<char>    {_ESCAPE} | [^\\()|*+?\[{{] | \{{ (?!\d*,?\d*\}}) )
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_SET = re.compile(
    rf"(?P<open>\[(?!:)\^?\]?)|(?P<close>\])|(?P<other>{_POSIX}|{_ESCAPE}|[^\[\]\\])", re.DOTALL
)


@dataclass(frozen=True)
class Cost:
    """What it takes to match a piece of a pattern at one place of a text"""

    ways: float = 1  # in which it can match
    effort: float = 1  # tries until it has matched, or cannot
    full_effort: float = 1  # tries until every way has been seen, which a failure behind it leads to
    width: float = 1  # the fewest characters that it matches
    can_fail: bool = True


@dataclass
class _Group:
    looks_around: bool = False
    branches: list[list[Cost]] = field(default_factory=lambda: [[]])

    def cost(self) -> Cost:
        costs = [_in_sequence(branch) for branch in self.branches]
        if self.looks_around:  # it has one way, but reads on to find it, and takes nothing it has read
            effort = sum(max(cost.effort, cost.ways) for cost in costs)
            return Cost(effort=effort, full_effort=effort, width=0)
        ways, effort = sum(cost.ways for cost in costs), sum(cost.effort for cost in costs)
        full_effort = sum(cost.full_effort for cost in costs)
        width, can_fail = min(cost.width for cost in costs), all(cost.can_fail for cost in costs)
        return Cost(ways, effort, full_effort, width, can_fail)


def cost_of_regex(pattern: str) -> Cost:
    """The cost of a whole pattern. One that could search for too long, or is not understood, is refused."""
    stack = [_Group()]
    for kind, text in _tokens(pattern.removeprefix("(?i)")):
        current = stack[-1].branches[-1]
        if kind == "open":
            stack.append(_Group(looks_around=text.endswith(("=", "!"))))
        elif kind == "close" and len(stack) > 1:
            cost = stack.pop().cost()
            stack[-1].branches[-1].append(cost)
        elif kind == "bar":
            stack[-1].branches.append([])
        elif kind == "repeat" and current:
            current.append(_repeated(current.pop(), text))
        elif kind in ("char", "anchor"):
            current.append(Cost(width=kind == "char"))
        else:
            raise _not_understood(pattern, text)
    if len(stack) > 1:
        raise _not_understood(pattern, "")
    return _checked(stack[0].cost(), pattern)


def _checked(cost: Cost, pattern: str) -> Cost:
    if not cost.effort <= MAX_EFFORT:
        raise ValueError(f"the pattern {pattern[:200]!r} has too many ways to match at one place of a text")
    return cost


def _not_understood(pattern: str, rest: str) -> ValueError:
    return ValueError(f"the pattern {pattern[:200]!r} is not understood at {rest[:20]!r}")


def _tokens(pattern: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(pattern):
        token = _TOKEN.match(pattern, place)
        if token is None:
            raise _not_understood(pattern, pattern[place:])
        kind = str(token.lastgroup)
        end = _end_of_set(pattern, place) if kind == "set" else token.end()
        yield ("char" if kind == "set" else kind), pattern[place:end]
        place = end


def _end_of_set(pattern: str, place: int) -> int:
    """Sets may hold sets; a bracket that would close an empty one is meant as a character."""
    depth = 0
    while token := _IN_SET.match(pattern, place):
        place = token.end()
        depth += {"open": 1, "close": -1}.get(str(token.lastgroup), 0)
        if depth == 0:
            return place
    raise _not_understood(pattern, pattern[place:])


def _in_sequence(costs: Sequence[Cost]) -> Cost:
    """Each piece is tried for every way of those before it, up to the last that can send the search back."""
    last = max((place for place, cost in enumerate(costs) if cost.can_fail), default=-1)
    effort = full_effort = 0.0
    ways = 1.0
    for place, cost in enumerate(costs):
        effort += cost.effort if place > last else ways * (cost.effort if place == last else cost.full_effort)
        full_effort += ways * cost.full_effort
        ways *= cost.ways
    width = sum(cost.width for cost in costs)
    return Cost(ways, max(1, effort), max(1, full_effort), width, last >= 0)


def _repeated(cost: Cost, quantifier: str) -> Cost:
    least, most = _counts(quantifier)
    width, can_fail = least * cost.width, least > 0 and cost.can_fail
    if most <= 1:
        return Cost(cost.ways + 1 - least, cost.effort, cost.full_effort, width, can_fail)
    if cost.ways == 1 and cost.width > 0:  # only the number of times is open
        effort = max(least, 1) if cost.full_effort == 1 else most * cost.full_effort
        return Cost(most - least + 1, effort, effort, width, can_fail)
    ways = (cost.ways + 1) ** most if most < 30 and cost.ways < RUN else math.inf
    return Cost(ways, ways * cost.full_effort, ways * cost.full_effort, width, can_fail)


def _counts(quantifier: str) -> tuple[int, int]:
    """The fewest and the most times that a quantifier asks for."""
    if quantifier[0] != "{":
        return int(quantifier[0] == "+"), 1 if quantifier[0] == "?" else RUN
    least, comma, most = quantifier.strip("{}?").partition(",")
    fewest = int(least or 0)
    return fewest, (int(most or fewest + RUN) if comma else fewest)
