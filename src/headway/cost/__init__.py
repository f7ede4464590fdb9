"""Prices of machines, what an attempt and a run have spent, forecasts: plain arithmetic. Imports core and config."""
