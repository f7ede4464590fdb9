"""Templates, Python iterables and Hugging Face datasets as sources."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.config.sections.data import DataConfig
from headway.config.units import Amount
from headway.core.errors import ConfigError, DataError
from headway.text.reading import sources
from headway.text.reading.documents import Batch
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import Source, pieces_of
from support.sources import find, read

RECORDS = [
    {"question": "How {many}?", "answer": "Zwölf 🎉", "meta": {"title": "One", "n": 7}, "a.b": "dotted"},
    {"question": "Why?", "answer": "Because.", "meta": {"title": "Two", "n": 8}, "a.b": "named"},
]


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = arrow.Table.from_pylist(records)
        if path.suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            with arrow.ipc.new_stream(path, table.schema) as out:
                out.write_table(table)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow"])
def test_a_template_renders_several_fields(tmp_path: Path, ending: str) -> None:
    path = write_records(tmp_path / f"a.{ending}", RECORDS)
    found = read(path, template="# {meta.title} ({meta.n})\n{{Q}}: {question}\nA: {answer} [{a.b}]\n")
    assert found.texts == [
        "# One (7)\n{Q}: How {many}?\nA: Zwölf 🎉 [dotted]\n",
        "# Two (8)\n{Q}: Why?\nA: Because. [named]\n",
    ]
    assert not found.bad


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow"])
def test_a_field_may_be_nested(tmp_path: Path, ending: str) -> None:
    path = write_records(tmp_path / f"a.{ending}", RECORDS)
    assert read(path, field="meta.title").texts == ["One", "Two"]
    # A field of that very name comes first.
    assert read(path, field="a.b").texts == ["dotted", "named"]


def test_a_template_over_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('question,id,answer\nWhy?,1,"So, that"\nHow?,2\n')
    found = read(tmp_path / "a.csv", template="{question} {answer}")
    assert found.texts == ["Why? So, that"] and "2 of 3 columns" in found.bad[0].reason
    with pytest.raises(DataError, match="did you mean 'answer'"):
        read(tmp_path / "a.csv", template="{question} {answers}")


def test_numbers_in_a_template_are_exact(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "id": 12345678901234567890123, "n": 1.5, "yes": true}\n'
        '{"text": "b", "id": -9007199254740993, "n": 1e3, "yes": false}\n'
    )
    assert read(tmp_path / "a.jsonl", template="{text} {id} {n} {yes}").texts == [
        "a 12345678901234567890123 1.5 true",
        "b -9007199254740993 1000.0 false",
    ]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_what_is_no_number_is_in_a_template_as_json_has_it(tmp_path: Path, ending: str) -> None:
    values = [math.nan, math.inf, -math.inf, 0.1]
    path = write_records(tmp_path / f"a.{ending}", [{"n": value} for value in values])
    assert read(path, template="{n}").texts == [json.dumps(value) for value in values]
    assert read(path, template="{n}").texts[:3] == ["NaN", "Infinity", "-Infinity"]


def test_a_record_that_a_template_does_not_fit_is_named(tmp_path: Path) -> None:
    records = [
        RECORDS[0],
        {"question": "no answer"},
        {"question": "q", "answer": None},
        {"question": "q", "answer": [{"role": "user", "content": "text"}]},
        {"question": "q", "answer": {"text": "deep"}},
        RECORDS[1],
    ]
    write_records(tmp_path / "a.jsonl", records)
    found = read(tmp_path / "a.jsonl", template="{question} {answer}")
    assert len(found.texts) == 2
    assert [item.where.rsplit(":", 1)[1] for item in found.bad] == ["2", "3", "4", "5"]
    missing, null, many, deep = (item.reason for item in found.bad)
    assert "no field 'answer'; there are: question" in missing
    assert "field 'answer' of the template is null" in null
    assert "holds a list, which has no unique text form" in many and "holds dict" in deep


def test_a_template_that_fits_nothing_is_a_mistake_of_the_config(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", RECORDS)
    with pytest.raises(DataError, match=r"no field 'meta\.titel'.*did you mean 'meta\.title'"):
        read(tmp_path / "a.jsonl", template="{meta.titel}")
    with pytest.raises(DataError, match=r"no field 'question\.text': 'question' holds str"):
        read(tmp_path / "a.jsonl", template="{question.text}")
    write_records(tmp_path / "b.parquet", [{"messages": [{"role": "user"}], "meta": {"title": "x"}}])
    with pytest.raises(DataError, match="no unique text form") as caught:
        read(tmp_path / "b.parquet", template="{messages}")
    assert caught.value.where == str(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"no field 'meta.titel'.*did you mean 'meta.title'"):
        read(tmp_path / "b.parquet", template="{meta.titel}")


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{question", "literal braces"),
        ("question}", "literal braces"),
        ("no field at all {{really}}", "names no field"),
        ("{}", "names no field"),
        ("{a!r}", "format or conversion"),
        ("{a:>5}", "format or conversion"),
        ("{a[0]}", "with dots"),
    ],
)
def test_templates_are_checked_with_the_config(template: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        DataConfig.model_validate({"sources": [{"path": "a.jsonl", "template": template}]})


def test_a_field_and_a_template_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="a field or a template"):
        DataConfig.model_validate({"sources": [{"path": "a.jsonl", "template": "{a}", "field": "b"}]})
    # A resolved config names every field, and has to load again.
    config = DataConfig.model_validate({"sources": [{"path": "a.jsonl", "template": "{a}"}]})
    assert DataConfig.model_validate(config.model_dump()) == config


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Writes a module with function `texts` into the working directory; returns the source's path."""
    name = f"stories_{os.getpid()}_{tmp_path.name}"

    def write(body: str) -> str:
        (tmp_path / f"{name}.py").write_text(f"def texts():\n    {body}\n")
        return f"python:{name}:texts"

    yield write
    sys.modules.pop(name, None)


def test_a_python_function_is_a_source(module: Callable[[str], str]) -> None:
    path = module('yield "one"; yield {"text": "two", "n": 2}; yield ""; yield "Grüße"')
    found = read(path)
    assert (found.texts, found.empty.total(), found.bad) == (["one", "two", "Grüße"], 1, [])
    assert read(path).texts == found.texts  # called anew each time
    (source,) = find(path)
    assert source.files == [] and source.name.startswith("python")


def test_a_stream_comes_in_pieces_and_no_faster_than_asked(
    module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    given: list[int] = []

    def endless() -> Iterator[str]:
        number = 0
        while True:
            given.append(number)
            yield f"{number:0100}"
            number += 1

    pieces = pieces_of([Source("endless", "text", [], stream=endless, location="endless")])
    first, second = next(pieces), next(pieces)
    assert (first.bytes, len(first.texts or ())) == (1000, 10) and len(given) <= 20
    assert [text for piece in (first, second) for batch in read_batches(piece) for text in batch.texts] == [
        f"{number:0100}" for number in range(20)
    ]


@pytest.mark.parametrize(("limit", "texts"), [("3 documents", 3), ("250 bytes", 3), ("300 bytes", 3)])
def test_a_stream_is_asked_for_no_more_than_its_limit(limit: str, texts: int) -> None:
    given: list[str] = []

    def endless() -> Iterator[str]:
        while True:
            given.append(f"{len(given):0100}" if given else "")
            yield given[-1]

    source = Source("endless", "text", [], stream=endless, location="endless", limit=Amount.parse(limit))
    (piece,) = pieces_of([source])
    assert (piece.texts, sum(count for _, count in piece.empty)) == (tuple(given[1:]), 1) and len(given) == 1 + texts


def test_items_that_are_no_documents_are_named(module: Callable[[str], str]) -> None:
    path = module('yield "fine"; yield 5; yield {"body": "x"}; yield {"text": None}; yield "half \\ud800"')
    found = read(path)
    assert found.texts == ["fine"]
    assert [item.where.rsplit(":", 1)[1] for item in found.bad] == ["item 2", "item 3", "item 4", "item 5"]
    assert "holds int, neither text" in found.bad[0].reason and "there are: body" in found.bad[1].reason
    assert "not valid UTF-8" in found.bad[3].reason


def test_a_stream_without_the_field_is_a_mistake_of_the_config(module: Callable[[str], str]) -> None:
    with pytest.raises(DataError, match="no field 'text'; there are: texts; did you mean 'texts'"):
        read(module('return [{"texts": "a"}] * 5'))


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ('yield "one"; raise KeyError("gone")', "failed after 1 items: KeyError: 'gone'"),
        ("return 5", "an iterable of texts or mappings, not int"),
        ('return "one text"', "not str"),
        ("return open('nowhere.txt')", "failed after 0 items: FileNotFoundError"),
    ],
)
def test_a_function_that_fails_is_one_clear_error(module: Callable[[str], str], body: str, what: str) -> None:
    path = module(body)
    with pytest.raises(DataError, match=what) as caught:
        read(path)
    assert caught.value.where == path


@pytest.mark.parametrize("path", ["python:no_such_module:f", "python:json:no_such_function", "python:json"])
def test_a_function_that_is_not_there(path: str) -> None:
    with pytest.raises(ConfigError):
        find(path)


def in_order(batch: Batch) -> list[str]:
    assert not batch.bad
    return batch.texts


def test_folders_that_save_to_disk_wrote(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"text": [f"text {number}" for number in range(100)], "meta": [{"title": f"t{n}"} for n in range(100)]}
    whole = datasets.Dataset.from_dict(rows)
    shuffled = whole.shuffle(seed=5).filter(lambda row: row["text"] != "text 7")  # has an indices mapping
    assert shuffled._indices is not None
    shuffled.save_to_disk(tmp_path / "saved", num_shards=3)
    expected = list(shuffled["text"])
    assert in_order(read(tmp_path / "saved")) == in_order(read(f"hf://{tmp_path}/saved")) == expected
    (source,) = find(tmp_path / "saved")
    assert [file.name for file in source.files] == [f"data-0000{part}-of-00003.arrow" for part in range(3)]
    assert read(tmp_path / "saved", template="{meta.title}: {text}").texts[0].endswith(f": {expected[0]}")
    datasets.DatasetDict(train=whole, test=whole.select(range(3))).save_to_disk(tmp_path / "splits")
    assert in_order(read(tmp_path / "splits")) == rows["text"]
    assert in_order(read(tmp_path / "splits", split="test")) == rows["text"][:3]
    with pytest.raises(DataError, match="no split 'dev'; there are: test, train"):
        read(tmp_path / "splits", split="dev")
    (tmp_path / "saved" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00003\.arrow is missing"):
        read(tmp_path / "saved")


def test_a_saved_folder_with_an_indices_mapping(tmp_path: Path) -> None:
    """As older versions of `datasets` saved shuffled datasets: the rows, and beside them their order."""
    datasets = pytest.importorskip("datasets")
    arrow = pytest.importorskip("pyarrow")
    texts = [f"text {number}" for number in range(50)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved", num_shards=2)
    order = [49, 0, 0, 25, 24, 3]
    table = arrow.table({"indices": arrow.array(order, arrow.uint64())})
    with arrow.ipc.new_stream(tmp_path / "saved" / "indices.arrow", table.schema) as out:
        out.write_table(table, max_chunksize=4)
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    assert in_order(read(tmp_path / "saved")) == [texts[number] for number in order]


_READ = """
import json, sys
sys.path.insert(0, sys.argv[1])
from headway.core.errors import DataError
from support.sources import find, read
try:
    values = json.loads(sys.argv[3])
    (source,) = find(sys.argv[2], **values)
    files = [file.name for file in source.files]
    print(json.dumps({"files": files, "texts": read(sys.argv[2], **values).texts}))
except DataError as error:
    print(json.dumps({"error": error.what, "where": error.where, "fix": error.fix}))
"""


def read_offline(home: Path, path: str, **values: Any) -> dict[str, Any]:
    """Read in a process of its own: the libraries look at the environment when they are imported."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    arguments = [str(Path(__file__).parents[2]), path, json.dumps(values)]
    if not (Path(arguments[0]) / "support" / "sources.py").is_file():
        arguments[0] = str(Path(sys.modules["support.sources"].__file__ or "").parents[1])
    result = subprocess.run(
        [sys.executable, "-c", _READ, *arguments], capture_output=True, text=True, env=environment, check=True
    )
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of Hugging Face's libraries in whose cache `datasets` has built dataset org/name from files."""
    pytest.importorskip("datasets")
    home = tmp_path_factory.mktemp("home")
    for split in ("train", "test"):
        lines = (json.dumps({"text": f"{split} {number}", "n": number}) + "\n" for number in range(50))
        (home / f"{split}.jsonl").write_text("".join(lines))
    build = (
        "import datasets, sys\n"
        "files = {split: f'{sys.argv[1]}/{split}.jsonl' for split in ('train', 'test')}\n"
        "print(datasets.load_dataset('json', data_files=files)['train'].cache_files[0]['filename'])"
    )
    environment = {**os.environ, "HF_HOME": str(home)}
    command = [sys.executable, "-c", build, str(home)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    built = Path(result.stdout.strip()).parent
    # What the cache of a dataset from the Hub looks like differs in names alone.
    cached = home / "datasets" / "org___name" / "default" / "0.0.0" / ("a" * 40)
    shutil.copytree(built, cached)
    for file in cached.glob("json-*.arrow"):
        file.rename(file.with_name(file.name.replace("json-", "name-")))
    info = json.loads((cached / "dataset_info.json").read_text())
    (cached / "dataset_info.json").write_text(json.dumps({**info, "dataset_name": "name", "config_name": "default"}))
    return home


@pytest.mark.slow
def test_a_cached_dataset_is_read_through_its_arrow_files(cache: Path) -> None:
    texts = [f"train {number}" for number in range(50)]
    assert read_offline(cache, "hf://org/name") == {"files": ["name-train.arrow"], "texts": texts}
    assert read_offline(cache, "hf://org/name", split="test")["texts"][0] == "test 0"
    # Part of a split is no whole file.
    part = read_offline(cache, "hf://org/name", split="train[10:20]+test[:1]", template="{n}: {text}")
    assert part == {"files": [], "texts": [*(f"{n}: train {n}" for n in range(10, 20)), "0: test 0"]}
    assert read_offline(cache, "hf://org/name", streaming=True) == {"files": [], "texts": texts}


@pytest.mark.slow
def test_what_a_dataset_lacks_is_told(cache: Path) -> None:
    missing = read_offline(cache, "hf://org/name", split="dev")
    assert "train" in missing["error"] and missing["where"] == "hf://org/name"
    missing = read_offline(cache, "hf://org/name", subset="french")
    assert "french" in missing["error"] and "subset" in missing["fix"]
    for streaming in (False, True):
        missing = read_offline(cache, "hf://org/name", field="texts", streaming=streaming)
        assert "no field 'texts'" in missing["error"] and "did you mean 'text'" in missing["error"]


@pytest.mark.parametrize("streaming", [False, True])
def test_without_a_network_the_error_says_so(cache: Path, streaming: bool) -> None:
    missing = read_offline(cache, "hf://nowhere", streaming=streaming)
    assert "Hub cannot be reached" in missing["error"] and "HF_HUB_OFFLINE" in missing["fix"]
    assert missing["where"] == "hf://nowhere"


def test_a_missing_datasets_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'datasets>=\S+ 'pyarrow>="):
        find("hf://org/name")
