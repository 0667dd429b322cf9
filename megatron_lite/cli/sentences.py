"""Text -> sentences, for `preprocess --split-sentences` (BERT, T5).

    punkt       nltk's, with its data of the language installed: what Megatron-LM uses
    sentencex   rules for some 300 languages, in one package without data of its own to fetch
    lines       every line is one: source code, verse, text with a sentence a line

`auto` takes punkt where nltk and the data are there, else sentencex; the choice is printed, and a run that goes on
where another one stopped must have the same. Neither is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

from megatron_lite.cli.jsonl import BadLine
from megatron_lite.cli.optional import installed
from megatron_lite.errors import ConfigError

SPLITTERS = ("auto", "punkt", "sentencex", "lines")

# The languages that punkt knows, by the names of its data, with the codes that sentencex knows them by.
_CODES = {
    "czech": "cs",
    "danish": "da",
    "dutch": "nl",
    "english": "en",
    "estonian": "et",
    "finnish": "fi",
    "french": "fr",
    "german": "de",
    "greek": "el",
    "italian": "it",
    "malayalam": "ml",
    "norwegian": "no",
    "polish": "pl",
    "portuguese": "pt",
    "russian": "ru",
    "slovene": "sl",
    "spanish": "es",
    "swedish": "sv",
    "turkish": "tr",
}
# sentencex (1.0) panics at white space of several bytes after an initial; the text itself keeps its characters.
_ONE_BYTE_SPACES = {
    code: "\n" if chr(code) in "\u0085\u2028\u2029" else " " for code in range(128, 0x3001) if chr(code).isspace()
}
_LONGEST = 1_000_000  # characters; a longer text is cut there first, as Megatron-LM does


class SentenceSplitter:
    """Cuts texts into sentences.

    Args:
        kind: one of `SPLITTERS`.
        lang: a language by its English name, or by its code.
        keep_newlines: the white space after a sentence stays with it; otherwise it is dropped.

    Raises: ConfigError if the package, its data or the language is missing. Called: BadLine for a text that the
        package fails on.
    """

    def __init__(self, kind: str, lang: str, keep_newlines: bool):
        names = {code: name for name, code in _CODES.items()}
        self.keep_newlines = keep_newlines
        name, code = names.get(lang.lower(), lang.lower()), _CODES.get(lang.lower(), lang.lower())
        missing = []
        if kind == "lines":
            self._spans: Callable[[str], Iterator[tuple[int, int]]] = _lines
            self.name = "lines"
            return
        for candidate in ("punkt", "sentencex") if kind == "auto" else (kind,):
            try:
                self._spans, self.name = (
                    (_punkt(name), f"nltk {version('nltk')} punkt, {name}")
                    if candidate == "punkt"
                    else (_sentencex(code), f"sentencex {version('sentencex')}, {code}")
                )
                return
            except _Missing as error:
                missing.append(f"{candidate}: {error}")
        raise ConfigError(
            f"--split-sentences with --sentence-splitter {kind} --lang {lang}: there is no sentence splitter",
            why="; ".join(missing),
            fix="pip install sentencex, or pip install nltk and nltk's punkt_tab data in a folder of $NLTK_DATA",
        )

    def __call__(self, text: str) -> list[str]:
        """The sentences in their order. Sentences of white space alone are left out."""
        sentences = []
        for begin in range(0, len(text), _LONGEST):
            part = text[begin : begin + _LONGEST]
            spans = list(self._spans(part))
            for (start, end), following in zip(spans, [*(start for start, _ in spans[1:]), len(part)]):
                sentence = part[start:following] if self.keep_newlines else part[start:end].strip()
                if sentence and not sentence.isspace():
                    sentences.append(sentence)
        return sentences


def _lines(text: str) -> Iterator[tuple[int, int]]:
    end = 0
    for line in text.splitlines(keepends=True):
        yield end, end + len(line.rstrip())
        end += len(line)


class _Missing(Exception):
    """Why a splitter cannot be had."""


def _punkt(language: str) -> Callable[[str], Iterator[tuple[int, int]]]:
    if not installed("nltk"):
        raise _Missing("the package nltk is not installed")
    from nltk.tokenize.punkt import PunktTokenizer

    try:
        return PunktTokenizer(language).span_tokenize
    except (LookupError, OSError):
        raise _Missing(f"nltk has no punkt_tab data for {language!r} on this machine") from None


def _sentencex(code: str) -> Callable[[str], Iterator[tuple[int, int]]]:
    if not installed("sentencex"):
        raise _Missing("the package sentencex is not installed")
    if not 2 <= len(code) <= 3:
        raise _Missing(f"{code!r} is no code of a language; known by name are {', '.join(_CODES)}")
    import sentencex

    segment: Any = sentencex.segment

    def spans(text: str) -> Iterator[tuple[int, int]]:
        text = text.translate(_ONE_BYTE_SPACES)
        try:
            sentences = segment(code, text)
        except BaseException as error:  # a panic of its Rust code is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise BadLine(f"sentencex cannot split it ({error})") from None
        at = 0
        for sentence in sentences:
            found = text.find(sentence, at)
            if found < 0:  # it would be lost text
                raise BadLine(f"sentencex made {sentence[:40]!r} of it, which is not in the text")
            at = found + len(sentence)
            yield found, at

    return spans
