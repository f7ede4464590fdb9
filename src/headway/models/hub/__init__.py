"""Pretrained models that transformers computes: where they come from, how they train, and how they leave.

Only this package and exports import `transformers` and `peft`, and only when such a model is used.
"""
