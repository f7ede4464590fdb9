"""The command `headway`, with the modules of this repository."""

from __future__ import annotations

from headway.cli.main import main

if __name__ == "__main__":
    main()
