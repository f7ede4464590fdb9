"""Lightning's Trainer around the model of transformers."""

from __future__ import annotations

import lightning
import torch
from llama import MeanLoss, build_optimizer
from workload import Job, Recorder, RowsDataset


class Module(lightning.LightningModule):
    """As its users write it."""

    def __init__(self, job: Job, recorder: Recorder) -> None:
        super().__init__()
        self._job, self._recorder = job, recorder
        self.loss = MeanLoss(job)
        self.losses: list[torch.Tensor] = []
        if job.compile:
            self.loss.compile()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch."""
        loss = self.loss(**batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, *arguments: object) -> None:
        """A step has ended."""
        self._recorder.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As of all."""
        return build_optimizer(self._job, self)


def main() -> None:
    """Train."""
    job, recorder = Job.given(), Recorder()
    rows, module = RowsDataset(job), Module(job, recorder)
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="bf16-mixed" if job.precision == "bf16" else "32-true",
        max_steps=job.steps,
        gradient_clip_val=job.max_grad_norm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, rows.batch_size))
    recorder.write(job, torch.stack(module.losses).mean().item())


if __name__ == "__main__":
    main()
