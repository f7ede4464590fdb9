"""A small model learns from a larger one: train the teacher, export it, and name it in the student's config.

cd examples
python distillation.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import headway
from headway.training.evaluation.inference import export_trained, load_trained

TEACHER = ["name=teacher", "model={dim: 64, layers: 2, heads: 4, ffn_dim: 128}"]
STUDENT = ["name=student", "model={dim: 32, layers: 2, heads: 4, ffn_dim: 64}"]


def main(overrides: list[str]) -> headway.Run:
    """Train a teacher, then a student that learns from it; overrides are those of both runs."""
    plain = ["loss=null", "callbacks=[]", *overrides]
    teacher = headway.train(headway.load_config("custom_parts.yaml", [*plain, *TEACHER]))
    exported: Path = teacher.directory / "export"
    export_trained(load_trained(teacher.directory), exported)
    distill = f"distill={{teacher: {exported.resolve()}, weight: 0.7, temperature: 2.0}}"
    return headway.train(headway.load_config("custom_parts.yaml", [*plain, *STUDENT, distill]))


if __name__ == "__main__":
    run = main(sys.argv[1:])
    print(f"validation loss {run.validation_loss:.4f}")
