"""Predict, measure, examine and prove runs: reads configs and run directories, starts `headway` as a command."""
