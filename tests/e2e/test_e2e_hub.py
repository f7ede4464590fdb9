"""Datasets from a Hugging Face Hub: with `datasets` and `huggingface_hub` as they are, and a server that answers as the
Hub does (tests/support/hub_server.py)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.hub import HubUser, document, parquet, tokens
from support.hub_server import READER, STRANGER, HubServer
from support.runs import skip_without, store_contents

skip_without("datasets", "there is no client for the Hub: pip install '.[datasets]'")

FILES = {f"data/train-{n:05}-of-00004.parquet": parquet(100 * n, 100 * n + 100) for n in range(4)}
TEXTS = [document(number) for number in range(400)]
CARD = """---
configs:
- config_name: english
  data_files:
  - {split: train, path: en/train-*}
  - {split: test, path: en/test.jsonl}
- config_name: german
  data_files:
  - {split: train, path: de/train.jsonl}
---
# Questions
"""


def lines(language: str, count: int) -> str:
    """Questions with answers."""
    rows = ({"question": f"{language} {n}?", "answer": {"text": f"{n}!"}} for n in range(count))
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def module_hub() -> Iterator[HubServer]:
    hub = HubServer(page=3)
    hub.commit("org/books", {"README.md": "# Books\n", **FILES, "data/test-00000-of-00001.parquet": parquet(900, 910)})
    questions = {"en/train-0.jsonl": lines("en", 3), "en/train-1.jsonl": lines("more", 3)}
    questions |= {"en/test.jsonl": lines("test", 2), "de/train.jsonl": lines("de", 2)}
    hub.commit("org/questions", {"README.md": CARD, **questions})
    hub.commit("org/private", {"data/train.parquet": parquet(0, 5)}, private=True)
    hub.commit("org/gated", {"README.md": "# Gated\n", "data/train.parquet": parquet(0, 5)}, gated=True)
    yield hub
    hub.close()


@pytest.fixture
def hub(module_hub: HubServer) -> HubServer:
    module_hub.forget()
    module_hub.budget, module_hub.refusals, module_hub.on_request = None, [], None
    return module_hub


@pytest.fixture(scope="module")
def user(module_hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubUser]:
    user = HubUser(module_hub, tmp_path_factory.mktemp("hub") / "home")
    yield user
    user.close()


def done(user: HubUser, folder: Path, path: str, **values: Any) -> Path:
    """The store of a preparation that must succeed."""
    result = user.prepare(folder, path, **values)
    assert result.returncode == 0, result.stderr
    return folder / "store"


def test_cached_streamed_and_as_files_a_dataset_gives_equal_bytes(
    hub: HubServer, user: HubUser, tmp_path: Path
) -> None:
    cached, streamed, files = "hf://org/books", "hf://org/books", "hf://datasets/org/books/data/train-*.parquet"
    one = done(user, tmp_path / "one", cached)
    assert store_contents(done(user, tmp_path / "two", cached, workers=2)) == store_contents(one)
    stream = done(user, tmp_path / "stream", streamed, streaming=True)
    assert store_contents(done(user, tmp_path / "streams", streamed, streaming=True, workers=2)) == store_contents(
        stream
    )
    as_files = done(user, tmp_path / "files", files)
    assert tokens(one) == tokens(stream) == tokens(as_files)


def test_subsets_splits_fields_and_templates(hub: HubServer, user: HubUser) -> None:
    assert user.read("hf://org/books")["texts"] == TEXTS
    assert user.read("hf://org/books", split="test", streaming=True)["texts"] == [document(n) for n in range(900, 910)]
    for streaming in (False, True):
        english: dict[str, Any] = {"subset": "english", "streaming": streaming}
        train = user.read("hf://org/questions", field="question", **english)
        assert train["texts"] == [f"{kind} {n}?" for kind in ("en", "more") for n in range(3)]
        test = user.read("hf://org/questions", template="{question} {answer.text}", split="test", **english)
        assert test["texts"] == ["test 0? 0!", "test 1? 1!"]
    part = user.read("hf://org/questions", field="answer.text", subset="german", split="train[1:]")
    assert part["texts"] == ["1!"]


def test_a_limit_on_a_stream_leaves_the_rest_where_it_is(hub: HubServer, user: HubUser, tmp_path: Path) -> None:
    store = done(user, tmp_path / "some", "hf://org/books", streaming=True, limit="20 documents")
    assert json.loads((store / "manifest.json").read_text())["sources"][0]["documents"] == 20
    rest = [request for request in hub.requests if any(f"train-0000{n}" in request.path for n in (1, 2, 3))]
    assert not rest and hub.sent() > 0


MISSING = [
    ("hf://org/bookz", {}, "no such dataset on the Hugging Face Hub, or it is private", "HF_TOKEN"),
    ("hf://org/questions", {}, "has several subsets: english, german", "subset"),
    (
        "hf://org/questions",
        {"subset": "germann"},
        "no subset 'germann'; there are: english, german; did you mean",
        "subset",
    ),
    ("hf://org/books", {"subset": "x"}, "no subset 'x'; there are: default", "subset"),
    ("hf://org/books", {"split": "trian"}, "no split 'trian'; there are: test, train; did you mean 'train'?", "split"),
    ("hf://org/books", {"split": "train+dev[:1]"}, "no split 'dev'; there are", "split"),
    ("hf://org/books", {"field": "txet"}, "no field 'txet'; there are: number, text; did you mean 'text'?", "field"),
    ("hf://org/books@mian", {}, "no revision 'mian'; there are: main; did you mean 'main'?", "commit"),
]


@pytest.mark.parametrize(("path", "values", "what", "fix"), MISSING)
def test_what_is_not_there_is_told_with_what_is(
    hub: HubServer, user: HubUser, path: str, values: dict[str, Any], what: str, fix: str
) -> None:
    for streaming in (False, True):
        told = user.read(path, streaming=streaming, **values)
        assert what in told["error"] and fix in told["fix"] and told["where"] == path


def test_a_part_of_a_split_is_not_streamed(hub: HubServer, user: HubUser) -> None:
    told = user.read("hf://org/books", split="train[:10%]", streaming=True)
    assert "is a part or a sum of splits" in told["error"] and "leave streaming out" in told["fix"]


def test_who_may_read_a_dataset(hub: HubServer, user: HubUser) -> None:
    files = "hf://datasets/org/{}/data/*.parquet"
    for streaming in (False, True):
        for token in ("", STRANGER):
            told = user.read("hf://org/private", token=token, streaming=streaming)
            assert "no such dataset" in told["error"] and "set HF_TOKEN" in told["fix"]
            told = user.read("hf://org/gated", token=token, streaming=streaming)
            assert "is gated" in told["error"] and "access is asked for" in told["fix"]
        told = user.read("hf://org/private", token="hf_wrong", streaming=streaming)
        assert "does not let us in" in told["error"] and "set HF_TOKEN" in told["fix"] and "hf_wrong" not in str(told)
    for name in ("private", "gated"):
        asked = len(hub.requests)
        told = user.read(files.format(name))
        assert "HF_TOKEN" in told["fix"] and "org/" + name in told["where"]
        refused = [request for request in hub.requests[asked:] if request.status in (401, 403)]
        assert refused and len(refused) == len(set(refused)), "an answer that will not change is asked for once"
        for path in (f"hf://org/{name}", files.format(name)):
            assert user.read(path, token=READER)["texts"] == TEXTS[:5]
            assert (
                user.read(path, token=READER, **({"streaming": True} if "*" not in path else {}))["texts"] == TEXTS[:5]
            )


def test_a_dataset_with_another_name_now(hub: HubServer, user: HubUser) -> None:
    hub.commit("org/old", {"data/train.parquet": parquet(0, 5)})
    hub.rename("org/old", "org/new")
    for path in ("hf://org/old", "hf://datasets/org/old/data/*"):
        assert user.read(path)["texts"] == TEXTS[:5]


def test_a_revision_stays_where_main_moves_on(hub: HubServer, user: HubUser, tmp_path: Path) -> None:
    first = hub.commit("org/moving", {"data/train-0.parquet": parquet(0, 5)})
    pinned = (f"hf://org/moving@{first}", f"hf://datasets/org/moving@{first}/data/*")
    assert user.read("hf://org/moving")["texts"] == TEXTS[:5]
    hub.commit("org/moving", {"data/train-1.parquet": parquet(5, 10)})
    hub.commit("org/moving", {"data/train-1.parquet": parquet(7, 9)}, branch="draft")
    for streaming in (False, True):
        assert user.read("hf://org/moving", streaming=streaming)["texts"] == TEXTS[:10]
        assert user.read(pinned[0], streaming=streaming)["texts"] == TEXTS[:5]
        assert user.read("hf://org/moving@draft", streaming=streaming)["texts"] == TEXTS[7:9]
    assert user.read(pinned[1])["texts"] == TEXTS[:5]
    # The source's name is the dataset's.
    store = done(user, tmp_path / "pinned", pinned[0])
    assert json.loads((store / "manifest.json").read_text())["sources"][0]["name"] == "moving"


def units(store: Path) -> dict[str, int]:
    """Inodes of a store's shards: they stay where nothing is done again."""
    return {file.name: file.stat().st_ino for file in (store / "train").rglob("*.bin")}


def test_only_files_that_a_new_commit_changes_are_done_again(hub: HubServer, user: HubUser, tmp_path: Path) -> None:
    hub.commit("org/growing", FILES)
    path = "hf://datasets/org/growing/data/*"
    before = units(done(user, tmp_path / "a", path, small=True)).items()
    hub.commit("org/growing", {"data/train-00002-of-00004.parquet": parquet(500, 600)})
    hub.forget()
    after = units(done(user, tmp_path / "a", path, small=True)).items()
    assert len(after - before) == len(before - after) == len(before) // 4
    # Of others only where they are cut is looked up, but for the sample of text that the encoder is chosen by.
    asked = [sum(f"train-0000{n}" in request.path for request in hub.requests) for n in range(4)]
    assert asked.count(1) >= 2 and asked[2] > 1


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_that_grows_keeps_what_was_done(
    hub: HubServer, user: HubUser, tmp_path: Path, streaming: bool
) -> None:
    """Cached, names of files say how many there are, which would make another file of each."""
    path, values = f"hf://org/grows-{streaming}", {"streaming": streaming}
    hub.commit(path.removeprefix("hf://"), {"data/train-0.parquet": parquet(0, 100)})
    before = units(done(user, tmp_path / "a", path, small=True, **values))
    hub.commit(path.removeprefix("hf://"), {"data/train-1.parquet": parquet(100, 150)})
    after = units(done(user, tmp_path / "a", path, small=True, **values))
    assert len(before) > 1 and len(after) > len(before)
    assert len(before.items() & after.items()) >= len(before) - 1


def test_main_may_move_on_while_files_are_read(hub: HubServer, user: HubUser, tmp_path: Path) -> None:
    hub.commit("org/live", {"data/train.parquet": parquet(0, 100)})

    def move(path: str) -> None:
        if "/storage/" in path:
            hub.on_request = None
            hub.commit("org/live", {"data/train.parquet": parquet(100, 200)})

    before = done(user, tmp_path / "before", "hf://datasets/org/live/data/*")
    hub.on_request = move
    after = done(user, tmp_path / "after", "hf://datasets/org/live/data/*")
    assert hub.on_request is None and tokens(after) == tokens(before)
    assert tokens(done(user, tmp_path / "after", "hf://datasets/org/live/data/*")) != tokens(before)


FORMS = {
    "streamed": ("hf://org/books", {"streaming": True}, "the Hugging Face Hub no longer answers"),
    "files": ("hf://datasets/org/books/data/train-*.parquet", {}, "the remote store cannot be read"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_hub_that_dies_half_way_costs_nothing_that_was_done(
    hub: HubServer, user: HubUser, tmp_path: Path, form: str
) -> None:
    path, values, what = FORMS[form]
    whole = done(user, tmp_path / "whole", path, small=True, **values)
    hub.budget = hub.sent() - 60_000  # of the last file, and the last time it is read
    result = user.prepare(tmp_path / "half", path, small=True, **values)
    told = result.stderr[result.stderr.index("error:") :]
    assert result.returncode == 3 and what in told and "where: hf://" in told
    assert "run the same command again" in told or "check the network and storage_options, and retry" in told
    assert hub.budget == 0 and not (tmp_path / "half" / "store").exists()
    kept = units(tmp_path / "half" / ".store.preparing")
    hub.budget = None
    store = done(user, tmp_path / "half", path, small=True, **values)
    assert kept and kept.items() <= units(store).items() and store_contents(store) == store_contents(whole)


def test_a_fetch_that_is_cut_goes_on_behind_the_files_that_came(hub: HubServer, user: HubUser, tmp_path: Path) -> None:
    hub.commit("org/dying", FILES)
    one, size = len(FILES["data/train-00000-of-00004.parquet"]), sum(map(len, FILES.values()))
    hub.budget = 2 * one + one // 2
    result = user.prepare(tmp_path / "half", "hf://org/dying")
    assert result.returncode == 3 and "the Hugging Face Hub no longer answers" in result.stderr
    assert "again" in result.stderr[result.stderr.index("error:") :]
    hub.budget = None
    hub.forget()
    store = done(user, tmp_path / "half", "hf://org/dying")
    assert hub.sent() < size - one
    assert tokens(store) == tokens(done(user, tmp_path / "whole", "hf://org/books"))


def test_a_dropped_connection_is_tried_again(hub: HubServer, user: HubUser) -> None:
    for refusals in ([0, 0], [503, 429, 0]):
        hub.refusals = [*refusals]
        assert user.read("hf://datasets/org/books/data/test-*")["texts"] == [document(n) for n in range(900, 910)]
        assert not hub.refusals
    hub.commit("org/fresh", {"data/train.parquet": parquet(0, 5)})
    hub.refusals = [503] * 100
    told = user.read("hf://org/fresh")
    assert "Hub cannot be reached, and the dataset is not in the local cache" in told["error"]


def test_a_damaged_file_is_told_as_that(hub: HubServer, user: HubUser) -> None:
    whole = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode())
    hub.commit("org/damaged", {"data/train.jsonl.gz": whole[: len(whole) // 2]})
    for streaming in (False, True):
        told = user.read("hf://org/damaged", streaming=streaming)
        assert told["error"].startswith("the dataset cannot be read: Compressed file ended")


def test_a_folder_of_that_name_is_not_read_in_its_place(hub: HubServer, user: HubUser, tmp_path: Path) -> None:
    (tmp_path / "org" / "books").mkdir(parents=True)
    (tmp_path / "org" / "books" / "a.txt").write_text("not from the Hub")
    told = user.read("hf://org/books", folder=tmp_path)
    assert "would read the local folder org/books" in told["error"] and "omit hf://" in told["fix"]


@pytest.mark.slow
def test_without_a_network(hub: HubServer, user: HubUser, tmp_path: Path) -> None:
    old = hub.commit("org/kept", {"data/train.parquet": parquet(0, 100)})
    path = f"hf://org/kept@{old}"
    store = done(user, tmp_path / "on", path)
    hub.forget()
    offline = HubUser(hub, user.home, HF_HUB_OFFLINE="1")
    try:
        assert store_contents(done(offline, tmp_path / "off", path)) == store_contents(store)
        assert offline.read("hf://org/kept", streaming=True)["texts"] == TEXTS[:100]
        # `datasets` would take what it has for any revision.
        told = offline.read(f"hf://org/kept@{'0' * 40}")
        assert f"the local cache has commit {old}" in told["error"] and path in told["fix"]
        told = offline.read("hf://org/kept", subset="french")
        assert "french" in told["error"] and "subset" in told["fix"]
        for streaming in (False, True):
            told = offline.read("hf://org/nowhere", streaming=streaming)
            assert "cannot be reached, and the dataset is not in the local cache" in told["error"]
            assert "HF_HUB_OFFLINE=1" in told["fix"]
        told = offline.read("hf://datasets/org/books/data/*")
        assert "HF_HUB_OFFLINE" in told["error"]
        assert not hub.requests
    finally:
        offline.close()
