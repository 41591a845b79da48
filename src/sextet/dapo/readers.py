"""Rows of prompts and answers from JSONL, JSON, Parquet and folders of Hugging Face datasets."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sextet.core.errors import DataError, missing_extra, unknown
from sextet.core.files import read_json

MAX_LINE = 16 * 2**20
KINDS = ".jsonl, .json, .parquet, or a folder of a saved Hugging Face dataset or of .parquet files"


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it is in the file."""

    place: str
    """File and row, counted from 1: ``train.jsonl:12``."""
    prompt: Any
    answer: Any


@dataclass(frozen=True)
class Source:
    """A file of the data folder whose fields are known."""

    file: str
    prompt: str
    answer: str


SETS = {
    "gsm8k_train": Source("gsm8k_train.jsonl", "question", "answer"),
    "gsm8k_test": Source("gsm8k_test.jsonl", "question", "answer"),
    "math500": Source("math500.jsonl", "problem", "answer"),
    "aime24": Source("aime24.jsonl", "problem", "answer"),
    "amc23": Source("amc23.jsonl", "problem", "answer"),
    "svamp": Source("svamp.jsonl", "Body+Question", "Answer"),
    "aime-2024": Source("aime-2024.parquet", "prompt", "reward_model.ground_truth"),
}
"""Public sets by name; a file of the same name elsewhere is read in the same way, if it has these fields."""


def data_folder() -> Path:
    """Returns ``math`` in the folder SEXTET_DATA, or in ``../shared/data`` beside a source checkout."""
    data = os.environ.get("SEXTET_DATA") or Path(__file__).parents[2].parent.parent / "shared" / "data"
    return Path(data) / "math"


def read_rows(path: Path | str, *, prompt_field: str = "prompt", answer_field: str = "answer") -> Iterator[Row]:
    """Yields the rows of a file, a folder, or a set of `SETS`; large files are never in memory as a whole.

    Args:
        path: A name of `SETS`, a file, or a folder.
        prompt_field: Of the prompt; with dots for nested fields, and with ``+`` between several that are joined.
        answer_field: Of the right answer. Both are not used for the files of `SETS`.

    Raises:
        DataError: It is not there, of another kind, damaged (with the line), or its first row lacks the prompt's field.
    """
    if str(path) in SETS and not Path(path).exists():
        path = data_folder() / SETS[str(path)].file
    path = Path(path)
    given = Source(path.name, prompt_field, answer_field)
    source = next((source for source in SETS.values() if source.file == path.name), given)
    tops = {name.split(".")[0] for some in (source, given) for name in (*some.prompt.split("+"), some.answer)}
    for number, (place, record) in enumerate(_records(path, tops)):
        if not isinstance(record, dict):
            raise DataError(f"{place}: a row must be an object with fields, not {type(record).__name__}")
        if number == 0 and _absent(record, source):
            source = given
            if absent := _absent(record, source):
                raise DataError(f"{place}: {unknown('field', absent[0], record)}; name the prompt's with prompt_field")
        texts = [_pick(record, name) for name in source.prompt.split("+")]
        answer = _pick(record, source.answer)
        if source.file.startswith("gsm8k_") and isinstance(answer, str):
            answer = answer.rpartition("####")[2].strip().replace(",", "")
        yield Row(place, _joined(texts) if len(texts) > 1 else texts[0], answer)


def _absent(record: dict[str, Any], source: Source) -> list[str]:
    return [name for name in source.prompt.split("+") if name not in record and name.split(".")[0] not in record]


def _joined(texts: Sequence[Any]) -> str:
    parts = [str(text).strip() for text in texts if text]
    return " ".join(part if part.endswith((".", "?", "!")) else part + "." for part in parts)


def _pick(record: Any, name: str) -> Any:
    if isinstance(record, dict) and name not in record and "." in name:
        first, _, rest = name.partition(".")
        return _pick(record.get(first), rest)
    return record.get(name) if isinstance(record, dict) else None


def _records(path: Path, tops: set[str]) -> Iterator[tuple[str, Any]]:
    """Yields place and record of every row; of tables only the columns ``tops`` are read."""
    if path.is_dir():
        files = _files_of(path)
    elif path.is_file():
        files = [path]
    else:
        raise DataError(f"{path}: no such file or folder; give {KINDS}, or one of: {', '.join(SETS)}")
    for file in files:
        kind = file.suffix.lower()
        if kind == ".jsonl":
            yield from _lines(file)
        elif kind == ".json":
            records = read_json(file)
            if not isinstance(records, list):
                raise DataError(f"{file}: a list of rows is expected, not {type(records).__name__}")
            yield from ((f"{file.name}:{number}", record) for number, record in enumerate(records, 1))
        elif kind in (".parquet", ".arrow"):
            yield from _table(file, tops)
        else:
            raise DataError(f"{file}: cannot be read; allowed: {KINDS}")


def _files_of(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(item.parent.name for item in folder.glob("*/state.json"))
        raise DataError(
            f"{folder} holds several splits; give the folder of one: {', '.join(splits) or 'none is there'}"
        )
    if (folder / "state.json").is_file():
        try:
            names = [Path(entry["filename"]).name for entry in read_json(folder / "state.json")["_data_files"]]
        except (TypeError, KeyError) as error:
            raise DataError(f"{folder / 'state.json'}: no list of files in it (_data_files)") from error
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise DataError(f"{folder / missing[0]}: the file is missing; state.json names it")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.arrow")) or sorted(folder.glob("*.parquet"))
    if not files:
        raise DataError(f"{folder}: no .arrow or .parquet files are in the folder; allowed: {KINDS}")
    return files


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as handle:
            number = 0
            while line := handle.readline(MAX_LINE):
                number += 1
                place = f"{path}:{number}"
                if len(line) == MAX_LINE:
                    raise DataError(f"{place}: the line is over {MAX_LINE:,} bytes")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                    if text:
                        yield f"{path.name}:{number}", json.loads(text)
                except UnicodeDecodeError as error:
                    raise DataError(f"{place}: not UTF-8 text (byte {error.start} of the line)") from error
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{place}: not JSON ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error.strerror or error})") from error


def _table(path: Path, tops: set[str]) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing_extra("pyarrow", "llm", f"reading {path.name}") from error
    try:
        with pa.memory_map(str(path)) as handle:
            file = pq.ParquetFile(handle) if path.suffix.lower() == ".parquet" else pa.ipc.open_stream(handle)
            names = (file.schema_arrow if isinstance(file, pq.ParquetFile) else file.schema).names
            columns = [name for name in names if name.split(".")[0] in tops]
            absent = dict.fromkeys(name for name in names if name not in columns)
            number = 0
            for batch in file.iter_batches(1024, columns=columns) if isinstance(file, pq.ParquetFile) else file:
                for record in batch.select(columns).to_pylist():
                    number += 1
                    # the first also names the other columns, for the message where the prompt's is not there
                    yield f"{path.name}:{number}", record if number > 1 else {**absent, **record}
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error
