"""From text to a token store, on many workers; the store's bytes do not depend on their number.

Units of input (`units`) become shards (`build`) in a folder next to the store, which replaces the store when it is
complete (`building`). Results are cached by a hash of their inputs (`records`), so only new or changed units are
processed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from headway.config.sections.clean import CleanStep
from headway.config.sections.data import DataConfig
from headway.config.template import CHAT
from headway.core.console import warning
from headway.core.errors import ConfigError, DataError
from headway.core.files.atomic import atomic_write, write_json
from headway.core.format import format_bytes, format_count, plural
from headway.core.machine.cores import usable_cores
from headway.data.in_use import check_not_in_use
from headway.data.made_of import keep_made_of, settings_json
from headway.data.replacing import check_replaceable, check_vocabulary_stays
from headway.data.store import INPUTS, SKIPPED, TokenStore
from headway.data.store_manifest import MANIFEST, read_manifest
from headway.data.tokenizing.encoders import choose_encoder
from headway.data.used_by import Use, uses_of
from headway.text.clean import describe_steps
from headway.text.preparing.build import Builder, Outcome
from headway.text.preparing.building import building, check_not_foreign, publish, writing_store
from headway.text.preparing.encode import open_chat_encoder
from headway.text.preparing.inputs import InputHashes
from headway.text.preparing.manifest import inputs_json, manifest_json
from headway.text.preparing.pieces import LISTED, Recipe
from headway.text.preparing.pools import UnitPool
from headway.text.preparing.records import WORK, Records, record_encoder
from headway.text.preparing.report import PrepareReport, report_of
from headway.text.preparing.vocabulary import SETTINGS, TRAINED, renew_settings, vocabulary_of
from headway.text.reading.sources import Source, check_sources, find_sources, longest_piece
from headway.text.tokenizing.train import sample_text

# The files that `Tokenizer.save` writes; after a kill, incomplete ones have other names and are removed.
_TOKENIZER = ("tokenizer/tokenizer.json", SETTINGS)
_HASHES = f"{WORK}/hashes"
# Starting a worker takes about as long as tokenizing this much.
_BYTES_PER_WORKER = 2 * 2**20
_DISK_FIX = "free space there or set data.store to another disk; a store that was there before is untouched"


def prepare(
    data: DataConfig,
    *,
    workers: int | None = None,
    force: bool = False,
    repair: bool = False,
    pool: UnitPool | None = None,
    iterables: Mapping[str, Any] | None = None,
    run: Path | None = None,
) -> PrepareReport:
    """Make the token store that `data` describes, or bring it up to date.

    An error or a kill leaves an existing store as it was; finished work stays, and the next call continues from it.

    Args:
        data: Sources, cleaning, tokenizer, split and place.
        workers: Number of pieces to process at a time; `data.workers` when not given. The store's bytes do not depend
            on it. With more than one, a script that calls this needs the usual `if __name__ == "__main__":` guard.
        force: Make the store again even if nothing has changed, and train its vocabulary again.
        repair: Hash the existing shards and make damaged ones again. Without it, only the length of their files is
            checked.
        pool: Other machines, which process the units that can travel; this one assembles the store.
        iterables: By name, the documents of sources whose path is `python:`: iterables of texts or of mappings with
            fields, or functions that return one.
        run: The run directory of the config. That run may get other data; its present files are kept.

    Raises:
        ConfigError: An optional package is missing; or the store is elsewhere (`data.remote`), or was imported; or
            runs use the present store, and it would not only grow.
        DataError: Text, tokenizer or disk has a problem; too much would be removed as duplicates; the present store's
            manifest cannot be read; or a run is reading that store and something has changed.
    """
    started = time.monotonic()
    # The build folder must be next to the store's folder itself, not next to a link to it, so that a rename works.
    path = data.store.resolve() if data.store.is_symlink() else data.store
    check_not_foreign(path)
    _check_same_origin(data, path, force)
    uses = uses_of(path)
    if not force:
        check_replaceable(data, run, grows=True, moves=True)
    keeps_for = {use.pid for use in uses}
    if force:
        check_not_in_use(path, keeps_for)  # without `force`, nothing may have changed: the check waits for a change
    if pool is not None:
        pool.check()
    steps, own_steps = check_steps(data)
    sources = find_sources(data.sources, iterables, data.max_document_bytes)
    _warn_of_empty_files(sources)
    count = _worker_count(workers or data.workers, sources)
    with building(path) as folder, writing_store(path, _DISK_FIX):
        # Opened without a check: damaged parts are made again, and the trained vocabulary stays.
        present = TokenStore.open(path, check=False) if not force and (path / MANIFEST).exists() else None
        hashes = InputHashes(path / _HASHES, folder / _HASHES, keep=folder / _HASHES, fresh=force)
        check_sources(sources)
        tokenizer = vocabulary_of(data, sources, folder, present, hashes, fresh=force)
        if present is not None:
            check_vocabulary_stays(present, tokenizer, [use.run for use in uses])
        begin = tokenizer.begin_of_text(data.begin_of_text)
        encoder = choose_encoder(
            tokenizer,
            data.tokenizer.encoder,
            sample_text([source for source in sources if source.template != CHAT], _sample_bytes(sources)),
            data.tokenizer.special_tokens_in_text,
            threads=_threads_per_call(count, sources),
        )
        recipe = Recipe(
            tokenizer=folder / "tokenizer",
            encoder=encoder,
            special_tokens_in_text=data.tokenizer.special_tokens_in_text,
            bound=0,
            holds_out=data.validation > 0,
            skip_bad=data.bad_documents == "skip",
            clean=tuple((*data.clean, *source.clean) for source in data.sources),
            begin=tuple(begin.values()),
            unavoidable={} if data.tokenizer.special_tokens_in_text else tokenizer.unavoidable,
            chat=tokenizer.where if any(source.template == CHAT for source in sources) else None,
        )
        width = tokenizer.dtype.itemsize
        most = data.max_document_bytes
        records = Records(folder, path, width, most, fresh=force, hashed=repair)
        builder = Builder(
            data,
            sources,
            records,
            hashes,
            recipe,
            described_steps=[_one_after_the_other(steps, own) for own in own_steps],
            tokenizer=tokenizer,
            workers=count,
            pool=pool,
            keeps_for=keeps_for,
            chat=open_chat_encoder(recipe, tokenizer).fingerprint if recipe.chat is not None else None,
        )
        outcomes, bound = _build_units(builder, data, sources, present)
        _warn_of_cut_files(outcomes)
        _warn_of_no_tokens(outcomes)
        skipped = list(islice(_malformed(records, outcomes), LISTED))
        inputs = _as_bytes(inputs_json(data, sources, outcomes, builder.duplicates))
        settings = settings_json(data, steps, own_steps)
        manifest = manifest_json(settings, tokenizer, sources, outcomes, bound=bound, inputs=inputs, begin=begin)
        # The builder has checked the shards already.
        up_to_date = (
            present is not None
            and not builder.processed
            and present.manifest == manifest
            and not present.problems_outside_shards()
        )
        if not (up_to_date or force):
            check_replaceable(data, run, grows=True)  # sources that only lie elsewhere would have changed nothing
        hashes.save((path if up_to_date else folder) / _HASHES)
        if up_to_date:
            renew_settings(folder, path, data)
            with suppress(OSError):  # the store may be one that this user can only read
                keep_made_of(path, data, manifest)
        else:
            kept = _files_of_runs(uses, path, records)
            _write(folder, records, manifest, inputs, skipped=skipped, encoder=encoder, kept=kept)
            keep_made_of(folder, data, manifest)
            publish(folder, path, keeps_for)
    seconds = time.monotonic() - started
    return report_of(path, manifest, sources, builder, outcomes, up_to_date=up_to_date, workers=count, seconds=seconds)


def _check_same_origin(data: DataConfig, path: Path, force: bool) -> None:
    """Raise an error if a store that is remote or imported would be replaced by one prepared from text."""
    if data.remote is not None:
        raise ConfigError(
            f"this config trains from the store at {data.remote}, and {path} is the cache of that store",
            where="data.remote",
            fix="data.remote=null prepares a store here",
        )
    if not force and _is_imported(path):
        raise ConfigError(
            "the store there was imported from another project's files, not prepared from text",
            where=str(path),
            fix="training uses it as it is; set data.store to prepare another, or --force to replace it",
        )


def _is_imported(path: Path) -> bool:
    try:
        return "imported" in read_manifest(path)
    except DataError:
        return False


def check_steps(data: DataConfig) -> tuple[Any, list[Any]]:
    """Return the cleaning steps of all sources and those of each, with everything they depend on.

    Raises:
        ConfigError: a package or a function that a step needs is missing.
        DataError: a file that a step needs cannot be read.
    """
    return _described_steps(data.clean), [_described_steps(source.clean) for source in data.sources]


def _described_steps(steps: Sequence[CleanStep]) -> Any:
    """Return cleaning steps with everything they depend on, and check that their dependencies are installed."""
    if not steps:
        return []

    return describe_steps(steps)


def _one_after_the_other(steps: Any, own: Any) -> Any:
    """Return the description of steps for all sources followed by those of one source."""
    return {**own, "steps": [*steps["steps"], *own["steps"]]} if steps and own else steps or own


def _worker_count(wanted: int | str, sources: Sequence[Source]) -> int:
    """Return the number of workers; `auto` means one per core, but no more than the input can keep busy."""
    if wanted == "auto":
        cores = usable_cores()
        if any(source.stream is not None for source in sources):
            return cores
        wanted = min(cores, _input_bytes(sources) // _BYTES_PER_WORKER)
    return max(1, int(wanted))


def _input_bytes(sources: Sequence[Source]) -> int:
    return sum(file.bytes for source in sources for file in source.files)


def _threads_per_call(workers: int, sources: Sequence[Source]) -> int:
    """Return the number of threads that share the encoding of each text.

    Each thread has its own cache of words, so several threads pay off only where a long file would leave other workers
    idle.
    """
    return 1 if workers * longest_piece(sources) <= _input_bytes(sources) else workers


def _sample_bytes(sources: Sequence[Source]) -> int:
    """Return the bytes of text on which encoders are compared: a thousandth of the input, within bounds.

    The lower bound keeps the comparison meaningful, the upper bound keeps it short.
    """
    return max(2**16, min(2**20, _input_bytes(sources) // 1000))


def _warn_of_empty_files(sources: Sequence[Source]) -> None:
    empty = [file.location for source in sources for file in source.files if not file.bytes]
    if empty:
        count = "an input file is" if len(empty) == 1 else f"{len(empty)} input files are"
        warning(f"{count} empty: {', '.join(empty[:3])}{' ...' if len(empty) > 3 else ''}")


def _warn_of_cut_files(outcomes: Iterable[Outcome]) -> None:
    cut = sum(outcome.survey.cut for outcome in outcomes)
    if cut:
        files = "an input file is" if cut == 1 else f"{cut} input files are"
        warning(f"{files} left out from a place on, named in {SKIPPED}: the text after that place cannot be read")


def _warn_of_no_tokens(outcomes: Iterable[Outcome]) -> None:
    found = [outcome.shards for outcome in outcomes if outcome.shards.without_tokens]
    if found:
        count = sum(shards.without_tokens for shards in found)
        documents = f"{format_count(count)} {plural(count, 'document')}"
        warning(
            f"the tokenizer gives no token for the text of {documents}, the first of them {found[0].first_without}:"
            " the store has an end-of-text token for each of them"
        )


def _build_units(
    builder: Builder, data: DataConfig, sources: Sequence[Source], present: TokenStore | None
) -> tuple[list[Outcome], int]:
    """Build all units; return their outcomes, and the bound under which documents are held out.

    A document is held out if its hash, as a fraction, is below `data.validation`. In a small corpus that may leave one
    side of the split empty. Then the bound moves just far enough that each side has a document (the one with the
    smallest or the largest hash), and the builder runs again.
    """
    same = present is not None and present.manifest["settings"].get("validation") == data.validation
    bound = int(present.manifest["split"]["bound"]) if present and same else int(data.validation * 2**64)
    outcomes = builder.run(bound)
    largest = max((outcome.shards.largest for outcome in outcomes), default=-1)
    smallest = min((outcome.shards.smallest for outcome in outcomes), default=2**64)
    if largest < 0:
        raise _no_documents(sources, outcomes, next(_malformed(builder.records, outcomes), None))
    settled = settled_bound(data.validation, smallest, largest)
    if settled != bound:
        outcomes = builder.run(settled)
    if data.validation and not smallest < settled:
        warning("one document cannot be split (nor can equal ones): nothing is held out for validation")
    return outcomes, settled


def settled_bound(validation: float, smallest: int, largest: int) -> int:
    """Return the bound that gives each side a document if two documents differ, and otherwise training the only one."""
    bound = int(validation * 2**64)
    if largest < bound:
        return largest
    if validation and smallest < largest and smallest >= bound:
        return smallest + 1
    return bound


def _malformed(records: Records, outcomes: Iterable[Outcome]) -> Iterator[dict[str, str]]:
    """Yield some malformed documents of each unit, in input order."""
    yield from records.listed(outcome.key for outcome in outcomes if outcome.survey.skipped)
    for outcome in outcomes:
        yield from outcome.shards.unencodable_list


def _no_documents(
    sources: Sequence[Source], outcomes: Sequence[Outcome], malformed: dict[str, str] | None
) -> DataError:
    files = [file.location for source in sources for file in source.files]
    where = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    read = sum(outcome.survey.read for outcome in outcomes)
    unencodable = [listed for outcome in outcomes for listed in outcome.shards.unencodable_list]
    if unencodable:
        return DataError(
            f"the tokenizer can encode none of {read:,} documents, the first: {unencodable[0]['reason']}",
            where=unencodable[0]["where"],
            fix="check data.tokenizer.path",
        )
    if read:
        return DataError(
            f"the cleaning has left nothing of {read:,} documents", where=where, fix="loosen data.clean, step by step"
        )
    if malformed is None:
        return DataError("the input holds no text", where=where, fix="check data.sources")
    count = sum(outcome.survey.skipped for outcome in outcomes)
    return DataError(
        f"the input holds no text: all {count:,} documents are malformed, the first: {malformed['reason']}",
        where=malformed["where"],
        fix="repair the input, or set the source's format or field",
    )


def _as_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _write(
    folder: Path,
    records: Records,
    manifest: dict[str, Any],
    inputs: bytes,
    *,
    skipped: Sequence[dict[str, str]],
    encoder: str,
    kept: Sequence[str],
) -> None:
    """Write everything but the shards, and remove files that neither the store nor a run needs."""
    records.link_present(kept)
    records.collect([*_TOKENIZER, _HASHES, TRAINED, *kept])
    record_encoder(folder, encoder)
    if skipped:
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in skipped)
        (folder / SKIPPED).write_text(lines, "utf-8", "backslashreplace")
    with atomic_write(folder / INPUTS) as file:
        file.write(inputs)
    write_json(folder / MANIFEST, manifest, exact=True)


def _files_of_runs(uses: Sequence[Use], path: Path, records: Records) -> list[str]:
    """Return the present store's files that runs need and the new store lacks, and the marks of these runs."""
    kept: dict[str, None] = {}
    for use in uses:
        needed = [name for name in use.files if name not in records.used and (path / name).exists()]
        kept.update(dict.fromkeys([*needed, use.mark]))
        if needed:
            size = sum((path / name).stat().st_size for name in needed)
            warning(
                f"{use.run} reads this store as it was: {format_bytes(size)} of it stay here for that run; with"
                " --accept-changes the new data joins the run's data"
            )
    return list(kept)
