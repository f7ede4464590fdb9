"""What a model is worth: loss on held-out text, benchmarks, generation; and models ready for use."""
