"""Weights in bf16 on the device; fp32 masters, moments and summed gradients in host memory (`train.weights`)."""
