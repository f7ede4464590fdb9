"""The Trainer of Hugging Face."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from workload import Job, Recorder, RowsDataset


class Ends(TrainerCallback):
    """Notes the ends of steps."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_step_end(self, *arguments: Any, **words: Any) -> None:
        """One more."""
        self._recorder.step()


class InOrder(Trainer):
    """Rows in the order of all others."""

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Shifted(RowsDataset):
    """Rows as the Trainer's models expect them: `shift_labels` takes the place of labels that they would shift."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        return {**row, "shift_labels": row["labels"]}


def main() -> None:
    """Train."""
    job, recorder = Job.given(), Recorder()
    rows = Shifted(job)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=job.steps,
            per_device_train_batch_size=rows.batch_size,
            learning_rate=job.learning_rate,
            lr_scheduler_type="constant",
            adam_beta1=job.betas[0],
            adam_beta2=job.betas[1],
            weight_decay=0.0,
            max_grad_norm=job.max_grad_norm,
            optim="adamw_torch_fused",
            bf16=job.precision == "bf16",
            torch_compile=job.compile,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        model = AutoModelForCausalLM.from_pretrained(job.model)
        trainer = InOrder(model, arguments, train_dataset=rows, callbacks=[Ends(recorder)])
        result = trainer.train()
    recorder.write(job, result.training_loss)


if __name__ == "__main__":
    main()
