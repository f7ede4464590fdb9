"""The deployment patterns: each command of `examples/deploy` writes the files that stand beside it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from support.runs import headway_in_copy

ROOT = Path(__file__).parents[4]
DEPLOY = ROOT / "examples" / "deploy"
#: What starts the machines; the config, and what holds a copy of it, change with every new key.
STARTS = ("30-train.yaml", "task.yaml", "job.sh")
PATTERNS = sorted(path.stem for path in DEPLOY.glob("*.yaml") if "headway launch examples" in path.read_text())


def test_every_pattern_is_on_the_page() -> None:
    page = (DEPLOY / "README.md").read_text()
    named = set(re.findall(r"examples/deploy/([a-z-]+)\.yaml", page))
    assert named == {*PATTERNS} and len(PATTERNS) >= 9
    for name in PATTERNS:
        (command,) = re.findall(r"headway launch examples/.*", (DEPLOY / f"{name}.yaml").read_text())
        assert command in page, name


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_writes_the_files_that_are_beside_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = re.findall(r"headway launch (examples/.*)", (DEPLOY / f"{name}.yaml").read_text())
    monkeypatch.chdir(ROOT)
    code, printed = headway_in_copy("launch", *command.split(), "--dry-run", "--out", str(tmp_path))
    assert code == 0, printed
    written = [tmp_path / file for file in STARTS if (tmp_path / file).exists()]
    assert len(written) == 1
    text = written[0].read_text().replace(str(tmp_path), "/home/you/deploy").replace(str(ROOT), "/home/you")
    kept = DEPLOY / "files" / name / written[0].name
    if os.environ.get("WRITE_EXAMPLES"):  # to write them anew, after a change that is meant
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text)
    assert text == kept.read_text(), f"{kept} is not what the launch writes (WRITE_EXAMPLES=1 writes it anew)"
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    checked = 0
    for path in tmp_path.glob("[0-9]*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            group = document["apiVersion"].rpartition("/")[0]
            if "." not in group or group.endswith(".k8s.io"):
                kubernetes_validate.validate(document, "1.37", strict=True)
                checked += 1
    assert checked or written[0].name != "30-train.yaml"
