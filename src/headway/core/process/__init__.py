"""This process and those of its machine: their table, signals, waiting, exit; faults that tests inject."""
