"""This process and those of its machine: their table and trees, signals, waiting, exit; faults that tests inject."""
