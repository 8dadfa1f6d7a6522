"""`infinilm batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.cli.options import add_engine_options, add_model_options, load
from infinilm.progress import progress

if TYPE_CHECKING:
    from infinilm.batch_files import Answers, Counts, Lines


def add(commands: Any) -> None:
    """`infinilm batch`"""
    command = commands.add_parser("batch", help="answer a file of requests, in OpenAI's batch format")
    command.add_argument("input", metavar="IN.jsonl", type=file, help="a request a line")
    command.add_argument(
        "output",
        metavar="OUT.jsonl",
        type=file,
        help="an answer a line; lines that have one there are not asked",
    )
    add_model_options(command)
    add_engine_options(command)
    command.set_defaults(run=run)


def file(given: str) -> Path:
    if given == "-":  # else answers would go into a file of that name
        raise argparse.ArgumentTypeError("must be a file, where a run that was stopped can go on, but is '-'")
    return Path(given)


def run(options: argparse.Namespace) -> None:
    from infinilm.batch_files import Answers, Lines

    lines = Lines(options.input)
    if options.output.exists() and options.output.samefile(options.input):
        raise ValueError(f"{options.output}: is the input; answers need a file of their own")
    with Answers(options.output, lines.num_lines) as answers:
        counts = complete(lines, answers) or answer(options, lines, answers)
    known = f", {counts.known:,} were there already" if counts.known else ""
    print(f"{counts.answered:,} answered, {counts.refused:,} refused{known}", file=sys.stderr)


def complete(lines: Lines, answers: Answers) -> Counts | None:
    """What came of it, if every line has its answer: no model is needed then."""
    from infinilm.batch_files import Counts

    counts = Counts()
    for line in lines:
        if line is not None and not answers.has(line):
            return None
        counts.known += line is not None
    return counts


def answer(options: argparse.Namespace, lines: Lines, answers: Answers) -> Counts:
    from infinilm.batch_files import BatchRun
    from infinilm.hub import served_name

    llm = load(options)
    with progress("answering", lines.num_lines) as report:
        return BatchRun(llm, served_name(options.model), lines, answers, report).run()
