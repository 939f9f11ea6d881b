"""The project's prose is short and plain: word budgets, first lines of docstrings, no logs, no private vocabulary."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("encore", "host_tuning", "models", "optimizations", "suite")
FOLDERS = (*PACKAGES, "docs", "figures", "results/recorded", "tests")
PLAIN_TESTS = tuple(
    f"tests/{name}" for name in ("fuzz", "judges", "kinds", "models", "optimizations", "suite", "support", "tools")
)
"""Folders of tests whose names, comments and docstrings use the field's words, too."""

MOST_WORDS = 1_500
MOST_WORDS_OF = {
    "CHANGELOG.md": 2_500,
    "docs/results.md": 3_000,
    "optimizations/DESIGN.md": 4_000,
    "suite/DESIGN.md": 4_000,
}
MOST_WORDS_TOGETHER = 32_000

GENERATED_FILES = frozenset({"results/recorded/README.md"})
GENERATED = re.compile(r"<!-- generated: (.+?) -->.*?<!-- end: \1 -->", re.DOTALL)
COMMIT = re.compile(r"(?<![\w#])(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}(?!\w)")
RUN = re.compile(r"\b\d{8}-\d{6}-")

NO_SENTENCE = re.compile(r"(What|Whether|Of|By|To be|How many)\b")

DIALECT = {
    "nobody|somebody|whoever": "the actor: the caller, the program, the allocator",
    "steady calls?|lean calls?": "fast path",
    "full way": "slow path",
    "in vain": "without use, without success",
    "(plays?|played|takes?|took) no part": "is unused, is not compared",
    "held alone": "has no other reference",
    "in the midst": "during",
    "in turns": "interleaved, alternately",
    "dearer|dear": "slower, expensive",
    "mends?|mended|mending": "fix",
    "as far off as": "within the numerical error of",
    "tuned otherwise": "different kernels",
    "otherwise than|looks? otherwise": "differs from",
    "the host long": "CPU time, host-bound",
    "(another one|others?) in each call": "changes on every call",
    r"(?<!by )(hand|hands|handed|handing) (out|on)": "return, pass, copy",
    "(give|gives|given|giving|gave) away": "donate",
    "to be told": "callback, flag, report",
    "words? of the graph": "kernel arguments, node parameters",
    "brought up to date": "updated, copied",
    "ways? there (is|are)": "each way, all ways",
    "(come|comes|came) to lie": "is allocated at",
    "in one go": "in one call",
    "thereof|therein|whereof": "of it, in it",
    "so to speak": "the plain statement",
    "looks of": "metadata of",
    "(is|are|was|were) void": "is invalidated",
    "ballot is closed": "the ranks have agreed already",
    "appliers?": "node updater",
    "(set|sets|setting) aside": "offload",
    "(lead|leads|led) (the|a) graph|led to (the|these|those|inputs)": "patch pointers, update node parameters",
    "behind (a|the|its|each|every) (launch|step|call|recording|replay|capture|backward|forward)": "after",
    "such as there are": "all",
    "as (told|asked)": "as planned, as requested",
    "beside": "next to, alongside",
    "behind (it|them|which|each other|this one|everything)": "after",
    "(hand|hands|handed|handing) (back|over)": "return, pass",
    "what became of": "what was done with, the outcome of",
    "led to": "set in the graph, caused",
    "brought to": "copied to",
    "(seen|sees|saw) to it": "does so",
    "chance is": "random numbers are",
    "another one than": "a different one from",
}
"""Phrases of a private vocabulary, as regular expressions of lower-case words, and the field's words for them."""

STILL_THERE = {
    "tuned otherwise": (3, "the name of a verdict, which recorded runs have"),
}
"""Of `DIALECT`, how many places there may still be, and where. These numbers may only shrink. At most 20 entries."""


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


@cache
def pages() -> dict[str, str]:
    found = [*REPOSITORY.glob("*.md"), *(path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.md"))]
    return {name_of(path): path.read_text(encoding="utf-8") for path in sorted(found)}


@cache
def modules() -> dict[str, str]:
    return read_modules(PACKAGES)


def read_modules(folders: Sequence[str]) -> dict[str, str]:
    found = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    return {name_of(path): path.read_text(encoding="utf-8") for path in sorted(found)}


def written(name: str) -> str:
    """Return the text of a page without what commands generate."""
    return "" if name in GENERATED_FILES else GENERATED.sub("", pages()[name])


def plain_words(text: str) -> str:
    """Return lower-case words: names are split, and strings and comments that go over several lines are joined."""
    text = re.sub(r"""["']\s*\n\s*[rfb]*["']""", "", text)
    text = re.sub(r"\n\s*#?\s*", " ", text)
    text = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text)
    return re.sub(r"[\s_]+", " ", text).lower()


def log_entries(text: str) -> list[str]:
    """Return the commit hashes and names of runs in a text."""
    return [match.group() for pattern in (COMMIT, RUN) for match in pattern.finditer(text)]


def docstrings(text: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return [one for one in found if one]


@pytest.mark.parametrize("name", pages())
def test_page_is_short(name: str) -> None:
    assert len(pages()[name].split()) <= MOST_WORDS_OF.get(name, MOST_WORDS)


def test_pages_together_are_short() -> None:
    assert sum(len(text.split()) for text in pages().values()) <= MOST_WORDS_TOGETHER


@pytest.mark.parametrize("name", pages())
def test_page_is_no_log(name: str) -> None:
    assert log_entries(written(name)) == []


def test_docstrings_begin_with_sentences() -> None:
    """One that begins with "What", "Whether" or the like is a fragment, which has to be read twice."""
    found = [(name, one) for name, text in modules().items() for one in docstrings(text) if NO_SENTENCE.match(one)]
    assert found == [], "begin the docstrings that this change adds with a verb, as `Return ...`"


@cache
def all_words() -> dict[str, str]:
    return {name: plain_words(written(name)) for name in pages()} | {
        name: plain_words(text) for name, text in (modules() | read_modules(PLAIN_TESTS)).items()
    }


@pytest.mark.parametrize("phrase", DIALECT)
def test_phrase_of_the_dialect_is_gone(phrase: str) -> None:
    pattern = re.compile(rf"\b({phrase})\b")
    found = Counter({name: len(pattern.findall(text)) for name, text in all_words().items()})
    most, why = STILL_THERE.get(phrase, (0, "there is none"))
    places = ", ".join(f"{name}: {count}" for name, count in found.items() if count)
    assert found.total() <= most, f"write {DIALECT[phrase]!r} instead ({most} may stay: {why}); {places}"
