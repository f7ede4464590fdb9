"""Serving trained models with OpenAI's interface: the engine, the front, and experiments between two versions."""
