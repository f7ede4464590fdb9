"""`report.html`: one page about one run, readable during the run and years later, without external resources."""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from headway.config.sections.early_stopping import EarlyStoppingConfig, reason_to_stop
from headway.core.coordination.outcomes import FINISHED
from headway.core.credentials.secrets import redact_arguments
from headway.core.files.atomic import write_text
from headway.core.files.foreign import SETTINGS_BYTES, as_number, read_bytes, read_json_or_empty
from headway.core.format import UNKNOWN, counted, format_bytes, format_count, format_seconds
from headway.telemetry import html
from headway.telemetry.anomalies import AnomalyWatch, Episode, Episodes
from headway.telemetry.charts import loss_chart, metric_chart
from headway.telemetry.goodput import Goodput, goodput_of
from headway.telemetry.record import (
    DIED,
    NOT_ENDED,
    NOT_STARTED,
    RUNNING,
    Run,
    as_int,
    as_text,
    dig,
    open_run,
)
from headway.telemetry.summary import (
    Summary,
    ago_text,
    cost_note,
    loss_text,
    share_text,
    summarize,
    time_text,
    usd_text,
)

#: Sample text and diffs are truncated to this many characters; the files have the rest.
_SHOWN_CHARACTERS = 50_000
#: Most anomalies that are shown.
_SHOWN_ANOMALIES = 50
#: Waiting for a processor is shown if it ever took this share of a run's time.
_SHOWN_WAIT = 0.1


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write the report of a run, whatever state it is in.

    Args:
        run_dir: The run directory.
        output: Where to; `report.html` in the run directory when not given.

    Returns:
        The file's path.

    Raises:
        CheckpointError: `run_dir` is not a run directory.
    """
    text = render_report(open_run(run_dir))
    path = output or run_dir / "report.html"
    write_text(path, text)
    return path


def render_report(run: Run) -> str:
    """Return the page as text."""
    sections = record(run)  # first: it reads the history, which the others need too
    return html.page(
        f"{run.name} · Headway run",
        [
            head(run),
            _charts(run),
            sections,
            html.section("Config", config(run)),
            f'<p class="muted">Written {time_text(time.time())} by Headway.</p>',
        ],
    )


def head(run: Run) -> str:
    """Return the title of a run, how it stands, and its headline numbers."""
    summary = summarize(run)
    losses = (summary.train_loss_not_finite_since, summary.validation_loss_not_finite_since)
    tone = None if losses == (None, None) else "warn"
    note = _status_note(run, summary)
    return html.heading(run.name, summary.state, note, tone=tone) + html.tiles(_tiles(summary))


def record(run: Run) -> str:
    """Return what is on record of a run, but its curves and its config."""
    watch = AnomalyWatch()
    watch.configure(run)
    episodes = Episodes(watch)
    run.pass_history_to(episodes.add)
    found = goodput_of(run)
    parts = [
        html.section("Sample text", _samples(run)),
        html.section("Data", _data(run)),
        html.section("Model", html.facts(_model(run))),
        html.section("Changes during the run", _segments(run)),
        html.section("Attempts", _spent(found), _attempts(run, found)),
        html.section("Anomalies", _anomalies(episodes)),
        html.section("Benchmarks", _benchmarks(run)),
        html.section("Checkpoints", _checkpoints(run)),
        html.section("Environment", html.facts(_environment(run)), _changes(run)),
    ]
    return "\n".join(part for part in parts if part)


def _status_note(run: Run, summary: Summary) -> str:
    last = f"last sign of life {time_text(summary.updated)} ({ago_text(summary.updated)})"
    if summary.state == RUNNING:
        how = f"Running since {time_text(run.attempts[-1].started)}; {last}."
    elif summary.state == DIED:
        how = f"Died without a message; {last}. The same command continues from the newest checkpoint."
    elif summary.state == NOT_ENDED:
        how = f"No end is on record, and attempt {run.attempts[-1].number} is not on this machine; {last}."
    elif summary.state == NOT_STARTED:
        how = "No attempt is on record."
    else:
        how = f"{summary.outcome[:1].upper()}{summary.outcome[1:]}, {time_text(run.attempts[-1].ended)}."
    if (early := _stopped_early(run)) is not None:
        how = f"{how} Stopped early: {early}."
    since = summary.train_loss_not_finite_since
    diverged = "" if since is None else f" The training loss has not been finite since step {since:,}."
    return f"{how} Step {_of(summary.step, summary.total_steps)}.{diverged}"


def _stopped_early(run: Run) -> str | None:
    """Return why a run ended before its last step, if it did so by `train.early_stopping`."""
    settings = run.get("train.early_stopping")
    if run.state != FINISHED or run.step == run.total_steps or not isinstance(settings, dict):
        return None
    with suppress(ValidationError):  # written by hand
        evaluations = zip(*map(list, run.metrics.series("evaluation/loss")), strict=True)
        return reason_to_stop(EarlyStoppingConfig.model_validate(settings), evaluations)
    return None


def _of(step: int, total: int | None) -> str:
    return f"{step:,} of {total:,}" if total is not None else f"{step:,}"


def _tiles(summary: Summary) -> list[tuple[str, str, str]]:
    again = counted(summary.repeated_steps, "step")
    repeated = f"{again} done again after restarts" if summary.repeated_steps else ""
    skipped = f", {summary.skipped_steps:,} skipped" if summary.skipped_steps else ""
    over = "median of all steps"
    unknown = "the device's peak or the FLOPs of a token are not known"
    mfu = ("MFU", share_text(summary.mfu), "" if summary.mfu is not None else unknown)
    if summary.language_model:
        perplexity = summary.perplexity
        speed = summary.tokens_per_second
        of_items = [
            ("Perplexity", UNKNOWN if perplexity is None else f"{perplexity:,.2f}", "on validation data"),
            ("Tokens", format_count(summary.tokens), f"step {_of(summary.step, summary.total_steps)}{skipped}"),
            ("Tokens per second", format_count(speed), over if speed is not None else ""),
            mfu,
        ]
    else:
        speed = summary.samples_per_second
        of_items = [
            ("Steps", _of(summary.step, summary.total_steps), skipped.removeprefix(", ")),
            ("Samples per second", format_count(speed), over if speed is not None else ""),
        ]
    return [
        _training_tile(summary),
        _validation_tile(summary),
        *_replay_tiles(summary),
        *of_items,
        ("Wall time", format_seconds(summary.seconds), "while an attempt was going"),
        ("Cost", usd_text(summary.spent_usd), cost_note(summary)),
        ("Peak memory", _gib(summary.peak_memory_gib), "of one worker"),
        ("Attempts", f"{summary.attempts:,}", repeated),
    ]


def _training_tile(summary: Summary) -> tuple[str, str, str]:
    if summary.train_loss_not_finite_since is not None:
        return "Training loss", "not finite", f"since step {summary.train_loss_not_finite_since:,}"
    over = f"mean of the last {summary.train_loss_steps} steps" if summary.train_loss_steps > 1 else "last step"
    return "Training loss", loss_text(summary.train_loss), over if summary.train_loss is not None else ""


def _validation_tile(summary: Summary) -> tuple[str, str, str]:
    value = loss_text(summary.validation_loss)
    notes = []
    if summary.validation_loss_not_finite_since is not None:
        value = "not finite"
        notes = [f"since step {summary.validation_loss_not_finite_since:,}"]
    elif summary.validation_step is not None and summary.validation_step != summary.step:
        notes = [f"at step {summary.validation_step:,}"]
    if summary.best_validation_loss is not None and summary.best_validation_loss != summary.validation_loss:
        notes.append(f"best {loss_text(summary.best_validation_loss)} at step {summary.best_validation_step:,}")
    return "Validation loss", value, ", ".join(notes)


def _replay_tiles(summary: Summary) -> list[tuple[str, str, str]]:
    if summary.replay_loss is None:
        return []
    return [("Replay loss", loss_text(summary.replay_loss), f"first {loss_text(summary.first_replay_loss)}")]


def _gib(amount: float | None) -> str:
    return UNKNOWN if amount is None else f"{amount:,.1f} GiB"


def _charts(run: Run) -> str:
    small = [
        metric_chart(
            run,
            "speed/tokens_per_second",
            "Throughput",
            "tokens per second" if run.is_language_model else "samples per second",
            from_zero=True,
        ),
        metric_chart(run, "train/learning_rate", "Learning rate"),
        metric_chart(run, "train/grad_norm", "Gradient norm", may_be_log=True),
    ]
    drawn = "".join(html.figure(chart) for chart in small if chart)
    loss = loss_chart(run)
    if loss is None and not drawn:
        return html.section("Loss", '<p class="muted">No step has been recorded yet.</p>')
    above = f'<div class="charts">{html.figure(loss)}</div>' if loss else ""
    if run.metrics.last("train/loss") is not None and not above:
        above = html.section("Loss", '<p class="muted">No finite loss has been recorded.</p>')
    return f'{above}<div class="charts">{drawn}</div>'


def _samples(run: Run) -> str:
    try:
        text = read_bytes(run.path / "samples.txt", SETTINGS_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return html.preformatted(text[:_SHOWN_CHARACTERS]) if text.strip() else ""


def _data(run: Run) -> str:
    fingerprint = ("Fingerprint", as_text(dig(run.facts, "fingerprints", "data")) or UNKNOWN)
    if not run.is_language_model:
        epochs = run.metrics.last("data/epochs/dataset")
        return html.facts([("Epochs so far", UNKNOWN if epochs is None else f"{epochs:.2f}"), fingerprint])
    manifest = run.data_manifest
    splits = manifest.get("splits")
    rows = []
    held_out = 0
    total = 0
    for split, sources in splits.items() if isinstance(splits, dict) else ():
        for source, part in sources.items() if isinstance(sources, dict) else ():
            tokens = as_int(dig(part, "tokens"))
            total += tokens or 0
            held_out += (tokens or 0) if split == "validation" else 0
            rows.append([split, source, _count(dig(part, "documents")), _count(tokens)])
    seen = None
    if run.tokens is not None and total > held_out:
        seen = run.tokens / (total - held_out)
    facts = [
        ("Token store", as_text(run.get("data.store")) or UNKNOWN),
        ("Tokens", f"{total:,}" if total else UNKNOWN),
        ("Validation share", share_text(held_out / total if total else None)),
        ("Epochs so far", UNKNOWN if seen is None else f"{seen:.2f}"),
        ("Vocabulary", _count(run.vocab_size)),
        fingerprint,
        ("Tokenizer fingerprint", as_text(dig(run.facts, "fingerprints", "tokenizer")) or UNKNOWN),
    ]
    return html.facts(facts) + html.table(["Split", "Source", "Documents", "Tokens"], rows, numeric=(2, 3))


def _count(value: Any) -> str:
    number = as_int(value)
    return UNKNOWN if number is None else f"{number:,}"


def _model(run: Run) -> list[tuple[str, str]]:
    shape = [
        ("dim", "width"), ("layers", "layers"), ("heads", "heads"), ("kv_heads", "key-value heads"),
        ("head_dim", "head width"), ("ffn_dim", "feed-forward width"),
    ]  # fmt: skip
    told = [f"{label} {value:,}" for key, label in shape if (value := as_int(run.get(f"model.{key}"))) is not None]
    recorded = run.facts.get("model")
    extra = {key: value for key, value in recorded.items() if key != "vocab_size"} if isinstance(recorded, dict) else {}
    facts = [(key.replace("_", " ").capitalize(), _plain(value)) for key, value in extra.items()]
    promises = [
        ("Precision", as_text(run.get("train.precision")) or UNKNOWN),
        ("Determinism", as_text(run.get("determinism")) or UNKNOWN),
    ]
    if not run.is_language_model:
        return [*facts, ("Global batch", f"{_count(run.get('train.global_batch'))} samples"), *promises]
    return [
        *facts,
        ("Preset", as_text(run.get("model.preset")) or "none"),
        ("Started from", as_text(run.get("model.from_pretrained")) or "first weights drawn from the seed"),
        ("Shape", ", ".join(told) or UNKNOWN),
        ("Sequence length", _count(run.get("train.sequence_length"))),
        ("Global batch", f"{_count(run.get('train.global_batch'))} rows, {_count(run.tokens_per_step)} tokens"),
        *promises,
    ]


def _plain(value: Any) -> str:
    """Format a recorded value."""
    if value is None:
        return UNKNOWN
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return as_text(value) or str(value)


def _spent(found: Goodput | None) -> str:
    """Show where the time went."""
    if found is None or not found.wall_seconds:  # every measured time is part of the wall time
        return ""
    spent = [("training that counts", found.effective_seconds), *found.lost_seconds.items()]
    rows = [
        [name, format_seconds(seconds), f"{seconds / found.wall_seconds:.1%}"] for name, seconds in spent if seconds
    ]
    return html.table(["Spent on", "Time", "Share"], rows, numeric=(1, 2))


def _segments(run: Run) -> str:
    """Show how and where the run was changed; nothing if it was not."""
    rows = [
        [
            _count(segment.first_step),
            _count(segment.global_batch),
            _count(segment.sequence_length),
            "; ".join(segment.changes) or "as the run began",
        ]
        for segment in run.segments
    ]
    return html.table(["From step", "Rows in a step", "Tokens in a row", "What"], rows, numeric=(0, 1, 2))


def _attempts(run: Run, found: Goodput | None) -> str:
    lost = {} if found is None else found.lost_steps
    headers = ["Attempt", "Steps", "Lost steps", "Started", "Went for", "Why it ended", "Exit code", "Host", "Command"]
    rows = [
        [
            str(attempt.number),
            f"{_count(attempt.first_step)} to {_count(attempt.last_step)}",
            UNKNOWN if found is None else _count(lost.get(attempt.number, 0)),
            time_text(attempt.started),
            format_seconds(attempt.seconds),
            attempt.outcome,
            _count(attempt.exit_code),
            attempt.host or UNKNOWN,
            attempt.command or UNKNOWN,
        ]
        for attempt in run.attempts
    ]
    return html.table(headers, rows, numeric=(1, 2, 4, 6))


def _anomalies(episodes: Episodes) -> str:
    """Show what was not as usual; nothing if everything was."""
    found = episodes.found()
    rows = [[_steps(one), one.anomaly.label, one.anomaly.text, one.anomaly.advice] for one in found[:_SHOWN_ANOMALIES]]
    more = f'<p class="muted">{len(found) - len(rows)} more.</p>' if len(rows) < len(found) else ""
    return html.table(["Steps", "What, and its suspected cause", "Seen", "What may help"], rows) + more


def _steps(episode: Episode) -> str:
    if episode.first_step == episode.last_step:
        return f"{episode.first_step:,}"
    return f"{episode.first_step:,} to {episode.last_step:,}"


def _benchmarks(run: Run) -> str:
    """Show the results of lm-eval by step; nothing if there are none."""
    rows = []
    settings = []
    for path in sorted((run.path / "benchmarks").glob("step-*.json")):
        found = read_json_or_empty(path)
        results = found.get("results")
        for task, values in results.items() if isinstance(results, dict) else ():
            for name, value in values.items() if isinstance(values, dict) else ():
                rows.append([_count(found.get("step")), str(task), str(name), _plain(as_number(value))])
        if found:
            settings.append(f"lm-eval {as_text(found.get('lm_eval')) or UNKNOWN}")
        if (limit := as_int(found.get("limit"))) is not None:
            settings.append(f"at most {limit:,} documents per task")
    if not rows:
        return ""
    return html.facts([("Measured by", ", ".join(dict.fromkeys(settings)))]) + html.table(
        ["Step", "Task", "Metric", "Value"], rows, numeric=(0, 3)
    )


def _checkpoints(run: Run) -> str:
    headers = ["Step", "Saved", "Size", "Attempt", "State SHA-256"]
    rows = [
        [
            f"{checkpoint.step:,}",
            time_text(checkpoint.time),
            format_bytes(checkpoint.bytes),
            _count(checkpoint.attempt),
            checkpoint.state_sha256 or UNKNOWN,
        ]
        for checkpoint in run.checkpoints
    ]
    return html.table(headers, rows, numeric=(2, 3))


def _environment(run: Run) -> list[tuple[str, str]]:
    environment = run.facts.get("environment")
    hardware = run.facts.get("hardware")
    git = run.facts.get("git")
    words = run.facts.get("command")
    packages = dig(environment, "packages")
    variables = dig(environment, "variables")
    accelerators = dig(hardware, "accelerators")
    names = [as_text(dig(item, "name")) or UNKNOWN for item in accelerators] if isinstance(accelerators, list) else []
    memory = dig(hardware, "memory_gib")
    return [
        ("Command", shlex.join(redact_arguments(map(str, words))) if isinstance(words, list) else UNKNOWN),
        ("Processor", f"{_plain(dig(hardware, 'cpu'))}, {_plain(dig(hardware, 'cores_usable'))} usable cores"),
        *_neighbours(run),
        ("Instruction sets", as_text(dig(hardware, "instruction_sets")) or UNKNOWN),
        ("Memory", _gib(memory if isinstance(memory, float) else None)),
        ("Accelerators", ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "none"),
        ("Platform", _plain(dig(environment, "platform"))),
        ("Python", _plain(dig(environment, "python"))),
        ("CUDA", _plain(dig(environment, "cuda"))),
        ("Packages", _pairs(packages, " ")),
        ("Variables", _pairs(variables, "=")),
        ("Git commit", _git_text(git)),
    ]


def _neighbours(run: Run) -> list[tuple[str, str]]:
    """Show how much the first worker's machine was shared; nothing if that was not seen, or hardly the case."""
    _, waited = run.metrics.finite("health/cpu_wait_share")
    if not len(waited) or waited.max() < _SHOWN_WAIT:
        return []
    _, others = run.metrics.finite("health/cpu_used_by_others")
    used = f"; other processes used {others.mean():.1f} processors, at most {others.max():.1f}" if len(others) else ""
    text = f"threads waited {waited.mean():.0%} of their time for a processor, at most {waited.max():.0%}{used}"
    return [("Shared processors", text)]


def _pairs(value: Any, sign: str) -> str:
    if not isinstance(value, dict):
        return UNKNOWN
    return ", ".join(f"{name}{sign}{item}" for name, item in value.items()) or "none"


def _git_text(git: Any) -> str:
    commit = as_text(dig(git, "commit"))
    if commit is None:
        return UNKNOWN
    return f"{commit} with uncommitted changes" if dig(git, "dirty") else commit


def _changes(run: Run) -> str:
    """Show uncommitted changes: their hash and files, and the text only if the config allowed it to be recorded."""
    git = run.facts.get("git")
    sha256 = as_text(dig(git, "diff_sha256"))
    names = dig(git, "changed")
    if sha256 is None:
        return ""
    facts = [("Uncommitted changes", f"SHA-256 {sha256}, {format_bytes(as_int(dig(git, 'diff_bytes')))}")]
    if isinstance(names, list):
        facts.append(("Changed files", ", ".join(map(str, names))))
    if (file := as_text(dig(git, "diff_file"))) is not None:
        facts.append(("The changes themselves", f"{file} in the run directory"))
    diff = as_text(dig(git, "diff")) if run.get("telemetry.git_diff") == "full" else None
    text = html.preformatted(diff[:_SHOWN_CHARACTERS], "Uncommitted changes") if diff else ""
    return html.facts(facts) + text


def config(run: Run) -> str:
    """Return the whole config of a run, folded."""
    if not run.config:
        return ""
    unused = () if run.is_language_model else ("data", "model")
    values = {key: value for key, value in run.config.items() if key not in unused}
    return html.preformatted(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), "The resolved config")
