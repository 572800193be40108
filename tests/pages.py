"""The code blocks of README.md and docs/, and how each command of them is run.

A block is a fence of Markdown. What it is follows from what it says, so a page may be reworded and
its blocks may move; a block of a kind that is not known here fails ``test_pages.py``.
"""

from __future__ import annotations

import enum
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
PAGES += ("CONTRIBUTING.md",) if (ROOT / "CONTRIBUTING.md").exists() else ()

SHELLS = ("", "sh", "bash", "shell", "console")
FIRST_CONTACT = re.compile(
    r"engine \S+ at tcp://\S+, met in \d+ ms \(hello \d+, plan \d+, trials \d+, ranks \d+, attach "
    r"\d+\): \w+( over .+)? at [\d.]+ GB/s, \d+ us: \d+ tokens \([\d.]+ \w+\) in [\d.]+ ms"
    r"( in chunks of [\d.]+ \w+, \d+ slots of [\d.]+ \w+)?(; not \w+: [^;]+)*"
)
"""The log line of a peer that was met."""
TREE_LINE = re.compile(r"(\S+)  +\S.*")
SETTING = re.compile(r"(--[a-z-]+) (.*)", re.DOTALL)


class Kind(enum.Enum):
    PYTHON = "a script"
    COMMANDS = "commands"
    OUTPUT = "what the block before prints"
    LOG = "log lines of a first contact"
    TREE = "paths with what they are"
    OPTION = "an option of vllm serve"
    DATA = "JSON, YAML or TOML"
    DRAWING = "a drawing"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Fence:
    """``line``: of the page, from 1. ``follows``: the block right before it."""

    page: str
    line: int
    language: str
    text: str
    follows: Kind | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @cached_property
    def kind(self) -> Kind:
        if self.language == "python":
            return Kind.PYTHON
        if self.language in ("json", "yaml", "toml"):
            return Kind.DATA
        lines = self.text.splitlines()
        if self.language in SHELLS and all(rule_of(each) for each in commands(self.text)):
            return Kind.COMMANDS
        if FIRST_CONTACT.match(" ".join(lines)):
            return Kind.LOG
        if SETTING.fullmatch(self.text.strip()):
            return Kind.OPTION
        if all(TREE_LINE.fullmatch(line) and "/" in line.split()[0] for line in lines):
            return Kind.TREE
        if self.language in ("", "text") and self.follows in (Kind.PYTHON, Kind.COMMANDS):
            return Kind.OUTPUT
        return Kind.DRAWING if self.language == "mermaid" else Kind.UNKNOWN


def fences(page: str) -> list[Fence]:
    """All of a page, in order."""
    found: list[Fence] = []
    language, begin, end = "", 0, 0
    body: list[str] | None = None
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        is_edge = line.lstrip().startswith("```")
        if is_edge and body is None:
            language, begin, body = line.strip().removeprefix("```").strip(), number, []
        elif is_edge and body is not None:
            is_next = found and begin <= end + 2
            follows = found[-1].kind if is_next else None
            text = textwrap.dedent("\n".join(body)) + "\n"
            found.append(Fence(page, begin, language, text, follows))
            body, end = None, number
        elif body is not None:
            body.append(line)
    assert body is None, f"{page}:{begin}: this fence has no end"
    return found


# ------------------------------------------------------------------ commands


class How(enum.Enum):
    RUN = "to its end, which must be a good one"
    SERVE = "until the page ends"
    STAND_IN = "an engine that only speaks HTTP takes its place"
    NOT = "only looked at"


@dataclass(frozen=True)
class Rule:
    """``pattern``: of a command as :func:`plain` has it; the first that fits counts."""

    pattern: str
    how: How
    why: str = ""


# Words of the reader's own are capital letters; these are values.
_OWN = r"(?!(HND|NHD|DEBUG|INFO|WARNING|ERROR|CRITICAL)\b)[A-Z][A-Z_]+"
RULES = (
    Rule(rf"kvxfer (.* )?{_OWN}( .*)?", How.NOT, "a word stands for the reader's own"),
    Rule(r"kvxfer .*--device cuda.*", How.NOT, "needs GPUs; tests/end_to_end/test_gpu_pairs.py"),
    Rule(r"kvxfer bench\b.*", How.NOT, "measures for minutes; its own tests run it"),
    Rule(r"kvxfer (prefill|proxy)\b.*", How.SERVE),
    Rule(r"kvxfer \S+.*", How.RUN),
    Rule(r"kvxfer", How.RUN),
    Rule(r"scripts/test( .*)?", How.NOT, "these tests themselves"),
    Rule(r"scripts/quick", How.NOT, "a part of these tests"),
    Rule(r"scripts/test_integrations( .*)?", How.NOT, "installs Ray and Dynamo, 0.8 GB; .ci/run"),
    Rule(r"scripts/test_vllm( .*)?", How.NOT, "installs vLLM, 2.5 GB; .ci/run runs it"),
    Rule(r"scripts/check", How.NOT, ".ci/run runs it, for a minute"),
    Rule(r"scripts/grid( .*)?", How.NOT, "an hour; tests/end_to_end/test_grid.py runs parts of it"),
    Rule(r"scripts/test_gpu( .*)?", How.NOT, "needs GPUs"),
    Rule(r"scripts/vllm_load( .*)?", How.NOT, "needs vLLM; tests/vllm/test_load.py"),
    Rule(r"(\S*python3? )?scripts/\w+\.py( .*)?", How.NOT, "measures for minutes; tests/scripts"),
    Rule(r"scripts/_setup", How.NOT, "installs; tests/test_setup.py"),
    Rule(r"git clone .*", How.NOT, "the network; the tree is there"),
    Rule(r"\S*pip install .*", How.NOT, "the network"),
    Rule(r"\S*python3? -m pip install .*", How.NOT, "the network"),
    Rule(r"python3? -m venv \S+", How.NOT, "the tree of the test has one, with what pip installs"),
    Rule(r"vllm serve .*", How.STAND_IN, "needs a model; tests/vllm/test_two_hosts.py serves one"),
    Rule(r"(kubectl|helm|docker|podman) .*", How.NOT, "needs a cluster; tests of deploy/"),
    Rule(r"promtool .*", How.NOT, "not installed everywhere; tests of deploy/"),
    Rule(r"(source|\.) \S+/activate", How.RUN),
    Rule(r"(curl|cd|export|echo|printf|cat|mkdir|cp|ls) .*", How.RUN),
)
_KVXFER = re.compile(r"^(\w+=\S+ )*(\S*python3? -m kvxfer|\S*/kvxfer|kvxfer)(?= |$)")


def commands(text: str) -> Iterator[str]:
    """The commands of a block as they are printed, each with all of its lines; no comments."""
    pending = ""
    for line in text.splitlines():
        pending += line.removeprefix("$ ") if not pending else "\n" + line
        ends = re.search(r"<<-?\s*['\"]?(\w+)", pending)
        if ends and line.strip() != ends[1]:
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation goes on
            continue
        if pending.endswith("\\"):
            continue
        if words:
            yield pending
        pending = ""
    assert not pending.strip(), f"a command without an end: {pending}"


def words_of(command: str) -> list[str]:
    """Without what is the shell's: comments, a pipe and what follows, ``&``."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    ends = [i for i, word in enumerate(words) if word in ("|", "&&", "&", ";", ">", ">>", "2>&1")]
    return words[: min(ends, default=len(words))]


def plain(command: str) -> str:
    """The words with ``kvxfer`` for each way to call it, the demo's too."""
    joined = _KVXFER.sub("kvxfer", shlex.join(words_of(command)))
    return re.sub(r"^scripts/demo\b", "kvxfer pair", joined)


def rule_of(command: str) -> Rule | None:
    """How the command is run; None: nobody has said it."""
    return next((rule for rule in RULES if re.fullmatch(rule.pattern, plain(command))), None)


def masked(line: str) -> str:
    """Without its numbers, and how many columns there are between its words."""
    return " ".join(re.sub(r"\d+(\.\d+)?", "#", line).split())
