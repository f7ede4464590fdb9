"""From text to token ids: vocabularies of every kind, the fastest exact encoder, training."""
