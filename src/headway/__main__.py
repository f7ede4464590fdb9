"""`python -m headway`, the form that torchrun and the worker launcher use."""

from headway.cli.main import main

if __name__ == "__main__":
    main()
