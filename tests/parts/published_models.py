"""Reads manifests into the models that projects publish, in the environment that has them, and prints what is odd.

A script: it gets a JSON list of manifests on standard input. A model that leaves a key out does not know it, so what is
read must come back whole.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def read_back(manifest: dict[str, Any]) -> Any:
    """Return a manifest as its model gives it back.

    Raises:
        ValueError: a value is wrong, or a required one is missing.
    """
    kind = manifest["kind"]
    if kind in ("JobSet", "TrainJob", "TrainingRuntime"):
        import kubeflow_trainer_api.models as trainer

        name = "JobsetV1alpha2JobSet" if kind == "JobSet" else f"TrainerV1alpha1{kind}"
        return getattr(trainer, name).from_dict(manifest).to_dict()
    if kind == "PyTorchJob":
        from kubeflow.training import ApiClient
        from kubeflow.training.models import KubeflowOrgV1PyTorchJob

        class Response:
            data = json.dumps(manifest)

        client = ApiClient()
        return client.sanitize_for_serialization(client.deserialize(Response, KubeflowOrgV1PyTorchJob))
    from hera.workflows import models as argo

    return getattr(argo, kind).model_validate(manifest).model_dump(by_alias=True, exclude_none=True, mode="json")


def missing(given: Any, back: Any, path: str) -> list[str]:
    """Return what a model has not given back."""
    if isinstance(given, dict):
        if not isinstance(back, dict):
            return [f"{path}: {given!r} became {back!r}"]
        return [text for key, value in given.items() for text in missing(value, back.get(key), f"{path}.{key}")]
    if isinstance(given, list):
        if not isinstance(back, list) or len(back) != len(given):
            return [f"{path}: {given!r} became {back!r}"]
        return [text for number, one in enumerate(given) for text in missing(one, back[number], f"{path}.{number}")]
    return [] if given == back or str(given) == str(back) else [f"{path}: {given!r} became {back!r}"]


def main() -> None:
    """Print a JSON list of texts for each manifest."""
    found = []
    for manifest in json.load(sys.stdin):
        try:
            found.append(missing(manifest, read_back(manifest), manifest["kind"]))
        except Exception as error:
            found.append([f"{type(error).__name__}: {error}"])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
