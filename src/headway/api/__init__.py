"""The Python interface: what `import headway` offers, and what is settled before a run begins."""

from headway.api.training import Trainer, train

__all__ = ["Trainer", "train"]
