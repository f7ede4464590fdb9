"""Code that loads without a search for garbage."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from headway.core.startup.loading import without_collecting


def test_nothing_is_collected_in_the_block_and_only_there() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError), without_collecting():
        assert not gc.isenabled()
        with without_collecting():
            pass
        assert not gc.isenabled(), "the outer block goes on"
        raise ValueError
    assert gc.isenabled()


def test_verbs_and_pytorch_load_in_such_blocks() -> None:
    code = """
import gc, sys
from headway.cli.application import application
from headway.run.supervisor.agent import load_training
found = {}
sys.addaudithook(lambda event, words: event == "import" and found.setdefault(words[0], gc.isenabled()))
application(["data"])
load_training()
print(found["headway.text.importing.store"], found["torch"], gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]
