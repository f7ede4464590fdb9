"""Python imports this when it starts, in programs that have this folder in their path."""

import os

import emulated_cuda

if emulated_cuda.VARIABLE in os.environ:
    emulated_cuda.begin()
