"""Load for any server of OpenAI's API, and what its callers see: tokens a second, times, errors.

An open loop: requests arrive at random, so many a second on average (a Poisson process), whether or not
those before them have been answered; a slow server does not slow down who asks it. With a limit on requests
at once and no rate it is a closed loop: so many clients, each with its next request when it has its answer.

What is measured, for each request:
- time to the first token: from the moment it was due to the first text of its answer, connecting included;
- inter-token latency: between two chunks that have text. A server may put several tokens into a chunk, which
  `tokens_per_chunk` tells; the time per output token divides by tokens instead;
- tokens: by the usage that the server tells at the end, or, where it tells none, by the chunks that have
  text (`tokens_counted_by`).

A request that fails is counted by what went wrong, and in nothing else. No torch here: a client is light.
"""

from infinilm.load.client import Answer, Failure, Target
from infinilm.load.measures import measured, percentile, spread_of
from infinilm.load.prompts import Arrivals, Load, Query, queries
from infinilm.load.report import COLUMNS, check_chart, complaints, draw, row, short
from infinilm.load.traffic import find_model, run, sweep, warm_up

__all__ = [
    "COLUMNS",
    "Answer",
    "Arrivals",
    "Failure",
    "Load",
    "Query",
    "Target",
    "check_chart",
    "complaints",
    "draw",
    "find_model",
    "measured",
    "percentile",
    "queries",
    "row",
    "run",
    "short",
    "spread_of",
    "sweep",
    "warm_up",
]
