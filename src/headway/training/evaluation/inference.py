"""Trained models, ready to be evaluated, sampled or exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from headway.checkpoint.store import CheckpointInfo, CheckpointStore
from headway.config import Config, DataConfig, ModelConfig, load_resolved
from headway.config.template import CHAT
from headway.core.console import progress, warning
from headway.core.errors import CheckpointError, ConfigError, DataError
from headway.core.files.foreign import LISTING_BYTES, read_bytes, read_json_object
from headway.core.files.hashes import sha256_file
from headway.data.feeding.evaluation_feed import evaluation_feed
from headway.data.remote_store import open_store
from headway.data.remote_store import tokenizer_folder as folder_of
from headway.data.store import TokenStore
from headway.data.tokenizing.begin_of_text import is_same_but_for_template, with_tokens_before
from headway.data.tokenizing.beside import chat_encoder, has_chat_template
from headway.data.tokenizing.chat import ChatEncoder
from headway.data.tokenizing.files import has_tokenizer
from headway.data.tokenizing.library import UnencodableTextError
from headway.data.tokenizing.tokenizer import Tokenizer
from headway.models.build import build_any_model, build_pretrained
from headway.models.decoder import Decoder
from headway.models.finite import check_finite
from headway.models.hub.compressed import is_quantized, load_quantized
from headway.models.hub.export import export_transformers_model
from headway.models.hub.folder import base_folder, is_model_folder
from headway.models.hub.transformers_model import TransformersModel
from headway.models.huggingface.export import export_model
from headway.parallel.world import World, pick_device
from headway.training.evaluation.evaluate import Evaluation, evaluate
from headway.training.evaluation.generation import generate, stream_text
from headway.training.setup.trial import is_out_of_memory
from headway.training.state import model_tensors
from headway.training.task import LANGUAGE_MODELLING


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode with its tokenizer and config."""

    model: Decoder | TransformersModel
    tokenizer: Tokenizer
    tokenizer_folder: Path
    begin_of_text: Mapping[str, int]
    """The tokens that every text begins with, as in training, with their ids."""
    step: int | None
    """Training step of the weights; None when they come from a Hugging Face folder."""
    config: Config | None
    stop_ids: frozenset[int] = frozenset()
    """The tokens that end a text: the tokenizer's end of text, and those of the pretrained model's folder."""

    @property
    def has_adapter(self) -> bool:
        """True if the model has adapters of peft that can be merged."""
        by_transformers = self.model.config.implementation == "transformers"
        return by_transformers and cast("TransformersModel", self.model).has_adapter

    def open_chat(self) -> ChatEncoder | None:
        """Open what renders conversations; None if the tokenizer has no chat template.

        Raises:
            ConfigError: transformers is not installed.
            DataError: transformers cannot load the tokenizer.
        """
        if not has_chat_template(self.tokenizer):
            return None
        special_in_text = self.config is not None and self.config.data.tokenizer.special_tokens_in_text
        return chat_encoder(self.tokenizer, special_in_text, dated=True)


def stops_of_turns(encoder: ChatEncoder | None) -> frozenset[int]:
    """Return the tokens that end the turns of a template; none, with a warning, where it does not show them."""
    if encoder is None:
        return frozenset()
    try:
        return encoder.stop_ids
    except UnencodableTextError as error:
        warning(f"answers may not end where they should: {error.what}")
        return frozenset()


@contextmanager
def explain_full_gpu() -> Iterator[None]:
    """Turn a lack of GPU memory, mostly due to a run that trains there, into an error that names remedies."""
    try:
        yield
    except RuntimeError as error:
        if not (torch.cuda.is_initialized() and is_out_of_memory(error)):
            raise
        raise ConfigError(
            f"the GPU has too little memory: {str(error).splitlines()[0]}",
            where="nvidia-smi lists the processes that use a GPU",
            fix="try again when there is more; or leave the GPU alone: CUDA_VISIBLE_DEVICES= headway ...",
        ) from error


@explain_full_gpu()
def load_trained(
    path: Path, *, step: int | None = None, device: torch.device | Literal["auto"] | None = None
) -> TrainedModel:
    """Load a model from a run directory or a Hugging Face folder.

    Of a run, load the newest good checkpoint, or that of the given step.

    Args:
        device: Where the model computes: the CPU when not given, the fastest device of this machine for "auto".

    Raises:
        ConfigError: the path is neither, or the device's memory ran out.
        CheckpointError: there is no checkpoint that verifies.
    """
    if device == "auto":
        device = pick_device("auto")
    device = device or torch.device("cpu")
    if (path / "checkpoints").is_dir() and (path / "config.yaml").is_file():
        return _from_run(path, step, device)
    if is_model_folder(path):
        model = _from_folder(path, device)
        folder = _folder_with_tokenizer(path)
        tokenizer = Tokenizer.load(folder)
        stops = _stop_ids(tokenizer, base_folder(path))
        return TrainedModel(model, tokenizer, folder, tokenizer.begin_of_text(), None, None, stops)
    raise ConfigError(
        "neither a run directory nor a Hugging Face folder",
        where=str(path),
        fix="give a folder with config.yaml and checkpoints/, or one with config.json and safetensors",
    )


def load_tokenizer(path: Path, info: CheckpointInfo | None) -> tuple[Tokenizer, Mapping[str, int]]:
    """Load the tokenizer of a model, without the model, and the tokens that every text begins with.

    Args:
        path: Run directory or Hugging Face folder.
        info: The checkpoint of a run; None for a folder.

    Raises:
        CheckpointError: the run's tokenizer is not there.
    """
    if info is None:
        tokenizer = Tokenizer.load(_folder_with_tokenizer(path))
        return tokenizer, tokenizer.begin_of_text()
    _check_is_decoder(path, info)
    tokenizer = Tokenizer.load(_tokenizer_folder(path, load_resolved(path / "config.yaml").data, info))
    return tokenizer, tokenizer.saved_begin_of_text()


def _folder_with_tokenizer(path: Path) -> Path:
    return path if has_tokenizer(path) else base_folder(path)  # peft writes an adapter without one


def _from_folder(path: Path, device: torch.device) -> Decoder | TransformersModel:
    if is_quantized(path):
        return load_quantized(path, device)
    return build_pretrained(ModelConfig(from_pretrained=path)).to(device).eval()


def _from_run(path: Path, step: int | None, device: torch.device) -> TrainedModel:
    config = load_resolved(path / "config.yaml")
    store = CheckpointStore(path / "checkpoints")
    if step is None:
        info = store.newest(warning)
        if info is None:
            raise CheckpointError(
                "the run has no checkpoint yet", where=str(path), fix=f"headway train {path / 'config.yaml'}"
            )
    else:
        info = store.info(step)
        found = store.verify(step)
        if not found.good:
            raise CheckpointError(
                f"the checkpoint of step {step} is damaged: {'; '.join(map(str, found.damage))}",
                where=str(info.path),
                fix=f"take another step; headway checkpoints verify {path} lists the good ones",
            )
    _check_is_decoder(path, info)
    tokenizer_folder = _tokenizer_folder(path, config.data, info)
    tokenizer = Tokenizer.load(tokenizer_folder)
    # Reading a model needs no package or GPU of its training.
    shape = config.model.model_copy(update={"attention": "auto"})
    model = build_any_model(shape, vocab_size=tokenizer.vocab_size, seed=config.seed, initialize=False)
    tensors = model_tensors(model)
    saved = store.load(info)
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])
    fix = f"take another step (--step); headway checkpoints list {path} shows which there are"
    check_finite(tensors.items(), info.path, fix)
    begin = tokenizer.saved_begin_of_text()
    stops = _stop_ids(tokenizer, _pretrained_folder(config.model))
    return TrainedModel(model.to(device).eval(), tokenizer, tokenizer_folder, begin, info.step, config, stops)


def _pretrained_folder(config: ModelConfig) -> Path | None:
    """Return the folder of the model that a run has continued, where that is on this machine.

    The native decoder no longer needs it, so what is on the Hub is not fetched for its sake.
    """
    source = config.from_pretrained
    needed = config.implementation == "transformers"
    if source is None or not (needed or Path(source).is_dir()):
        return None
    return base_folder(source, with_code=config.trust_remote_code)


def _stop_ids(tokenizer: Tokenizer, folder: Path | None) -> frozenset[int]:
    """Return the tokens that end a text: the tokenizer's end of text, and those at which transformers stops.

    Args:
        tokenizer: The model's.
        folder: Of a Hugging Face model; None if there is none.

    Raises:
        CheckpointError: a file of the folder cannot be read.
    """
    files = [folder / name for name in ("generation_config.json", "config.json")] if folder is not None else []
    found: Any = []
    for file in files:
        if not file.is_file():
            continue
        try:
            found = read_json_object(file, LISTING_BYTES).get("eos_token_id")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the file cannot be read: {error}", where=str(file), fix="fetch the model again"
            ) from None
        break
    ids = found if isinstance(found, list) else [found]
    known = {number for number in ids if type(number) is int and 0 <= number < tokenizer.vocab_size}
    return frozenset({tokenizer.end_of_text_id, *known})


def _check_is_decoder(run: Path, info: CheckpointInfo) -> None:
    """Check that a checkpoint has the weights of the native decoder: only its data have a tokenizer.

    Raises:
        ConfigError: the run trained a module of the user's own.
    """
    if "data" in info.context and "tokenizer" not in info.context:
        raise ConfigError(
            "the run trained a module of your own, which this command does not know: it takes language models that"
            " headway train has made",
            where=str(run),
            fix=f"evaluate and export it in your own script: its weights are in {info.path}/*.safetensors",
        )


def _tokenizer_folder(run: Path, data: DataConfig, info: CheckpointInfo) -> Path:
    """Find the tokenizer that the checkpoint was made with: the run's copy, or the store's if it is unchanged.

    Raises:
        CheckpointError: neither matches.
    """
    wanted = info.context.get("tokenizer")
    copy = run / "tokenizer"
    if _is_tokenizer(copy, wanted):
        return copy
    folder = folder_of(data)
    if _is_tokenizer(folder, wanted):
        return folder
    there = next((place for place in (folder, copy) if (place / "tokenizer.json").is_file()), None)
    raise CheckpointError(
        "the tokenizer that the run was trained with is not there"
        if there is None
        else f"the checkpoint was made with another tokenizer: its fingerprint is {str(wanted)[:12]}",
        where=str(there or folder),
        fix=f"put the folder of the tokenizer that it was made with at {copy}, or the run's token store back in place",
    )


def _is_tokenizer(folder: Path, fingerprint: str | None) -> bool:
    """Return whether the folder holds a tokenizer, and the one with the fingerprint if that is known."""
    file = folder / "tokenizer.json"
    try:
        return file.is_file() and fingerprint in (None, sha256_file(file, LISTING_BYTES))
    except OSError:
        return False


def continue_text(
    trained: TrainedModel, prompt: str, *, max_new_tokens: int, temperature: float, top_p: float, seed: int
) -> Iterator[str]:
    """Continue a prompt, in pieces as they are sampled. The prompt begins a new document, even an empty one."""
    ids = prompt_ids(trained, prompt)
    new_ids = continue_ids(
        trained,
        ids,
        trained.stop_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    return stream_text(trained.tokenizer, new_ids, after=ids)


def prompt_ids(trained: TrainedModel, prompt: str) -> list[int]:
    """Return the token ids of a prompt that begins a new document, even an empty one."""
    begin = list(trained.begin_of_text.values())
    if not prompt:
        return begin or [trained.tokenizer.end_of_text_id]
    return begin + trained.tokenizer.encode_batch([prompt])[0]


def continue_ids(trained: TrainedModel, ids: list[int], stop_ids: frozenset[int], **sampling: Any) -> Iterator[int]:
    """Continue token ids with ids of the tokenizer; `sampling` is as for `generate`, whose errors come at once."""
    vocab_size = trained.tokenizer.vocab_size
    new_ids = generate(trained.model, ids, stop_ids=stop_ids, vocab_size=vocab_size, **sampling)
    return _with_full_gpu_explained(new_ids)


def _with_full_gpu_explained(ids: Iterator[int]) -> Iterator[int]:
    with explain_full_gpu():
        yield from ids


def export_trained(
    trained: TrainedModel, folder: Path, dtype: Literal["fp32", "bf16"] = "fp32", *, merge: bool = False
) -> None:
    """Write a trained model as a Hugging Face folder, whose texts begin and end as in training.

    Args:
        trained: From `load_trained`.
        folder: Output folder.
        dtype: Dtype of the stored weights.
        merge: Whether to add adapters to the weights that they adapt; otherwise they are written by themselves.

    Raises:
        ConfigError: as `export_model`; or there is no adapter to merge.
        OSError: as `export_model`.
    """
    content = with_tokens_before(trained.tokenizer.content, trained.begin_of_text)
    stop_ids = trained.stop_ids
    chat_template = None
    if trained.config is not None and any(source.text_template == CHAT for source in trained.config.data.sources):
        stop_ids |= stops_of_turns(trained.open_chat())
        chat_template = trained.tokenizer.settings.values.get("chat_template")
    if stop_ids == {trained.tokenizer.end_of_text_id}:
        stop_ids = frozenset()  # the tokenizer's files name it
    if trained.model.config.implementation == "transformers":
        export_transformers_model(
            cast("TransformersModel", trained.model),
            folder,
            trained.tokenizer_folder,
            dtype=dtype,
            tokenizer_json=content,
            chat_template=chat_template if isinstance(chat_template, str) else None,
            stop_ids=stop_ids,
            merge=merge,
        )
        return
    if merge:
        raise ConfigError("the model has no adapter to merge", where="headway merge", fix="headway export")
    export_model(
        cast("Decoder", trained.model),
        folder,
        trained.tokenizer_folder,
        dtype=dtype,
        tokenizer_json=content,
        stop_ids=stop_ids,
    )


def _check_same_tokens(store: TokenStore, trained: TrainedModel) -> None:
    """Check that token ids mean the same to a store and a model, and that documents begin alike.

    Raises:
        DataError: they do not.
    """
    ours = trained.tokenizer
    if store.tokenizer_fingerprint != ours.fingerprint:
        # An export may declare another begin of text; the store declares that itself.
        file = store.tokenizer_folder / "tokenizer.json"
        contents = [ours.content, read_bytes(file) if file.is_file() else b"{}"]
        if not is_same_but_for_template(*contents):
            raise DataError(
                "the store was written with another tokenizer than the model's",
                where=str(store.path),
                fix="give a store that was prepared with data.tokenizer.path set to the model's folder",
            )
    if list(store.begin_of_text.values()) != list(trained.begin_of_text.values()):
        theirs, mine = (" ".join(tokens) or "no token" for tokens in (store.begin_of_text, trained.begin_of_text))
        raise DataError(
            f"documents of the store begin with {theirs}, those that the model was trained on with {mine}",
            where=str(store.path),
            fix=f"prepare one with data.begin_of_text={'always' if trained.begin_of_text else 'never'}",
        )


def evaluate_trained(path: Path, *, step: int | None = None, **settings: Any) -> dict[str, Any]:
    """Evaluate a run's checkpoint or a Hugging Face folder on a token store; settings are those of `evaluate_model`.

    Raises:
        ConfigError: as `load_trained` and `evaluate_model`.
        DataError: as `evaluate_model`.
    """
    return evaluate_model(load_trained(path, step=step, device="auto"), path, **settings)


def _numbers(result: Evaluation) -> dict[str, Any]:
    return {"loss": result.loss, "perplexity": result.perplexity, "tokens": result.items}


@explain_full_gpu()
def evaluate_model(
    trained: TrainedModel,
    path: Path,
    *,
    store_path: Path | None = None,
    split: str = "validation",
    rows: int | None = None,
    sequence_length: int | None = None,
) -> dict[str, Any]:
    """Evaluate a model on a token store.

    Args:
        trained: The model.
        path: Where it comes from, for messages.
        store_path: Folder of the store; the run's own when not given.
        split: Split of the store.
        rows: Most rows to use; all when not given.
        sequence_length: Tokens per row; as in training when not given.

    Raises:
        ConfigError: the model is no run and no store is given, or the device's memory ran out.
        DataError: the store's vocabulary is not the model's, or its documents begin otherwise.
    """
    config = trained.config or Config()
    if store_path is None and trained.config is None:
        raise ConfigError("an exported model does not say where its data is", where=str(path), fix="--store FOLDER")
    store = TokenStore.open(store_path) if store_path else open_store(config.data)
    _check_same_tokens(store, trained)
    length = sequence_length or min(config.train.sequence_length, trained.model.config.max_sequence_length)
    feed = evaluation_feed(config.data, store, split=split, sequence_length=length, limit=rows, micro_batch=8)
    world = World(0, 1, 0, next(trained.model.parameters()).device)
    with progress("evaluating", len(feed), "batches") as shown:
        precision = config.train.precision
        result = evaluate(LANGUAGE_MODELLING, trained.model, feed, world, precision=precision, advance=shown.advance)
    assert result is not None, "nothing asks it to stop"
    return {
        "step": trained.step,
        **_numbers(result),
        **({} if result.replay is None else {"replay": _numbers(result.replay)}),
        "split": split,
        "sequence_length": length,
    }
