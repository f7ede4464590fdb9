"""A run on disk: its directory, owner, ledger, and the ways back to an earlier step.

Doors: `run_directory.RunDirectory` and `Attempt`, `ledger.Ledger`, `ledger_proof.prove`, `ownership.OwnerLock`.
"""
