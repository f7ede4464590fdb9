"""Keys of other trainers: Trainer and TRL, axolotl, litgpt, nanoGPT and nanochat, Lightning, torchtune.

Each has one sentence on what Headway has in its place.
"""

from __future__ import annotations

#: Names elsewhere, the key here (empty where there is none), and the sentence.
_TABLE: tuple[tuple[str, str, str], ...] = (
    (
        "max_steps num_steps max_iters train_iters iterations num_iterations total_steps",
        "train.steps",
        "train.steps counts optimizer steps; train.tokens or train.epochs give the length too",
    ),
    (
        "num_epochs num_train_epochs max_epochs",
        "train.epochs",
        "train.epochs is the number of passes over the data; max_epochs of an entry of data.sources limits that source",
    ),
    (
        "seq_len seq_length sequence_len max_seq_len max_seq_length block_size context_length max_length cutoff_len",
        "train.sequence_length",
        "train.sequence_length is the number of tokens in a row",
    ),
    (
        "batch_size global_batch_size train_batch_size total_batch_size",
        "train.global_batch",
        "train.global_batch counts the rows of an optimizer step over all workers, or its tokens: '64Ki tokens'",
    ),
    (
        "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches",
        "train.global_batch",
        "accumulation follows from train.global_batch (rows of a step, over all workers) and train.micro_batch (rows of"
        " a forward pass)",
    ),
    (
        "per_device_train_batch_size micro_batch_size device_batch_size mbs",
        "train.micro_batch",
        "train.global_batch counts rows over all workers; train.micro_batch is per worker",
    ),
    (
        "per_device_eval_batch_size eval_batch_size",
        "evaluation.rows",
        "evaluation takes micro-batches like those of training; evaluation.rows is the number of rows",
    ),
    (
        "dtype torch_dtype bf16 fp16 tf32 mixed_precision",
        "train.precision",
        "train.precision is bf16, fp16, tf32, fp32, fp8 or auto",
    ),
    (
        "gradient_checkpointing use_gradient_checkpointing",
        "train.activation_checkpointing",
        "train.activation_checkpointing is none, selective or full",
    ),
    (
        "grad_clip gradient_clipping gradient_clip_val clip_grad max_norm",
        "train.max_grad_norm",
        "train.max_grad_norm clips gradients to this global norm",
    ),
    ("torch_compile compile_model", "train.compile", "train.compile is true, false or auto"),
    (
        "early_stopping_patience",
        "train.early_stopping.patience",
        "train.early_stopping.patience counts evaluations without a better loss",
    ),
    (
        "early_stopping_threshold",
        "train.early_stopping.min_delta",
        "train.early_stopping.min_delta is the least fall of the loss that counts",
    ),
    ("hidden_size d_model n_embd", "model.dim", "model.dim is the width; model.preset names whole shapes"),
    (
        "num_layers n_layer n_layers num_hidden_layers",
        "model.layers",
        "model.layers is the number of layers; model.preset names whole shapes",
    ),
    ("num_heads n_head n_heads num_attention_heads", "model.heads", "model.heads is the number of query heads"),
    (
        "num_key_value_heads n_kv_heads n_kv_head n_query_groups",
        "model.kv_heads",
        "model.kv_heads is the number of heads of keys and values",
    ),
    ("intermediate_size", "model.ffn_dim", "model.ffn_dim is the inner width of a feed-forward layer"),
    ("tie_word_embeddings", "model.tie_embeddings", "model.tie_embeddings uses one matrix for input and output"),
    (
        "model_name_or_path pretrained_model_name_or_path base_model model_name model_id init_from",
        "model.from_pretrained",
        "model.from_pretrained continues a model: a folder, or hf://organisation/name",
    ),
    ("lora_r lora_rank", "model.adapter.rank", "model.adapter.rank is the width of LoRA's adapters"),
    ("lora_alpha", "model.adapter.alpha", "model.adapter.alpha scales LoRA's adapters, by alpha / rank"),
    ("lora_dropout", "model.adapter.dropout", "model.adapter.dropout is the dropout before LoRA's adapters"),
    (
        "lora_target_modules target_modules",
        "model.adapter.targets",
        "model.adapter.targets names the layers with adapters",
    ),
    (
        "load_in_4bit load_in_8bit",
        "model.adapter.frozen_precision",
        "model.adapter.frozen_precision is nf4 (QLoRA) or int8 below an adapter",
    ),
    ("neftune_noise_alpha", "model.neftune_alpha", "model.neftune_alpha is the noise on embeddings"),
    ("lr max_lr peak_lr", "optimizer.learning_rate", "optimizer.learning_rate is the peak of the learning rate"),
    ("optim optimizer_name", "optimizer.name", "optimizer.name names the optimizer"),
    ("beta1 beta2 adam_beta1 adam_beta2", "optimizer.betas", "optimizer.betas is a pair: [0.9, 0.95]"),
    ("adam_epsilon adam_eps", "optimizer.eps", "optimizer.eps is added to the root of the second moment"),
    (
        "lr_scheduler lr_scheduler_type lr_schedule decay_lr",
        "schedule.name",
        "schedule.name is cosine, linear, wsd, rsqrt, constant or infinite",
    ),
    (
        "warmup_steps warmup_ratio warmup_iters lr_warmup_steps",
        "schedule.warmup",
        "schedule.warmup is a share of the run, or '500 steps'",
    ),
    ("min_lr", "schedule.min_ratio", "schedule.min_ratio is the last learning rate as a share of the peak"),
    (
        "save_steps save_interval save_every save_strategy interval",
        "checkpoint.every",
        "checkpoint.every is '500 steps', '1B tokens' or '10 min'",
    ),
    ("save_total_limit", "checkpoint.keep", "checkpoint.keep is the number of checkpoints that are kept"),
    (
        "load_best_model_at_end",
        "checkpoint.keep_best",
        "checkpoint.keep_best keeps the best checkpoints; --step of export and chat takes one",
    ),
    (
        "resume_from_checkpoint resume auto_resume",
        "",
        "a run continues from its newest good checkpoint when the same command is typed again",
    ),
    (
        "eval_steps eval_interval eval_every eval_strategy evaluation_strategy",
        "evaluation.every",
        "evaluation.every is '500 steps' or '1B tokens'",
    ),
    ("eval_iters", "evaluation.rows", "evaluation.rows is the number of validation rows of an evaluation"),
    ("val_set_size val_split_fraction", "data.validation", "data.validation is the share of documents held out"),
    (
        "gpus devices num_gpus nproc_per_node num_processes",
        "parallel.workers",
        "parallel.workers is the number of processes on a machine, one for each GPU; --workers sets it too",
    ),
    ("num_nodes nnodes", "parallel.machines", "parallel.machines is the number of machines; --machines sets it too"),
    (
        "fsdp fsdp_config deepspeed",
        "parallel.strategy",
        "parallel.strategy names how a model is spread over workers",
    ),
    (
        "output_dir out_dir save_dir default_root_dir",
        "runs",
        "a run's folder is RUNS/NAME, by the keys runs and name: runs=out name=first",
    ),
    ("run_name experiment_name", "name", "name is the name of the run and of its folder"),
    (
        "report_to wandb_log wandb_project log_with logger",
        "track",
        "track lists trackers: track=wandb, mlflow or tensorboard",
    ),
    ("logging_steps log_interval log_every_n_steps", "telemetry.log_every", "telemetry.log_every counts steps"),
    (
        "dataset dataset_name datasets train_file train_files data_path dataset_path",
        "data.sources",
        "data.sources lists files, folders, globs and hf://NAME",
    ),
    (
        "dataset_text_field text_column",
        "data.sources.field",
        "field of an entry of data.sources names the field with the text",
    ),
    (
        "tokenizer_name tokenizer_dir tokenizer_path",
        "data.tokenizer.path",
        "data.tokenizer.path is a tokenizer's file or folder, or hf://organisation/name; without it one is trained",
    ),
    (
        "dataset_num_proc preprocessing_num_workers dataloader_num_workers num_workers",
        "data.workers",
        "data.workers is the number of processes that prepare data; training reads ahead by itself",
    ),
    ("sample_packing", "data.packing", "data.packing is concat, best_fit or pad"),
    (
        "chat_template completion_only_loss assistant_only_loss train_on_inputs",
        "data.sources.format",
        "format: chat of an entry of data.sources renders by the tokenizer's template, and trains what the assistant"
        " says; format: completion trains completions",
    ),
    ("random_seed", "seed", "seed is the seed of everything random"),
    (
        "flash_attention use_flash_attention_2 attn_implementation",
        "",
        "attention takes the fastest kernel of PyTorch that the device has; there is nothing to set",
    ),
    ("push_to_hub hub_model_id", "", "headway push sends a trained model to the Hub"),
)

#: Name elsewhere -> sentence.
SENTENCES = {name: sentence for names, _, sentence in _TABLE for name in names.split()}
#: Name elsewhere -> key here, where there is one.
OURS = {name: key for names, key, _ in _TABLE for name in names.split() if key}
