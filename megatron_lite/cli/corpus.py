"""`megatron-lite corpus`: a JSONL corpus, one `{"text": ..., "path": ...}` a line, from what is on the disk already.

    no --text        the Python standard library's own source, one document a file: about 30 MB where its tests are
                     installed (python.org, pyenv, conda), 11 MB where they are a package of their own (Debian)
    --text FILE      .jsonl: its documents.  Any other text: cut at blank lines into about a hundred or more documents,
    --text FOLDER    or every text file below it, in the same manner

Files come in an order that is fixed but has nothing to do with their names: a validation split is the last part of a
corpus, and the last files by name (`zipfile`, `zoneinfo`, a last chapter) are a poor sample of the whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.cli.progress import progress
from megatron_lite.errors import DataError

LONGEST_PIECE = 64 * 1024  # characters: a text file becomes documents of at most this length,
SHORTEST_PIECE = 256  # of no less than this (but for the last),
PIECES = 100  # and about this many or more altogether, so that a few percent can be held out


@dataclass(frozen=True)
class Source:
    """Where documents come from."""

    root: Path
    files: tuple[Path, ...]
    is_stdlib: bool = False

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.files)

    def name_of(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix() if file != self.root else file.name

    def fingerprint(self) -> str:
        """Changes when a file comes, goes, or is written to."""
        digest = hashlib.sha256(str(self.root).encode())
        for file in self.files:
            stat = file.stat()
            digest.update(f"{self.name_of(file)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]


def standard_library() -> Source:
    """The source of this Python's standard library, without what was installed on top of it."""
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages", "__pycache__"}
    return _source(root, [f for f in root.rglob("*.py") if not others & set(f.relative_to(root).parts)], is_stdlib=True)


def user_text(path: Path) -> Source:
    """A file, or the files below a folder; hidden ones are left out. Raises: DataError if there are none."""
    path = path.expanduser().resolve()
    if path.is_dir():
        visible = [f for f in path.rglob("*") if not any(p.startswith(".") for p in f.relative_to(path).parts)]
        files = [f for f in visible if f.is_file()]
    elif path.exists():
        files = [path]
    else:
        raise DataError(f"{path} does not exist", why="--text names a text file, a .jsonl file, or a folder of them")
    if not files:
        raise DataError(f"{path} holds no files", why="--text names a text file, a .jsonl file, or a folder of them")
    return _source(path, files)


def _source(root: Path, files: list[Path], is_stdlib: bool = False) -> Source:
    """Files in an order that is the same everywhere and independent of the alphabet (see the top of this file)."""

    def place(file: Path) -> bytes:
        return hashlib.sha256(file.relative_to(root).as_posix().encode()).digest()

    return Source(root, tuple(sorted(files, key=place)), is_stdlib)


def cut(text: str, longest: int) -> Iterator[str]:
    """Pieces of at most `longest` characters that join to `text`, cut after a blank line or a line if they can."""
    start = 0
    while len(text) - start > longest:
        window = slice(start + longest // 2, start + longest)  # a cut in the first half would make tiny pieces
        blank, line = text.rfind("\n\n", window.start, window.stop), text.rfind("\n", window.start, window.stop)
        end = blank + 2 if blank >= 0 else line + 1 if line >= 0 else window.stop
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def read_text(file: Path) -> str | None:
    """The file's text, or None if it is not UTF-8 text."""
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def documents(source: Source, key: str = "text") -> Iterator[tuple[str, str]]:
    """(path, text) of every document that is not blank.

    Raises: DataError for a line of a .jsonl file that is no JSON object with a text under `key`, naming the line.
    """
    piece = LONGEST_PIECE if source.is_stdlib else min(LONGEST_PIECE, max(SHORTEST_PIECE, source.size // PIECES))
    for file in source.files:
        name = source.name_of(file)
        if file.suffix == ".jsonl":
            for number, line in _json_lines(file, key):
                if line.strip():
                    yield f"{name}:{number}", line
            continue
        text = read_text(file)
        if not text or not text.strip():
            continue
        for part in [text] if source.is_stdlib else cut(text, piece):
            if part.strip():
                yield name, part


def _json_lines(file: Path, key: str) -> Iterator[tuple[int, str]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[key]
            except (ValueError, KeyError, TypeError) as problem:
                raise DataError(
                    f"{file}, line {number}: no JSON object with the key {key!r} ({type(problem).__name__})",
                    why="a .jsonl file holds one document a line",
                    fix="mend the line, or name the key that holds the text with --json-key",
                ) from None
            if not isinstance(text, str):
                raise DataError(f"{file}, line {number}: {key!r} is {type(text).__name__}, not text")
            yield number, text


def write_corpus(source: Source, output: Path, key: str = "text") -> tuple[int, int]:
    """Writes the corpus under a temporary name, then renames it: `output` is complete or absent.

    Returns: number of documents, and their length in bytes.
    Raises: DataError if no document is left, or the folder cannot be written to.
    """
    temporary = output.with_name(output.name + ".partial")
    count = size = 0
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as out, progress("reading", source.size / 1e6, "MB") as advance:
            for name, text in documents(source, key):
                out.write(json.dumps({"text": text, "path": name}, ensure_ascii=False) + "\n")
                count, size = count + 1, size + len(text.encode())
                advance(len(text) / 1e6)
            out.flush()
            os.fsync(out.fileno())
        if not count:
            raise DataError(
                f"{source.root} holds no text",
                why="every file is blank, or is not UTF-8 text",
                fix="--text with a text file, a .jsonl file, or a folder of them",
            )
        temporary.replace(output)
    except OSError as problem:
        raise DataError(f"cannot write {output}: {problem.strerror}", fix="another --output") from problem
    finally:
        with suppress(OSError):  # there only after a failure
            temporary.unlink()
    return count, size


def main(argv: Sequence[str]) -> int:
    """The verb: prints what was written."""
    parser = argparse.ArgumentParser("megatron-lite corpus", description=__doc__.split("\n\n")[0].split(": ", 1)[1])
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the .jsonl file to write")
    parser.add_argument("--text", type=Path, metavar="PATH", help="your text: a file, a .jsonl file, or a folder")
    parser.add_argument("--json-key", default="text", help="where a .jsonl line holds its text (default: %(default)s)")
    args = parser.parse_args(argv)
    source = user_text(args.text) if args.text else standard_library()
    count, size = write_corpus(source, args.output, args.json_key)
    print(f"{args.output}: {count:,} documents, {size / 1e6:.1f} MB of text from {source.root}")
    return 0
